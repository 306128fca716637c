"""`freeze_long_lived`: frozen objects, the garbage collector's threshold, and the setting `freeze_gc`."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from harness import ANSWER, run

from strands_rollout import aio
from strands_rollout.slime_plugin.garbage import freeze_long_lived


@pytest.fixture
def _unfrozen() -> Iterator[None]:
    """Unfreeze all objects, and restore the collector afterwards."""
    thresholds = gc.get_threshold()
    gc.unfreeze()
    freeze_long_lived.cache_clear()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.node = self


@pytest.mark.usefixtures("_unfrozen")
def test_freeze_long_lived_freezes_once() -> None:
    before = weakref.ref(Node())
    freeze_long_lived()
    assert before() is None, "garbage was frozen"
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    later = weakref.ref(Node())
    gc.collect()
    assert later() is None, "new cycles are not collected"
    new_objects = [object(), [None]]
    freeze_long_lived()
    assert gc.get_freeze_count() <= frozen, f"{new_objects} were frozen too"


@pytest.mark.usefixtures("_unfrozen")
@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        ((700, 10, 10), (10_000, 10, 10)),
        ((2000, 10, 0), (10_000, 10, 0)),
        ((20_000, 20, 500), (20_000, 20, 500)),
        ((0, 10, 10), (0, 10, 10)),
    ],
    ids=["Python's own", "no full collections", "already larger", "disabled"],
)
def test_freeze_long_lived_raises_default_gc_thresholds(threshold: Any, expected: Any) -> None:
    gc.set_threshold(*threshold)
    freeze_long_lived()
    assert gc.get_threshold() == expected


@pytest.mark.usefixtures("_unfrozen")
@pytest.mark.parametrize("freeze_gc", [True, False])
async def test_generate_freezes_gc_by_setting(
    shipped_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, freeze_gc: bool
) -> None:
    monkeypatch.setattr(aio, "_FINISHED_KEYS", set())
    played = await run(shipped_tokenizer, [ANSWER], settings={"freeze_gc": freeze_gc})
    assert played.facts["stop_reason"] == "completed"
    assert (gc.get_freeze_count() > 1000) == freeze_gc
