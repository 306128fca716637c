"""GRPO on one machine through this package's own `generate` and `reward_func`: `strands-rollout train`.

A small trainer, to see a policy learn from the samples and to test them end to end; slime trains what is large.
"""
