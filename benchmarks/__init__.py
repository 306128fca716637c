"""Benchmarks of the client with its gateway and workers, of engines and of the sandbox: `python -m benchmarks --help`.

Not part of the installed package: run them in a checkout.
"""
