"""The token-in/token-out Strands model, which samples turns within budgets and records exact tokens."""
