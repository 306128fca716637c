"""`strands-rollout rescore` and `validate`: another reward for saved samples, and for a data set's own gold answers.

What changed is told and written; rows whose own gold answer does not score are listed by line, with the reason.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from saved import dump_of
from typer.testing import CliRunner, Result

from strands_rollout import Sample
from strands_rollout.cli.commands import app
from strands_rollout.dump import read_dump
from strands_rollout.errors import ConfigError, DumpError
from strands_rollout.evaluation.rows import shipped_rows


def sample(index: int, response: str, reward: Any, **fields: Any) -> Sample:
    whole = {"prompt": "?", "label": "34", "status": Sample.Status.COMPLETED, "tokens": [1, 2], "response_length": 1}
    whole |= {"index": index, "response": response, "reward": reward, "loss_mask": [1], "rollout_log_probs": [-0.25]}
    return Sample(**{**whole, **fields})


def rescore(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["rescore", *map(str, arguments)])


def lines_of(*arguments: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rescore(*arguments, "--json").stdout.splitlines()]


RIGHT, WRONG = "\\boxed{34}", "\\boxed{35}"


def test_the_rewards_of_this_package_are_what_they_were(tmp_path: Path) -> None:
    graded = {"score": 1.0, "acc": 1.0, "pred": "34", "label": "34", "method": "number", "error": ""}
    wrong = {**graded, "score": -1.0, "acc": 0.0, "pred": "35"}
    dump = dump_of(tmp_path, sample(0, RIGHT, graded), sample(1, WRONG, wrong))
    out = tmp_path / "again.jsonl"
    *_, totals = lines_of(dump, "--out", out)
    counts = {"samples": 2, "scored": 2, "failed": 0, "compared": 2, "changed": 0, "raised": 0, "lowered": 0}
    assert totals == {**counts, "old_mean": 0.0, "new_mean": 0.0, "correlation": pytest.approx(1.0)}
    rewards = [record.values["reward"] for record in read_dump(out)]
    assert [(reward["score"], reward["pred"]) for reward in rewards] == [(1.0, "34"), (-1.0, "35")]


def test_another_reward_is_written_beside_everything_else_as_it_was(tmp_path: Path) -> None:
    dump = dump_of(tmp_path, sample(0, "four", {"score": 5.0}), sample(1, "seventeen", 4.0, metadata={"x": (1,)}))
    out = tmp_path / "out" / "new.jsonl.gz"
    first, second, totals = lines_of(dump, "--reward", "test_rewards.length", "--out", out)
    assert (first["old"], first["new"], second["old"], second["new"]) == (5.0, 4.0, 4.0, 9.0)
    assert (totals["changed"], totals["raised"], totals["lowered"]) == (2, 1, 1)
    assert totals["correlation"] == pytest.approx(-1.0)
    old, new = ([record.values for record in read_dump(path)] for path in (dump, out))
    assert [values.pop("reward") for values in new] == [4, 9]
    for values in old:
        del values["reward"]
    assert new == old


def test_an_async_reward_with_a_key_of_its_own_is_compared_with_the_old_score(tmp_path: Path) -> None:
    dump = dump_of(tmp_path, sample(0, "It is 34.", {"score": 1.0}), sample(1, "No.", {"score": 1.0}))
    first, second, totals = lines_of(dump, "--reward", "test_rewards.is_exactly", "--reward-key", "value")
    assert [(one["new"], one["changed"]) for one in (first, second)] == [(1.0, False), (0.0, True)]
    assert totals["correlation"] is None


def test_what_was_aborted_or_had_no_reward_is_told_apart(tmp_path: Path) -> None:
    aborted = sample(0, RIGHT, None, status=Sample.Status.ABORTED)
    out = tmp_path / "new.jsonl"
    first, second, totals = lines_of(dump_of(tmp_path, aborted, sample(1, RIGHT, None)), "--out", out)
    assert (first["new"], first["error"], second["new"]) == (None, None, 1.0)
    assert (totals["samples"], totals["scored"], totals["compared"], totals["failed"]) == (2, 1, 0, 0)
    assert [record.values["reward"] is None for record in read_dump(out)] == [True, False]


def test_a_reward_that_fails_for_a_sample_keeps_the_old_one_and_fails_the_command(tmp_path: Path) -> None:
    dump = dump_of(tmp_path, sample(0, RIGHT, 0.5), sample(1, RIGHT, 0.5, label="13"))
    out = tmp_path / "new.jsonl"
    result = rescore(dump, "--reward", "test_rewards.raising", "--out", out)
    assert (result.exit_code, "sample 1 could not be scored: ValueError: unlucky" in result.stdout) == (1, True)
    assert [record.values["reward"] for record in read_dump(out)] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        ("exiting", "RuntimeError: it raised SystemExit('no 34')"),
        ("cancelled", "RuntimeError: it was cancelled by its own code"),
        ("text", "got the reward 'good'; expected a number, or a dict with one under 'score' or 'acc' (--reward-key)"),
        ("coloured", "ValueError: \u241b[31mred"),  # a terminal does not obey it
    ],
)
def test_a_reward_that_gives_no_number_fails_its_sample(reward: str, why: str, tmp_path: Path) -> None:
    dump = dump_of(tmp_path, sample(0, RIGHT, 0.5))
    result = rescore(dump, "--reward", f"test_rewards.{reward}")
    assert (result.exit_code, f"sample 0 could not be scored: {why}" in " ".join(result.stdout.split())) == (1, True)
    assert lines_of(dump, "--reward", f"test_rewards.{reward}")[-1]["failed"] == 1


def test_siblings_of_a_fan_out_keep_their_main_agents_reward(tmp_path: Path) -> None:
    def part(number: int, response: str) -> Sample:
        facts = {"strands_rollout": {"fan_out": {"part": number}}}
        return sample(number, response, -1.0, rollout_id=7, group_index=0, metadata=facts)

    *lines, _ = lines_of(dump_of(tmp_path, part(0, RIGHT), part(1, WRONG)))
    assert [line["new"] for line in lines] == [1.0, 1.0]


def test_a_table_lists_the_changed_samples(tmp_path: Path) -> None:
    dump = dump_of(tmp_path, sample(0, RIGHT, 1.0), sample(1, RIGHT + " [red]\x1b[2J", -1.0))
    shown = rescore(dump).stdout
    assert "[red]\u241b[2J" in shown
    assert "of 2 with an old reward 1 changed (1 up, 0 down), mean 0 -> 1, correlation none" in shown


def test_a_dump_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    dump = dump_of(tmp_path, sample(0, RIGHT, 1.0))
    assert isinstance(rescore(dump, "--out", dump).exception, DumpError)
    assert len(list(read_dump(dump))) == 1


def test_a_reward_for_groups_is_given_whole_groups(tmp_path: Path) -> None:
    groups = [0, 0, 0, 1, None, None]
    dump = dump_of(tmp_path, *(sample(index, RIGHT, 1.0, group_index=group) for index, group in enumerate(groups)))
    *lines, totals = lines_of(dump, "--reward", "test_rewards.of_a_group", "--group-rm")
    assert [line["new"] for line in lines] == [3.0, 3.0, 3.0, 1.0, 1.0, 1.0]
    assert (totals["scored"], totals["failed"]) == (6, 0)
    failed = rescore(dump, "--reward", "test_rewards.one_for_a_group", "--group-rm")
    assert "got 1.0 for a group; expected a list of 3 rewards" in failed.stdout
    assert failed.exit_code == 1
    assert rescore(dump, "--group-rm").exit_code == 2


def test_a_group_is_not_torn_where_samples_are_taken_in_turns(tmp_path: Path) -> None:
    dump = dump_of(tmp_path, *(sample(index, RIGHT, 1.0, group_index=index // 150) for index in range(300)))
    *lines, _ = lines_of(dump, "--reward", "test_rewards.of_a_group", "--group-rm")
    assert {line["new"] for line in lines} == {150.0}


def test_what_a_reward_does_to_its_sample_is_not_in_the_new_dump(tmp_path: Path) -> None:
    dump, out = dump_of(tmp_path, sample(0, RIGHT, 0.0, metadata={"a": 1})), tmp_path / "again.jsonl"
    assert rescore(dump, "--reward", "test_rewards.destroying", "--out", out).exit_code == 0
    (record,) = read_dump(out)
    assert (record.values["tokens"], record.values["metadata"], record.values["reward"]) == ([1, 2], {"a": 1}, 1.0)


@pytest.mark.parametrize("command", [["rescore"], ["replay"], ["export", "--to", "otel", "--endpoint", "http://a:1"]])
def test_a_dump_without_a_sample_is_an_error(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    result = CliRunner().invoke(app, [command[0], str(path), *command[1:]])
    assert isinstance(result.exception, DumpError)
    assert str(result.exception) == f"{path} holds no sample; expected one or more"


def data(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "data.jsonl"
    lines = [row if isinstance(row, str) else json.dumps({"prompt": "?", **row}) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def validate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["validate", *map(str, arguments)])


def found(*arguments: object) -> dict[str, Any]:
    return dict(json.loads(validate(*arguments, "--json").stdout))


def test_each_shipped_rows_gold_answer_is_right() -> None:
    result = validate(shipped_rows())
    assert (result.exit_code, result.stdout) == (0, "256 of 256 gold answers are right\n")


def test_rows_that_do_not_score_are_listed_by_line_with_the_reason(tmp_path: Path) -> None:
    rows = [{"label": "34"}, "", {"label": ""}, "no JSON", {"label": "34"}, {"prompt": "?"}, {"label": ""}]
    path = data(tmp_path, *rows)
    result = validate(path)
    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    assert [line.split(": ")[0] for line in lines[:-1]] == [f"{path}:{n}" for n in (3, 4, 6, 7)]
    assert "no_label" in lines[0]
    assert all("expected a JSON object" in line for line in lines[1:3])
    assert lines[-1] == "2 of 6 gold answers are right"


@pytest.mark.parametrize(
    ("reward", "rows", "line"),
    [
        ("has_a_four", [{"label": ["4", "4.0"]}, {"label": ["4", "four"]}], 2),  # each alternative must score
        (
            "of_a_known_source",
            [{"label": "1", "metadata": {"source": source}} for source in ("mine", "theirs")],
            2,
        ),
        (None, [{"label": {"x": 1}}, {"label": "1"}], 1),
    ],
    ids=["alternatives", "metadata", "a mapping"],
)
def test_the_row_whose_answer_does_not_score_is_named(
    reward: str | None, rows: list[dict[str, Any]], line: int, tmp_path: Path
) -> None:
    named = ["--reward", f"test_rewards.{reward}"] if reward else []
    (fault,) = found(data(tmp_path, *rows), *named)["faults"]
    assert fault["line"] == line
    assert reward is not None or fault["reason"] == "no answer equals the label {'x': 1}"


def test_a_label_under_another_key_is_read(tmp_path: Path) -> None:
    path = data(tmp_path, {"answer": "7"})
    assert found(path)["right"] == 0
    assert found(path, "--label-key", "answer")["right"] == 1


def test_a_reward_of_ones_own_is_asked_with_answers_said_its_way(tmp_path: Path) -> None:
    path = data(tmp_path, {"label": "7"})
    own = ("--reward", "test_rewards.is_exactly", "--answer", "It is {label}.")
    assert found(path, *own, "--reward-key", "value")["ok"]
    (fault,) = found(path, *own)["faults"]
    assert fault["reason"] == "the reward gives {'value': 1.0, 'acc': 0.5} for 'It is 7.'; expected 1 or more"


def test_a_reward_that_raises_is_a_fault_of_its_row_alone(tmp_path: Path) -> None:
    path = data(tmp_path, {"label": "12"}, {"label": "13"})
    (fault,) = found(path, "--reward", "test_rewards.raising")["faults"]
    assert (fault["line"], fault["reason"]) == (2, "the reward raises ValueError: unlucky for '\\\\boxed{13}'")


@pytest.mark.parametrize(("iterations", "right"), [(3, 1), (4, 0)])
def test_a_reward_reads_the_configurations_settings(tmp_path: Path, iterations: int, right: int) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"strands_rollout: {{max_tool_iterations: {iterations}}}")
    path = data(tmp_path, {"label": "12"})
    assert found(path, "--reward", "test_rewards.wants_config", "--config", config)["right"] == right


@pytest.mark.parametrize(("reward", "words"), [("none", "has no attribute"), ("no_function", "expected a function")])
def test_what_can_not_be_asked_is_a_usage_error(reward: str, words: str, tmp_path: Path) -> None:
    result = validate(data(tmp_path, {"label": "12"}), "--reward", f"test_rewards.{reward}")
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)
    placeless = validate(data(tmp_path, {"label": "12"}), "--answer", "It is")
    assert (placeless.exit_code, "expected {label}" in placeless.output) == (2, True)


no_function = 3


# rewards of a user's own, by dotted path


async def is_exactly(args: object, sample: Sample) -> dict[str, Any]:
    return {"value": float(sample.response == f"It is {sample.label}."), "acc": 0.5}


def length(args: object, sample: Sample) -> int:
    return len(sample.response)


def has_a_four(args: object, sample: Sample) -> bool:
    return "4" in sample.response


def raising(args: object, sample: Sample) -> float:
    if sample.label == "13":
        raise ValueError("unlucky")
    return 1.0


def wants_config(args: Any, sample: Sample) -> float:
    return float(args.strands_rollout["max_tool_iterations"] == 3)


def of_a_known_source(args: object, sample: Sample) -> float:
    return float(sample.metadata["source"] == "mine")


def text(args: object, sample: Sample) -> str:
    return "good"


async def of_a_group(args: object, samples: list[Sample], **kwargs: object) -> list[float]:
    return [float(len(samples)) for _ in samples]


def one_for_a_group(args: object, samples: list[Sample]) -> float:
    return 1.0


def destroying(args: object, sample: Sample) -> float:
    sample.tokens.clear()
    sample.metadata.clear()
    return 1.0


def coloured(args: object, sample: Sample) -> float:
    raise ValueError("\x1b[31mred")


def exiting(args: object, sample: Sample) -> float:
    sys.exit(f"no {sample.label}")


async def cancelled(args: object, sample: Sample) -> float:
    raise asyncio.CancelledError
