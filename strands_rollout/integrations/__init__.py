"""Samples and sessions for other trainers and tools, a file for each; this package requires none of these."""
