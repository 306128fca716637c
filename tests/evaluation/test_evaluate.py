"""Rows run through `generate` and `reward_func`: the samples, the totals and the checks, against a scripted engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from evaluation_stage import tamper
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, call_text, ids_of

from strands_rollout.dataset_rows import Row, read_rows
from strands_rollout.errors import PromptError
from strands_rollout.evaluate import Outcome, RunPlan, Summary, evaluate, slime_sampling_params
from strands_rollout.sample_type import Sample

ROWS = [Row([{"role": "user", "content": "What is 17 * 2?"}], "34"), Row("What is 17 * 3?", "51")]


def plan(fake: FakeSGLang, tokenizer: Any, **more: Any) -> RunPlan:
    return RunPlan(fake.base_url, Path(tokenizer.name_or_path), slime_sampling_params(1.0, 4096), **more)


def solver(tokenizer: Any) -> Any:
    """A policy that calls the tool once, then answers 34 to everything."""

    def reply(request: dict[str, Any], number: int) -> Reply:
        seen = tokenizer.decode(request["input_ids"], skip_special_tokens=False)
        return Reply.tokens(ids_of(tokenizer, ANSWER if "<tool_response>" in seen else call_text()))

    return reply


async def run(tokenizer: Any, script: Any, **more: Any) -> tuple[list[Outcome], FakeSGLang]:
    async with FakeSGLang(script, context_length=8192) as fake:
        return await evaluate(ROWS, plan(fake, tokenizer, **more)), fake


async def test_samples_come_back_in_order_graded_and_without_violations(shipped_tokenizer: Any) -> None:
    outcomes, fake = await run(shipped_tokenizer, solver(shipped_tokenizer))
    assert [outcome.graded["acc"] for outcome in outcomes] == [1.0, 0.0]
    assert Summary.of(outcomes).to_dict() == {
        "samples": 2,
        "completed": 2,
        "mean_reward": 0.0,
        "accuracy": 0.5,
        "tool_calls": 2,
        "tito_violations": 0,
        "contract_violations": 0,
    }
    assert len(fake.requests) == 4


async def test_a_plan_with_a_seed_gives_each_sample_its_own(shipped_tokenizer: Any) -> None:
    _, fake = await run(shipped_tokenizer, [Reply.tokens(ids_of(shipped_tokenizer, ANSWER))] * 2, seed=7)
    assert sorted(request.body["sampling_params"]["sampling_seed"] for request in fake.requests) == [7, 8]


async def test_no_more_episodes_run_at_once_than_the_plan_says(shipped_tokenizer: Any) -> None:
    running, most = 0, 0

    async def reply(request: dict[str, Any], number: int) -> Reply:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return Reply.tokens(ids_of(shipped_tokenizer, ANSWER))

    async with FakeSGLang(reply) as fake:
        await evaluate(ROWS * 3, plan(fake, shipped_tokenizer, concurrency=1))
    assert most == 1


async def test_a_failed_episode_is_a_valid_sample_that_is_not_completed(shipped_tokenizer: Any) -> None:
    outcomes, _ = await run(shipped_tokenizer, [Reply.status(400, "no")] * 2)
    assert {outcome.sample.status for outcome in outcomes} == {Sample.Status.FAILED}
    summary = Summary.of(outcomes)
    assert (summary.completed, summary.contract_violations, summary.ok) == (0, 0, False)


async def test_a_tampered_sample_is_counted_against_the_wire(
    shipped_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper(monkeypatch)
    outcomes, _ = await run(shipped_tokenizer, solver(shipped_tokenizer))
    summary = Summary.of(outcomes)
    assert (summary.tito_violations, summary.contract_violations, summary.ok) == (2, 2, False)


def test_rows_are_read_in_order_and_again_from_the_top(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "label": 1}\n\n{"prompt": "b", "label": 2}\n')
    assert [row.prompt for row in read_rows(data, 5)] == ["a", "b", "a", "b", "a"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no rows"),
        ("{", "rows.jsonl:1"),
        ('{"prompt": "a", "label": 1}\n{"question": "b"}', 'rows.jsonl:2: got b\'{"question"'),
    ],
)
def test_a_bad_data_file_is_named_with_its_line(tmp_path: Path, content: str, words: str) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(content)
    with pytest.raises(PromptError) as caught:
        read_rows(data, 5)
    assert words in str(caught.value)


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="can't read the data file"):
        read_rows(tmp_path / "none.jsonl", 1)
