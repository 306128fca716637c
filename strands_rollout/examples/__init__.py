"""Example agents: a module for each, with a YAML in `configs/`; the tests play them on a scripted engine."""
