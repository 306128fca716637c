"""Evaluation without slime: samples played through `generate` and `reward_func`, and their report.

The command `eval` is in `run`: read it first. `demo` is the command `demo`.
"""
