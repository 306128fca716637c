"""Garbage collection in a process that plays episodes for hours."""

import functools
import gc
from typing import Final

# the third threshold of `gc.set_threshold`: collections of the middle generation before a full one; Python's default
# is 10. With 2,000 episodes the process grew no larger, since reference cycles hold little beside a running episode
_FULL_COLLECTION_THRESHOLD: Final = 100


@functools.cache
def freeze_long_lived() -> None:
    """Collect garbage, freeze all that is left (`gc.freeze`), and make full collections rarer; once per process.

    Call it before the first episode, so that no object of an episode is frozen. Frozen objects are still freed when
    their reference count drops to zero; only cycles of them are no longer found. Full collections scan the objects of
    all running episodes at once. They become rarer unless the process has already made them rarer still, or disabled
    them, with `gc.set_threshold`.
    """
    gc.collect()
    gc.freeze()
    young, middle, full = gc.get_threshold()
    if 0 < full < _FULL_COLLECTION_THRESHOLD:
        gc.set_threshold(young, middle, _FULL_COLLECTION_THRESHOLD)
