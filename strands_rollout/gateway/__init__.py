"""A model endpoint that records the exact tokens of each answer, for agents in any process.

It serves OpenAI's APIs Chat Completions and Responses, and Anthropic's Messages API. Each API key has a session of its
own.
"""
