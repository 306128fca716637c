"""The command `eval`: complete runs, interrupted and resumed runs, and runs that end early."""

import asyncio
import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from evaluation_stage import (
    PROBLEMS,
    corrupt_samples,
    guess_by_seed,
    options_for,
    result_line,
    sample_seed,
    write_problems,
)
from fake_sglang import Reply, dead_url
from harness import ids_of
from rich.console import Console

from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.evaluation.evaluate import Summary
from strands_rollout.evaluation.plan import SampleKey
from strands_rollout.evaluation.results import SampleResult
from strands_rollout.evaluation.run import accuracy_bar, print_outcomes, print_summary, run_evaluation, run_samples
from strands_rollout.play.options import Sampling
from strands_rollout.play.player import Outcome
from strands_rollout.samples import Sample


async def test_run_evaluation_report_counts_the_answers(run, capsys):
    ended = await run()
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
    shown = capsys.readouterr()
    out = shown.out.splitlines()
    printed = json.loads(out[-1])
    assert "by_problem" not in printed["data_sets"]["sums"]
    assert printed["data_sets"]["sums"]["avg_at_n"] == sums["avg_at_n"]
    assert any("avg@4" in line and "maj@4" in line for line in out)
    assert "strands-rollout view " in shown.err or "strands_rollout.cli view " in shown.err


async def test_run_evaluation_results_hold_tokens_only_if_asked(run, shipped_tokenizer, tmp_path):
    ended = await run()
    assert Counter((line["problem"], line["number"]) for line in ended.lines) == Counter(
        (problem, number) for problem in range(PROBLEMS) for number in range(4)
    )
    first = next(line for line in ended.lines if (line["problem"], line["number"]) == (1, 0))
    answer = sample_seed(1, 0) % 3
    assert (first["seed"], first["reward"]["pred"], first["label"]) == (sample_seed(1, 0), str(answer), "1")
    assert first["response"] == f"So \\boxed{{{answer}}}.<|im_end|>"
    assert first["response_tokens"] == first["sampled_tokens"] == len(ids_of(shipped_tokenizer, first["response"]))
    assert "sample" not in first
    whole = (await run(keeps_tokens=True, out=tmp_path / "whole")).lines[0]["sample"]
    assert len(whole["rollout_log_probs"]) == whole["response_length"]


