"""`generate_rollout_fully_async`: how many groups in flight a staleness allows, and a slime without this rollout."""

import asyncio
import heapq
import itertools
import queue
import random
import sys
import threading
from argparse import Namespace
from collections import deque
from types import ModuleType
from typing import Any

import pytest

from strands_rollout.errors import ConfigError
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.fully_async import generate_rollout_fully_async, max_started_groups


def longest_wait(groups: int, prompts: int, update_interval: int = 1) -> float:
    """Return the number of weight updates until the last of these groups is taken."""
    return groups / prompts / update_interval


@pytest.mark.parametrize(
    ("limit", "prompts", "interval", "groups"),
    [(4, 16, 1, 48), (4, 32, 1, 96), (2, 16, 4, 64), (1, 16, 1, 16), (0, 16, 1, 16)],
)
def test_max_started_groups_keeps_the_wait_within_the_staleness(
    limit: int, prompts: int, interval: int, groups: int
) -> None:
    found = max_started_groups(limit, prompts=prompts, update_interval=interval)
    assert found == groups
    assert longest_wait(found, prompts, interval) <= max(limit - 1, 1)


def test_async_script_fills_its_engines_within_the_staleness() -> None:
    """The script's defaults: 16 prompts x 8 episodes, 2 engines x 64 episodes, at most 4 versions."""
    assert max_started_groups(4, prompts=16) * 8 >= 2 * 64


@pytest.mark.parametrize("train_s", [30.0, 120.0, 400.0], ids=["engines are slower", "equal", "trainer is slower"])
@pytest.mark.parametrize("limit", [1, 2, 4, 8])
def test_max_started_groups_in_a_simulation(limit: int, train_s: float) -> None:
    """Few samples are too old; from a limit of 4 on, steps take less than 10% longer than without a limit."""
    groups = max_started_groups(limit, prompts=16)
    staleness, step_s = simulate(groups, train_s=train_s)
    _, unlimited_s = simulate(16 * 16, train_s=train_s)
    assert sum(versions > limit for versions in staleness) / len(staleness) < 0.1
    assert limit < 4 or step_s < 1.1 * unlimited_s


