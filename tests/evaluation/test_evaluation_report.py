"""What an evaluation's report says of its own numbers: on what they stand, and what speaks against them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from evaluation_stage import PROBLEMS, evaluated, guesser, sample_seed
from fake_sglang import FakeSGLang, Reply
from harness import ids_of

from strands_rollout import evaluate as evaluate_module
from strands_rollout.evaluation.options import idle_ks
from strands_rollout.evaluation.plan import DataFile, EvalSet, Sampling


def failing(tokenizer: Any, *seeds: int) -> Any:
    """The guesser on an engine that refuses some samples."""
    guess = guesser(tokenizer)

    def reply(request: dict[str, Any], number: int) -> Reply:
        if request["sampling_params"]["sampling_seed"] in seeds:
            return Reply.status(400, "no")
        answer: Reply = guess(request, number)
        return answer

    return reply


async def test_each_number_says_on_how_many_problems_it_stands(
    shipped_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = [sample_seed(1, number) for number in range(4)] + [sample_seed(2, 0)]
    ended = await evaluated(tmp_path, shipped_tokenizer, failing(shipped_tokenizer, *broken))
    sums = ended.report["data_sets"]["sums"]
    assert (sums["problems"], sums["problems_scored"]) == (PROBLEMS, 2)
    assert sums["pass_at_k_problems"] == {"1": 2, "4": 1}
    out = capsys.readouterr().out
    assert " over 2 of 3 problems (95% interval" in out
    assert f"pass@4 {sums['pass_at_k']['4']:.1%} over 1 of 3 problems" in out
    await evaluated(tmp_path, shipped_tokenizer)
    assert "of 3 problems" not in capsys.readouterr().out


async def test_problems_that_are_all_alike_have_no_interval(
    shipped_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Reply.tokens(ids_of(shipped_tokenizer, "So \\boxed{99}.<|im_end|>"))
    ended = await evaluated(tmp_path, shipped_tokenizer, lambda *_: wrong)
    sums = ended.report["data_sets"]["sums"]
    assert (sums["avg_at_n"], sums["interval_95"]) == (0.0, None)
    assert "(95% interval -: all problems alike)" in capsys.readouterr().out


async def test_what_could_not_be_graded_is_missing_and_is_tried_again(
    shipped_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = await evaluated(tmp_path, shipped_tokenizer)
    results = whole.folder / "results.jsonl"
    lines = whole.lines
    lines[3]["reward"] |= {"acc": 0.0, "method": "algebra_crash", "error": "the symbolic worker ended twice"}
    lines[5]["reward"] |= {"acc": 0.0, "method": "algebra_timeout"}
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = await evaluated(tmp_path, shipped_tokenizer, lambda *_: Reply.status(400, "no"))
    sums = again.report["data_sets"]["sums"]
    assert (again.code, sums["scored"], sums["missing"]) == (1, 11, 1)
    assert len(again.fake.requests) == 1
    assert sums["methods"]["algebra_timeout"] == 1
    assert sum(sums["methods"].values()) == 11
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert "sums: 1 answers count as wrong since comparing them took too long" in text
    assert "1 that failed are tried again" in captured.err


async def test_grading_that_fails_for_all_ends_the_run_and_counts_nowhere(
    shipped_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strands_rollout import evaluate as evaluate_module

    async def unavailable(args: Any, sample: Any) -> dict[str, Any]:
        words = "no symbolic worker could be started; the log says why"
        return {"score": -1.0, "acc": 0.0, "pred": "1", "label": "1", "method": "algebra_unavailable", "error": words}

    monkeypatch.setattr(evaluate_module, "reward_func", unavailable)
    ended = await evaluated(tmp_path, shipped_tokenizer)
    sums = ended.report["data_sets"]["sums"]
    assert (ended.code, sums["scored"], sums["avg_at_n"]) == (1, 0, None)
    assert "not graded: no symbolic worker could be started" in ended.report["session"]["stopped"]


async def test_weights_that_change_in_mid_run_are_told(
    shipped_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guess = guesser(shipped_tokenizer)
    engines: list[FakeSGLang] = []

    def reply(request: dict[str, Any], number: int) -> Reply:
        if number == 6:
            engines[0].engine.weight_version = "2"
        answer: Reply = guess(request, number)
        return answer

    async def run(script: Any, name: str) -> dict[str, Any]:
        return (await evaluated(tmp_path, shipped_tokenizer, script, out=tmp_path / name, engines=engines)).report

    steady = await run(None, "steady")
    assert (steady["weight_versions"], steady["notes"]) == (["default"], [])
    capsys.readouterr()
    engines.clear()
    changed = await run(reply, "changed")
    assert changed["weight_versions"] == ["2", "default"]
    words = "sampled with the weights 2, default; the run was begun with default"
    captured = capsys.readouterr()
    assert words in captured.out
    assert words in captured.err


async def test_a_path_is_the_same_however_it_is_written(
    shipped_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.symlink_to(shipped_tokenizer.name_or_path)
    await evaluated(tmp_path, shipped_tokenizer)
    monkeypatch.chdir(tmp_path)
    again = await evaluated(tmp_path, shipped_tokenizer, tokenizer_dir=Path("tokenizer"), data=[Path("sums.jsonl")])
    assert (again.code, again.fake.requests) == (0, [])


def test_a_k_above_the_samples_is_told() -> None:
    chosen = EvalSet(DataFile("sums", Path("sums.jsonl")), [], "", Sampling(4, 64))
    assert idle_ks([1, 4, 8], [chosen]) == ["sums: no pass@8, since each problem has 4 samples"]


async def test_a_k_above_the_samples_is_noted(
    shipped_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await evaluated(tmp_path, shipped_tokenizer, ks=[1, 8])
    assert "sums: no pass@8" in capsys.readouterr().err
    await evaluated(tmp_path, shipped_tokenizer, ks=None)
    assert "no pass@" not in capsys.readouterr().err


async def test_drift_and_context_that_is_not_the_templates_are_reported(
    shipped_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = (await evaluated(tmp_path, shipped_tokenizer)).report
    drift = right["data_sets"]["sums"]["drift"]
    assert (drift["measured"], drift["drifted"], drift["mismatched"], drift["mismatched_tokens"]) == (12, 0, 0, 0)
    assert (drift["turn_drift"], drift["text_drift"], drift["off_policy"]) == (0, 0, 0)
    assert right["notes"] == []
    honest = evaluate_module.generate

    async def tampering(args: Any, sample: Any, params: Any, **more: Any) -> Any:
        done = await honest(args, sample, params, **more)
        del done.tokens[len(done.tokens) - done.response_length - 1]
        spans = done.metadata["strands_rollout"]["spans"]
        done.metadata["strands_rollout"]["spans"] = [[turn, start - 1, end - 1, by] for turn, start, end, by in spans]
        return done

    monkeypatch.setattr(evaluate_module, "generate", tampering)
    wrong = await evaluated(tmp_path, shipped_tokenizer, out=tmp_path / "tampered")
    counts = wrong.report["data_sets"]["sums"]["drift"]
    assert (counts["measured"], counts["drifted"], counts["mismatched"]) == (12, 0, 12)
    (note,) = wrong.report["notes"]
    assert f"sums: {counts['mismatched_tokens']} context tokens in 12 of 12 samples are not what the chat" in note
    assert [line["drift"]["sampled_tokens"] for line in wrong.lines] == [line["sampled_tokens"] for line in wrong.lines]
