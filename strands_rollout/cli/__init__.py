"""The command line `strands-rollout`: its commands, options and exit codes; start with `commands`."""


def main() -> None:
    """Run the command line and exit with its exit code."""
    from strands_rollout.cli.commands import main as run

    run()
