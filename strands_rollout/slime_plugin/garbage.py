"""Garbage collection in a process that plays episodes for hours."""

import functools
import gc
from typing import Final

# the first threshold of `gc.set_threshold`: new containers before a collection of the youngest generation. Python's
# default is 700 (2,000 from 3.13 on), but the JSON of a turn is decoded to one list for each token. This threshold
# makes full collections rarer, too, which scan the objects of all running episodes. Memory did not grow in 3,000
# episodes with a plain tool, which leave no cycles
_YOUNG_COLLECTION_THRESHOLD: Final = 10_000


@functools.cache
def freeze_long_lived() -> None:
    """Collect garbage, freeze all remaining objects (`gc.freeze`), and make collections rarer; once per process.

    Call it before the first episode, so that no object of an episode is frozen. Frozen objects are still freed when
    their reference count drops to zero; only cycles of them are no longer found. If the process has set a higher
    threshold or disabled collections (`gc.set_threshold`, `gc.disable`), that setting stays.
    """
    gc.collect()
    gc.freeze()
    young, *older = gc.get_threshold()
    if 0 < young < _YOUNG_COLLECTION_THRESHOLD:
        gc.set_threshold(_YOUNG_COLLECTION_THRESHOLD, *older)
