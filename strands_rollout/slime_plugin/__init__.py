"""The functions that slime calls (their paths are options of slime's command line), and the modules behind them.

START HERE: `generate.py`.
"""
