"""Steps that take turns in the event loop, work that is done once per process, and sync functions in own threads."""

import asyncio
import gc
import itertools
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, args_for, ids_of, run
from strands.hooks import BeforeModelCallEvent, HookProvider, HookRegistry

from strands_rollout import Sample, aio, generate
from strands_rollout.aio import freeze_long_lived, in_own_thread, once, own_pass
from strands_rollout.errors import ToolError

TASKS = 50
began: list[int] = []
passes = itertools.count()


async def test_between_two_steps_everything_else_that_is_ready_comes_to_its_turn() -> None:
    seen: list[str] = []
    is_over = False

    async def step(number: int) -> None:
        await own_pass()
        seen.append(f"step {number}")

    async def watch() -> None:
        while not is_over:
            seen.append("other")
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(step(number) for number in range(TASKS)))
    is_over = True
    await watching
    steps = [entry for entry in seen if entry != "other"]
    assert steps == [f"step {number}" for number in range(TASKS)]
    neighbours = [pair for pair in itertools.pairwise(seen) if "other" not in pair]
    assert neighbours == []


async def test_who_is_alone_goes_on_at_once() -> None:
    seen: list[str] = []
    asyncio.get_running_loop().call_soon(seen.append, "next pass")
    await own_pass()
    assert seen == []


async def test_a_second_step_of_one_task_comes_in_a_later_pass() -> None:
    seen: list[str] = []
    asyncio.get_running_loop().call_soon(seen.append, "next pass")
    await own_pass()
    await own_pass()
    assert seen == ["next pass"]


@pytest.mark.parametrize("cancelled", [[0], [1], [1, 2, 3], [TASKS - 1]])
async def test_a_cancelled_step_holds_up_nobody(cancelled: list[int]) -> None:
    done: list[int] = []

    async def step(number: int) -> None:
        await own_pass()
        done.append(number)

    tasks = [asyncio.create_task(step(number)) for number in range(TASKS)]
    await asyncio.sleep(0)
    for number in cancelled:
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [number for number in range(1, TASKS) if number not in done] == [n for n in cancelled if n]
    async with asyncio.timeout(5):
        await own_pass()


def test_a_loop_that_was_closed_while_steps_waited_is_not_kept() -> None:
    async def begin() -> weakref.ref[asyncio.AbstractEventLoop]:
        for _ in range(3):
            asyncio.create_task(own_pass())  # noqa: RUF006 - they are left behind on purpose
        await asyncio.sleep(0)
        return weakref.ref(asyncio.get_running_loop())

    closed = asyncio.run(begin())
    gc.collect()
    assert closed() is None


class NotesThePass(HookProvider):
    """Notes in which pass of the loop an episode asks its model first."""

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        self._is_first = True
        registry.add_callback(BeforeModelCallEvent, self._note)

    def _note(self, event: BeforeModelCallEvent) -> None:
        if self._is_first:
            self._is_first = False
            began.append(next(passes))


async def test_episodes_that_begin_at_once_begin_in_passes_of_their_own(shipped_tokenizer: Any) -> None:
    began.clear()
    answer = Reply.tokens(ids_of(shipped_tokenizer, ANSWER))
    settings = {"executor": "turn_costs.InstantExecutor", "hooks": [f"{__name__}.NotesThePass"]}

    async def count() -> None:
        while True:
            next(passes)
            await asyncio.sleep(0)

    async with FakeSGLang(lambda *_: answer) as fake:
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=settings)
        await generate(args, Sample(prompt="first", label="", index=0), {"max_new_tokens": 500})
        counting = asyncio.create_task(count())
        samples = [Sample(prompt="What is 17 * 2?", label="34", index=index) for index in range(20)]
        await asyncio.gather(*(generate(args, sample, {"max_new_tokens": 500}) for sample in samples))
        counting.cancel()
    gaps = [later - earlier for earlier, later in itertools.pairwise(began[1:])]
    assert len(gaps) == 19
    assert min(gaps) > 1


@pytest.fixture
def _thawed() -> Iterator[None]:
    """A process in which nothing is frozen; afterwards it collects garbage as before."""
    thresholds = gc.get_threshold()
    gc.unfreeze()
    freeze_long_lived.cache_clear()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Node:
    """Refers to itself."""

    def __init__(self) -> None:
        self.node = self


@pytest.mark.usefixtures("_thawed")
def test_the_first_call_freezes_what_there_is_and_later_cycles_are_collected() -> None:
    before = weakref.ref(Node())
    freeze_long_lived()
    assert before() is None, "garbage was frozen"
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    later = weakref.ref(Node())
    gc.collect()
    assert later() is None, "new cycles are not collected"
    kept = [object(), [None]]
    freeze_long_lived()
    assert gc.get_freeze_count() <= frozen, f"{kept} was frozen too"


