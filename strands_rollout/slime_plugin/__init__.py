"""The functions that slime's command line names and slime calls, and the modules behind these functions.

START HERE: `generate.py`.
"""
