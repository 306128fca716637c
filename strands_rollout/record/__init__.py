"""The record of an episode: what the policy read and wrote, what a request continues, and how episodes are saved."""
