"""What commands do with a configuration before anything starts: modules beside it are found, wrong names are errors."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


def strands_rollout(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "strands_rollout.cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


CONFIGURATION = "strands_rollout: {{tools: [my_agent_tools.look_up], {more}}}"


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Path]:
    """Writes a configuration beside the module of tools that it names."""
    (tmp_path / "my_agent_tools.py").write_text(
        'from strands import tool\n\n\n@tool\ndef look_up(name: str) -> str:\n    """Look up."""\n    return name\n'
    )

    def write(more: str = "") -> Path:
        path = tmp_path / "rollout.yaml"
        path.write_text(CONFIGURATION.format(more=more))
        return path

    return write


def test_modules_beside_a_configuration_are_found(configured: Callable[..., Path]) -> None:
    done = strands_rollout("config", str(configured()), cwd=Path("/"))
    assert (done.returncode, "my_agent_tools.look_up" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize("command", ["config", "eval --config", "train --config"])
def test_what_a_configuration_names_wrongly_is_an_error_before_anything_starts(
    configured: Callable[..., Path], command: str, tmp_path: Path
) -> None:
    if command.startswith("train"):
        pytest.importorskip("torch")
    path = configured("executor: locl, tool_parser: hermess, hooks: [no_such.hook]")
    done = strands_rollout(*command.split(), str(path), cwd=tmp_path)
    assert done.returncode == 2
    for words in ("hooks: can't load 'no_such.hook'", "did you mean 'hermes'", "'locl'"):
        assert words in done.stderr
    assert "engine at" not in done.stderr


def test_a_demo_that_could_write_nothing_plays_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = strands_rollout("demo", "--dump", str(tmp_path / "file" / "dump"), cwd=tmp_path)
    assert (done.returncode, "engine at" in done.stderr) == (2, False)
    assert "choose another one with --dump" in done.stderr
