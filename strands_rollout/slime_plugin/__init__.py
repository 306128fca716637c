"""All that slime calls, by the names of its command line.

START HERE: `generate.py`.
"""
