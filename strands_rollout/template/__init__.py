"""Token-exact, append-only conversion of messages to token ids with chat templates."""
