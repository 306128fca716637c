"""A measured process of the client benchmark: `python -m benchmarks.worker JOB` prints figures as one line of JSON.

It warms up a variant, then measures its CPU, loop lag, memory or a profile; every episode is checked. It exits when its
stdin closes, so it never outlives the process that reads the figures.
"""

import asyncio
import gc
import http.client
import logging
import os
import resource
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import orjson

from benchmarks.measuring import LoopLag, percentile, pin_to
from benchmarks.script import Script, load_scripts
from benchmarks.variants import Job, JobKind, Played, Player, WrongEpisodeError, check_played, make_player

Figures = dict[str, Any]
"""Figures by name; names contain the units."""
Done = list[tuple[Script, Played]]
_STATUS: Final = Path("/proc/self/status")
_CLEAR_REFS: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"
_WINDOW_TURNS: Final = 8


def main() -> None:
    job = Job.from_json(sys.argv[1])
    pin_to(job.core)
    threading.Thread(target=end_with_stdin, daemon=True).start()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print(orjson.dumps(asyncio.run(measure(job))).decode(), flush=True)


def end_with_stdin() -> None:
    """Exit when stdin ends; waits in a blocking read, which takes no CPU from the measurement."""
    os.read(0, 1)
    os._exit(1)


async def measure(job: Job) -> Figures:
    """Warm up the variant, measure the job's step and return its figures.

    Raises:
        WrongEpisodeError: The variant did not play the scripts.
    """
    scripts, short = load_scripts(Path(job.scripts)), load_scripts(Path(job.warm_up_scripts))
    player = make_player(job, [*scripts, *short])
    for warm_up, count in ((short, min(job.step.concurrency, job.step.episodes)), (scripts, 1)):
        check_all(
            await play_episodes(player, warm_up, count, job.step.concurrency),
            any_prompt=not job.step.has_script_prompts,
        )
    gc.collect()
    if job.collector == "frozen":
        gc.freeze()
    figures = await MEASURES[job.step.kind](job, player, scripts)
    await player.close()
    return figures


async def play_episodes(player: Player, scripts: Sequence[Script], episodes: int, concurrency: int) -> Done:
    """Play this number of episodes, the scripts in turn and repeatedly; return each episode with its script."""
    todo: Iterator[Script] = (scripts[n % len(scripts)] for n in range(episodes))
    done: Done = []

    async def work() -> None:
        done.extend([(script, await player.play(script)) for script in todo])

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, episodes)):
            group.create_task(work())
    return done


def check_all(done: Done, *, any_prompt: bool = False) -> None:
    for script, played in done:
        check_played(played, script, any_prompt=any_prompt)


def _check(job: Job, done: Done) -> None:
    check_all(done, any_prompt=not job.step.has_script_prompts)


async def _play_step(job: Job, player: Player, scripts: Sequence[Script]) -> Done:
    return await play_episodes(player, scripts, job.step.episodes, job.step.concurrency)


async def cpu(job: Job, player: Player, scripts: Sequence[Script]) -> Figures:
    """Measure the CPU time of this process (all threads, user and system), and the bytes that the engine counts.

    Raises:
        WrongEpisodeError: The variant did not play the scripts, or did not send exactly one request for each turn.
    """
    before = _fetch_counters(job.port)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    done = await _play_step(job, player, scripts)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    after = _fetch_counters(job.port)
    _check(job, done)
    crossed = {name: after[name] - before[name] for name in after}
    expected, episodes = sum(len(script.turns) for script, _ in done), job.step.episodes
    if crossed["requests"] != expected:
        raise WrongEpisodeError(f"got {crossed['requests']} requests; expected {expected}, one for each turn")
    return {
        "cpu_ms_per_trajectory": cpu_s / episodes * 1e3,
        "cpu_ms_per_request": cpu_s / crossed["requests"] * 1e3,
        "wall_ms_per_trajectory": wall_s / episodes * 1e3,
        "engine_cpu_ms_per_trajectory": crossed["cpu_s"] / episodes * 1e3,
        "client_busy_percent": 100 * cpu_s / wall_s,
        "engine_busy_percent": 100 * crossed["cpu_s"] / wall_s,
        "requests_per_trajectory": crossed["requests"] / episodes,
        "bytes_sent_per_trajectory": crossed["bytes_in"] / episodes,
        "bytes_received_per_trajectory": crossed["bytes_out"] / episodes,
        # don't count the connection of the second request for counters
        "connections_opened": crossed["connections"] - 1,
    }


