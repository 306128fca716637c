"""The page: one HTML file with its styles, its script and its data, that asks the network for nothing.

The script may run by its hash alone, and what a dump holds enters the page as JSON with `<` escaped, and as base64.
A dump is read twice: what most turns do is known at its end.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import orjson

from strands_rollout.dump import DumpRecord, read_dump
from strands_rollout.errors import foreign_code
from strands_rollout.files import Json
from strands_rollout.samples import Sample
from strands_rollout.slime_plugin.reward_groups import normalize_rewards
from strands_rollout.view.sample import Retokeniser, view_sample
from strands_rollout.view.tokens import HabitCounter, TurnHabits

_MOST_FLOAT: Final = 10**308
_POSITION: Final = re.compile(r"(:\d+|\[\d+\])$")
_SCRIPTS: Final = ("data.js", "list.js", "tokens.js", "talk.js", "timeline.js", "sample.js", "groups.js", "main.js")
_PLACE: Final = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One sample, judged: its row, its detail (JSON packed by gzip), and where it stands.

    `values` is what its group's rewards are normalised by: a sample without tokens.
    """

    row: dict[str, Any]
    detail: bytes
    where: str
    values: Sample


@dataclass(frozen=True, slots=True)
class DumpView:
    """What a dump shows: one row per sample, in order, and its details, JSON packed by gzip; see `view_sample`.

    Each row has its `file`, from 0, and its `advantage`.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    details: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, shown: Sequence[ShownSample]) -> DumpView:
        """These samples; files number their groups each for itself."""
        known: dict[str, int] = {}
        numbers = [known.setdefault(_POSITION.sub("", one.where), len(known)) for one in shown]
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
    """Read and judge all samples of a dump; without a retokeniser there are no marks of drift.

    `on_read` is told how many more samples are done. For the path, and what is raised, see `read_dump`.
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
    """Judge one sample; one that can't be is shown as such, beside the others."""
    with foreign_code("a dump may hold anything, and one odd sample must not hide the others") as outcome:
        return _shown(record, habits, retokeniser)
    why = f"it can't be shown: {type(outcome.error).__name__}: {outcome.error!s:.500}"
    values = Sample(status=Sample.Status.FAILED, response=why).to_dict()
    return _shown(DumpRecord(values, record.where, record.source, violations=(why,)), habits, None)


def _shown(record: DumpRecord, habits: TurnHabits, retokeniser: Retokeniser | None) -> ShownSample:
    row, detail = view_sample(record, habits, retokeniser)
    packed = gzip.compress(json_bytes(detail), 5, mtime=0)
    row = orjson.loads(json_bytes(row))
    return ShownSample(row, packed, record.where, _compared(record, row["reward"]))


def json_bytes(value: object) -> bytes:
    """JSON of what a sample may hold: half a surrogate pair becomes "?", and an integer above 64 bits a float."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(_writable(value), default=repr)


def _writable(value: object) -> Json:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {str(_writable(key)): _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value) if abs(value) < _MOST_FLOAT else None
    return value


def _compared(record: DumpRecord, reward: float | None) -> Sample:
    """What `group_rewards` reads of a sample, without its tokens."""
    values: dict[str, Any] = {
        key: value if isinstance(value, Hashable) else repr(value) for key, value in record.values.items()
    }
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


def write_page(view: DumpView, title: str) -> str:
    """A page that holds all of the dump."""
    details = (
        f'<script type="text/plain" id="d{position}">{base64.b64encode(detail).decode("ascii")}</script>'
        for position, detail in enumerate(view.details)
    )
    return _page(view.index(title, live=False), "\n".join(details))


def live_page(title: str) -> str:
    """A page that asks the server which sent it for rows and details."""
    return _page(DumpView().index(title, live=True), "")


def _page(index: Mapping[str, Any], details: str) -> str:
    style, script = _asset("page.css"), "\n".join(map(_asset, _SCRIPTS))
    connect = "'self'" if index["live"] else "'none'"
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
    # ends no script element, whatever its texts hold
    escaped = json_bytes(index).decode().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    parts = {"policy": policy, "style": style, "index": escaped, "details": details, "script": script}
    return _PLACE.sub(lambda place: parts[place[1]], _asset("page.html"))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _asset(name: str) -> str:
    return (files("strands_rollout.view") / "assets" / name).read_text(encoding="utf-8")
