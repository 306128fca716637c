"""The functions that slime calls, under the names of its command line.

START HERE: `generate.py`.
"""
