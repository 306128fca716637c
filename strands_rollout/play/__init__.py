"""Play rows through `generate` and `reward_func` without slime, on a running engine or the embedded engine."""
