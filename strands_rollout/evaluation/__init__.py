"""Evaluation without slime: data sets, several samples of each problem, their results, and the report with pass@k.

The commands `eval` and `demo` are in `run`: read it first. `try_row` has the command `try`, and `slime_protocol` writes
data sets for slime's own evaluation.
"""
