"""Environments of other libraries, played unchanged; reasoning-gym's scorers; a search tool; QA rewards."""
