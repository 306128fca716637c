"""Build the page of a dump: one HTML file with styles, script and data, which needs no network.

A live page holds no data; it requests the data from its server.

The content security policy admits the script by its hash alone. Data of a dump enters the page as base64, or as JSON
with `<` escaped.
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
from strands_rollout.view.sample import Retokenizer, to_plain, view_sample
from strands_rollout.view.tokens import TurnHabits, learn_habits

MAX_RUNS: Final = 4  # runs side by side, each in a color of its own
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
_PLACEHOLDER: Final = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True, slots=True)
class SampleView:
    """One sample as the page shows it.

    Attributes:
        row: The sample's values for the list; see `view_sample`.
        detail: The details as JSON in gzip; see `view_sample`.
        file: The file that holds the sample.
        reward_sample: The sample without tokens, for the normalization of its group's rewards.
    """

    row: dict[str, Any]
    detail: bytes
    file: str
    reward_sample: Sample


@dataclass(frozen=True, slots=True)
class DumpView:
    """A dump, or several dumps (`runs`) side by side: a row per sample, in order, and its details.

    A row has the values of `view_sample`, and four more: `run` and `file`, both counted from 0; `step`, from the file's
    name; and the sample's `advantage`. If the sample names no data set, `set` comes from the file's name.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    details: list[bytes] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)

    @classmethod
    def from_samples(cls, shown: Sequence[SampleView]) -> DumpView:
        """Join the samples of one dump; each file counts its groups from 0, so file and number identify a group."""
        files = {file: number for number, file in enumerate(dict.fromkeys(sample.file for sample in shown))}
        sets_and_steps = {file: set_and_step(file) for file in files}
        rows = [
            {**sample.row, "run": 0, "file": files[sample.file], "advantage": None}
            | {"set": sample.row["set"] or sets_and_steps[sample.file][0], "step": sets_and_steps[sample.file][1]}
            for sample in shown
        ]
        # `normalize_rewards` accepts any hashable value as a group
        rewarded = [
            (row, replace(sample.reward_sample, group_index=(sample.file, sample.reward_sample.group_index)))  # type: ignore[arg-type]
            for row, sample in zip(rows, shown, strict=True)
            if sample.reward_sample.reward is not None and sample.reward_sample.group_index is not None
        ]
        _, advantages = normalize_rewards(SimpleNamespace(reward_key=None), [sample for _, sample in rewarded])
        for (row, _), advantage in zip(rewarded, advantages, strict=True):
            row["advantage"] = advantage
        return cls(rows, [sample.detail for sample in shown])

    @classmethod
    def side_by_side(cls, views: Mapping[str, DumpView]) -> DumpView:
        """Join the views of several runs, by name; return a single view unchanged."""
        if len(views) == 1:
            return next(iter(views.values()))
        rows = [{**row, "run": run} for run, view in enumerate(views.values()) for row in view.rows]
        return cls(rows, [detail for view in views.values() for detail in view.details], list(views))

    def start_values(self, title: str, *, live: bool) -> dict[str, Any]:
        """Return the values that the page reads at its start."""
        return {"title": title, "live": live, "runs": self.runs, "rows": self.rows}


