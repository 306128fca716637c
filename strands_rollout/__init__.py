"""Token-exact Strands agent rollouts for slime."""
