"""Garbage collection in a process that plays episodes for hours."""

import functools
import gc
from typing import Final

# full collections wait for so many of the middle generation's; 10 is Python's own number. With 2,000 episodes the
# process grew no larger, since what an episode leaves in cycles is small beside what it holds while it runs
_YOUNGER_COLLECTIONS: Final = 100


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
