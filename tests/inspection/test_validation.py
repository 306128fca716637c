"""`strands-rollout validate`: rows whose own gold answer does not score are listed by line, with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from strands_rollout.cli import app
from strands_rollout.dataset_rows import shipped_rows
from strands_rollout.errors import ConfigError


def data(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "data.jsonl"
    lines = [row if isinstance(row, str) else json.dumps({"prompt": "?", **row}) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["validate", *map(str, arguments)])


def found(*arguments: object) -> dict[str, Any]:
    return dict(json.loads(run(*arguments, "--json").stdout))


def test_each_shipped_rows_gold_answer_is_right() -> None:
    result = run(shipped_rows())
    assert (result.exit_code, result.stdout) == (0, "256 of 256 gold answers are right\n")


def test_rows_that_do_not_score_are_listed_by_line_with_the_reason(tmp_path: Path) -> None:
    path = data(
        tmp_path, {"label": "34"}, "", {"label": ""}, "no JSON", {"label": "34"}, {"prompt": "?"}, {"label": ""}
    )
    result = run(path)
    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    assert [line.split(": ")[0] for line in lines[:-1]] == [f"{path}:{n}" for n in (3, 4, 6, 7)]
    assert "no_label" in lines[0]
    assert all("expected a JSON object" in line for line in lines[1:3])
    assert lines[-1] == "2 of 6 gold answers are right"


def test_each_alternative_of_a_label_must_score(tmp_path: Path) -> None:
    path = data(tmp_path, {"label": ["4", "4.0"]}, {"label": ["4", "four"]})
    assert [fault["line"] for fault in found(path, "--reward", "rewards.has_a_four")["faults"]] == [2]


def test_a_reward_reads_a_rows_metadata(tmp_path: Path) -> None:
    path = data(tmp_path, *({"label": "1", "metadata": {"source": source}} for source in ("mine", "theirs")))
    assert [fault["line"] for fault in found(path, "--reward", "rewards.of_a_known_source")["faults"]] == [2]


def test_a_label_under_another_key_is_read(tmp_path: Path) -> None:
    path = data(tmp_path, {"answer": "7"})
    assert found(path)["right"] == 0
    assert found(path, "--label-key", "answer")["right"] == 1


def test_a_reward_of_ones_own_is_asked_with_answers_said_its_way(tmp_path: Path) -> None:
    path = data(tmp_path, {"label": "7"})
    own = ("--reward", "rewards.is_exactly", "--answer", "It is {label}.")
    assert found(path, *own, "--reward-key", "value")["ok"]
    (fault,) = found(path, *own)["faults"]
    assert fault["reason"] == "the reward gives {'value': 1.0, 'acc': 0.5} for 'It is 7.'; expected 1 or more"


def test_a_reward_that_raises_is_a_fault_of_its_row_alone(tmp_path: Path) -> None:
    path = data(tmp_path, {"label": "12"}, {"label": "13"})
    (fault,) = found(path, "--reward", "rewards.raising")["faults"]
    assert (fault["line"], fault["reason"]) == (2, "the reward raises ValueError: unlucky for '\\\\boxed{13}'")


@pytest.mark.parametrize(("iterations", "right"), [(3, 1), (4, 0)])
def test_a_reward_reads_the_configurations_settings(tmp_path: Path, iterations: int, right: int) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"strands_rollout: {{max_tool_iterations: {iterations}}}")
    path = data(tmp_path, {"label": "12"})
    assert found(path, "--reward", "rewards.wants_config", "--config", config)["right"] == right


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--reward", "rewards.none"], "has no attribute 'none'"),
        (["--reward", "rewards.no_function"], "is a int; expected a function"),
    ],
)
def test_a_reward_that_is_none_is_a_usage_error(tmp_path: Path, arguments: list[str], words: str) -> None:
    result = run(data(tmp_path, {"label": "12"}), *arguments)
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


def test_an_answer_without_a_place_for_the_label_is_a_usage_error(tmp_path: Path) -> None:
    result = run(data(tmp_path, {"label": "12"}), "--answer", "It is")
    assert (result.exit_code, "expected {label}" in result.output) == (2, True)


def test_a_label_that_nothing_answers_is_a_fault_as_for_eval(tmp_path: Path) -> None:
    (fault,) = found(data(tmp_path, {"label": {"x": 1}}, {"label": "1"}))["faults"]
    assert (fault["line"], fault["reason"]) == (1, "no answer equals the label {'x': 1}")