async def turns(job: Job, player: Player, scripts: Sequence[Script]) -> Figures:
    """Measure the CPU of this process per turn: over all turns, around the 8th, and around the last.

    All episodes must run concurrently: they reach each turn at about the same time, so that the CPU time between two
    requests belongs to turns of the same number.
    """
    from strands_rollout import SGLangModel

    episodes, last = job.step.episodes, job.step.turns
    requested_at_s: list[float] = []
    answer_at = SGLangModel.answer_at

    def record_and_answer(*args: Any, **kwargs: Any) -> Awaitable[Any]:
        requested_at_s.append(time.process_time())
        return answer_at(*args, **kwargs)

    with patch.object(SGLangModel, "answer_at", record_and_answer):
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        done = await _play_step(job, player, scripts)
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    _check(job, done)
    count = sum(len(script.turns) for script, _ in done)
    half = max(1, min(_WINDOW_TURNS, last) // 2)

    def turn_cpu_s(turn: int) -> float:
        spent_s = requested_at_s[(turn + half) * episodes] - requested_at_s[(turn - half) * episodes]
        return spent_s / (2 * half * episodes)

    eighth_ms, last_ms = turn_cpu_s(min(_WINDOW_TURNS, last - half)) * 1e3, turn_cpu_s(last - half) * 1e3
    return {
        "cpu_ms_per_turn": cpu_s / count * 1e3,
        "cpu_ms_of_8th_turn": eighth_ms,
        "cpu_ms_of_last_turn": last_ms,
        "growth": last_ms / eighth_ms,
        "turns_per_s_and_core": count / cpu_s,
        "busy_percent": 100 * cpu_s / wall_s,
        "cpu_ms_per_trajectory": cpu_s / episodes * 1e3,
    }


async def lag(job: Job, player: Player, scripts: Sequence[Script]) -> Figures:
    """Measure the lag of the loop while episodes run."""
    with LoopLag() as watch:
        done = await _play_step(job, player, scripts)
    _check(job, done)
    return {
        "lag_p50_ms": percentile(watch.lags_ms, 0.5),
        "lag_p99_ms": percentile(watch.lags_ms, 0.99),
        "lag_max_ms": max(watch.lags_ms, default=0.0),
        "ticks": len(watch.lags_ms),
    }


async def rss(job: Job, player: Player, scripts: Sequence[Script]) -> Figures:
    """Measure the peak of resident memory while finished episodes stay in memory; all should run concurrently."""
    before, is_new_peak = _status_bytes("VmRSS"), _reset_peak()
    done = await _play_step(job, player, scripts)
    peak = _status_bytes("VmHWM")
    _check(job, done)
    return {
        "peak_rss_bytes_per_episode": max(0, peak - before) / job.step.episodes,
        "rss_bytes_before": before,
        "peak_is_of_the_episodes": is_new_peak,
    }


async def traced(job: Job, player: Player, scripts: Sequence[Script]) -> Figures:
    """Measure Python's allocations: at their peak, with finished samples, and after the samples are freed."""
    await _collect_garbage()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    done = await _play_step(job, player, scripts)
    _, peak = tracemalloc.get_traced_memory()
    _check(job, done)
    arrays = sum(array_bytes((played.tokens, played.loss_mask, played.logprobs)) for _, played in done)
    kept = [played.result for _, played in done]
    del done
    await _collect_garbage()
    with_samples, _ = tracemalloc.get_traced_memory()
    count = len(kept)
    del kept
    await _collect_garbage()
    without, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "peak_traced_bytes_per_episode": (peak - before) / count,
        "kept_bytes_per_sample": (with_samples - before) / count,
        "array_bytes_per_sample": arrays / count,
        "kept_per_array_byte": (with_samples - before) / arrays,
        "left_behind_bytes_per_episode": (without - before) / count,
    }


