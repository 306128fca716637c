"""The token-in/token-out Strands model: a conversation of exact tokens, sampled turn by turn within its budgets."""
