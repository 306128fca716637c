"""Evaluation without slime: data sets, several samples of each problem, their results, and the report with pass@k.

The command `eval` is in `run`: read it first. `demo` is the command `demo`.
"""