async def growth(job: Job, player: Player, scripts: Sequence[Script]) -> Figures:
    """Measure the memory that stays behind after many episodes; the sample of each is freed when the episode ends.

    Each episode has a prompt of its own, as each group has in training, so that a cache without a limit would grow.
    The growth is measured from the end of the first tenth of the episodes, which fills the caches that have a limit.
    """
    resident, blocks = [], []
    tenth = max(1, job.step.episodes // 10)
    for first in range(0, job.step.episodes, tenth):
        await _play_and_free(player, scripts, range(first, first + tenth), job.step.concurrency)
        await _collect_garbage()
        resident.append(_status_bytes("VmRSS"))
        blocks.append(sys.getallocatedblocks())
    measured = job.step.episodes - tenth
    return {
        "growth_bytes": resident[-1] - resident[0],
        "growth_bytes_per_episode": (resident[-1] - resident[0]) / measured,
        "growth_blocks_per_episode": (blocks[-1] - blocks[0]) / measured,
        "resident_bytes_by_tenth": resident,
    }


async def _play_and_free(player: Player, scripts: Sequence[Script], numbers: range, concurrency: int) -> None:
    """Play an episode for each number, with a question of its own; check it and free its sample."""
    todo = iter(numbers)

    async def work() -> None:
        for number in todo:
            script = scripts[number % len(scripts)]
            script = replace(script, question=f"Problem {number:06}. {script.question}")
            check_played(await player.play(script), script, any_prompt=True)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())


async def profile(job: Job, player: Player, scripts: Sequence[Script]) -> Figures:
    """Measure the shares of the loop thread's CPU time by package and function, and the share of other threads."""
    from benchmarks.profiling import profile_figures, start_profile

    thread_s, process_s = time.thread_time(), time.process_time()
    profiler = start_profile()
    done = await _play_step(job, player, scripts)
    profiler.disable()
    thread_s, process_s = time.thread_time() - thread_s, time.process_time() - process_s
    _check(job, done)
    return {**profile_figures(profiler), "other_threads_percent": round(100 * (1 - thread_s / process_s), 2)}


Measure = Callable[[Job, Player, Sequence[Script]], Awaitable[Figures]]
MEASURES: Final[Mapping[JobKind, Measure]] = {
    "cpu": cpu,
    "turns": turns,
    "lag": lag,
    "rss": rss,
    "traced": traced,
    "growth": growth,
    "profile": profile,
}


async def _collect_garbage() -> None:
    """Free objects in reference cycles and in unfinished generators; the loop ends generators asynchronously."""
    for _ in range(3):
        gc.collect()
        await asyncio.sleep(0.05)


def _fetch_counters(port: int) -> dict[str, float]:
    """Return the engine's counters of requests and bytes, and its CPU; this request counts only as a connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/counters")
    found: dict[str, float] = orjson.loads(connection.getresponse().read())
    connection.close()
    return found


def array_bytes(arrays: Iterable[list[int] | list[float] | None]) -> int:
    """Return the bytes of lists and of the numbers in them; an object that occurs several times is counted once."""
    lists = [array for array in arrays if array is not None]
    numbers = {id(number): number for array in lists for number in array}
    return sum(map(sys.getsizeof, lists)) + sum(map(sys.getsizeof, numbers.values()))


def _reset_peak() -> bool:
    """Reset the peak of resident memory; return whether the system supports it."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _status_bytes(name: str) -> int:
    """Return the resident memory in bytes: now (VmRSS) or at its peak (VmHWM); if there is no /proc, the peak."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS reports bytes, other systems KiB
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


if __name__ == "__main__":
    main()
