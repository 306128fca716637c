"""Configurations on the command line: modules beside the file, wrong names, and `--set`."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strands_rollout.cli.commands import app
from strands_rollout.errors import ConfigError


def strands_rollout(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "strands_rollout.cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


TWO = ("strands_rollout.examples.two_tools", "strands_rollout.tools.execute_python_code")
CONFIGURATION = "strands_rollout: {{tools: [my_agent_tools.look_up], {more}}}"


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a configuration beside the module of tools that it names."""
    (tmp_path / "my_agent_tools.py").write_text(
        'from strands import tool\n\n\n@tool\ndef look_up(name: str) -> str:\n    """Look up."""\n    return name\n'
    )

    def write(more: str = "") -> Path:
        path = tmp_path / "rollout.yaml"
        path.write_text(CONFIGURATION.format(more=more))
        return path

    return write


@pytest.mark.end_to_end
def test_config_finds_modules_beside_the_file(configured: Callable[..., Path]) -> None:
    done = strands_rollout("config", str(configured()), cwd=Path("/"))
    assert (done.returncode, "my_agent_tools.look_up" in done.stdout) == (0, True), done.stderr
    assert "not checked" not in done.stderr
    more = "row_tools: ['http://127.0.0.1:1/mcp'], agent_factory: strands_rollout.examples.sub_agent.build"
    done = strands_rollout("config", str(configured(more)), cwd=Path("/"))
    assert done.stderr.count("not checked") == 2


@pytest.mark.end_to_end
@pytest.mark.parametrize("command", ["config", "eval --config", "train --config"])
def test_config_bad_names_are_errors_before_the_start(configured, command, tmp_path) -> None:
    if command.startswith("train"):
        pytest.importorskip("torch")
    path = configured("executor: locl, tool_parser: hermess, hooks: [no_such.hook]")
    done = strands_rollout(*command.split(), str(path), cwd=tmp_path)
    assert done.returncode == 2
    for words in ("hooks: can't load 'no_such.hook'", "did you mean 'hermes'", "'locl'"):
        assert words in done.stderr
    assert "engine at" not in done.stderr


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("max_tool_iterations=8", 8),
        ("system_prompt=Be brief: 1", "Be brief: 1"),
        ("system_prompt=No. #1", "No. #1"),
        ("dump_dir=null", None),
        ("hooks=[]", []),
        (f"tools={','.join(TWO)}", list(TWO)),
        ("strands_rollout.reward.correct=2", 2.0),
    ],
)
def test_set_option_overrides_the_file(configured, change, value) -> None:
    path = configured("max_tool_iterations: 2, dump_dir: there, reward: {wrong: 0.0}")
    done = CliRunner().invoke(app, ["config", str(path), "--set", "tools=[]", "--set", change, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    for key in change.partition("=")[0].removeprefix("strands_rollout.").split("."):
        found = found[key]
    assert (found, json.loads(done.stdout)["reward"]["wrong"]) == (value, 0.0)


@pytest.mark.parametrize(
    ("command", "change", "said"),
    [
        ("config", "max_tool_iteration=3", "did you mean 'max_tool_iterations'"),
        ("config", "reward.corect=3", "did you mean 'correct'"),
        ("config", "max_tool_iterations=many", "expected: an integer"),
        ("config", "max_tool_iterations", "expected KEY=VALUE"),
        ("config", "max_tool_iterations=", "or KEY=null"),
        ("eval", "tool_parser=hermess", "did you mean 'hermes'"),
        ("validate row.jsonl", "rewards=3", "did you mean 'reward'"),
        ("rescore row.jsonl", "rewards=3", "did you mean 'reward'"),
        ("drift row.jsonl", "tool_parsers=3", "did you mean 'tool_parser'"),
        ("doctor --json", "tool_parsers=3", "did you mean 'tool_parser'"),
    ],
)
def test_set_option_error_suggests_the_right_key(command, change, said, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "row.jsonl").write_text('{"prompt": "1 + 1?", "label": "2", "status": "completed", "tokens": []}\n')
    done = CliRunner().invoke(app, [*command.split(), "--set", change])
    assert said in f"{done.exception}{done.output}"
    assert isinstance(done.exception, ConfigError) or command.startswith("doctor")


@pytest.mark.parametrize(
    ("arguments", "heads"),
    [
        (["eval", "--config", "it.yaml", "--reward", "no.score"], ["the command line"]),
        (["eval", "--config", "it.yaml", "--set", "tools=[no.tool]"], ["the command line"]),
        (["try", "it.yaml", "--set", "strands_rollout.reward.function=no.score"], ["the command line"]),
        (["eval", "--config", "bad.yaml", "--reward", "no.score"], ["bad.yaml", "the command line"]),
        (["eval", "--config", "bad.yaml"], ["bad.yaml"]),
    ],
    ids=str,
)
def test_load_error_names_the_file_or_the_command_line(arguments, heads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("it.yaml").write_text("strands_rollout: {max_tool_iterations: 2}\n")
    Path("bad.yaml").write_text("strands_rollout: {tools: [no.tool]}\n")
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, ConfigError)
    said = str(done.exception).splitlines()
    assert [
        line.removesuffix(" has settings that can't be used:") for line in said if not line.startswith(" ")
    ] == heads


def test_demo_with_an_unwritable_dump_plays_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = strands_rollout("demo", "--dump", str(tmp_path / "file" / "dump"), cwd=tmp_path)
    assert (done.returncode, "engine at" in done.stderr) == (2, False)
    assert "choose another folder with --dump" in done.stderr
