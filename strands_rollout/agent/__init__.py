"""One Strands episode: the agent, its tools, limits, environment and loop."""
