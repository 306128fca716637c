"""Messages -> token ids by a tokenizer's chat template, token-exactly and append-only."""
