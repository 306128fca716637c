"""Experiments on training: sampled tokens compared with text that is encoded again, and injected faults. See README.md.

Not part of the installed package: run `python -m experiments --help` in a checkout.
"""
