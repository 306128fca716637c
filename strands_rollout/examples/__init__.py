"""Agents to start from: each a module here and a YAML in `configs/`, played in the tests on a scripted engine."""
