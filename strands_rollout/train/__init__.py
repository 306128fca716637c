"""GRPO on one machine through this package's own `generate` and `reward_func`: `strands-rollout train`.

A small trainer, which shows that a policy learns from the samples and tests them end to end. Train large models with
slime.
"""
