"""What the README promises is what the code does. A table that differs is printed as it should be."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import pkgutil
import re
import shlex
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from typer.main import get_command

from strands_rollout import SGLangModel, StopReason, ToolLimiter, Trajectory, create_client
from strands_rollout.cli import app
from strands_rollout.config import RolloutSettings, settings_from_args
from strands_rollout.doctor.sandbox_layers import MEANING
from strands_rollout.evaluate import Summary
from strands_rollout.executors import EXECUTORS
from strands_rollout.group_filter import _reason
from strands_rollout.reward import reward_func
from strands_rollout.reward_settings import RewardSettings
from strands_rollout.sample import _status
from strands_rollout.sample_type import Sample
from strands_rollout.sandbox import LocalExecutor

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()
LAUNCH_SCRIPTS = [
    f"scripts/{name}.sh"
    for name in ("strands_qwen3_8b", "strands_qwen3_4b", "strands_qwen3_8b_async", "eval_aime", "prepare_model")
]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def section(title: str) -> str:
    """The text between a heading and the next of its level."""
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def table_rows(text: str, title: str) -> list[list[str]]:
    """The cells of the table whose first heading is `title`."""
    lines = text.split(f"\n| {title} |", 1)[1].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def settings_table(model: type[BaseModel]) -> str:
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "[below](#rewards)" if isinstance(default, BaseModel) else f"`{json.dumps(default)}`"
        lines.append(f"| `{name}` | {shown} | {field.description} |")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("marker", "model"), [("settings", RolloutSettings), ("reward settings", RewardSettings)], ids=["rollout", "reward"]
)
def test_the_settings_tables_hold_every_key_default_and_meaning(marker: str, model: type[BaseModel]) -> None:
    shown = re.search(rf"<!-- {marker}: .*? -->\n(.*?)\n?<!-- end of {marker} -->", README, re.DOTALL)
    expected = settings_table(model)
    assert shown is not None
    assert shown[1] == expected, f"the README's table should be:\n{expected}"


def test_the_yaml_examples_are_valid() -> None:
    general, executor = (settings_from_args(SimpleNamespace(**yaml.safe_load(block))) for block in code_blocks("yaml"))
    assert general.max_tool_iterations == 8
    options = dict(executor.executor)
    assert options.pop("name") == "local"
    assert options.keys() <= inspect.signature(LocalExecutor).parameters.keys()


def test_the_table_of_executors_holds_every_name_and_option() -> None:
    rows = {row[0].strip("`"): row[2] for row in table_rows(section("Where code runs"), "executor")}
    assert list(rows)[:-1] == list(EXECUTORS)
    for name, path in EXECUTORS.items():
        options = inspect.signature(pkgutil.resolve_name(path)).parameters.keys() - {"timeout_s", "disabled_layers"}
        assert options == set(re.findall(r"`(\w+)`", rows[name])), name


def test_the_layers_that_are_explained_are_the_layers_there_are() -> None:
    rows = [row[0].strip("`") for row in table_rows(section("Where code runs"), "layer")]
    assert rows == list(MEANING)


async def test_the_example_of_the_executor_alone_is_right() -> None:
    async with LocalExecutor(memory_mb=1024) as executor:
        result = await executor.run("import sympy\nsympy.factorint(360)", timeout_s=5)
    (block,) = (block for block in code_blocks("python") if "LocalExecutor" in block)
    assert repr(result.stdout).replace("'", '"') in block


def test_stop_reasons_are_listed_in_their_order_with_their_status() -> None:
    rows = table_rows(README, "stop reason")
    assert [row[0] for row in rows] == [f"`{reason}`" for reason in StopReason]
    for name, _, status in rows:
        assert _status(Sample(), StopReason(name.strip("`")), may_abort=True).name == status
    assert _status(Sample(), StopReason.ABORTED, may_abort=False) is Sample.Status.FAILED


def test_every_status_is_explained() -> None:
    statuses = {status.name for status in Sample.Status} - {"PENDING"}
    assert {row[0] for row in table_rows(section("How an episode ends"), "sample")} == statuses


def test_limits_are_documented_in_the_order_of_the_code() -> None:
    documented = re.sub(r"\s+", " ", inspect.getdoc(StopReason) or "")
    order = re.search(r"Limits are checked in this order: .*? The first that holds counts\.", documented)
    assert order is not None
    assert order[0] in re.sub(r"\s+", " ", README)


def test_the_summary_has_the_keys_that_the_readme_names() -> None:
    shown = re.search(r'`(\{"samples": .*?\})`', README, re.DOTALL)
    assert shown is not None
    assert re.findall(r'"(\w+)":', shown[1]) == [field.name for field in fields(Summary)]


async def test_the_reward_has_the_keys_that_the_readme_names() -> None:
    shown = re.search(r"returns `\{(.*?)\}` for each sample", README)
    reward = await reward_func(SimpleNamespace(), Sample(response="\\boxed{4}", label="4"))
    assert shown is not None
    assert isinstance(reward, dict)
    assert shown[1].split(", ") == list(reward)


def slime_flags() -> dict[str, str]:
    block = next(block for block in code_blocks("bash") if "--custom-generate-function-path" in block)
    return {flag: value for flag, _, value in (line.partition(" ") for line in block.splitlines())}


def test_slime_finds_both_functions_by_their_dotted_paths() -> None:
    flags = slime_flags()
    for flag, first in (
        ("--custom-generate-function-path", ["args", "sample", "sampling_params", "evaluation"]),
        ("--custom-rm-path", ["args", "sample", "kwargs"]),
    ):
        module, _, name = flags[flag].rpartition(".")
        function = getattr(importlib.import_module(module), name)
        assert inspect.iscoroutinefunction(function)
        assert list(inspect.signature(function).parameters) == first


def test_slime_finds_the_functions_for_groups_by_their_dotted_paths() -> None:
    (block,) = (block for block in code_blocks("bash") if "--custom-reward-post-process-path" in block)
    paths = dict(line.split() for line in block.splitlines())
    assert list(paths) == ["--custom-reward-post-process-path", "--dynamic-sampling-filter-path"]
    functions = [pkgutil.resolve_name(path) for path in paths.values()]
    assert [list(inspect.signature(function).parameters)[:2] for function in functions] == [["args", "samples"]] * 2


def test_the_reasons_of_dropped_groups_are_those_that_the_filter_gives() -> None:
    reasons = [_reason(rewards) for rewards in ([1.0, 1.0], [1.0], [])]
    assert [reason for reason in reasons if f"`{reason.removesuffix('1.0')}`" in section("Rewards")] == reasons


async def test_the_reward_keys_given_to_slime_exist() -> None:
    reward = await reward_func(SimpleNamespace(), Sample(response="4", label="4"))
    assert {slime_flags()["--reward-key"], slime_flags()["--eval-reward-key"]} <= set(reward)


def test_the_arguments_read_from_slime_are_all_listed() -> None:
    sources = "".join(path.read_text() for path in (REPOSITORY / "strands_rollout").glob("*.py"))
    read = set(re.findall(r'getattr\(args, "(\w+)"', sources)) - {"strands_rollout", "reward_key"}
    sentence = re.search(r"slime's arguments these are read: (.*?)\.", README, re.DOTALL)
    assert sentence is not None
    listed = set(re.findall(r"`(\w+)`", sentence[1]))
    assert read <= listed
    assert all(f'"{name}"' in sources for name in listed)


def test_python_examples_name_what_exists() -> None:
    for block in code_blocks("python"):
        if "torchrl" in block and find_spec("torchrl") is None:
            continue
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names)
        for name in re.findall(r"^trajectory\.(\w+)", block, re.MULTILINE):
            assert name in {field.name for field in fields(Trajectory)}


def test_every_argument_of_the_model_is_named() -> None:
    for name in list(inspect.signature(SGLangModel.__init__).parameters)[1:]:
        assert re.search(rf"\b{name}\b", section("Use without slime")), name


def test_the_migration_table_names_what_exists() -> None:
    rows = dict(table_rows(section("Coming from strands-sglang"), "strands-sglang"))
    theirs = next(name for name in rows if name.startswith("`create_client"))
    arguments = re.findall(r"\w+", theirs.partition("(")[2])
    assert set(arguments) <= set(inspect.signature(create_client).parameters)
    known = {field.name for field in fields(Trajectory)}
    assert {name for row in rows.values() for name in re.findall(r"trajectory\.(\w+)", row)} <= known
    assert "max_iterations" in inspect.signature(ToolLimiter).parameters
    assert ToolLimiter().tripped is None


def test_the_fifteen_rules_each_have_a_test_named_after_them() -> None:
    rules = re.findall(r"^(\d+)\. ", section("What token exactness means here"), re.MULTILINE)
    assert rules == [str(number) for number in range(1, 16)]
    tests = (REPOSITORY / "tests" / "test_token_exactness.py").read_text()
    assert all(f"def test_rule_{int(number):02d}_" in tests for number in rules)


def test_the_engine_serves_the_endpoints_that_are_listed() -> None:
    from strands_rollout.engine.http_server import engine_app

    engine: Any = None  # routes are made without asking it
    served = {resource.canonical for resource in engine_app(engine).router.resources()}
    listed = set(re.findall(r"`(/[\w/]+)`", section("The embedded engine")))
    assert len(listed) >= 10
    assert listed <= served


def shell_commands() -> Iterator[list[str]]:
    """The commands of all examples, those that `&&` joins one by one."""
    for block in code_blocks("bash"):
        for line in block.splitlines():
            if line.startswith(("bash ", "strands-rollout ")):
                for command in line.split("&&"):
                    yield shlex.split(command, comments=True)


@functools.cache
def options_of(command: str) -> str:
    """What a script or a command of `strands-rollout` says of its options."""
    if command == "scripts/demo.sh":
        command = "demo"
    if command.endswith(".sh"):
        shown = ["bash", str(REPOSITORY / command), "--help"]
        return subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    return " ".join(name for parameter in get_command(app).commands[command].params for name in parameter.opts)  # type: ignore[attr-defined]


def test_every_command_exists_and_knows_its_options() -> None:
    seen = set()
    for words in shell_commands():
        command, options = words[1], {word for word in words[2:] if word.startswith("--")}
        seen.add(command)
        if command == "scripts/test.sh":
            options -= {"--real"}
        if options:
            assert options <= set(re.findall(r"--[\w-]+", options_of(command))), words
        assert command in get_command(app).commands or (REPOSITORY / command).is_file()  # type: ignore[attr-defined]
    assert {"scripts/demo.sh", "scripts/test.sh", "scripts/strands_qwen3_8b.sh", "eval", "doctor"} <= seen


def test_every_setting_of_the_launch_scripts_that_is_named_exists() -> None:
    named = set(
        re.findall(
            r"`(?:export )?([A-Z][A-Z_]+[A-Z])(?:=[^`]*)?`", section("Train in five steps") + section("Troubleshooting")
        )
    )
    known = set(re.findall(r"--[\w-]+ +([A-Z_]+) ", "".join(map(options_of, LAUNCH_SCRIPTS))))
    assert named - known == {"FAILED", "TRUNCATED", "WANDB_API_KEY", "WANDB_KEY", "WANDB_MODE", "HF_ENDPOINT"} & named
    assert {"MAX_RESPONSE_LEN", "RAY_ADDRESS", "DYNAMIC_SAMPLING"} <= named


def test_every_script_of_the_launch_kit_is_listed() -> None:
    text = section("Train in five steps")
    assert [row[0].strip("`") for row in table_rows(text, "script")] == LAUNCH_SCRIPTS
    prepared = {path.name for path in (REPOSITORY / "data_prep").glob("*.py")} - {"contamination.py"}
    assert prepared == set(re.findall(r"data_prep/(\w+\.py)", text))
    listed = [row[0].strip("`") for row in table_rows(README, "file in `configs/`")]
    assert sorted(listed) == sorted(path.name for path in (REPOSITORY / "configs").iterdir())


def test_the_two_commands_stand_on_the_first_screen() -> None:
    first_screen = "\n".join(README.splitlines()[:20])
    assert "bash scripts/demo.sh" in first_screen
    assert "bash scripts/test.sh" in first_screen


def test_supported_versions_are_those_of_the_package() -> None:
    text = section("Supported versions")
    strands = next(name for name in PROJECT["dependencies"] if name.startswith("strands-agents"))
    lowest, below = re.fullmatch(r"strands-agents>=([\d.]+),<(\d+)", strands).groups()  # type: ignore[union-attr]
    assert f"strands-agents {lowest} or newer, below {below}" in text
    pythons = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if "Python :: 3." in name]
    assert f"Python {pythons[0]} to {pythons[-1]}" in text
    assert PROJECT["requires-python"] == f">={pythons[0]}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_resolve(document: str) -> None:
    text = (REPOSITORY / document).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        assert not path or (REPOSITORY / path).exists(), target
        if anchor and not path:
            anchors = {
                re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in text.splitlines()
            }
            assert anchor in anchors, target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document: str) -> None:
    text = (REPOSITORY / document).read_text()
    for name in re.findall(r"`((?:scripts|tests|strands_rollout|\.ci)/[\w./]*)`", text):
        assert (REPOSITORY / name).exists(), name


def test_the_changelog_begins_with_this_version() -> None:
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    first = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    assert first is not None
    assert first[1] == PROJECT["version"] == importlib.import_module("strands_rollout").__version__


def test_contributing_maps_every_module_once_and_shows_the_layers_that_are_checked() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    package = REPOSITORY / "strands_rollout"
    modules = {path.stem for path in package.glob("*.py") if path.stem != "__init__"}
    modules |= {path.parent.name for path in package.glob("*/__init__.py")}
    mapped = [
        cell
        for line in text.splitlines()
        if (row := re.match(r"\| `(\w+)(?:\.py|/)` \|", line))
        for cell in row.groups()
    ]
    assert sorted(mapped) == sorted(modules)
    checked = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0][
        "layers"
    ]
    assert textwrap.indent("\n".join(checked), "    ") in text
