"""Records of episodes' steps: where they are kept, so that another process can continue what a dead one has begun."""
