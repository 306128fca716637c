"""What is done once per process: in a thread, for all who wait."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import harness
import pytest

from strands_rollout.aio import once

SUPPORT = Path(harness.__file__).parent

FREEZING = """
import gc, weakref
from strands_rollout.aio import freeze_long_lived

class Node:
    pass

def cycle():
    node = Node()
    node.self = node
    return weakref.ref(node)

before = cycle()
freeze_long_lived()
assert before() is None, "garbage was frozen"
frozen = gc.get_freeze_count()
assert frozen > 1000, frozen
later = cycle()
gc.collect()
assert later() is None, "new cycles are not collected"
kept = [object(), []]
freeze_long_lived()
assert gc.get_freeze_count() <= frozen, "it was frozen twice"
"""
THRESHOLDS = """
import gc
from strands_rollout.aio import freeze_long_lived

for given, expected in (
    ((700, 10, 10), (700, 10, 100)),  # Python's own
    ((900, 20, 500), (900, 20, 500)),  # rarer already
    ((700, 10, 0), (700, 10, 0)),  # none at all
    ((0, 10, 10), (0, 10, 100)),  # the collector is off
):
    gc.set_threshold(*given)
    freeze_long_lived.__wrapped__()
    assert gc.get_threshold() == expected, (given, gc.get_threshold())
"""
EPISODE = """
import asyncio, gc, sys
sys.path.insert(0, sys.argv[1])
from harness import ANSWER, run
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
done = asyncio.run(run(tokenizer, [ANSWER], settings={"freeze_gc": sys.argv[3] == "yes"}))
assert done.sample.status.value == "completed"
print(gc.get_freeze_count())
"""


def test_the_first_call_freezes_what_there_is_and_later_cycles_are_collected() -> None:
    done = subprocess.run([sys.executable, "-c", FREEZING], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_full_collections_become_rarer_where_the_process_has_not_seen_to_it() -> None:
    done = subprocess.run([sys.executable, "-c", THRESHOLDS], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("wanted", ["yes", "no"])
def test_the_first_sample_freezes_what_the_process_has_unless_told_not_to(shipped_tokenizer: Any, wanted: str) -> None:
    command = [sys.executable, "-c", EPISODE, str(SUPPORT), shipped_tokenizer.name_or_path, wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout.splitlines()[-1]) > 1000) == (wanted == "yes")


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
