"""An evaluation from its options to its report, against a scripted engine: what counts, and what is gone on with."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from evaluation_stage import PROBLEMS, evaluated, guesser, sample_seed, tamper
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, call_text, ids_of

from strands_rollout.evaluation.plan import Sampling


async def test_the_report_counts_what_the_samples_answered(
    shipped_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = await evaluated(tmp_path, shipped_tokenizer)
    answers = {(problem, number): sample_seed(problem, number) % 3 for problem in range(3) for number in range(4)}
    right = [sum(answers[problem, number] == problem for number in range(4)) for problem in range(3)]
    (sums,) = ended.report["data_sets"].values()
    assert [problem["right"] for problem in sums["by_problem"]] == right
    assert sums["avg_at_n"] == pytest.approx(sum(right) / 12, abs=1e-6)
    assert sums["pass_at_k"] == {
        "1": pytest.approx(sum(right) / 12, abs=1e-6),
        "4": pytest.approx(sum(map(bool, right)) / 3, abs=1e-6),
    }
    assert (ended.code, ended.report["complete"], sums["scored"]) == (0, True, 12)
    out = capsys.readouterr().out.splitlines()
    printed = json.loads(out[-1])
    assert "by_problem" not in printed["data_sets"]["sums"]
    assert printed["data_sets"]["sums"]["avg_at_n"] == sums["avg_at_n"]
    assert any("avg@4" in line and "maj@4" in line for line in out)


async def test_json_only_means_one_line_on_stdout(
    shipped_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await evaluated(tmp_path, shipped_tokenizer, json_only=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["scored"] == 12


async def test_a_line_holds_the_sample_without_its_tokens_unless_asked(shipped_tokenizer: Any, tmp_path: Path) -> None:
    ended = await evaluated(tmp_path, shipped_tokenizer)
    assert Counter((line["problem"], line["number"]) for line in ended.lines) == Counter(
        (problem, number) for problem in range(PROBLEMS) for number in range(4)
    )
    first = next(line for line in ended.lines if (line["problem"], line["number"]) == (1, 0))
    answer = sample_seed(1, 0) % 3
    assert first["seed"] == sample_seed(1, 0)
    assert first["reward"]["pred"] == str(answer)
    assert first["label"] == "1"
    assert first["response"] == f"So \\boxed{{{answer}}}.<|im_end|>"
    assert first["response_tokens"] == first["sampled_tokens"] == len(ids_of(shipped_tokenizer, first["response"]))
    assert "sample" not in first
    whole = (await evaluated(tmp_path, shipped_tokenizer, keeps_tokens=True, out=tmp_path / "whole")).lines[0]["sample"]
    assert len(whole["rollout_log_probs"]) == whole["response_length"]


async def test_neither_the_order_nor_the_number_at_once_changes_the_report(
    shipped_tokenizer: Any, tmp_path: Path
) -> None:
    guess = guesser(shipped_tokenizer)

    async def slow_at_first(request: dict[str, Any], number: int) -> Reply:
        await asyncio.sleep(0.05 if number % 3 == 0 else 0)
        return guess(request, number)  # type: ignore[no-any-return]

    one = await evaluated(tmp_path, shipped_tokenizer, concurrency=1)
    many = await evaluated(tmp_path, shipped_tokenizer, slow_at_first, concurrency=12, out=tmp_path / "many")
    assert [line["number"] for line in one.lines] != [line["number"] for line in many.lines]
    assert json.dumps(one.outcome) == json.dumps(many.outcome)


async def test_a_run_cut_anywhere_goes_on_to_the_same_report(shipped_tokenizer: Any, tmp_path: Path) -> None:
    whole = await evaluated(tmp_path, shipped_tokenizer)
    results = whole.folder / "results.jsonl"
    content = results.read_bytes()
    for cut in [0, 1, len(content) // 3, content.index(b"\n") + 1, len(content) - 1]:
        results.write_bytes(content[:cut])
        (whole.folder / "report.json").unlink()
        again = await evaluated(tmp_path, shipped_tokenizer)
        assert (again.code, json.dumps(again.outcome)) == (0, json.dumps(whole.outcome))
        assert len(again.fake.requests) == 12 - content[:cut].count(b"\n")
        assert len(again.lines) == 12


async def test_a_finished_run_is_reported_again_without_a_sample(shipped_tokenizer: Any, tmp_path: Path) -> None:
    first = await evaluated(tmp_path, shipped_tokenizer)
    again = await evaluated(tmp_path, shipped_tokenizer)
    assert (again.code, again.fake.requests, again.outcome) == (0, [], first.outcome)


async def test_failed_samples_are_missing_not_wrong_and_are_tried_again(
    shipped_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guess = guesser(shipped_tokenizer)
    broken = {sample_seed(1, 0), sample_seed(2, 3)}

    def reply(request: dict[str, Any], number: int) -> Reply:
        return Reply.status(400, "no") if request["sampling_params"]["sampling_seed"] in broken else guess(request, 0)

    ended = await evaluated(tmp_path, shipped_tokenizer, reply)
    sums = ended.report["data_sets"]["sums"]
    assert (ended.code, ended.report["complete"]) == (1, False)
    assert (sums["scored"], sums["missing"], sums["failed"], sums["status"]) == (
        10,
        2,
        2,
        {"completed": 10, "failed": 2},
    )
    assert sums["avg_at_n"] == pytest.approx(sums["right"] / 10, abs=1e-6)
    assert [problem["scored"] for problem in sums["by_problem"]] == [4, 3, 3]
    captured = capsys.readouterr()
    assert "2 samples are missing (2 failed) and count nowhere" in captured.out
    assert "2 failed: EngineRejectedError" in captured.err
    assert f"--out {ended.folder} goes on" in captured.err
    again = await evaluated(tmp_path, shipped_tokenizer)
    assert (again.code, len(again.fake.requests)) == (0, 2)
    assert json.dumps(again.outcome) == json.dumps(
        (await evaluated(tmp_path, shipped_tokenizer, out=tmp_path / "whole")).outcome
    )


async def test_the_bar_goes_on_where_it_was_and_shows_the_accuracy_of_what_is_scored(
    shipped_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = Reply.tokens(ids_of(shipped_tokenizer, "So \\boxed{0}.<|im_end|>"))

    def reply(request: dict[str, Any], number: int) -> Reply:
        return answer if number < 6 else Reply.status(400, "no")

    await evaluated(tmp_path, shipped_tokenizer, reply, concurrency=1)
    # the first problem's four are right, two of the next are wrong, and the rest has no score
    assert "accuracy 67%" in capsys.readouterr().err
    await evaluated(tmp_path, shipped_tokenizer, lambda *_: answer)
    err = capsys.readouterr().err
    assert "accuracy 33%" in err
    assert "12/12" in err
    assert "6 samples are there already; 6 that failed are tried again" in err


async def test_an_engine_that_only_fails_ends_the_run_early(
    shipped_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = await evaluated(
        tmp_path, shipped_tokenizer, lambda *_: Reply.status(400, "no"), sampling=Sampling(200, max_new_tokens=256)
    )
    assert ended.code == 1
    assert len(ended.lines) <= 10
    assert "8 samples in a row failed alike" in ended.report["session"]["stopped"]
    assert ended.report["data_sets"]["sums"]["missing"] == 600
    assert ended.report["data_sets"]["sums"]["avg_at_n"] is None
    assert "stopped: 8 samples in a row failed alike, the last one with EngineRejectedError" in capsys.readouterr().err


async def test_a_sample_that_was_cut_by_a_limit_counts_and_is_wrong(shipped_tokenizer: Any, tmp_path: Path) -> None:
    rambling = Reply.tokens(ids_of(shipped_tokenizer, "well " * 20), finish="length")
    ended = await evaluated(tmp_path, shipped_tokenizer, lambda *_: rambling, sampling=Sampling(4, max_new_tokens=20))
    sums = ended.report["data_sets"]["sums"]
    assert (ended.code, sums["scored"], sums["avg_at_n"], sums["without_answer"]) == (0, 12, 0.0, 12)
    assert sums["by_problem"][0]["truncated"] == 4
    assert sums["by_problem"][0]["majority"] == []


async def test_an_audit_checks_every_sample_and_finds_a_wrong_one(
    shipped_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest_run = await evaluated(tmp_path, shipped_tokenizer, audits=True)
    assert (honest_run.code, honest_run.report["violations"]) == (0, 0)
    tamper(monkeypatch)
    ended = await evaluated(tmp_path, shipped_tokenizer, audits=True, out=tmp_path / "audited")
    assert (ended.code, ended.report["complete"]) == (1, True)
    assert ended.report["violations"] >= 12
    assert all(line["violations"] for line in ended.lines)
    assert ended.report["audited"] == 12
    unaudited = await evaluated(tmp_path, shipped_tokenizer, out=tmp_path / "unaudited")
    assert (unaudited.code, unaudited.report["violations"], unaudited.report["audited"]) == (0, None, 0)


async def test_an_audit_keeps_nothing_of_a_sample_that_is_done(shipped_tokenizer: Any, tmp_path: Path) -> None:
    from strands_rollout.evaluate import playing
    from strands_rollout.sample_type import Sample

    answer = Reply.tokens(ids_of(shipped_tokenizer, ANSWER))
    folder = Path(shipped_tokenizer.name_or_path)
    async with FakeSGLang([answer]) as fake, playing(fake.base_url, folder, {"tools": []}, audited=True) as player:
        outcome = await player.play(Sample(prompt="What is 17 * 2?", label="34"), Sampling(1, 64).params)
        assert outcome.tito_violations == []
        assert player.recorder is not None
        assert player.recorder.episodes == {}


async def test_the_tool_is_called_and_counted(shipped_tokenizer: Any, tmp_path: Path) -> None:
    def solve(request: dict[str, Any], number: int) -> Reply:
        seen = shipped_tokenizer.decode(request["input_ids"], skip_special_tokens=False)
        return Reply.tokens(ids_of(shipped_tokenizer, ANSWER if "<tool_response>" in seen else call_text()))

    ended = await evaluated(tmp_path, shipped_tokenizer, solve, config=None, sampling=Sampling(2, 1024), audits=True)
    sums = ended.report["data_sets"]["sums"]
    assert (ended.code, sums["tool_calls"], sums["mean_turns"]) == (0, 6, 2.0)
    assert sums["by_problem"][0]["mean_tool_calls"] == 1.0
