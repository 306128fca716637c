"""A scripted engine with the shipped tokenizer, for the benchmark's own tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from conftest import SHIPPED_TOKENIZER

from strands_rollout.bench.answer_script import AnswerScript, save_scripts
from strands_rollout.bench.bench_plan import Step
from strands_rollout.bench.bench_processes import scripted_engine
from strands_rollout.bench.bench_summary import Measurement
from strands_rollout.bench.player import Played, Stage


@contextmanager
def stage_of(scripts: list[AnswerScript], folder: Path, *, any_input: bool = False) -> Iterator[Stage]:
    path = folder / "scripts.json"
    save_scripts(scripts, path)
    with scripted_engine([path], core=None, any_input=any_input) as port:
        yield Stage(port, SHIPPED_TOKENIZER, 2, scripts)


def perfect(script: AnswerScript) -> Played:
    """The script's episode as a variant should play it."""
    logprobs = iter(script.logprobs())
    mask = script.loss_mask()
    return Played(script.tokens(), mask, [next(logprobs) if bit else 0.0 for bit in mask], None)


def measured(variant: str, cpu_ms: float, **step: Any) -> Measurement:
    """A measurement of 64 episodes with 20 tool turns, but for what is given."""
    usual = Step("cpu", variant, turns=20, concurrency=64, episodes=64, round=0)
    return Measurement(replace(usual, **step), {"cpu_ms_per_trajectory": cpu_ms})
