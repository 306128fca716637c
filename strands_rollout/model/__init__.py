"""The token-in/token-out Strands model: samples conversations turn by turn, within budgets; records exact tokens."""
