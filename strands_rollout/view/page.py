"""A dump as a page: one HTML file with its styles, its script and its data, that asks the network for nothing.

The script may run by its hash alone, and what a dump holds enters the page as JSON with `<` escaped, and as base64.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import orjson

from strands_rollout.dump import DumpRecord, read_dump
from strands_rollout.files.json_codec import Json
from strands_rollout.samples import METADATA_KEY, EpisodeFacts, Sample
from strands_rollout.slime_plugin.reward_groups import normalize_rewards
from strands_rollout.view.sample import Retokeniser, plain, view_sample
from strands_rollout.view.tokens import TurnHabits, habits_of

MAX_RUNS: Final = 4  # side by side, each in a color of its own
_HABIT_SAMPLES: Final = 200
_POSITION: Final = re.compile(r"(:\d+|\[\d+\])$")
_STEP: Final = re.compile(r"(?:(.*)_)?(\d{1,9})")  # rollout_000003, eval-aime_000003, 3
_STYLES: Final = ("libraries/libraries.css", "page.css")
_SCRIPTS: Final = (
    "data.js",
    "libraries/libraries.js",
    "filter.js",
    "list.js",
    "code.js",
    "markdown.js",
    "tokens.js",
    "talk.js",
    "timeline.js",
    "sample.js",
    "groups.js",
    "charts.js",
    "overview.js",
    "main.js",
)
_PLACE: Final = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One sample, judged."""

    row: dict[str, Any]
    detail: bytes  # JSON, packed by gzip; see `view_sample`
    file: str
    compared: Sample  # without tokens; its group's rewards are normalized with it


@dataclass(frozen=True, slots=True)
class DumpView:
    """A dump, or several `runs` side by side: a row per sample, in order, and its details.

    A row has its `run` and `file`, both counted from 0, `set` and `step` from the file's name, and its `advantage`.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    details: list[bytes] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, shown: Sequence[ShownSample]) -> DumpView:
        """Join samples of one dump; each file numbers its groups from 0: equal numbers in two files are two groups."""
        files = {file: number for number, file in enumerate(dict.fromkeys(one.file for one in shown))}
        named = {file: set_and_step(file) for file in files}
        rows = [
            {**one.row, "run": 0, "file": files[one.file], "advantage": None}
            | {"set": one.row["set"] or named[one.file][0], "step": named[one.file][1]}
            for one in shown
        ]
        # any hashable value is a group to `normalize_rewards`
        rewarded = [
            (row, replace(one.compared, group_index=(one.file, one.compared.group_index)))  # type: ignore[arg-type]
            for row, one in zip(rows, shown, strict=True)
            if one.compared.reward is not None and one.compared.group_index is not None
        ]
        _, advantages = normalize_rewards(SimpleNamespace(reward_key=None), [sample for _, sample in rewarded])
        for (row, _), advantage in zip(rewarded, advantages, strict=True):
            row["advantage"] = advantage
        return cls(rows, [one.detail for one in shown])

    @classmethod
    def beside(cls, views: Mapping[str, DumpView]) -> DumpView:
        """Put runs side by side, by name; a single one stays as it is."""
        if len(views) == 1:
            return next(iter(views.values()))
        rows = [{**row, "run": run} for run, view in enumerate(views.values()) for row in view.rows]
        return cls(rows, [detail for view in views.values() for detail in view.details], list(views))

    def index(self, title: str, *, live: bool) -> dict[str, Any]:
        """Return the values that the page reads first."""
        return {"title": title, "live": live, "runs": self.runs, "rows": self.rows}


def set_and_step(file: str) -> tuple[str, int | None]:
    """Read set and step from a dump's name: `rollout_000003.jsonl.gz` holds step 3 of the set `rollout`."""
    stem = Path(file).name.removesuffix(".gz").rpartition(".")[0]
    found = _STEP.fullmatch(stem)
    return (found[1] or "rollout", int(found[2])) if found else (stem, None)


def run_names(paths: Sequence[Path]) -> list[str]:
    """Name each dump by its file, with as many folders before it as tell it from the others."""
    parts = [path.resolve().parts for path in paths]
    depth = next((n for n in range(1, 99) if len({one[-n:] for one in parts}) == len(set(parts))), 99)
    return ["/".join(one[-depth:]) for one in parts]


def view_dump(
    path: Path, retokeniser: Retokeniser | None, on_read: Callable[[int], object] = lambda _more: None
) -> DumpView:
    """Read and judge all samples of a dump; without a retokeniser there are no marks of drift.

    `on_read` is called with 1 for each sample that is done. For the path, and the errors, see `read_dump`.
    """
    habits = dump_habits(path, retokeniser)
    shown = []
    for record in read_dump(path):
        shown.append(show(record, habits, retokeniser))
        on_read(1)
    return DumpView.of(shown)


def dump_habits(path: Path, retokeniser: Retokeniser | None) -> TurnHabits:
    """Learn from the first samples of a dump which rules most turns and contexts keep."""
    first = list(islice(read_dump(path), _HABIT_SAMPLES))
    return habits_of(first, None if retokeniser is None else retokeniser.controls)


def show(record: DumpRecord, habits: TurnHabits, retokeniser: Retokeniser | None) -> ShownSample:
    """Judge one sample; one that can't be judged is shown as such, beside the others."""
    try:
        return _judge(record, habits, retokeniser)
    except Exception as e:  # a dump may hold anything, and one odd sample must not hide the others
        why = f"it can't be shown: {type(e).__name__}: {e!s:.500}"
    values = Sample(status=Sample.Status.FAILED, response=why).to_dict()
    return _judge(DumpRecord(values, record.where, record.source, violations=(why,)), habits, None)


def _judge(record: DumpRecord, habits: TurnHabits, retokeniser: Retokeniser | None) -> ShownSample:
    row, detail = view_sample(record, habits, retokeniser)
    row = orjson.loads(json_bytes(row))
    packed = gzip.compress(json_bytes(detail), 5, mtime=0)
    return ShownSample(row, packed, _POSITION.sub("", record.where), _compared(record, row["reward"]))


def json_bytes(value: object) -> bytes:
    """Write values of a sample as JSON; those that have no form there become what `plain` makes of them."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(plain(value))


def _compared(record: DumpRecord, reward: float | None) -> Sample:
    """Make a sample of the fields that `normalize_rewards` reads."""
    values = record.values

    def hashable(name: str) -> Json:
        number = values.get(name)
        return number if isinstance(number, Hashable) else repr(number)

    known = {status.value: status for status in Sample.Status}
    return Sample(
        group_index=hashable("group_index"),
        index=hashable("index"),
        rollout_id=hashable("rollout_id"),
        reward=reward,
        remove_sample=bool(values.get("remove_sample")),
        status=known.get(str(values.get("status")), Sample.Status.PENDING),
        metadata={METADATA_KEY: EpisodeFacts(fan_out=record.facts.fan_out).to_metadata()},
    )


def write_page(view: DumpView, title: str) -> str:
    """Write the page that holds all of a dump."""
    details = (
        f'<script type="text/plain" id="d{position}">{base64.b64encode(detail).decode("ascii")}</script>'
        for position, detail in enumerate(view.details)
    )
    return _page(view.index(title, live=False), "\n".join(details))


def live_page(title: str) -> str:
    """Write the page that asks the server which sent it for rows and details."""
    return _page(DumpView().index(title, live=True), "")


def _page(index: Mapping[str, Any], details: str) -> str:
    style, script = "\n".join(map(_asset, _STYLES)), "\n".join(map(_asset, _SCRIPTS))
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
