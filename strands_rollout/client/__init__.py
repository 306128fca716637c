"""HTTP clients: SGLang (token ids in, one checked generation out), OpenAI-compatible chat APIs, and their retries."""
