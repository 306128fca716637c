"""Evaluation without slime: data sets, several samples of each problem, their results, and the report with pass@k.

The commands `eval` and `demo` are in `run`: read it first.
"""
