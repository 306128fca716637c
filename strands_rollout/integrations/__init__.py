"""Conversion of samples for other trainers and tools (all optional), and a server of gateway sessions over HTTP."""
