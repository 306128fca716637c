"""GRPO on one machine through this package's own `generate` and `reward_func`: `strands-rollout train`.

This small trainer shows that a policy learns from the samples, and so tests the samples end to end. Train large models
with slime.
"""
