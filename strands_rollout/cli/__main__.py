"""Run `strands-rollout` as `python -m strands_rollout.cli`."""

from strands_rollout.cli import main

if __name__ == "__main__":
    main()
