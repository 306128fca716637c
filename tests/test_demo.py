"""The demo without its command line: dump, JSON, where the tokenizer comes from, and the engine that it starts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, ids_of

from strands_rollout.demo import DemoOptions, most_telling, run_demo, served_tokenizer, write_dump
from strands_rollout.errors import ConfigError
from strands_rollout.evaluate import Outcome, Summary
from strands_rollout.sample_type import Sample


def options(folder: Path, tokenizer: Any, **changes: Any) -> DemoOptions:
    data = folder / "rows.jsonl"
    data.write_text('{"prompt": "What is 17 * 2?", "label": "34"}\n')
    made = DemoOptions(
        base_url=None,
        model_dir=None,
        tokenizer_dir=Path(tokenizer.name_or_path),
        data=data,
        samples=2,
        concurrency=2,
        temperature=1.0,
        max_new_tokens=512,
        seed=None,
        dump_dir=folder / "dump",
        json_only=False,
    )
    return replace(made, **changes)


async def run_on(script: Any, made: DemoOptions) -> Summary:
    """Run it as the command does: in a thread without a loop, against a scripted engine."""
    async with FakeSGLang(script, context_length=8192) as fake:
        return await asyncio.to_thread(run_demo, replace(made, base_url=fake.base_url))


async def test_the_dump_holds_each_sample_with_its_reward(shipped_tokenizer: Any, tmp_path: Path) -> None:
    await run_on([Reply.tokens(ids_of(shipped_tokenizer, ANSWER))] * 2, options(tmp_path, shipped_tokenizer))
    (dump,) = (tmp_path / "dump").glob("*.jsonl")
    samples = [Sample.from_dict(json.loads(line)) for line in dump.read_text().splitlines()]
    assert [sample.reward["acc"] for sample in samples if isinstance(sample.reward, dict)] == [1.0, 1.0]
    assert all(len(sample.loss_mask or []) == sample.response_length for sample in samples)


async def test_json_only_means_one_line_on_stdout(
    shipped_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = options(tmp_path, shipped_tokenizer, json_only=True)
    summary = await run_on([Reply.tokens(ids_of(shipped_tokenizer, ANSWER))] * 2, made)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == summary.to_dict()


async def test_failed_episodes_are_explained_and_the_last_line_is_still_json(
    shipped_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = await run_on(lambda *_: Reply.status(400, "no such luck"), options(tmp_path, shipped_tokenizer))
    out = capsys.readouterr().out
    assert not summary.ok
    assert "failed, 2 of 2: EngineRejectedError" in out
    assert json.loads(out.splitlines()[-1])["completed"] == 0


async def test_the_embedded_engine_runs_the_demo_without_a_violation(shipped_tokenizer: Any, tmp_path: Path) -> None:
    made = options(tmp_path, shipped_tokenizer, tokenizer_dir=None, samples=4)
    summary = await asyncio.to_thread(run_demo, made)
    assert summary.ok, summary
    assert summary.samples == 4


async def test_the_tokenizer_is_the_folder_that_the_server_names(tmp_path: Path) -> None:
    async with FakeSGLang([]) as fake:
        with pytest.raises(ConfigError, match=r"names the tokenizer '/models/fake'.*--tokenizer DIR"):
            await served_tokenizer(fake.base_url)


def test_a_dump_that_can_not_be_written_names_the_folder(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigError, match="choose another folder with --dump"):
        write_dump(blocked, [])


def test_the_transcript_is_of_a_right_answer_found_with_tools_where_there_is_one() -> None:
    def outcome(calls: int, acc: float) -> Outcome:
        sample: Any = SimpleNamespace(metadata={"strands_rollout": {"tool_calls": calls}}, reward={"acc": acc})
        return Outcome(sample, [], [])

    plain, wrong, right = outcome(0, 1.0), outcome(2, 0.0), outcome(1, 1.0)
    assert most_telling([plain, wrong, right]) is right
    assert most_telling([plain, wrong]) is wrong
    assert most_telling([plain, plain]) is plain
