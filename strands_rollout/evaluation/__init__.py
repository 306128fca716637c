"""Evaluation without slime: samples played through `generate` and `reward_func`, and what they amount to.

`evaluate` plays samples, and `demo` shows some; `run` is the command `eval`: read it first.
"""
