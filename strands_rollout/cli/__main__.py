"""`python -m strands_rollout.cli`: the same as the command `strands-rollout`."""

from __future__ import annotations

from strands_rollout.cli import main

if __name__ == "__main__":
    main()
