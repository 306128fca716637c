"""The commands of `inspection` answer --help with an example, and import nothing heavy for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from strands_rollout.cli import app

COMMANDS = ("check-template", "validate", "drift", "rescore", "replay")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert (result.exit_code, f"Example: strands-rollout {command} " in result.stdout) == (0, True)


def test_reading_the_commands_arguments_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom strands_rollout.cli import app\n"
        f"for command in {COMMANDS}: assert CliRunner().invoke(app, [command, '--help']).exit_code == 0\n"
        "print([name for name in ('numpy', 'strands', 'transformers', 'httpx', 'rich.table') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
