"""The command line `strands-rollout`: its commands with their arguments and exit codes; see `commands`."""


def main() -> None:
    """Run the command line; never returns."""
    from strands_rollout.cli.commands import main as run

    run()
