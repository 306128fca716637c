"""Episodes with many kinds of tools, and a model that has learned them by heart: `checkpoint/`.

What the policy says is in `turns.py`. `bash tests/real/many_tools/make_checkpoint.sh` plays all episodes with a
scripted policy, so that prompts and tool results are what the package makes of them, and trains the model on them.
"""
