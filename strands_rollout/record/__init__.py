"""The record of an episode: what the policy read and wrote, where each request continues, and how it is stored."""
