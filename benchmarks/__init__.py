"""Benchmarks of the rollout client, of engines and of the code sandbox: `python -m benchmarks --help`.

Not part of the installed package: run them in a checkout.
"""
