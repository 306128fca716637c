"""Rows through `generate` and `reward_func` on a scripted engine: samples, totals, checks, and the demo."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evaluation_stage import corrupt_samples
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, call_text, ids_of

from strands_rollout.client.client import ServerInfo
from strands_rollout.errors import ConfigError, PromptError
from strands_rollout.evaluation.evaluate import RunPlan, Summary, evaluate
from strands_rollout.evaluation.run import run_demo
from strands_rollout.play.engine import tokenizer_folder
from strands_rollout.play.options import DemoOptions, slime_sampling_params
from strands_rollout.play.player import Outcome
from strands_rollout.play.rows import Row, take_rows
from strands_rollout.samples import Sample

ROWS = [Row([{"role": "user", "content": "What is 17 * 2?"}], "34"), Row("What is 17 * 3?", "51")]


def plan(fake: FakeSGLang, tokenizer: Any, **more: Any) -> RunPlan:
    return RunPlan(fake.base_url, Path(tokenizer.name_or_path), slime_sampling_params(1.0, 4096), **more)


def solver(tokenizer: Any) -> Any:
    def reply(request: dict[str, Any], number: int) -> Reply:
        seen = tokenizer.decode(request["input_ids"], skip_special_tokens=False)
        return Reply.tokens(ids_of(tokenizer, ANSWER if "<tool_response>" in seen else call_text()))

    return reply


async def run(tokenizer: Any, script: Any, **more: Any) -> tuple[list[Outcome], FakeSGLang]:
    async with FakeSGLang(script, context_length=8192) as fake:
        return await evaluate(ROWS, plan(fake, tokenizer, **more)), fake


async def test_evaluate_returns_graded_samples_in_order(shipped_tokenizer):
    outcomes, fake = await run(shipped_tokenizer, solver(shipped_tokenizer))
    assert [outcome.reward_details["acc"] for outcome in outcomes] == [1.0, 0.0]
    assert Summary.of(outcomes) == Summary(2, 2, 0.0, 0.5, tool_calls=2, tito_violations=0, contract_violations=0)
    assert len(fake.requests) == 4


def test_take_rows_refuses_empty_missing_and_pipe_files(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, words in (
        ("empty", "has no rows"),
        ("none", "can't read the data file"),
        ("pipe", "it is a named pipe; expected a regular file"),
    ):
        with pytest.raises(PromptError, match=words):
            take_rows(tmp_path / f"{name}.jsonl", 5)


async def test_evaluate_counts_a_tampered_sample(shipped_tokenizer, monkeypatch):
    corrupt_samples(monkeypatch)
    outcomes, _ = await run(shipped_tokenizer, solver(shipped_tokenizer))
    summary = Summary.of(outcomes)
    assert (summary.tito_violations, summary.contract_violations, summary.ok) == (2, 2, False)


def options(folder: Path, tokenizer: Any, **changes: Any) -> DemoOptions:
    data = folder / "rows.jsonl"
    data.write_text('{"prompt": "What is 17 * 2?", "label": "34"}\n')
    named = {"base_url": None, "model_dir": None, "tokenizer_dir": Path(tokenizer.name_or_path), "data": data}
    few = {"samples": 2, "concurrency": 2, "max_new_tokens": 512, "dump_dir": folder / "dump"}
    return DemoOptions(**{**named, **few, **changes})


async def run_demo_on(script: Any, made: DemoOptions) -> Summary:
    """Run the demo as the command does: in a thread without an event loop, against a scripted engine."""
    async with FakeSGLang(script, context_length=8192) as fake:
        return await asyncio.to_thread(run_demo, replace(made, base_url=fake.base_url))


async def test_run_demo_dumps_samples_and_prints_one_json_line(shipped_tokenizer, tmp_path, capsys):
    made = options(tmp_path, shipped_tokenizer, json_only=True)
    summary = await run_demo_on([Reply.tokens(ids_of(shipped_tokenizer, ANSWER))] * 2, made)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == summary.to_dict()
    (dump,) = (tmp_path / "dump").glob("*.jsonl")
    samples = [Sample.from_dict(json.loads(line)) for line in dump.read_text().splitlines()]
    assert [sample.reward["acc"] for sample in samples if isinstance(sample.reward, dict)] == [1.0, 1.0]
    assert all(len(sample.loss_mask or []) == sample.response_length for sample in samples)


async def test_run_demo_explains_failed_episodes(shipped_tokenizer, tmp_path, capsys):
    summary = await run_demo_on(lambda *_: Reply.status(400, "no such luck"), options(tmp_path, shipped_tokenizer))
    out = capsys.readouterr().out
    assert (summary.completed, summary.contract_violations, summary.ok) == (0, 0, False)
    assert "2 of 2 samples failed: EngineRejectedError" in out
    assert json.loads(out.splitlines()[-1])["completed"] == 0


@pytest.mark.end_to_end
async def test_run_demo_on_the_embedded_engine(shipped_tokenizer, tmp_path):
    made = options(tmp_path, shipped_tokenizer, tokenizer_dir=None, samples=4)
    summary = await asyncio.to_thread(run_demo, made)
    assert (summary.ok, summary.samples) == (True, 4)


def test_tokenizer_folder_refuses_a_server_without_a_model() -> None:
    with pytest.raises(ConfigError, match="names no model; expected an SGLang server or router. Check the URL's port"):
        tokenizer_folder(ServerInfo(), "http://127.0.0.1:1")
