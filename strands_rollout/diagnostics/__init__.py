"""Looks before and after a run: the machine, slime's flags, chat templates, data, and saved episodes."""
