"""A whole dump as the page shows it: rows with their advantages, and each sample's details, packed.

Knows records and how they are shown; nothing of HTML. Reads the dump twice: what most turns do is known at its end.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import orjson

from strands_rollout.dump import DumpRecord, read_dump
from strands_rollout.group_rewards import normalize_rewards
from strands_rollout.sample_type import Sample
from strands_rollout.view.sample_view import Retokeniser, view_sample
from strands_rollout.view.turn_habits import HabitCounter, TurnHabits

_POSITION: Final = re.compile(r"(:\d+|\[\d+\])$")


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One sample, judged.

    Attributes:
        row: See `sample_view`.
        detail: JSON packed by gzip.
        where: See `DumpRecord`.
        values: What its group's rewards are normalised by: a sample without tokens.
    """

    row: dict[str, Any]
    detail: bytes
    where: str
    values: Sample


@dataclass(frozen=True, slots=True)
class DumpView:
    """What a dump shows.

    Attributes:
        rows: One per sample, in order; see `sample_view`. Each has its `file`, from 0, and its `advantage`.
        details: Each sample's, JSON packed by gzip.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    details: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, shown: Sequence[ShownSample]) -> DumpView:
        """These samples; files number their groups each for itself."""
        files: dict[str, int] = {}
        numbers = [files.setdefault(_POSITION.sub("", one.where), len(files)) for one in shown]
        advantages = _advantages([one.values for one in shown], numbers)
        rows = [
            {**one.row, "file": number, "advantage": advantage}
            for one, number, advantage in zip(shown, numbers, advantages, strict=True)
        ]
        return cls(rows, [one.detail for one in shown])

    def index(self, title: str, *, live: bool) -> dict[str, Any]:
        """What the page reads first."""
        return {"title": title, "live": live, "rows": self.rows}


def view_dump(
    path: Path, retokeniser: Retokeniser | None, on_read: Callable[[int], object] = lambda _more: None
) -> DumpView:
    """Read and judge all samples of a dump.

    Args:
        path: See `read_dump`.
        retokeniser: None for no marks of drift.
        on_read: Told how many more samples are done.

    Raises:
        DumpError: It can't be read; see `read_dump`.
    """
    habits = dump_habits(read_dump(path), retokeniser)
    shown = []
    for record in read_dump(path):
        shown.append(show(record, habits, retokeniser))
        on_read(1)
    return DumpView.of(shown)


def dump_habits(records: Iterable[DumpRecord], retokeniser: Retokeniser | None) -> TurnHabits:
    """What most turns and contexts of these samples do."""
    counter = habit_counter(retokeniser)
    for record in records:
        counter.count(record)
    return counter.habits()


def habit_counter(retokeniser: Retokeniser | None) -> HabitCounter:
    """One that has counted nothing."""
    return HabitCounter(None if retokeniser is None else retokeniser.controls)


def show(record: DumpRecord, habits: TurnHabits, retokeniser: Retokeniser | None) -> ShownSample:
    """Judge one sample."""
    shown = view_sample(record, habits, retokeniser)
    packed = gzip.compress(orjson.dumps(shown.detail), 5, mtime=0)
    return ShownSample(shown.row, packed, record.where, _compared(record, shown.row["reward"]))


def _compared(record: DumpRecord, reward: float | None) -> Sample:
    """What `group_rewards` reads of a sample, without its tokens."""
    values = record.values
    known = {status.value: status for status in Sample.Status}
    return Sample(
        group_index=values.get("group_index"),
        index=values.get("index"),
        rollout_id=values.get("rollout_id"),
        reward=reward,
        remove_sample=bool(values.get("remove_sample")),
        status=known.get(str(values.get("status")), Sample.Status.PENDING),
        metadata={"strands_rollout": {"fan_out": record.facts.get("fan_out")}},
    )


def _advantages(samples: Sequence[Sample], files: Sequence[int]) -> list[float | None]:
    """Each sample's as slime's GRPO has it by default; None where it is in no group or has no reward."""
    # any hashable value is a group to `normalize_rewards`
    rewarded = [
        (place, replace(sample, group_index=(file, sample.group_index)))  # type: ignore[arg-type]
        for place, (sample, file) in enumerate(zip(samples, files, strict=True))
        if sample.reward is not None and sample.group_index is not None
    ]
    _, normalized = normalize_rewards(SimpleNamespace(reward_key=None), [sample for _, sample in rewarded])
    found: list[float | None] = [None] * len(samples)
    for (place, _), value in zip(rewarded, normalized, strict=True):
        found[place] = value
    return found