def set_and_step(file: str) -> tuple[str, int | None]:
    """Return set and step from a file's name: `rollout_000003.jsonl.gz` holds step 3 of the set `rollout`.

    A name that is only a number is a step of the set `rollout`; any other name is the name of the set, without a step.
    """
    stem = Path(file).name.removesuffix(".gz").rpartition(".")[0]
    found = _STEP.fullmatch(stem)
    return (found[1] or "rollout", int(found[2])) if found else (stem, None)


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each dump: its file name, preceded by the folders that distinguish it from other dumps."""
    all_parts = [path.resolve().parts for path in paths]
    depth = next((n for n in range(1, 99) if len({parts[-n:] for parts in all_parts}) == len(set(all_parts))), 99)
    return ["/".join(parts[-depth:]) for parts in all_parts]


def view_dump(
    path: Path, retokenizer: Retokenizer | None, on_read: Callable[[int], object] = lambda _more: None
) -> DumpView:
    """Read all samples of a dump; if `retokenizer` is None, drift is not marked.

    `on_read` is called with 1 after each sample. For the path and errors, see `read_dump`.
    """
    habits = learn_dump_habits(path, retokenizer)
    shown = []
    for record in read_dump(path):
        shown.append(view_record(record, habits, retokenizer))
        on_read(1)
    return DumpView.from_samples(shown)


def learn_dump_habits(path: Path, retokenizer: Retokenizer | None) -> TurnHabits:
    """Infer the rules that most turns and contexts follow, from the first samples of a dump."""
    first = list(islice(read_dump(path), _HABIT_SAMPLES))
    return learn_habits(first, None if retokenizer is None else retokenizer.controls)


def view_record(record: DumpRecord, habits: TurnHabits, retokenizer: Retokenizer | None) -> SampleView:
    """Return a sample for the page; if that fails, return a failed sample with the error."""
    try:
        return _view_or_raise(record, habits, retokenizer)
    except Exception as e:  # a dump may hold anything, and one odd sample must not hide the others
        error = f"can't show this sample: {type(e).__name__}: {e!s:.500}"
    values = Sample(status=Sample.Status.FAILED, response=error).to_dict()
    return _view_or_raise(DumpRecord(values, record.where, record.source, violations=(error,)), habits, None)


def _view_or_raise(record: DumpRecord, habits: TurnHabits, retokenizer: Retokenizer | None) -> SampleView:
    row, detail = view_sample(record, habits, retokenizer)
    row = orjson.loads(json_bytes(row))
    packed = gzip.compress(json_bytes(detail), 5, mtime=0)
    return SampleView(row, packed, _POSITION.sub("", record.where), _reward_sample(record, row["reward"]))


def json_bytes(value: object) -> bytes:
    """Encode `value` as JSON, after `to_plain` if it contains anything that JSON can't hold."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(to_plain(value))


def _reward_sample(record: DumpRecord, reward: float | None) -> Sample:
    """Return a sample with only the fields that `normalize_rewards` reads."""
    values = record.values

    def hashable(name: str) -> Json:
        number = values.get(name)
        return number if isinstance(number, Hashable) else repr(number)

    statuses = {status.value: status for status in Sample.Status}
    return Sample(
        group_index=hashable("group_index"),
        index=hashable("index"),
        rollout_id=hashable("rollout_id"),
        reward=reward,
        remove_sample=bool(values.get("remove_sample")),
        status=statuses.get(str(values.get("status")), Sample.Status.PENDING),
        metadata={METADATA_KEY: EpisodeFacts(fan_out=record.facts.fan_out).to_metadata()},
    )


def write_page(view: DumpView, title: str) -> str:
    """Return the HTML of a page that holds a whole dump."""
    details = (
        f'<script type="text/plain" id="d{position}">{base64.b64encode(detail).decode("ascii")}</script>'
        for position, detail in enumerate(view.details)
    )
    return _page(view.start_values(title, live=False), "\n".join(details))


def live_page(title: str) -> str:
    """Return the HTML of a page that requests rows and details from its server."""
    return _page(DumpView().start_values(title, live=True), "")


def _page(start_values: Mapping[str, Any], details: str) -> str:
    style, script = "\n".join(map(_read_asset, _STYLES)), "\n".join(map(_read_asset, _SCRIPTS))
    connect = "'self'" if start_values["live"] else "'none'"
    policy = (
        f"default-src 'none'; style-src {_csp_hash(style)}; script-src {_csp_hash(script)}; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
    # escape everything that could end the script element
    escaped = json_bytes(start_values).decode().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    parts = {"policy": policy, "style": style, "index": escaped, "details": details, "script": script}
    return _PLACEHOLDER.sub(lambda place: parts[place[1]], _read_asset("page.html"))


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _read_asset(name: str) -> str:
    return (files("strands_rollout.view") / "assets" / name).read_text(encoding="utf-8")
