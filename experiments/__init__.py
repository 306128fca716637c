"""Experiments on training: tokens as sampled against text encoded again, and faults put in on purpose. See README.md.

Not part of the installed package: run `python -m experiments --help` in a checkout.
"""
