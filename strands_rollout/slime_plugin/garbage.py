"""Garbage collection in a process that plays episodes for hours."""

import functools
import gc
from typing import Final

# the first threshold of `gc.set_threshold`: new containers before a collection of the youngest generation; Python's
# default is 700 (2,000 from 3.13 on). The JSON of a turn is decoded to one list for each token
_YOUNG_COLLECTION_THRESHOLD: Final = 10_000
# the third threshold of `gc.set_threshold`: collections of the middle generation before a full collection; Python's
# default is 10. In a run of 2,000 episodes the higher value did not use more memory, since cycles hold little of it
_FULL_COLLECTION_THRESHOLD: Final = 100


@functools.cache
def freeze_long_lived() -> None:
    """Collect garbage, freeze all remaining objects (`gc.freeze`), and make collections rarer; once per process.

    Call it before the first episode, so that no object of an episode is frozen. Frozen objects are still freed when
    their reference count drops to zero; only cycles of them are no longer found. Full collections become rarer because
    each scans the objects of all running episodes, and collections of new objects because they find next to nothing.
    If the process has set a higher threshold or disabled such collections (`gc.set_threshold`), that setting stays.
    """
    gc.collect()
    gc.freeze()
    young, middle, full = gc.get_threshold()
    gc.set_threshold(
        max(young, _YOUNG_COLLECTION_THRESHOLD) if young else 0,
        middle,
        max(full, _FULL_COLLECTION_THRESHOLD) if full else 0,
    )
