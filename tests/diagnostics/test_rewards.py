"""`strands-rollout rescore` scores saved samples again; `validate` scores each row's ground truth.

`rescore` prints and writes the changed scores; `validate` lists the rows that fail, with line and reason.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from dumped_samples import write_sample_dump
from typer.testing import CliRunner, Result

from strands_rollout import Sample
from strands_rollout.cli.commands import app
from strands_rollout.dump import read_dump
from strands_rollout.errors import DumpError
from strands_rollout.play.rows import shipped_rows


def sample(index: int, response: str, reward: Any, **fields: Any) -> Sample:
    whole = {"prompt": "?", "label": "34", "status": Sample.Status.COMPLETED, "tokens": [1, 2], "response_length": 1}
    whole |= {"index": index, "response": response, "reward": reward, "loss_mask": [1], "rollout_log_probs": [-0.25]}
    return Sample(**{**whole, **fields})


def rescore(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["rescore", *map(str, arguments)])


def lines_of(*arguments: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rescore(*arguments, "--json").stdout.splitlines()]


RIGHT, WRONG = "\\boxed{34}", "\\boxed{35}"


def test_rescore_with_own_reward_changes_nothing(tmp_path: Path) -> None:
    graded = {"score": 1.0, "acc": 1.0, "pred": "34", "label": "34", "method": "number", "error": ""}
    wrong = {**graded, "score": -1.0, "acc": 0.0, "pred": "35"}
    dump, out = write_sample_dump(tmp_path, sample(0, RIGHT, graded), sample(1, WRONG, wrong)), tmp_path / "again.jsonl"
    *_, totals = lines_of(dump, "--out", out)
    counts = {"samples": 2, "scored": 2, "failed": 0, "compared": 2, "changed": 0, "raised": 0, "lowered": 0}
    assert totals == {**counts, "old_mean": 0.0, "new_mean": 0.0, "correlation": pytest.approx(1.0)}
    assert [record.values["reward"]["pred"] for record in read_dump(out)] == ["34", "35"]
    assert isinstance(rescore(dump, "--out", dump).exception, DumpError)
    assert len(list(read_dump(dump))) == 2


def test_rescore_out_changes_only_the_reward(tmp_path: Path) -> None:
    dump = write_sample_dump(
        tmp_path, sample(0, "four", {"score": 5.0}), sample(1, "seventeen", 4.0, metadata={"x": (1,)})
    )
    out = tmp_path / "out" / "new.jsonl.gz"
    first, second, totals = lines_of(dump, "--reward", "test_rewards.destroying_length", "--out", out)
    assert (first["old"], first["new"], second["old"], second["new"]) == (5.0, 4.0, 4.0, 9.0)
    assert (totals["changed"], totals["raised"], totals["lowered"]) == (2, 1, 1)
    assert totals["correlation"] == pytest.approx(-1.0)
    old, new = ([record.values for record in read_dump(path)] for path in (dump, out))
    assert [values.pop("reward") for values in new] == [4, 9]
    for values in old:
        del values["reward"]
    assert new == old


def test_rescore_skips_aborted_and_unrewarded_samples(tmp_path: Path) -> None:
    aborted = sample(0, RIGHT, None, status=Sample.Status.ABORTED)
    out = tmp_path / "new.jsonl"
    first, second, totals = lines_of(write_sample_dump(tmp_path, aborted, sample(1, RIGHT, None)), "--out", out)
    assert (first["new"], first["error"], second["new"]) == (None, None, 1.0)
    assert (totals["samples"], totals["scored"], totals["compared"], totals["failed"]) == (2, 1, 0, 0)
    assert [record.values["reward"] is None for record in read_dump(out)] == [True, False]


def test_rescore_does_not_compare_with_failed_rewards(tmp_path: Path) -> None:
    lost = {"score": -1.0, "acc": 0.0, "method": "no_judge", "error": "no judge."}
    first, totals = lines_of(write_sample_dump(tmp_path, sample(0, RIGHT, lost)))
    assert (first["old"], first["new"], totals["compared"], totals["changed"]) == (None, 1.0, 0, 0)


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        ("raising", "ValueError: \u241b[31munlucky"),  # a symbol replaces the escape character
        ("exiting", "RuntimeError: the reward raised SystemExit('no 13')"),
        ("text", "got the reward 'good'; expected a number, or a dict with one under 'score' or 'acc' (--reward-key)"),
    ],
)
def test_rescore_keeps_the_old_reward_without_a_new_number(reward, why, tmp_path) -> None:
    dump, out = (
        write_sample_dump(tmp_path, sample(0, RIGHT, 0.5), sample(1, RIGHT, 0.5, label="13")),
        tmp_path / "new.jsonl",
    )
    result = rescore(dump, "--reward", f"test_rewards.{reward}", "--out", out)
    assert (result.exit_code, f"sample 1 could not be scored: {why}" in " ".join(result.stdout.split())) == (1, True)
    assert [record.values["reward"] for record in read_dump(out)] == [1.0, 0.5]
    assert lines_of(dump, "--reward", f"test_rewards.{reward}")[-1]["failed"] == 1


def test_rescore_group_rm_passes_whole_groups(tmp_path: Path) -> None:
    sizes = {0: 3, 1: 1, None: 2, 2: 150, 3: 150}  # more samples than are scored concurrently
    groups = [group for group, size in sizes.items() for _ in range(size)]
    dump = write_sample_dump(
        tmp_path, *(sample(index, RIGHT, 1.0, group_index=group) for index, group in enumerate(groups))
    )
    *lines, totals = lines_of(dump, "--reward", "test_rewards.of_a_group", "--group-rm")
    assert [line["new"] for line in lines] == [1.0 if group is None else sizes[group] for group in groups]
    assert (totals["scored"], totals["failed"]) == (306, 0)
    failed = rescore(dump, "--reward", "test_rewards.one_for_a_group", "--group-rm")
    assert "got 1.0 for a group; expected a list of 3 rewards" in failed.stdout
    assert (failed.exit_code, rescore(dump, "--group-rm").exit_code) == (1, 2)


@pytest.mark.parametrize("command", [["rescore"], ["replay"], ["export", "--to", "otel", "--endpoint", "http://a:1"]])
def test_commands_fail_on_a_dump_without_samples(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    result = CliRunner().invoke(app, [command[0], str(path), *command[1:]])
    assert isinstance(result.exception, DumpError)
    assert str(result.exception) == f"{path} has no samples; expected at least one"


def test_rescore_and_validate_call_a_text_reward_as_a_run(tmp_path: Path) -> None:
    samples = (sample(0, RIGHT, -1.0), sample(1, RIGHT, 0.5, label="13"))
    first, second, totals = lines_of(write_sample_dump(tmp_path, *samples), "--reward", "test_rewards.of_text")
    assert (first["new"], second["new"], totals["failed"]) == (1.0, None, 1)
    assert "test_rewards.of_text raised KeyError: 13" in second["error"]


def data(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "data.jsonl"
    lines = [row if isinstance(row, str) else json.dumps({"prompt": "?", **row}) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def validate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["validate", *map(str, arguments)])


def found(*arguments: object) -> dict[str, Any]:
    return dict(json.loads(validate(*arguments, "--json").stdout))


def test_validate_passes_the_shipped_rows() -> None:
    result = validate(shipped_rows())
    assert (result.exit_code, result.stdout) == (0, "256 of 256 ground truths are right\n")


def test_validate_lists_failing_rows_with_reasons(tmp_path: Path) -> None:
    rows = [{"label": "34"}, "", {"label": ""}, "no JSON", {"label": "34"}, {"prompt": "?"}, {"label": ""}]
    path = data(tmp_path, *rows)
    result = validate(path)
    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    assert [line.split(": ")[0] for line in lines[:-1]] == [f"{path}:{n}" for n in (3, 4, 6, 7)]
    assert "no_label" in lines[0]
    assert all("expected a JSON object" in line for line in lines[1:3])
    assert lines[-1] == "2 of 6 ground truths are right"


EXACT = ("--reward", "test_rewards.is_exactly", "--answer", "It is {label}.")


@pytest.mark.parametrize(
    ("rows", "options", "faults"),
    [
        # each alternative must score
        ([{"label": ["4", "4.0"]}, {"label": ["4", "four"]}], ("--reward", "test_rewards.has_a_four"), [2]),
        ([{"label": {"x": 1}}, {"label": "1"}], (), ["no answer equals the label {'x': 1}"]),
        ([{"answer": "7"}], ("--label-key", "answer"), []),
        ([{"label": "7"}], EXACT,
         ["the reward gives {'value': 1.0, 'acc': 0.5} for 'It is 7.'; expected 1 or more"]),
        ([{"label": "7"}], ("--reward", "test_rewards.of_text"), []),
        ([{"label": "7"}], ("--reward", "test_rewards.of_text", "--answer", "seven{label}"),
         ["the reward gives 0, acc 0, for 'seven7'; expected 1 or more; to try another form, give --answer"]),
        ([{"label": "12"}, {"label": "13"}], ("--reward", "test_rewards.raising"),
         ["the reward raises ValueError: \x1b[31munlucky for '\\\\boxed{13}'"]),
    ],
    ids=["alternatives", "a mapping", "label key", "own answer", "text", "text, wrong answer", "raises"],
)  # fmt: skip
def test_validate_names_the_failing_row(rows, options, faults, tmp_path) -> None:
    got = found(data(tmp_path, *rows), *options)
    assert got["ok"] == (not faults)
    keys = ["line" if isinstance(fault, int) else "reason" for fault in faults]
    assert [fault[key] for fault, key in zip(got["faults"], keys, strict=True)] == faults


def test_validate_notes_labels_that_look_like_containers(tmp_path: Path) -> None:
    labels = ["34", "['34']", "[1, 2]", '["a", "b"]', "{'a': '34'}", "[3, 4]"]
    path = data(tmp_path, *({"label": label} for label in labels))
    result = validate(path)
    *notes, total = result.stdout.splitlines()
    assert (result.exit_code, total) == (0, "6 of 6 ground truths are right")
    assert [note.split(": ")[0] for note in notes] == [f"{path}:{line}" for line in (2, 3, 5)]
    assert notes[0].endswith("is the text of a list, read as '34' (2 such labels)")
    assert "is read as mathematics" in notes[1]
    assert notes[1].endswith("(2 such labels)")
    assert "can't be read" in notes[2]
    first, *_ = found(path)["notes"]
    assert (first["kind"], first["rows"]) == ("alternatives", 2)
    assert found(path, "--reward", "test_rewards.has_a_four")["notes"] == []  # this reward parses labels itself


def test_validate_fails_nested_list_labels(tmp_path: Path) -> None:
    deep: Any = "34"
    for _ in range(12):
        deep = [deep]
    (fault,) = found(data(tmp_path, {"label": deep}, {"label": "34"}))["faults"]
    assert (fault["line"], "no answer equals the label" in fault["reason"]) == (1, True)


def test_validate_merges_equal_reasons(tmp_path: Path) -> None:
    path = data(tmp_path, *({"label": str(number)} for number in range(40)), {"label": ""})
    lines = validate(path, "--reward", "test_rewards.never", "--answer", "It is {label}.").stdout.splitlines()
    why = "the reward gives 0, acc 0, for 'It is 0.'; expected 1 or more; to try another form, give --answer"
    assert lines == [f"{path}: 41 rows (lines 1, 2, 3, ...); the first: {why}", "0 of 41 ground truths are right"]


@pytest.mark.parametrize("reward", ["of_an_episode", "of_its_calls"])
def test_validate_gives_rewards_the_facts_of_a_one_turn_episode(tmp_path: Path, reward: str) -> None:
    result = validate(data(tmp_path, *({"label": str(n)} for n in range(5))), "--reward", f"test_rewards.{reward}")
    assert (result.exit_code, result.stdout) == (0, "5 of 5 ground truths are right\n")


def test_validate_reports_a_reward_that_always_fails(tmp_path: Path) -> None:
    path = data(tmp_path, *({"label": str(number)} for number in range(64)))
    result = validate(path, "--reward", "test_rewards.of_the_world")
    assert result.exit_code == 1
    failed, why, total = result.stdout.splitlines()
    assert failed.startswith("the reward failed for 64 ground truths (lines 1, 2, 3, ...): RolloutError: ")
    assert "so none was scored" in why
    assert total == "0 of 64 ground truths are right, 64 not scored"
    got = found(path, "--reward", "test_rewards.of_the_world")
    assert (got["ok"], got["right"], got["unscored"], got["faults"]) == (False, 0, 64, [])


OWN_SETTINGS = {
    "a misspelled setting": ({"max_tool_call": 3}, "did you mean 'max_tool_calls'?"),
    "a tool that the run lacks": ({"tools": ["my.tools.lookup"]}, "got the tools ['my.tools.lookup']"),
    "a bad value": ({"max_turn_tokens": 0}, "max_turn_tokens"),
    "not a mapping": ([1], "expected a mapping of settings"),
}


@pytest.mark.parametrize(("own", "words"), OWN_SETTINGS.values(), ids=OWN_SETTINGS)
def test_validate_names_rows_with_invalid_settings(tmp_path: Path, own: Any, words: str) -> None:
    good = {"label": "1", "metadata": {"strands_rollout_settings": {"max_tool_calls": 3, "tools": []}}}
    path = data(tmp_path, good, {"label": "2", "metadata": {"strands_rollout_settings": own}})
    got = found(path, "--set", "tools=[strands_rollout.examples.two_tools.order]")
    assert [fault["line"] for fault in got["faults"]] == [2]
    assert "the row's settings are invalid" in got["faults"][0]["reason"]
    assert words in got["faults"][0]["reason"]


def test_validate_ignores_row_tools_without_a_configuration(tmp_path: Path) -> None:
    row = {"label": "1", "metadata": {"strands_rollout_settings": {"tools": ["my.tools.lookup"]}}}
    assert found(data(tmp_path, row))["ok"]


def test_rescore_merges_equal_errors(tmp_path: Path) -> None:
    dump = write_sample_dump(tmp_path, *(sample(index, RIGHT, None, label=str(index)) for index in range(20)))
    words = [
        line for line in rescore(dump, "--reward", "test_rewards.of_the_world").stdout.splitlines() if "could" in line
    ]
    assert len(words) == 1
    assert words[0].startswith("20 samples (0, 1, 2, ...) could not be scored: RolloutError: ")


# rewards that the tests name by dotted path


def never(response: str, label: str) -> float:
    return 0.0


def of_an_episode(sample: Sample) -> float:
    facts = sample.metadata["strands_rollout"]
    return float(facts["stop_reason"] == "completed" and sample.label in facts["final_text"])


def of_its_calls(sample: Sample) -> float:
    facts = sample.metadata["strands_rollout"]
    return 1.0 - sum(call["status"] != "success" for call in facts["calls"]) - facts["tool_calls"]


def of_the_world(sample: Sample) -> float:
    return float(sample.metadata["strands_rollout"]["world"][sample.label])


async def is_exactly(args: object, sample: Sample) -> dict[str, Any]:
    return {"value": float(sample.response == f"It is {sample.label}."), "acc": 0.5}


def of_text(response: str, label: str) -> bool:
    if label == "13":
        raise KeyError(13)
    return label in response and "seven" not in response


def destroying_length(args: object, sample: Sample) -> int:
    sample.tokens.clear()
    sample.metadata.clear()
    return len(sample.response)


def has_a_four(args: object, sample: Sample) -> bool:
    return "4" in sample.response


async def of_a_group(args: object, samples: list[Sample], **kwargs: object) -> list[float]:
    return [float(len(samples)) for _ in samples]


def one_for_a_group(args: object, samples: list[Sample]) -> float:
    return 1.0


# these rewards fail for the label 13


def raising(args: object, sample: Sample) -> float:
    if sample.label == "13":
        raise ValueError("\x1b[31munlucky")
    return 1.0


def text(args: object, sample: Sample) -> object:
    return "good" if sample.label == "13" else 1.0


def exiting(args: object, sample: Sample) -> float:
    return sys.exit(f"no {sample.label}") if sample.label == "13" else 1.0
