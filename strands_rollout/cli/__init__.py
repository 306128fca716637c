"""The command line `strands-rollout`: a file for each command, with its arguments and exit codes; see `commands`."""


def main() -> None:
    """Run the command line; never returns."""
    from strands_rollout.cli.commands import main as run

    run()
