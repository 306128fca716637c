"""The benchmark of episode workers: the driver's CPU per episode, episodes per second, and the lag of its loop.

A scripted engine in a process of its own answers immediately, and the tool knows the results, so that only the workers'
own work is measured. Every token is checked.
"""

import asyncio
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final

from strands import tool

from benchmarks.client import REPOSITORY, scripted_engine
from benchmarks.measuring import LoopLag, percentile, usable_cores
from benchmarks.script import Script, load_scripts, save_scripts, write_scripts
from benchmarks.variants import Played, WrongEpisodeError, check_played, sampling_params
from strands_rollout import Sample, generate
from strands_rollout.code_tool.tool import CODE_TOOL_DESCRIPTION, CODE_TOOL_NAME, CODE_TOOL_SCHEMA
from strands_rollout.settings import SYSTEM_PROMPT
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer
from strands_rollout.slime_plugin.workers import local_workers

_SCRIPTS_VARIABLE: Final = "STRANDS_ROLLOUT_BENCH_SCRIPTS"  # has the path of the scripts; the workers inherit it
OnStep = Callable[[str, int, int], None]


@functools.cache
def _results() -> dict[str, str]:
    scripts = load_scripts(Path(os.environ[_SCRIPTS_VARIABLE]))
    return {turn.code: turn.result for script in scripts for turn in script.turns if turn.code}


@tool(name=CODE_TOOL_NAME, description=CODE_TOOL_DESCRIPTION, inputSchema={"json": CODE_TOOL_SCHEMA})
async def known_result(code: str) -> str:
    """Return the script's result for this code."""
    return _results()[code]


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """A measurement of episodes that all begin at once; with 0 workers, the driver plays them.

    Attributes:
        driver_cpu_ms: CPU of the driver's process, all threads, per episode.
        episodes_per_s: Episodes per second of wall-clock time.
        driver_lag_p50_ms: Median delay of timers on the driver's event loop.
        driver_lag_p99_ms: 99th percentile of these delays.
    """

    workers: int
    episodes: int
    tool_turns: int
    driver_cpu_ms: float
    episodes_per_s: float
    driver_lag_p50_ms: float
    driver_lag_p99_ms: float


def measure(
    counts: Sequence[int], sizes: Sequence[int], *, turns: int, rounds: int, tokenizer_dir: Path, on_step: OnStep
) -> dict[str, Any]:
    """Return figures for each number of workers and of episodes at once, round by round.

    Raises:
        WrongEpisodeError: An episode differs from its script.
    """
    steps = [(count, size) for _ in range(rounds) for size in sizes for count in counts]
    found = []
    with TemporaryDirectory(prefix="strands-rollout-bench-") as folder:
        path = Path(folder, "scripts.json")
        save_scripts(write_scripts(load_tokenizer(str(tokenizer_dir)), turns), path)
        os.environ[_SCRIPTS_VARIABLE] = str(path)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        scripts = load_scripts(path)
        with scripted_engine([path], core=None) as port:
            for number, (count, size) in enumerate(steps):
                on_step(f"{count} workers, {size} episodes at once", number, len(steps))
                with local_workers(count):
                    found.append(asyncio.run(_measure_once(count, size, port, tokenizer_dir, scripts)))
    return {"cores": len(usable_cores()), "measurements": [asdict(one) for one in found]}


def table(found: Mapping[str, Any]) -> str:
    """Return the medians over the rounds as a Markdown table."""
    names = ("driver_cpu_ms", "episodes_per_s", "driver_lag_p50_ms", "driver_lag_p99_ms")
    rows = [
        "| workers | at once | driver, ms CPU per episode | episodes/s | lag p50, ms | p99, ms |",
        "|---:" * 6 + "|",
    ]
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for one in found["measurements"]:
        groups.setdefault((one["workers"], one["episodes"]), []).append(one)
    for (count, size), ones in groups.items():
        values = [median(one[name] for one in ones) for name in names]
        rows.append(f"| {count} | {size} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
    return "\n".join(rows)


async def _measure_once(count: int, size: int, port: int, tokenizer: Path, scripts: Sequence[Script]) -> WorkerFigures:
    args = SimpleNamespace(
        hf_checkpoint=str(tokenizer),
        sglang_router_ip="127.0.0.1",
        sglang_router_port=port,
        strands_rollout={
            "max_tool_iterations": None,
            "tools": [f"{__name__}.known_result"],
            "system_prompt": SYSTEM_PROMPT,
            "episode_workers": count,
        },
    )
    params = sampling_params()

    done: list[tuple[Script, Sample]] = []

    async def play(script: Script) -> None:
        sample = Sample(prompt=[{"role": "user", "content": script.question}], label="144")
        sample = await generate(args, sample, params)
        if sample.status is not Sample.Status.COMPLETED:
            raise WrongEpisodeError(f"the sample is {sample.status.name}: {sample.metadata}")
        done.append((script, sample))

    async def play_all(episodes: int) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(episodes):
                group.create_task(play(scripts[number % len(scripts)]))

    await play_all(max(8, 4 * count))  # starts the workers and loads their modules
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    with LoopLag() as lag:
        await play_all(size)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    for script, sample in done:
        check_played(Played(sample.tokens, sample.loss_mask or [], sample.rollout_log_probs, sample), script)
    return WorkerFigures(
        workers=count,
        episodes=size,
        tool_turns=scripts[0].tool_turns,
        driver_cpu_ms=cpu_s / size * 1e3,
        episodes_per_s=size / wall_s,
        driver_lag_p50_ms=percentile(lag.lags_ms, 0.5) or 0.0,
        driver_lag_p99_ms=percentile(lag.lags_ms, 0.99) or 0.0,
    )
