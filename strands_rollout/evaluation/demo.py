"""The demo: rows of a data set through `generate` and `reward_func` on an engine; a table, a transcript and a dump."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from strands_rollout import dump
from strands_rollout.client.transport import parse_base_url, redacted
from strands_rollout.dump import TokenTexts
from strands_rollout.dump.terminal import make_console, print_transcript
from strands_rollout.errors import ConfigError, DumpError
from strands_rollout.evaluation.display import accuracy_bar, print_outcomes, print_summary
from strands_rollout.evaluation.evaluate import Outcome, RunPlan, Summary, evaluate
from strands_rollout.evaluation.options import DemoOptions, slime_sampling_params
from strands_rollout.evaluation.rows import read_rows, shipped_rows
from strands_rollout.evaluation.served_engine import (
    SHIPPED_MODELS_EXECUTOR,
    served_engine,
    served_tokenizer,
    start_executor,
)
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def run_demo(options: DemoOptions) -> Summary:
    """Run the demo; the last line on stdout is the summary as JSON.

    Raises:
        RolloutError: The data, the engine or the tokenizer can't be used.
    """
    summary = asyncio.run(_run(options))
    print(json.dumps(summary.to_dict()), flush=True)
    return summary


async def _run(options: DemoOptions) -> Summary:
    log = make_console(stderr=True)
    rows = read_rows(options.data or shipped_rows(), options.samples)
    started = time.monotonic()
    async with served_engine(options.base_url, options.model_dir) as base_url:
        log.print(f"engine at {redacted(parse_base_url(base_url))} after {time.monotonic() - started:.1f} s")
        tokenizer_dir = options.tokenizer_dir or await served_tokenizer(base_url)
        # loading it imports transformers, which takes seconds: not while episodes wait on the loop
        tokenizer = load_tokenizer(str(tokenizer_dir))
        executor = "local" if options.base_url or options.model_dir else SHIPPED_MODELS_EXECUTOR
        plan = RunPlan(
            base_url=base_url,
            tokenizer_dir=tokenizer_dir,
            sampling_params=slime_sampling_params(options.temperature, options.max_new_tokens),
            concurrency=options.concurrency,
            seed=options.seed,
            settings={"executor": executor},
        )
        log.print(f"code runs with isolation {await start_executor(executor)!r}", highlight=False)
        started = time.monotonic()
        with accuracy_bar(log, len(rows)) as show:
            outcomes = await evaluate(rows, plan, on_done=lambda outcome: show(bool(outcome.graded.get("acc"))))
    seconds = time.monotonic() - started
    summary = Summary.of(outcomes)
    written = write_dump(options.dump_dir, outcomes, tokenizer)
    if not options.json_only:
        console, shown = make_console(), most_telling(outcomes).sample
        print_outcomes(console, outcomes)
        console.print(f"\nsample {shown.index}, token for token:")
        print_transcript(console, shown, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)))
        console.print()
        print_summary(console, outcomes, summary, seconds=seconds)
        console.print(f"all samples: {written}", soft_wrap=True)
    return summary


def write_dump(folder: Path, outcomes: Sequence[Outcome], tokenizer: PreTrainedTokenizerBase = None) -> Path:
    """Write rewarded samples to a new file in `folder`; with a tokenizer, the texts of their tokens too.

    Raises:
        ConfigError: The folder can't be written to.
    """
    path = folder / f"samples-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 1_000_000:06d}.jsonl"
    texts = None if tokenizer is None else TokenTexts(tokenizer)
    try:
        dump.write_dump(path, [outcome.sample for outcome in outcomes], texts)
    except DumpError as e:
        raise ConfigError(f"{e}; choose another folder with --dump") from e
    return path


def most_telling(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome whose transcript shows most: a right answer found with tools, else tools, else the first."""
    return max(outcomes, key=lambda o: (bool(o.facts.get("tool_calls")), bool(o.graded.get("acc"))))
