"""Run an evaluation in this process on the fake SGLang, by default with a policy whose answers depend on the seed."""

import asyncio
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply
from harness import ids_of

from strands_rollout.evaluation.plan import SampleKey
from strands_rollout.evaluation.run import run_evaluation
from strands_rollout.play.options import EvalOptions, Sampling

PROBLEMS = 3


def write_problems(folder: Path, problems: int = PROBLEMS, name: str = "sums.jsonl") -> Path:
    """Write a data set whose labels are 0, 1, 2 ..., and return its path."""
    rows = [{"prompt": f"What is {number} + 0?", "label": str(number)} for number in range(problems)]
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options_for(folder: Path, base_url: str | None, tokenizer: Any, **changes: Any) -> EvalOptions:
    """Return options for three problems with four samples each; no URL means the embedded engine.

    Writes a `rollout.yaml` without tools to the folder, unless the folder has one.
    """
    config = folder / "rollout.yaml"
    if not config.exists():
        config.write_text("strands_rollout:\n  tools: []\n")
    options = EvalOptions(
        data=[write_problems(folder)],
        base_url=base_url,
        tokenizer_dir=Path(tokenizer.name_or_path) if tokenizer else None,
        config=config,
        sampling=Sampling(samples=4, max_new_tokens=256),
        concurrency=2,
        seed=7,
        ks=[1, 4, 8],
        out=folder / "out",
    )
    return replace(options, **changes)


def sample_seed(problem: int, number: int, name: str = "sums") -> int:
    """Return the seed of a sample in a run with seed 7."""
    return SampleKey(name, problem, number).seed(7)


def result_line(number: int, **changes: Any) -> dict[str, Any]:
    """Return a line of `results.jsonl` for a correct sample, with `changes`."""
    line = {
        "data_set": "sums",
        "problem": 0,
        "number": number,
        "status": "completed",
        "stop_reason": "completed",
        "error": None,
        "reward": {"acc": 1.0, "pred": "34"},
        "response": "34\n" * 3,
        "response_tokens": 5,
        "sampled_tokens": 4,
        "turns": 1,
        "tool_calls": 0,
        "tool_errors": 0,
        "seconds": 0.5,
        "weight_versions": ["1"],
        "violations": [],
        "audited": False,
    }
    return {**line, **changes}


def guess_by_seed(tokenizer: Any) -> Any:
    """Return a script for `FakeSGLang` that answers 0, 1 or 2, depending on the seed."""

    def reply(request: dict[str, Any], number: int) -> Reply:
        answer = request["sampling_params"]["sampling_seed"] % 3
        return Reply.tokens(ids_of(tokenizer, f"So \\boxed{{{answer}}}.<|im_end|>"))

    return reply


@dataclass(frozen=True)
class EvaluationRun:
    """A finished run: its exit code, its folder, and its engine."""

    code: int
    folder: Path
    fake: FakeSGLang

    @property
    def report(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "report.json").read_text()))

    @property
    def outcome(self) -> dict[str, Any]:
        """Report without its session, which differs between runs."""
        return {key: value for key, value in self.report.items() if key != "session"}

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "results.jsonl").read_text().splitlines()]


async def evaluate_on_fake(
    folder: Path, tokenizer: Any, script: Any = None, *, context_length: int = 8192, **changes: Any
) -> EvaluationRun:
    """Run an evaluation to its end, in a thread without an event loop, as the command runs."""
    async with FakeSGLang(script or guess_by_seed(tokenizer), context_length=context_length) as fake:
        options = options_for(folder, fake.base_url, tokenizer, **changes)
        return EvaluationRun(await asyncio.to_thread(run_evaluation, options), options.out, fake)


def corrupt_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `generate` return samples with one wrong token."""
    from strands_rollout.play import player as player_module

    original = player_module.generate

    async def generate_corrupted(args: Any, sample: Any, params: Any, **more: Any) -> Any:
        done = await original(args, sample, params, **more)
        done.tokens[-2] += 1
        return done

    monkeypatch.setattr(player_module, "generate", generate_corrupted)
