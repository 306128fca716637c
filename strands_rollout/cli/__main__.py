"""`python -m strands_rollout.cli`: the same as the command `strands-rollout`."""

from strands_rollout.cli import main

if __name__ == "__main__":
    main()
