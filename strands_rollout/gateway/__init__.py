"""A model endpoint for agents in any process, which records the exact tokens of each answer.

It serves OpenAI's Chat Completions and Responses and Anthropic's Messages APIs. Each API key has a session of its own.
"""
