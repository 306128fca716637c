"""Chat templates: messages to token ids, token-exactly and append-only."""
