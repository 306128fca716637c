"""The record of an episode: what the policy read and wrote, and where each request goes on in it."""
