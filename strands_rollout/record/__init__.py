"""The record of an episode: what the policy read and wrote, where requests continue, and how episodes are saved."""
