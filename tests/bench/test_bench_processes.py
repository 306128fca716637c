"""The benchmark's processes: a failure is told with its last words, and none outlives whoever started it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench_stage import stage_of

from strands_rollout.bench import worker
from strands_rollout.bench.answer_script import AnswerScript
from strands_rollout.bench.bench_processes import BenchProcessError, run_job, scripted_engine
from strands_rollout.bench.job import Job
from strands_rollout.bench.measures import cpu
from strands_rollout.bench.player import Played, WrongEpisodeError
from strands_rollout.bench.script_writer import write_scripts

JOB = Job("floor", "cpu", "no such file", "no such file", "", port=1, concurrency=1, episodes=1, core=None)


def test_a_measurement_that_fails_is_told_with_its_last_words() -> None:
    with pytest.raises(BenchProcessError, match=r"(?s)cpu of floor failed, exit code 1:.*no such file"):
        run_job(JOB)


def test_an_engine_that_does_not_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(BenchProcessError, match=r"(?s)did not start\nthe scripted engine said:.*no such file"),
        scripted_engine([tmp_path / "no such file"], core=None),
    ):
        pass


def test_a_worker_ends_when_whoever_holds_its_stdin_is_gone() -> None:
    holder = (
        "import subprocess, sys\n"
        "code = 'import threading, time; from strands_rollout.bench.worker import _end_with_stdin as end\\n'\n"
        "code += 'threading.Thread(target=end, daemon=True).start(); time.sleep(60)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.send_signal(signal.SIGKILL)
    for _ in range(200):
        if not is_running(pid):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the worker runs on")


def is_running(pid: int) -> bool:
    """Whether there is such a process, a dead one that nobody has waited for yet aside."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(done.stdout.strip()) and not done.stdout.strip().startswith("Z")


def test_a_variant_that_asks_twice_is_refused(shipped_tokenizer: object, tmp_path: Path) -> None:
    scripts = write_scripts(shipped_tokenizer, 1, count=1)

    async def measure() -> None:
        with stage_of(scripts, tmp_path) as stage:
            player = worker.make_player("floor", stage)

            class Twice:
                async def play(self, script: AnswerScript) -> Played:
                    await player.play(script)
                    return await player.play(script)

                async def close(self) -> None:
                    await player.close()

            with pytest.raises(WrongEpisodeError, match="got 4 requests; expected 2"):
                await cpu(Job("floor", "cpu", "", "", "", stage.port, 1, 1, None), Twice(), scripts)
            await player.close()

    asyncio.run(measure())