def simulate(groups: int, *, train_s: float, prompts: int = 16, size: int = 8, slots: int = 128) -> Any:
    """Return the staleness of the trained samples, and the mean seconds of a step.

    Episodes take a minute on average. As in slime's train_async.py, a step's groups are collected while the step before
    is trained, and the weights are updated in between.
    """
    rng, steps = random.Random(0), 120
    # time, order, and the group of an episode that ends; None if a training step ends
    events: list[tuple[float, int, int | None]] = []
    order = itertools.count()
    remaining, versions, waiting = dict[int, int](), dict[int, list[int]](), deque[int]()
    queued, collected, staleness = deque[int](), list[int](), list[int]()
    version, free, started, trained, is_training, now = 1, slots, 0, 0, False, 0.0
    while trained < steps:
        while len(remaining) + len(queued) < groups:
            remaining[started], versions[started] = size, []
            waiting.extend([started] * size)
            started += 1
        while free and waiting:
            free -= 1
            heapq.heappush(events, (now + 60 * rng.lognormvariate(-0.18, 0.6), next(order), waiting.popleft()))
        while queued and len(collected) < prompts:
            collected.append(queued.popleft())
        if len(collected) == prompts and not is_training:
            staleness += [version - each for group in collected for each in versions.pop(group)]
            collected, is_training, version = [], True, version + 1
            heapq.heappush(events, (now + train_s, next(order), None))
            continue
        now, _, group = heapq.heappop(events)
        if group is None:
            is_training, trained = False, trained + 1
            continue
        free += 1
        versions[group].append(version)
        remaining[group] -= 1
        if not remaining[group]:
            del remaining[group]
            queued.append(group)
    return staleness[len(staleness) // 5 :], now / steps


def test_generate_rollout_fully_async_names_the_missing_slime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strands_rollout.slime_plugin.fully_async._MODULE", "slime.no_such_rollout")
    with pytest.raises(ConfigError, match="expected slime 0.3.0 or newer"):
        generate_rollout_fully_async(Namespace(strands_rollout={}), 0, None)


@pytest.mark.parametrize(("given", "limit"), [(None, None), ("none", None), ("4", 4)])
def test_max_sample_staleness_default_comes_from_environment(
    given: str | None, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STRANDS_ROLLOUT_MAX_SAMPLE_STALENESS", raising=False)
    if given is not None:
        monkeypatch.setenv("STRANDS_ROLLOUT_MAX_SAMPLE_STALENESS", given)
    assert RolloutSettings().max_sample_staleness == limit
    assert RolloutSettings(max_sample_staleness=7).max_sample_staleness == 7


def test_max_sample_staleness_refuses_a_bad_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRANDS_ROLLOUT_MAX_SAMPLE_STALENESS", "four")
    with pytest.raises(ConfigError, match="STRANDS_ROLLOUT_MAX_SAMPLE_STALENESS='four'"):
        RolloutSettings()


class StandInWorker:
    """slime's AsyncRolloutWorker, reduced to what the plugin changes; `play` is a pass of its loop."""

    maxsize = 0

    def __init__(self, args: Any, data_buffer: Any, concurrency: int) -> None:
        self.args, self.data_buffer, self.concurrency = args, data_buffer, concurrency
        self.output_queue: queue.Queue[Any] = queue.Queue(self.maxsize)
        self.worker_thread: threading.Thread | None = None
        self.ended = threading.Event()
        self.tasks: dict[int, Any] = {}

    def start(self) -> None:
        self.worker_thread = threading.Thread(target=self.ended.wait, daemon=True)
        self.worker_thread.start()

    def play(self) -> None:
        while len(self.tasks) < self.concurrency and (groups := self.data_buffer.get_samples(1)):
            self.tasks[groups[0]] = self._make_done_cb(groups[0])

    def end(self, group: int, result: str = "done") -> None:
        self.tasks.pop(group)((group, result))

    def _make_done_cb(self, _gid: int) -> Any:
        def on_done(task: Any) -> None:
            group, result = task
            if result == "cancelled":
                raise asyncio.CancelledError
            if result == "aborted":
                self.data_buffer.add_samples([group])
            elif result == "done":
                self.output_queue.put(task)

        return on_done

    def get_completed_groups(self) -> list[Any]:
        raise NotImplementedError


class StandInSource:
    def __init__(self) -> None:
        self.numbers, self.returned = itertools.count(), list[int]()

    def get_samples(self, _count: int) -> list[int]:
        return [self.returned.pop() if self.returned else next(self.numbers)]

    def add_samples(self, groups: list[int]) -> None:
        self.returned += groups


@pytest.fixture
def slimes_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("slime.rollout.fully_async_rollout")
    module._global_worker, module._worker_lock = None, threading.Lock()
    module.AsyncRolloutWorker = StandInWorker
    module.generate_rollout_fully_async = lambda *_, **__: module._global_worker
    http_utils: Any = ModuleType("slime.utils.http_utils")
    http_utils.get_rollout_num_engines = lambda _: 2
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, http_utils.__name__, http_utils)
    return module


def job(limit: int | None, **more: Any) -> Namespace:
    sizes = {"sglang_server_concurrency": 64, "rollout_batch_size": 4, "n_samples_per_prompt": 8}
    return Namespace(strands_rollout={"max_sample_staleness": limit}, **sizes, **more)


@pytest.mark.usefixtures("slimes_module")
def test_worker_starts_no_group_beyond_the_limit() -> None:
    source = StandInSource()
    worker: Any = generate_rollout_fully_async(job(3), 0, source)
    worker.play()
    assert sorted(worker.tasks) == list(range(8))  # two versions of four groups
    for group in (5, 2, 7):
        worker.end(group)
    worker.play()
    assert len(worker.tasks) == 5  # the three others wait
    assert [gid for gid, _ in worker.get_completed_groups()] == [5]  # slime 0.3 drops what a step does not need
    assert [gid for gid, _ in worker.get_completed_groups(limit=4)] == [2, 7]
    worker.play()
    assert len(worker.tasks) == 8
    worker.end(8, "aborted")
    worker.end(9, "failed")
    with pytest.raises(asyncio.CancelledError):
        worker.end(10, "cancelled")
    worker.play()
    assert len(worker.tasks) == 8
    assert {8, 11, 12} <= set(worker.tasks)  # the aborted group is played again


def test_worker_is_replaced_only_when_it_has_ended(slimes_module: Any) -> None:
    first: Any = generate_rollout_fully_async(job(3), 0, StandInSource())
    assert generate_rollout_fully_async(job(3), 1, StandInSource()) is first
    first.ended.set()
    first.worker_thread.join()
    second: Any = generate_rollout_fully_async(job(3), 2, StandInSource())
    assert second is not first
    second.play()
    assert len(second.tasks) == 8
    assert slimes_module._global_worker is second


def test_worker_fills_no_bounded_queue(slimes_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue would block the event loop of slime 0.3's worker."""
    monkeypatch.setattr(StandInWorker, "maxsize", 5)
    worker: Any = generate_rollout_fully_async(job(9), 0, StandInSource())
    worker.play()
    assert len(worker.tasks) == 5


def test_worker_is_slimes_own_without_a_limit(slimes_module: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert generate_rollout_fully_async(job(None), 0, StandInSource()) is None
    del slimes_module._worker_lock
    assert generate_rollout_fully_async(job(3), 0, StandInSource()) is None
    assert "this slime's slime.rollout.fully_async_rollout has an unknown structure" in caplog.text


def test_generate_rollout_fully_async_passes_on_what_slime_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise ModuleNotFoundError("No module named 'sglang_router'", name="sglang_router")

    monkeypatch.setattr("strands_rollout.slime_plugin.fully_async.importlib.import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="sglang_router"):
        generate_rollout_fully_async(job(3), 0, None)
