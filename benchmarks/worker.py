"""What a worker measures of a variant that is warmed up: CPU, loop lag, memory, a profile. Every episode is checked."""

from __future__ import annotations

import asyncio
import gc
import http.client
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import orjson

from strands_rollout.bench.answer_script import AnswerScript
from strands_rollout.bench.episode_run import check_all, play_episodes
from strands_rollout.bench.job import Figures, Job, JobKind
from strands_rollout.bench.loop_lag import LoopLag, percentile
from strands_rollout.bench.memory_use import array_bytes, forget_peak, peak_rss_bytes, rss_bytes
from strands_rollout.bench.package_profile import profile_figures, start_profile
from strands_rollout.bench.player import Player, WrongEpisodeError

Measure = Callable[[Job, Player, Sequence[AnswerScript]], Awaitable[Figures]]


async def cpu(job: Job, player: Player, scripts: Sequence[AnswerScript]) -> Figures:
    """CPU of this process, all threads, user and system; bytes by the engine's count."""
    before = _counters(job.port)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    done = await play_episodes(player, scripts, job.episodes, job.concurrency)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    after = _counters(job.port)
    check_all(done)
    crossed = {name: after[name] - before[name] for name in after}
    expected = sum(len(script.turns) for script, _ in done)
    if crossed["requests"] != expected:
        raise WrongEpisodeError(f"got {crossed['requests']} requests; expected {expected}, one for each turn")
    return {
        "cpu_ms_per_trajectory": cpu_s / job.episodes * 1e3,
        "cpu_ms_per_request": cpu_s / crossed["requests"] * 1e3,
        "wall_ms_per_trajectory": wall_s / job.episodes * 1e3,
        "engine_cpu_ms_per_trajectory": crossed["cpu_s"] / job.episodes * 1e3,
        "client_busy_percent": 100 * cpu_s / wall_s,
        "engine_busy_percent": 100 * crossed["cpu_s"] / wall_s,
        "requests_per_trajectory": crossed["requests"] / job.episodes,
        "bytes_sent_per_trajectory": crossed["bytes_in"] / job.episodes,
        "bytes_received_per_trajectory": crossed["bytes_out"] / job.episodes,
        # the second question for the counters opens one
        "connections_opened": crossed["connections"] - 1,
    }


async def lag(job: Job, player: Player, scripts: Sequence[AnswerScript]) -> Figures:
    """How late the loop is while episodes run."""
    with LoopLag() as watch:
        done = await play_episodes(player, scripts, job.episodes, job.concurrency)
    check_all(done, any_prompt=job.runs_code)
    return {
        "lag_p50_ms": percentile(watch.lags_ms, 0.5),
        "lag_p99_ms": percentile(watch.lags_ms, 0.99),
        "lag_max_ms": max(watch.lags_ms, default=0.0),
        "ticks": len(watch.lags_ms),
    }


async def rss(job: Job, player: Player, scripts: Sequence[AnswerScript]) -> Figures:
    """Resident memory at its peak, with finished episodes kept; meant for as many episodes as run at once."""
    before, is_new_peak = rss_bytes(), forget_peak()
    done = await play_episodes(player, scripts, job.episodes, job.concurrency)
    peak = peak_rss_bytes()
    check_all(done)
    return {
        "peak_rss_bytes_per_episode": max(0, peak - before) / job.episodes,
        "rss_bytes_before": before,
        "peak_is_of_the_episodes": is_new_peak,
    }


async def traced(job: Job, player: Player, scripts: Sequence[AnswerScript]) -> Figures:
    """Python's own allocations: at their peak, with finished samples, and when those are gone."""
    await _settle()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    done = await play_episodes(player, scripts, job.episodes, job.concurrency)
    _, peak = tracemalloc.get_traced_memory()
    check_all(done)
    arrays = sum(array_bytes((played.tokens, played.loss_mask, played.logprobs)) for _, played in done)
    kept = [played.kept for _, played in done]
    del done
    await _settle()
    with_samples, _ = tracemalloc.get_traced_memory()
    count = len(kept)
    del kept
    await _settle()
    without, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "peak_traced_bytes_per_episode": (peak - before) / count,
        "kept_bytes_per_sample": (with_samples - before) / count,
        "array_bytes_per_sample": arrays / count,
        "kept_per_array_byte": (with_samples - before) / arrays,
        "left_behind_bytes_per_episode": (without - before) / count,
    }


async def profile(job: Job, player: Player, scripts: Sequence[AnswerScript]) -> Figures:
    """Shares of the loop's thread by package and function, and how much of the CPU other threads took."""
    thread_s, process_s = time.thread_time(), time.process_time()
    profiler = start_profile()
    done = await play_episodes(player, scripts, job.episodes, job.concurrency)
    profiler.disable()
    thread_s, process_s = time.thread_time() - thread_s, time.process_time() - process_s
    check_all(done)
    return {**profile_figures(profiler), "other_threads_percent": round(100 * (1 - thread_s / process_s), 2)}


MEASURES: Final[Mapping[JobKind, Measure]] = {"cpu": cpu, "lag": lag, "rss": rss, "traced": traced, "profile": profile}


async def _settle() -> None:
    """Let go of what only cycles or unfinished generators hold; the loop ends those in its own time."""
    for _ in range(3):
        gc.collect()
        await asyncio.sleep(0.05)


def _counters(port: int) -> dict[str, float]:
    """What crossed the wire so far by the engine's count, and its CPU; this question counts as a connection only."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/counters")
    found: dict[str, float] = orjson.loads(connection.getresponse().read())
    connection.close()
    return found