@pytest.mark.usefixtures("_thawed")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((700, 10, 10), (700, 10, 100)),
        ((900, 20, 500), (900, 20, 500)),
        ((700, 10, 0), (700, 10, 0)),
        ((0, 10, 10), (0, 10, 100)),
    ],
    ids=["Python's own", "rarer already", "none at all", "the collector is off"],
)
def test_full_collections_become_rarer_where_the_process_has_not_seen_to_it(given: Any, expected: Any) -> None:
    gc.set_threshold(*given)
    freeze_long_lived()
    assert gc.get_threshold() == expected


@pytest.mark.usefixtures("_thawed")
@pytest.mark.parametrize("wanted", [True, False])
async def test_the_first_sample_freezes_what_the_process_has_unless_told_not_to(
    shipped_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    monkeypatch.setattr(aio, "_DONE", set())
    played = await run(shipped_tokenizer, [ANSWER], settings={"freeze_gc": wanted})
    assert played.facts["stop_reason"] == "completed"
    assert (gc.get_freeze_count() > 1000) == wanted


async def test_all_who_come_first_wait_for_one_thread_that_is_not_the_loops() -> None:
    threads, has_begun, goes_on = [], threading.Event(), threading.Event()

    def work() -> None:
        threads.append(threading.current_thread())
        has_begun.set()
        goes_on.wait(20)

    waiting = [asyncio.create_task(once("first", work)) for _ in range(50)]
    assert await asyncio.to_thread(has_begun.wait, 20)
    waiting[0].cancel()
    goes_on.set()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(end) for end in ended] == [asyncio.CancelledError] + [type(None)] * 49
    await once("first", work)
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def test_work_that_fails_fails_all_who_wait_and_is_tried_again() -> None:
    tries = []

    def work() -> None:
        tries.append("try")
        if len(tries) == 1:
            raise ValueError("not yet")

    ended = await asyncio.gather(once("failing", work), once("failing", work), return_exceptions=True)
    assert [str(end) for end in ended] == ["not yet", "not yet"]
    await once("failing", work)
    await once("failing", work)
    assert len(tries) == 2


here = in_own_thread(threading.current_thread)


async def test_calls_after_each_other_share_a_thread() -> None:
    assert len({await here() for _ in range(20)}) == 1


async def test_calls_at_once_have_a_thread_each() -> None:
    together = threading.Barrier(5, timeout=20)

    def meet() -> threading.Thread:
        together.wait()
        return threading.current_thread()

    assert len(set(await asyncio.gather(*(in_own_thread(meet)() for _ in range(5))))) == 5


async def test_the_thread_of_a_call_that_hangs_is_nobody_elses() -> None:
    release, has_begun, seen = threading.Event(), threading.Event(), []

    def hang() -> None:
        seen.append(threading.current_thread())
        has_begun.set()
        release.wait(20)

    task = asyncio.create_task(in_own_thread(hang)())
    assert await asyncio.to_thread(has_begun.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen[0] not in {await here() for _ in range(5)}
    release.set()


async def test_most_idle_threads_end_after_many_calls_at_once() -> None:
    together = threading.Barrier(100, timeout=20)
    await asyncio.gather(*(in_own_thread(together.wait)() for _ in range(100)))
    for _ in range(1000):
        idle = [thread for thread in threading.enumerate() if thread.name.startswith("tool:")]
        if len(idle) <= 64:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{len(idle)} threads are idle")


FORKING = """
import asyncio, os, threading
from strands_rollout.aio import in_own_thread

here = in_own_thread(threading.get_ident)
asyncio.run(here())
child = os.fork()
if child == 0:
    try:
        asyncio.run(asyncio.wait_for(here(), 10))
    except BaseException:
        os._exit(1)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_starts_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "0\n"


async def test_an_exception_belongs_to_the_caller() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await in_own_thread(fail)()
    with pytest.raises(ToolError, match="SystemExit"):
        await in_own_thread(sys.exit)()


async def test_an_event_loop_that_a_function_left_in_its_thread_is_not_the_next_ones() -> None:
    def compute() -> int:
        try:
            loop = asyncio.get_event_loop()
        except RuntimeError:
            loop = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(asyncio.sleep(0, 7))
        finally:
            loop.close()

    assert [await in_own_thread(compute)() for _ in range(3)] == [7, 7, 7]
