"""A whole dump as the page shows it: rows with their advantages, and each sample's details, packed.

Knows records and how they are shown; nothing of HTML. Reads the dump twice: what most turns do is known at its end.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import orjson

from strands_rollout.dump import DumpRecord, read_dump
from strands_rollout.group_rewards import normalize_rewards
from strands_rollout.sample_type import Sample
from strands_rollout.view.sample_view import Retokeniser, view_sample
from strands_rollout.view.token_runs import TokenLists
from strands_rollout.view.turn_habits import HabitCounter, TurnHabits, control_ids

_POSITION: Final = re.compile(r"(:\d+|\[\d+\])$")


@dataclass(slots=True)
class DumpView:
    """What a dump shows.

    Attributes:
        rows: One per sample, in order; see `sample_view`.
        details: Each sample's, JSON packed by gzip.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    details: list[bytes] = field(default_factory=list)

    def add(self, row: dict[str, Any], detail: bytes) -> None:
        """Append one sample."""
        self.rows.append(row)
        self.details.append(detail)

    def index(self, title: str, *, live: bool) -> dict[str, Any]:
        """What the page reads first."""
        return {"title": title, "live": live, "rows": self.rows}


def view_dump(path: Path, retokeniser: Retokeniser | None) -> DumpView:
    """Read and judge all samples of a dump.

    Raises:
        DumpError: It can't be read; see `read_dump`.
    """
    habits = dump_habits(read_dump(path), retokeniser)
    return view_records(read_dump(path), habits, retokeniser)


def dump_habits(records: Iterable[DumpRecord], retokeniser: Retokeniser | None) -> TurnHabits:
    """What most turns and contexts of these samples do."""
    counter = HabitCounter(retokeniser.controls if retokeniser else frozenset())
    for record in records:
        if retokeniser is None:
            counter.controls |= control_ids(record.token_texts.items())
        counter.add(TokenLists.of(record))
    return counter.habits()


def view_records(
    records: Iterable[DumpRecord],
    habits: TurnHabits,
    retokeniser: Retokeniser | None,
    known: DumpView | None = None,
) -> DumpView:
    """Judge these samples; those that `known` has at the same place of the same file are taken from there."""
    view, compared = DumpView(), []
    files: dict[str, int] = {}
    before = known.rows if known is not None else []
    for position, record in enumerate(records):
        if known is not None and position < len(before) and before[position]["where"] == record.where:
            view.add(before[position], known.details[position])
        else:
            shown = view_sample(record, habits, retokeniser)
            view.add(shown.row, gzip.compress(orjson.dumps(shown.detail), 5, mtime=0))
        row = view.rows[-1]
        row["file"] = files.setdefault(_POSITION.sub("", record.where), len(files))
        compared.append(_compared(record, row["reward"], row["file"]))
    for row, advantage in zip(view.rows, _advantages(compared), strict=True):
        row["advantage"] = advantage
    return view


def _compared(record: DumpRecord, reward: float | None, file: int) -> Sample:
    """What `group_rewards` reads of a sample, without its tokens; files number their groups each for itself."""
    values = record.values
    group: Any = None if values.get("group_index") is None else (file, values["group_index"])
    known = {status.value: status for status in Sample.Status}
    return Sample(
        group_index=group,
        index=values.get("index"),
        rollout_id=values.get("rollout_id"),
        reward=reward,
        remove_sample=bool(values.get("remove_sample")),
        status=known.get(str(values.get("status")), Sample.Status.PENDING),
        metadata={"strands_rollout": {"fan_out": record.facts.get("fan_out")}},
    )


def _advantages(samples: Sequence[Sample]) -> Iterator[float | None]:
    """Each sample's as slime's GRPO has it by default; None where it is in no group or has no reward."""
    rewarded = [sample for sample in samples if sample.reward is not None and sample.group_index is not None]
    _, normalized = normalize_rewards(SimpleNamespace(reward_key=None), rewarded)
    by_sample: Mapping[int, float] = {id(sample): value for sample, value in zip(rewarded, normalized, strict=True)}
    return (by_sample.get(id(sample)) for sample in samples)
