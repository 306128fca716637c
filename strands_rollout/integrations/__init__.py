"""Conversions of finished samples for other trainers and tools: a file for each; none of them is a dependency."""
