"""Compares the code sandbox with other ways to run Python: contenders, measures, interleaved rounds, figures.

Used by `scripts/bench_sandbox.py` alone. Each contender runs in a worker process of its own, which may belong to
another environment: what a worker imports (`worker`, `measures`, `contenders`, `programs`, `process_tree`, `loop_lag`)
knows the standard library alone.
"""
