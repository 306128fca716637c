"""`strands-rollout rescore`: saved samples get another reward, and what changed is told and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from saved import dump_of
from typer.testing import CliRunner, Result

from strands_rollout import Sample
from strands_rollout.cli import app
from strands_rollout.dump import read_dump
from strands_rollout.errors import DumpError


def sample(index: int, response: str, reward: Any, **fields: Any) -> Sample:
    return Sample(
        **{
            "index": index,
            "prompt": "?",
            "response": response,
            "label": "34",
            "reward": reward,
            "status": Sample.Status.COMPLETED,
            "tokens": [1, 2],
            "response_length": 1,
            "loss_mask": [1],
            "rollout_log_probs": [-0.25],
            **fields,
        }
    )


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
    assert totals == {
        "samples": 2,
        "scored": 2,
        "failed": 0,
        "compared": 2,
        "changed": 0,
        "raised": 0,
        "lowered": 0,
        "old_mean": 0.0,
        "new_mean": 0.0,
        "correlation": pytest.approx(1.0),
    }
    assert [(record.values["reward"]["score"], record.values["reward"]["pred"]) for record in read_dump(out)] == [
        (1.0, "34"),
        (-1.0, "35"),
    ]


def test_another_reward_is_written_beside_everything_else_as_it_was(tmp_path: Path) -> None:
    dump = dump_of(tmp_path, sample(0, "four", {"score": 5.0}), sample(1, "seventeen", 4.0, metadata={"x": (1,)}))
    out = tmp_path / "out" / "new.jsonl.gz"
    first, second, totals = lines_of(dump, "--reward", "rewards.length", "--out", out)
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
    first, second, totals = lines_of(dump, "--reward", "rewards.is_exactly", "--reward-key", "value")
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
    result = rescore(dump, "--reward", "rewards.raising", "--out", out)
    assert (result.exit_code, "sample 1 could not be scored: ValueError: unlucky" in result.stdout) == (1, True)
    assert [record.values["reward"] for record in read_dump(out)] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("reward", "why"), [("exiting", "it called sys.exit('no 34')"), ("cancelled", "it was cancelled by its own code")]
)
def test_a_reward_that_would_end_the_process_fails_its_sample(reward: str, why: str, tmp_path: Path) -> None:
    result = rescore(dump_of(tmp_path, sample(0, RIGHT, 0.5)), "--reward", f"rewards.{reward}")
    assert (result.exit_code, f"sample 0 could not be scored: RuntimeError: {why}" in result.stdout) == (1, True)


def test_what_is_no_number_is_an_error_of_its_sample(tmp_path: Path) -> None:
    dump = dump_of(tmp_path, sample(0, RIGHT, 0.5))
    first, totals = lines_of(dump, "--reward", "rewards.text")
    assert "got the reward 'good'; expected a number" in first["error"]
    assert totals["failed"] == 1


def test_siblings_of_a_fan_out_keep_their_main_agents_reward(tmp_path: Path) -> None:
    def part(number: int, response: str) -> Sample:
        facts = {"strands_rollout": {"fan_out": {"part": number}}}
        return sample(number, response, -1.0, rollout_id=7, group_index=0, metadata=facts)

    *lines, _ = lines_of(dump_of(tmp_path, part(0, RIGHT), part(1, WRONG)))
    assert [line["new"] for line in lines] == [1.0, 1.0]


def test_a_table_lists_the_changed_samples(tmp_path: Path) -> None:
    dump = dump_of(tmp_path, sample(0, RIGHT, 1.0), sample(1, RIGHT + " [red]\x1b[2J", -1.0))
    shown = rescore(dump).stdout
    assert "[red]\ufffd[2J" in shown
    assert "of 2 with an old reward 1 changed (1 up, 0 down), mean 0 -> 1, correlation none" in shown


def test_a_dump_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    dump = dump_of(tmp_path, sample(0, RIGHT, 1.0))
    assert isinstance(rescore(dump, "--out", dump).exception, DumpError)
    assert len(list(read_dump(dump))) == 1


def test_a_reward_for_groups_is_given_whole_groups(tmp_path: Path) -> None:
    groups = [0, 0, 0, 1, None, None]
    dump = dump_of(tmp_path, *(sample(index, RIGHT, 1.0, group_index=group) for index, group in enumerate(groups)))
    *lines, totals = lines_of(dump, "--reward", "rewards.of_a_group", "--group-rm")
    assert [line["new"] for line in lines] == [3.0, 3.0, 3.0, 1.0, 1.0, 1.0]
    assert (totals["scored"], totals["failed"]) == (6, 0)
    failed = rescore(dump, "--reward", "rewards.one_for_a_group", "--group-rm")
    assert "got 1.0 for a group; expected a list of 3 rewards" in failed.stdout
    assert failed.exit_code == 1
    assert rescore(dump, "--group-rm").exit_code == 2


def test_a_group_is_not_torn_where_samples_are_taken_in_turns(tmp_path: Path) -> None:
    dump = dump_of(tmp_path, *(sample(index, RIGHT, 1.0, group_index=index // 150) for index in range(300)))
    *lines, _ = lines_of(dump, "--reward", "rewards.of_a_group", "--group-rm")
    assert {line["new"] for line in lines} == {150.0}


def test_what_a_reward_does_to_its_sample_is_not_in_the_new_dump(tmp_path: Path) -> None:
    dump, out = dump_of(tmp_path, sample(0, RIGHT, 0.0, metadata={"a": 1})), tmp_path / "again.jsonl"
    assert rescore(dump, "--reward", "rewards.destroying", "--out", out).exit_code == 0
    (record,) = read_dump(out)
    assert (record.values["tokens"], record.values["metadata"], record.values["reward"]) == ([1, 2], {"a": 1}, 1.0)


def test_a_terminal_does_not_obey_a_rewards_error(tmp_path: Path) -> None:
    dump = dump_of(tmp_path, sample(0, RIGHT, 1.0))
    assert "ValueError: \ufffd[31mred" in rescore(dump, "--reward", "rewards.coloured").stdout


def test_a_dict_without_the_number_names_the_keys_that_were_looked_for(tmp_path: Path) -> None:
    dump = dump_of(tmp_path, sample(0, RIGHT, 1.0))
    told = rescore(dump, "--reward", "rewards.text").stdout
    assert "expected a number, or a dict with one under 'score' or 'acc' (--reward-key)" in " ".join(told.split())


@pytest.mark.parametrize("command", [["rescore"], ["replay"], ["export", "--to", "otel", "--endpoint", "http://a:1"]])
def test_a_dump_without_a_sample_is_an_error(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    result = CliRunner().invoke(app, [command[0], str(path), *command[1:]])
    assert isinstance(result.exception, DumpError)
    assert str(result.exception) == f"{path} holds no sample; expected one or more"
