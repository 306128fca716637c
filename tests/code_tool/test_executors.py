"""`make_executor`, `shared_executor`, and parts of executors: fair queue, usable CPUs, capped output."""

import asyncio
import gc
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_rollout.code_tool import CodeExecutor, ExecutionResult, LocalExecutor, SubprocessExecutor
from strands_rollout.code_tool.executors import CALL_OWNER, FairQueue, make_executor, shared_executor, usable_cpus
from strands_rollout.code_tool.sandbox.code_runner import CappedOutput
from strands_rollout.errors import ConfigError


class EchoExecutor(CodeExecutor):
    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        return ExecutionResult(self.prefix + code, "", 0)

    async def aclose(self) -> None: ...


def return_empty_dict() -> dict[str, str]:
    return {}


@pytest.mark.parametrize(("name", "kind"), [("local", LocalExecutor), ("subprocess", SubprocessExecutor)])
def test_shared_executor_is_created_once_per_process(name: str, kind: type) -> None:
    assert isinstance(shared_executor(name), kind)
    assert shared_executor(name) is shared_executor(name)
    assert make_executor(name) is not shared_executor(name)


@pytest.mark.parametrize("package", ["code_tool", "sandbox"])
def test_make_executor_accepts_old_dotted_paths(package: str) -> None:
    assert isinstance(make_executor(f"strands_rollout.{package}.SubprocessExecutor"), SubprocessExecutor)


def test_shared_executor_differs_by_options() -> None:
    small = {"name": "local", "memory_mb": 512, "libraries": ["numpy"]}
    executor = shared_executor(small)
    assert executor is shared_executor(dict(reversed(small.items())))
    assert executor is not shared_executor("local")
    assert executor.facts.memory_mb == 512  # type: ignore[attr-defined]


def test_make_executor_from_dotted_path() -> None:
    executor = make_executor({"name": f"{__name__}.EchoExecutor", "prefix": "> "})
    assert isinstance(executor, CodeExecutor)
    assert asyncio.run(executor.run("1")).stdout == "> 1"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lokal", "unknown executor 'lokal'; did you mean 'local'?"),
        ({"memory_mb": 1}, "expected a name, or a mapping with the key 'name'"),
        ("ray", "the executor 'ray' was removed; set episode_workers instead"),
        ({"name": "ray", "address": "auto"}, "set episode_workers instead"),
        ("strands_rollout.code_tool.RayExecutor", "set episode_workers instead"),
        ("strands_rollout.code_tool.ray:RayExecutor", "set episode_workers instead"),
        ({"name": "strands_rollout.sandbox.RayExecutor", "nodes": "all"}, "set episode_workers instead"),
        ({"name": "local", "memory": 1}, "got the options memory: .*did you mean 'memory_mb'?"),
        ("no_such.module", "can't load the executor 'no_such.module'"),
        (f"{__name__}.pytest", "is a module; expected a class or a function"),
        (f"{__name__}.return_empty_dict", "made a dict; expected a CodeExecutor"),
    ],
)
def test_make_executor_rejects_invalid_setting(setting: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_executor(setting)


def test_make_executor_error_hides_option_values() -> None:
    with pytest.raises(ConfigError) as refused:
        make_executor({"name": "local", "api_key": "secret-value"})
    assert "secret-value" not in str(refused.value)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), places=st.integers(1, 4), calls=st.integers(1, 40))
def test_fair_queue_keeps_slots_when_calls_are_cancelled(seed: int, places: int, calls: int) -> None:
    chance = random.Random(seed)

    async def run() -> None:
        queue = FairQueue(places)
        inside = 0

        async def call(owner: int) -> None:
            nonlocal inside
            CALL_OWNER.set(str(owner))
            async with queue.slot():
                inside += 1
                assert inside <= places
                try:
                    for _ in range(chance.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    inside -= 1

        tasks = [asyncio.create_task(call(chance.randrange(3))) for _ in range(calls)]
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)
            chance.choice(tasks).cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert [t.exception() for t in tasks if not t.cancelled() and t.exception()] == []
        await asyncio.wait_for(asyncio.gather(*(call(0) for _ in range(places * 2))), 10)

    asyncio.run(run())


@pytest.mark.parametrize("waits", [True, False], ids=["a waiting call", "a later call"])
def test_fair_queue_reclaims_slots_of_closed_loops(waits: bool) -> None:
    queue, lost = FairQueue(2), []
    kept: list[asyncio.Future[None]] = []

    async def hold() -> None:
        async with queue.slot():
            kept.append(asyncio.get_running_loop().create_future())
            await kept[-1]  # like an answer to which the executor's thread has a reference

    def closed_loop(start: Any) -> None:
        loop = asyncio.new_event_loop()
        tasks = [loop.create_task(hold()) for _ in range(2)]
        loop.run_until_complete(asyncio.wait(tasks, timeout=0.01))
        start()
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()

    async def enter() -> int:
        inside = 0
        async with queue.slot(lambda: lost.append(True)):
            inside += 1
            async with queue.slot(lambda: lost.append(True)):
                inside += 1
        return inside

    if not waits:
        closed_loop(lambda: None)
        assert asyncio.run(asyncio.wait_for(enter(), 60)) == 2
    else:
        with ThreadPoolExecutor(1) as pool:
            waiting: list[Any] = []
            closed_loop(lambda: waiting.append(pool.submit(asyncio.run, asyncio.wait_for(enter(), 60))))
            assert waiting[0].result() == 2
    assert lost
    kept.clear()
    gc.collect()  # collected calls must not return their slots again
    assert queue._free == 2


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "max 100000"}, 16),
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({}, 16),
    ],
)
def test_usable_cpus_reads_cgroup_quota_or_affinity(tmp_path, monkeypatch, files, cpus) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    (tmp_path / "cpu").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(f"{content}\n")
    assert usable_cpus(tmp_path) == cpus


MARKER = re.compile(r"\n\.\.\. \[(\d+) characters dropped\] \.\.\.\n")


@settings(deadline=None)
@given(text=st.text(alphabet="aé漢😀\n", max_size=300), cap=st.integers(1, 60), step=st.integers(1, 17))
def test_capped_output_keeps_or_counts_every_character(text: str, cap: int, step: int) -> None:
    output = CappedOutput(cap)
    data = text.encode()
    for start in range(0, len(data), step):
        output.feed(data[start : start + step])
    output.feed(b"", final=True)
    assert (output.total_bytes, output.truncated) == (len(data), len(text) > cap)
    if not output.truncated:
        assert output.text() == text
        return
    head, dropped, tail = MARKER.split(output.text())
    assert (len(head) + int(dropped) + len(tail), len(head) + len(tail)) == (len(text), cap)
    assert text.startswith(head)
    assert text.endswith(tail)
