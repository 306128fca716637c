"""Looks at a machine before a training run: what would fail, what may, and what to do about it."""