async def test_run_evaluation_resumes_to_the_same_report(run):
    whole = await run()
    results = whole.folder / "results.jsonl"
    content = results.read_bytes()
    for cut in [0, len(content) // 3, content.index(b"\n") + 1, len(content) - 1]:
        results.write_bytes(content[:cut])
        (whole.folder / "report.json").unlink()
        again = await run()
        assert (again.code, json.dumps(again.outcome)) == (0, json.dumps(whole.outcome))
        assert (len(again.fake.requests), len(again.lines)) == (12 - content[:cut].count(b"\n"), 12)


async def test_run_evaluation_failed_samples_are_missing_and_retried(run, shipped_tokenizer, capsys):
    guess = guess_by_seed(shipped_tokenizer)
    broken = {sample_seed(1, 0), sample_seed(2, 3)} | {sample_seed(0, number) for number in range(4)}

    def reply(request: dict[str, Any], number: int) -> Reply:
        return Reply.status(400, "no") if request["sampling_params"]["sampling_seed"] in broken else guess(request, 0)

    ended = await run(reply)
    sums = ended.report["data_sets"]["sums"]
    assert (ended.code, ended.report["complete"]) == (1, False)
    assert (sums["scored"], sums["missing"], sums["status"]) == (6, 6, {"completed": 6, "failed": 6})
    assert sums["avg_at_n"] == pytest.approx(sums["right"] / 6, abs=1e-6)
    assert [problem["scored"] for problem in sums["by_problem"]] == [0, 3, 3]
    assert (sums["problems_scored"], sums["pass_at_k_problems"]) == (2, {"1": 2, "4": 0})
    captured = capsys.readouterr()
    assert " over 2 of 3 problems (95% interval" in captured.out
    assert "6 samples are missing (6 failed) and are not counted" in captured.out
    assert "6 failed: EngineRejectedError" in captured.err
    assert f"to resume, run the same command with --out {ended.folder}\n" in captured.err
    again = await run()
    assert (again.code, len(again.fake.requests), again.report["missing"]) == (0, 6, 0)


async def test_run_evaluation_ends_early_if_the_engine_only_fails(run, capsys):
    ended = await run(lambda *_: Reply.status(400, "no"), sampling=Sampling(200, max_new_tokens=256))
    assert ended.code == 1
    assert len(ended.lines) <= 10
    assert ended.report["data_sets"]["sums"]["missing"] == 600
    assert ended.report["data_sets"]["sums"]["avg_at_n"] is None
    assert (
        "stopped: 8 consecutive samples failed for the same reason, the last with EngineRejectedError"
        in capsys.readouterr().err
    )


async def test_run_evaluation_counts_truncated_samples_as_wrong(run, shipped_tokenizer):
    rambling = Reply.tokens(ids_of(shipped_tokenizer, "well " * 20)[:20], finish="length")
    ended = await run(lambda *_: rambling, sampling=Sampling(4, max_new_tokens=20))
    sums = ended.report["data_sets"]["sums"]
    assert (ended.code, sums["scored"], sums["avg_at_n"], sums["without_answer"]) == (0, 12, 0.0, 12)
    assert (sums["by_problem"][0]["truncated"], sums["by_problem"][0]["majority"]) == (4, [])


async def test_run_evaluation_audit_finds_corrupt_samples(run, tmp_path, monkeypatch):
    honest_run = await run(audits=True)
    assert (honest_run.code, honest_run.report["violations"]) == (0, 0)
    corrupt_samples(monkeypatch)
    ended = await run(audits=True, out=tmp_path / "audited")
    assert (ended.code, ended.report["complete"]) == (1, True)
    assert ended.report["violations"] >= 12
    assert all(line["violations"] for line in ended.lines)
    assert ended.report["audited"] == 12
    unaudited = await run(out=tmp_path / "unaudited")
    assert (unaudited.code, unaudited.report["violations"], unaudited.report["audited"]) == (0, None, 0)


async def test_run_evaluation_uses_the_eval_context_limit(run):
    """Only evaluations read eval_max_context_len; a prompt of that length leaves no token for an answer."""
    ended = await run(max_context_tokens=8)
    assert (set(ended.report["data_sets"]["sums"]["stop_reasons"]), ended.fake.requests) == ({"prompt_too_long"}, [])


async def test_run_evaluation_refuses_a_folder_of_another_run(run, tmp_path):
    first = await run()
    data = tmp_path / "other" / "sums.jsonl"
    data.parent.mkdir()
    data.write_text((tmp_path / "sums.jsonl").read_text().replace("+ 0", "+ 1"))
    for change, words in (
        ({"seed": 8}, "seed was 7 and is 8"),
        ({"max_context_tokens": 99}, "max_context_length was None and is 99"),
        ({"sampling": Sampling(5, 256)}, "data_sets.sums.samples_per_problem was 4 and is 5"),
        ({"sampling": Sampling(4, 256, temperature=0.5)}, "sampling_params.temperature was 1.0 and is 0.5"),
        ({"limit": 2}, "data_sets.sums.problems was 3 and is 2"),
        ({"config": None}, "settings.tools was"),
        ({"data": [data]}, r"data_sets\.sums\.sha256 was"),
    ):
        with pytest.raises(ConfigError, match=words):
            await run(**change)
    record = json.loads((first.folder / "run.json").read_text())
    (first.folder / "run.json").write_text(json.dumps({**record, "model": "/models/another"}))
    with pytest.raises(ConfigError, match="model was '/models/another' and is '/models/fake'"):
        await run()


async def test_run_evaluation_reports_a_finished_run_again(run, capsys):
    first = await run()
    capsys.readouterr()
    again = await run(concurrency=5, json_only=True)
    assert (again.code, again.fake.requests, again.outcome) == (0, [], first.outcome)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["scored"] == 12


async def test_run_evaluation_reports_data_sets_separately(run, tmp_path):
    config = tmp_path / "eval.yaml"
    entries = [
        {"name": "few", "path": str(write_problems(tmp_path)), "n_samples_per_eval_prompt": 1},
        {"name": "cold", "path": str(write_problems(tmp_path)), "temperature": 0.25, "top_k": 5},
    ]
    config.write_text(yaml.safe_dump({"eval": {"datasets": entries}}))
    ended = await run(data=[], eval_config=config)
    assert {name: one["scored"] for name, one in ended.report["data_sets"].items()} == {"few": 3, "cold": 12}
    assert (ended.report["planned"], ended.report["scored"]) == (15, 15)
    assert ended.report["data_sets"]["few"]["pass_at_k"].keys() == {"1"}
    params = [request.body["sampling_params"] for request in ended.fake.requests]
    assert Counter((one["temperature"], one["top_k"]) for one in params) == {(1.0, -1): 3, (0.25, 5): 12}


WRONG_ROW = {"prompt": "?", "label": "1", "metadata": {"strands_rollout_settings": {"tools": ["os.system"]}}}
TYPO = {"strands_rollout": {"max_tool_iteration": 3}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: {"data": []}, "expected --data or --eval-config"),
        (lambda folder: {"eval_config": folder / "rollout.yaml"}, "got --data and --eval-config"),
        (lambda folder: {"data": [folder / "sums.jsonl"] * 2}, "got the data sets sums, sums"),
        (lambda folder: {"config": write_json(folder / "a.yaml", TYPO)}, "did you mean 'max_tool_iterations'"),
        (
            lambda folder: {"data": [write_json(folder / "rows.jsonl", WRONG_ROW)]},
            r"rows\.jsonl:1: got the tools \['os",
        ),
    ],
)
def test_run_evaluation_refuses_wrong_options_first(shipped_tokenizer, tmp_path, change, words):
    with pytest.raises(ConfigError, match=words):
        run_evaluation(options_for(tmp_path, dead_url(), shipped_tokenizer, **change(tmp_path)))


