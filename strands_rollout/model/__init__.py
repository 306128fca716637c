"""The token-in/token-out Strands model: conversations of exact tokens, sampled turn by turn within their budgets."""
