"""A model endpoint for agents in any process, which keeps the exact tokens behind what they are sent.

It speaks OpenAI's Chat Completions and Responses and Anthropic's Messages; each key has a session of its own.
"""
