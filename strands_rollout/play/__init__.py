"""Plays rows through `generate` and `reward_func` without slime, on a running or the embedded engine."""
