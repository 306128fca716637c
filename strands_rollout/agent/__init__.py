"""One Strands episode: the agent, its tools, limits, environment and loop.

slime is unknown here: `slime_plugin` gives an episode its sample and reads what it left.
"""
