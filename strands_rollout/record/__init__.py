"""The record of an episode: what the policy read and wrote, where each request goes on in it, and where it is kept."""
