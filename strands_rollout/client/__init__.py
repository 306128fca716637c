"""SGLang over HTTP: token ids in, one checked generation out; OpenAI-compatible APIs; requests that are sent again."""
