"""Conversions of finished samples for other trainers and tools, a file for each; none of these is a dependency."""
