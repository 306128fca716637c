"""Samples and sessions for other trainers and tools, none of which this package requires."""
