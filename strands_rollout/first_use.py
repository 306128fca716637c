"""What the first sample of a process needs and no later one: done once, beside the event loop, while samples wait.

Loading a tokenizer takes seconds. What lives as long as the process is taken out of Python's garbage collection then: a
process that trains has hundreds of thousands of such objects, each full collection looks through all of them on the
event loop's thread, and with 64 episodes at once there is one about every second.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Final

# full collections wait for so many of the middle generation's; 10 is Python's own number. With 2,000 episodes the
# process grew no larger, since what an episode leaves in cycles is small beside what it holds while it runs
_YOUNGER_COLLECTIONS: Final = 100
_DONE: Final[set[Hashable]] = set()
_RUNNING: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, asyncio.Task[Any]]]] = (
    weakref.WeakKeyDictionary()
)


async def once(key: Hashable, work: Callable[[], object]) -> None:
    """Have this work done in a thread, once for all who ask for it under this key; at once where it has been.

    Work that raises is tried again by who comes later; all who waited for it get what it raised.
    """
    if key in _DONE:
        return
    running = _RUNNING.setdefault(asyncio.get_running_loop(), {})
    task = running.get(key)
    if task is None:
        task = running[key] = asyncio.create_task(asyncio.to_thread(work))
        task.add_done_callback(functools.partial(_note_end, running, key))
    await asyncio.shield(task)  # who is cancelled does not cancel it for the others


def _note_end(running: dict[Hashable, asyncio.Task[Any]], key: Hashable, task: asyncio.Task[Any]) -> None:
    del running[key]
    if not task.cancelled() and task.exception() is None:
        _DONE.add(key)


@functools.cache
def freeze_long_lived() -> None:
    """Collect garbage and freeze what is left (`gc.freeze`); the first call does, any other returns at once.

    Frozen objects are freed as before when nothing refers to them; only cycles of them are not found any more. Call it
    before the first episode, so that no episode is among them. Full collections, which look through all running
    episodes at once, become rarer, unless the process has set them to be rarer still or off (`gc.set_threshold`).
    """
    gc.collect()
    gc.freeze()
    young, middle, full = gc.get_threshold()
    if 0 < full < _YOUNGER_COLLECTIONS:
        gc.set_threshold(young, middle, _YOUNGER_COLLECTIONS)
