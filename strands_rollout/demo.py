"""The demo: rows of a data set through `generate` and `reward_func` on an engine; a table, a transcript and a dump.

Knows where the engine and its tokenizer come from; the work is `evaluate`'s, the printing `report`'s and `viewer`'s.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from strands_rollout.dataset_rows import read_rows, shipped_rows
from strands_rollout.engine_process import engine_process
from strands_rollout.errors import ConfigError
from strands_rollout.evaluate import Outcome, RunPlan, Summary, evaluate, slime_sampling_params
from strands_rollout.executors import shared_executor
from strands_rollout.report import make_console, print_outcomes, print_summary, progress_bar
from strands_rollout.sandbox.local_executor import LocalExecutor
from strands_rollout.server_info import fetch_server_info
from strands_rollout.sglang_connection import create_client, parse_base_url, redacted
from strands_rollout.slime_seam import load_tokenizer
from strands_rollout.viewer import print_transcript

# what it runs is our own model's, so that the demo needs no Linux; the strongest isolation there is is used in any case
_SHIPPED_MODELS_EXECUTOR: Final = {"name": "local", "isolation": "rlimits"}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the `demo` command was asked for; see its --help.

    Attributes:
        base_url: An engine that runs already; None to start the embedded one.
        model_dir: What the embedded engine serves; None for the shipped model.
        tokenizer_dir: The served model's tokenizer; None to take the folder that the engine names.
        data: A JSONL file; None for the shipped problems.
        samples: Episodes, at least one.
        concurrency: Episodes at once.
        temperature: Sampling temperature.
        max_new_tokens: Budget of a whole response, tool results included.
        seed: The first sample's sampling seed; None for none.
        dump_dir: Folder of the dump; made if it is missing.
        json_only: Print nothing on stdout but the line of JSON.
    """

    base_url: str | None
    model_dir: Path | None
    tokenizer_dir: Path | None
    data: Path | None
    samples: int
    concurrency: int
    temperature: float
    max_new_tokens: int
    seed: int | None
    dump_dir: Path
    json_only: bool


def run_demo(options: DemoOptions) -> Summary:
    """Run it; the last line on stdout is the summary as JSON.

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
    async with _engine(options) as base_url:
        log.print(f"engine at {redacted(parse_base_url(base_url))} after {time.monotonic() - started:.1f} s")
        tokenizer_dir = options.tokenizer_dir or await served_tokenizer(base_url)
        # loading it imports transformers, which takes seconds: not while episodes wait on the loop
        tokenizer = load_tokenizer(str(tokenizer_dir))
        executor = "local" if options.base_url or options.model_dir else _SHIPPED_MODELS_EXECUTOR
        plan = RunPlan(
            base_url=base_url,
            tokenizer_dir=tokenizer_dir,
            sampling_params=slime_sampling_params(options.temperature, options.max_new_tokens),
            concurrency=options.concurrency,
            seed=options.seed,
            settings={"executor": executor},
        )
        log.print(f"code runs with isolation {await _isolation(executor)!r}", highlight=False)
        started = time.monotonic()
        with progress_bar(log, len(rows)) as on_done:
            outcomes = await evaluate(rows, plan, on_done=on_done)
    seconds = time.monotonic() - started
    summary = Summary.of(outcomes)
    dump = write_dump(options.dump_dir, outcomes)
    if not options.json_only:
        _print_report(outcomes, summary, tokenizer, seconds, dump)
    return summary


async def _isolation(executor: str | Mapping[str, Any]) -> str:
    """Start the sandbox before the episodes need it; what it enforces."""
    sandbox = shared_executor(executor)
    return (await sandbox.start()).isolation if isinstance(sandbox, LocalExecutor) else "unknown"


def _engine(options: DemoOptions) -> AbstractAsyncContextManager[str]:
    if options.base_url is not None:
        return nullcontext(options.base_url)
    return engine_process(options.model_dir)


async def served_tokenizer(base_url: str) -> Path:
    """The folder of the tokenizer that an engine says it uses.

    Raises:
        ConfigError: It names none, or none on this machine.
        EngineUnavailableError: Nothing answers.
    """
    async with create_client(base_url) as http:
        shown = redacted(http.base_url)
        info = await fetch_server_info(http, url=shown)
    return _local_folder(info.raw.get("tokenizer_path") or info.model_path, shown)


def _local_folder(named: object, engine: str) -> Path:
    if not isinstance(named, str) or not Path(named).is_dir():
        raise ConfigError(
            f"the engine at {engine} names the tokenizer {named!r}, which is no folder on this machine; pass the "
            "served model's tokenizer with --tokenizer DIR"
        )
    return Path(named)


def write_dump(folder: Path, outcomes: Sequence[Outcome]) -> Path:
    """Write one sample a line, with its reward, to a new file in `folder`; return the file.

    Raises:
        ConfigError: The folder can't be written to.
    """
    path = folder / f"samples-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 1_000_000:06d}.jsonl"
    lines = [orjson.dumps(outcome.sample.to_dict(), default=str) + b"\n" for outcome in outcomes]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(lines))
    except OSError as e:
        raise ConfigError(f"can't write the dump to {path}: {e.strerror}; choose another folder with --dump") from e
    return path


def most_telling(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome whose transcript shows most: a right answer found with tools, else tools, else the first."""
    return max(outcomes, key=lambda o: (bool(o.facts.get("tool_calls")), bool(o.graded.get("acc"))))


def _print_report(
    outcomes: Sequence[Outcome],
    summary: Summary,
    tokenizer: Any,  # noqa: ANN401 - any Hugging Face tokenizer
    seconds: float,
    dump: Path,
) -> None:
    console = make_console()
    print_outcomes(console, outcomes)
    shown = most_telling(outcomes).sample
    console.print(f"\nsample {shown.index}, token for token:")
    print_transcript(console, shown, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)))
    console.print()
    print_summary(console, outcomes, summary, seconds=seconds)
    console.print(f"all samples: {dump}", soft_wrap=True)