def write_json(path: Path, value: dict[str, Any]) -> Path:
    path.write_text(json.dumps(value))
    return path


DOWN = "EngineUnavailableError: no answer from http://127.0.0.1:1"


def keys(count: int) -> list[SampleKey]:
    return [SampleKey("sums", number, 0) for number in range(count)]


def result(problem: int, error: str | None = None) -> SampleResult:
    failed = {"status": "failed", "stop_reason": "engine_error", "error": error, "reward": None} if error else {}
    return SampleResult.from_line(result_line(0, problem=problem, **failed))


async def run_fake_samples(
    count: int, error_of: Callable[[int], str | None], concurrency: int = 2
) -> tuple[str | None, list[int]]:
    seen: list[int] = []

    async def one(key: SampleKey) -> SampleResult:
        seen.append(key.problem)
        await asyncio.sleep(0)
        return result(key.problem, error_of(key.problem))

    return await run_samples(keys(count), one, concurrency=concurrency), seen


@pytest.mark.parametrize(
    ("error_of", "concurrency", "failures", "least", "most"),
    [
        pytest.param(lambda _: None, 2, None, 100, 100, id="all right answers"),
        pytest.param(lambda _: DOWN, 2, 8, 8, 10, id="eight equal episodes"),
        pytest.param(lambda number: DOWN if number < 19 else None, 20, None, 100, 100, id="fewer than the concurrency"),
        pytest.param(lambda number: DOWN if number < 20 else None, 20, 20, 20, 60, id="as many as the concurrency"),
        pytest.param(
            lambda number: [DOWN, "SandboxError: full"][number % 2], 2, None, 100, 100, id="two kinds of errors"
        ),
        pytest.param(
            lambda number: f"EngineResponseError: request {number}", 2, 8, 8, 10, id="one kind with different texts"
        ),
    ],
)
async def test_run_samples_ends_after_consecutive_equal_failures(error_of, concurrency, failures, least, most):
    reason, seen = await run_fake_samples(100, error_of, concurrency)
    assert least <= len(seen) <= most
    assert seen == list(range(len(seen)))
    if failures is None:
        assert reason is None
    else:
        assert (reason or "").startswith(
            f"{failures} consecutive samples failed for the same reason, the last with Engine"
        )


async def test_run_samples_raises_the_runs_own_error():
    async def one(key: SampleKey) -> SampleResult:
        raise RolloutError(f"no room for {key.problem}")

    with pytest.raises(RolloutError, match="no room for 0"):
        await run_samples(keys(5), one, concurrency=2)


def outcome(*, right=True, violations=(), status=Sample.Status.COMPLETED, **facts):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    question = {"role": "user", "content": "What is [bold]17 * 2[/bold]?"}
    sample = Sample(prompt=[*chat, question], label="34", index=3)
    sample.status = status
    sample.response_length = 41
    sample.reward = {"score": 1.0 if right else -1.0, "acc": float(right), "pred": "34" if right else "35"}
    sample.metadata = {"strands_rollout": {"stop_reason": "completed", "turns": 2, "tool_calls": 1, **facts}}
    return Outcome(sample, list(violations), [])


def printed(call: Any, *args: Any, **kwargs: Any) -> str:
    out = io.StringIO()
    call(Console(file=out, width=140), *args, **kwargs)
    return out.getvalue()


def test_print_outcomes_narrow_terminal_omits_questions() -> None:
    out = io.StringIO()
    print_outcomes(Console(file=out, width=80), [outcome(stop_reason="max_tool_iterations")])
    shown = " ".join(out.getvalue().splitlines()[-1].split())
    assert shown == "3 34 34 1 completed max_tool_iterations 2 1 41"


def test_print_summary_counts_stop_reasons_and_violations() -> None:
    outcomes = [
        outcome(violations=("loss_mask has None",)),
        outcome(right=False, stop_reason="turn_length", error="limit"),
        outcome(right=False, status=Sample.Status.FAILED, stop_reason="engine_error", error="EngineError: x"),
    ]
    text = printed(print_summary, outcomes, Summary.of(outcomes), seconds=1.5)
    assert "3 samples in 1.5 s: accuracy 50.0%, mean reward 0.000, 3 tool calls" in text
    assert "completed 1, turn_length 1, engine_error 1" in text
    assert "token exactness: every sample passed" in text
    assert "slime's contract: 1 violations\n  sample 3: loss_mask has None" in text
    assert "1 of 3 samples failed: EngineError: x" in text
    assert "limit" not in text


def test_accuracy_bar_prints_lines_without_a_terminal() -> None:
    out = io.StringIO()
    with accuracy_bar(Console(file=out, width=80), 40, [True] * 20) as tell:
        for number in range(20):
            tell(None if number == 19 else number % 2 == 0)
            assert len(out.getvalue().splitlines()) == (number + 1) // 4
    shown = out.getvalue().splitlines()
    assert (shown[0], shown[-1]) == ("episodes 24/40  accuracy 92%", "episodes 40/40  accuracy 77%")
    with accuracy_bar(Console(file=out, width=80), 3) as tell:
        tell(None)
    assert out.getvalue().endswith("episodes 1/3\n")
