"""Make the shipped model and its data: synthetic math problems, episodes, training on a CPU.

The command is `python -m experiments.shipped_model`; the installed package never imports this.
"""
