"""The same episodes on the real SGLang and on the embedded engine."""

import json
import math
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from episode_stage import GREEDY, SAMPLED, episodes_on, facts_of, new_samples, tokens_of

from strands_rollout import Sample
from strands_rollout.engine import engine_process
from strands_rollout.evaluation.evaluate import RunPlan, Summary, evaluate
from strands_rollout.play.rows import shipped_rows, take_rows

pytestmark = pytest.mark.real

ROWS = 128
DEMO_SAMPLES = 32
# two runs of one policy exceed this bound less than once in a million times
SIGMAS = 5.0
LOGPROB_TOLERANCE = 1e-3
# the shipped model solves about 60 % of the problems; an accuracy below this bound can't be chance
LEAST_ACCURACY = 0.2
_SAME_FACTS = (
    "stop_reason", "final_text", "turns", "tool_iterations", "tool_calls", "tool_errors", "parse_failures",
    "sampled_tokens", "spans", "budgets",
)  # fmt: skip


@pytest.fixture
async def embedded() -> AsyncIterator[str]:
    """Yield the URL of an embedded engine with the shipped model."""
    async with engine_process() as url:
        yield url


def test_demo_completes_on_both_engines(sglang: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "strands_rollout.cli", "demo", "--base-url", sglang, "--json"]
    asked = ["--samples", str(DEMO_SAMPLES), "--dump", str(tmp_path)]
    done = subprocess.run([*command, *asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    summary = json.loads(line)
    assert (summary["samples"], summary["tito_violations"], summary["contract_violations"]) == (DEMO_SAMPLES, 0, 0)
    (dump,) = tmp_path.glob("*.jsonl")
    samples = [Sample.from_dict(json.loads(row)) for row in dump.read_text().splitlines()]
    assert all_finished(samples)
    assert summary["completed"] == sum(sample.status is Sample.Status.COMPLETED for sample in samples)
    assert summary["accuracy"] == pytest.approx(mean_accuracy(samples), abs=1e-4)
    assert summary["tool_calls"] == sum(facts_of(sample)["tool_calls"] for sample in samples)


def all_finished(samples: Sequence[Sample]) -> bool:
    """Return whether each episode was completed or, like a few of hundreds at T=1, ended at a limit."""
    return {sample.status for sample in samples} <= {Sample.Status.COMPLETED, Sample.Status.TRUNCATED}


def mean_accuracy(samples: Sequence[Sample]) -> float:
    return sum(sample.reward["acc"] for sample in samples if isinstance(sample.reward, dict)) / len(samples)


async def test_eval_accuracy_is_equal_on_both_engines(sglang, embedded, shipped_tokenizer, report_row) -> None:
    rows = take_rows(shipped_rows(), ROWS)
    found: dict[str, Summary] = {}
    for engine, url in (("SGLang", sglang), ("embedded", embedded)):
        outcomes = await evaluate(rows, RunPlan(url, Path(shipped_tokenizer.name_or_path), SAMPLED, concurrency=64))
        found[engine] = Summary.of(outcomes)
        assert found[engine].ok, found[engine]
        assert all_finished([outcome.sample for outcome in outcomes])
        report_row("accuracy at T=1", engine=engine, episodes=ROWS, accuracy=found[engine].accuracy)
    ours, theirs = (found[engine].accuracy for engine in ("embedded", "SGLang"))
    mean = (ours + theirs) / 2
    assert abs(ours - theirs) <= SIGMAS * math.sqrt(2 * mean * (1 - mean) / ROWS)
    assert theirs > LEAST_ACCURACY


async def test_generate_greedy_is_equal_on_both_engines(sglang, embedded, shipped_tokenizer, report_row):
    runs: list[list[Sample]] = []
    for url in (embedded, sglang):
        async with episodes_on(url, shipped_tokenizer) as stage:
            runs.append(await stage.play(new_samples(24), GREEDY))
    ours, theirs = runs
    assert tokens_of(ours) == tokens_of(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.response, one.loss_mask, one.reward) == (other.response, other.loss_mask, other.reward)
        assert one.status is other.status is Sample.Status.COMPLETED
        facts, others = facts_of(one), facts_of(other)
        assert {name: facts[name] for name in _SAME_FACTS} == {name: others[name] for name in _SAME_FACTS}
        read = [sample.prefix_cache_info.total_prompt_tokens for sample in (one, other)]
        assert read[0] == read[1]
    assert max(facts_of(sample)["turns"] for sample in theirs) > 1
    pairs = [pair for one, other in zip(ours, theirs, strict=True) for pair in logprob_pairs(one, other)]
    farthest = max(abs(one - other) for one, other in pairs)
    report_row(
        "greedy episodes on both engines", episodes=len(ours), tokens=len(pairs), largest_logprob_gap=f"{farthest:.1e}"
    )
    assert farthest < LOGPROB_TOLERANCE
    # at T=0 both report the logprobs of T=1, not zeros
    assert min(min(pair) for pair in pairs) < -LOGPROB_TOLERANCE


def logprob_pairs(one: Sample, other: Sample) -> list[tuple[float, float]]:
    """Return the logprobs of each sampled token in both samples."""
    values = zip(one.rollout_log_probs or [], other.rollout_log_probs or [], one.loss_mask or [], strict=True)
    return [(first, second) for first, second, mask in values if mask]


async def test_generate_greedy_is_equal_alone_and_in_batch(sglang: str, shipped_tokenizer: Any) -> None:
    async with episodes_on(sglang, shipped_tokenizer) as stage:
        together = await stage.play(new_samples(24), GREEDY)
        alone = await stage.play(new_samples(4), GREEDY, at_once=1)
    assert tokens_of(alone) == tokens_of(together[:4])
