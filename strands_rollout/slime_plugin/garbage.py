"""Garbage collection in a process that plays episodes for hours."""

import functools
import gc
from typing import Final

# the third threshold of `gc.set_threshold`: collections of the middle generation before a full collection; Python's
# default is 10. In a run of 2,000 episodes the higher value did not use more memory, since cycles hold little of it
_FULL_COLLECTION_THRESHOLD: Final = 100


@functools.cache
def freeze_long_lived() -> None:
    """Collect garbage, freeze all remaining objects (`gc.freeze`), and make full collections rarer; once per process.

    Call it before the first episode, so that no object of an episode is frozen. Frozen objects are still freed when
    their reference count drops to zero; only cycles of them are no longer found. Full collections become rarer because
    each scans the objects of all running episodes. If the process has set a higher threshold or disabled full
    collections (`gc.set_threshold`), that setting stays.
    """
    gc.collect()
    gc.freeze()
    young, middle, full = gc.get_threshold()
    if 0 < full < _FULL_COLLECTION_THRESHOLD:
        gc.set_threshold(young, middle, _FULL_COLLECTION_THRESHOLD)
