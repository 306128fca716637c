"""GRPO on this CPU: the command `strands-rollout train` as a script. See its --help."""

from strands_rollout.cli.commands import train
from strands_rollout.cli.options import run_command

if __name__ == "__main__":
    run_command(train, "python scripts/train_tiny.py")
