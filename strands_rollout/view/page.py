"""A dump as a page, in one file or served on this machine while a run writes; and as text in a terminal.

The page is one HTML file with its styles, its script and its data, that asks the network for nothing. The script may
run by its hash alone, and what a dump holds enters the page as JSON with `<` escaped, and as base64. What most turns do
is taken from the first samples of a dump.

The server answers only requests for the URL that was printed: it has a random part, and a page of another site can't
reach it, since Host and Origin are checked.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strands_rollout.dump import DumpRecord, read_dump
from strands_rollout.dump.files import dump_files, unread_samples
from strands_rollout.dump.terminal import print_transcript, printable
from strands_rollout.errors import ConfigError, DumpError, foreign_code
from strands_rollout.files.json_codec import Json
from strands_rollout.own_thread import in_own_thread
from strands_rollout.samples import METADATA_KEY, EpisodeFacts, Sample
from strands_rollout.slime_plugin.reward_groups import normalize_rewards
from strands_rollout.view.sample import Retokeniser, plain, view_sample
from strands_rollout.view.tokens import TurnHabits, habits_of

MOST_RUNS: Final = 4  # side by side, each in a color of its own
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
_HOSTS: Final = ("127.0.0.1", "localhost", "[::1]")
_STOP_TIMEOUT_S: Final = 0.1
_TEXT_COLUMNS: Final = (
    *("", "index", "status", "stop reason", "reward", "advantage", "turns", "calls", "tokens"),
    *("drift", "problems"),
)


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One sample, judged."""

    row: dict[str, Any]
    detail: bytes  # JSON, packed by gzip; see `view_sample`
    file: str
    compared: Sample  # what its group's rewards are normalised by, without tokens


@dataclass(frozen=True, slots=True)
class DumpView:
    """What a dump, or `runs` side by side, show: a row per sample, in order, and its details.

    A row says its `run` and `file`, both from 0, the `set` and `step` that the file's name says, and its `advantage`.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    details: list[bytes] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, shown: Sequence[ShownSample]) -> DumpView:
        """These samples; each file numbers its groups from 0, so that equal numbers in two files are two groups."""
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
        """Runs side by side, by name; a single one is itself."""
        if len(views) == 1:
            return next(iter(views.values()))
        rows = [{**row, "run": run} for run, view in enumerate(views.values()) for row in view.rows]
        return cls(rows, [detail for view in views.values() for detail in view.details], list(views))

    def index(self, title: str, *, live: bool) -> dict[str, Any]:
        """What the page reads first."""
        return {"title": title, "live": live, "runs": self.runs, "rows": self.rows}


def set_and_step(file: str) -> tuple[str, int | None]:
    """What a dump's name says of its samples: `rollout_000003.jsonl.gz` holds step 3 of the set `rollout`."""
    stem = Path(file).name.removesuffix(".gz").rpartition(".")[0]
    found = _STEP.fullmatch(stem)
    return (found[1] or "rollout", int(found[2])) if found else (stem, None)


def run_names(paths: Sequence[Path]) -> list[str]:
    """A short name for each dump, with as many of its folders as tell it from the others."""
    parts = [path.resolve().parts for path in paths]
    depth = next((n for n in range(1, 99) if len({one[-n:] for one in parts}) == len(set(parts))), 99)
    return ["/".join(one[-depth:]) for one in parts]


def view_dump(
    path: Path, retokeniser: Retokeniser | None, on_read: Callable[[int], object] = lambda _more: None
) -> DumpView:
    """Read and judge all samples of a dump; without a retokeniser there are no marks of drift.

    `on_read` is called with 1 for each sample that is done. For the path, and what is raised, see `read_dump`.
    """
    habits = dump_habits(path, retokeniser)
    shown = []
    for record in read_dump(path):
        shown.append(show(record, habits, retokeniser))
        on_read(1)
    return DumpView.of(shown)


def dump_habits(path: Path, retokeniser: Retokeniser | None) -> TurnHabits:
    """What most turns and contexts do, of the first samples of a dump."""
    first = list(islice(read_dump(path), _HABIT_SAMPLES))
    return habits_of(first, None if retokeniser is None else retokeniser.controls)


def show(record: DumpRecord, habits: TurnHabits, retokeniser: Retokeniser | None) -> ShownSample:
    """Judge one sample; one that can't be is shown as such, beside the others."""
    with foreign_code("a dump may hold anything, and one odd sample must not hide the others") as outcome:
        return _shown(record, habits, retokeniser)
    why = f"it can't be shown: {type(outcome.error).__name__}: {outcome.error!s:.500}"
    values = Sample(status=Sample.Status.FAILED, response=why).to_dict()
    return _shown(DumpRecord(values, record.where, record.source, violations=(why,)), habits, None)


def _shown(record: DumpRecord, habits: TurnHabits, retokeniser: Retokeniser | None) -> ShownSample:
    row, detail = view_sample(record, habits, retokeniser)
    row = orjson.loads(json_bytes(row))
    packed = gzip.compress(json_bytes(detail), 5, mtime=0)
    return ShownSample(row, packed, _POSITION.sub("", record.where), _compared(record, row["reward"]))


def json_bytes(value: object) -> bytes:
    """JSON of what a sample may hold; what has no form in it is shown as `plain` does."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(plain(value))


def _compared(record: DumpRecord, reward: float | None) -> Sample:
    """What `normalize_rewards` reads of a sample."""
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


class LiveDump:
    """A dump as it is now, or some by name; a sample is not judged again while its line stays what it is.

    `latest` is what `refresh` saw last, and a tag that changes with it; `read` counts the samples that a refresh in
    progress has come to.
    """

    def __init__(self, path: Path | Mapping[str, Path], retokeniser: Retokeniser | None) -> None:
        self._paths = {path.name: path} if isinstance(path, Path) else path
        self._retokeniser = retokeniser
        self._lock = threading.Lock()
        self._shown: dict[Path, dict[tuple[str, bytes], ShownSample]] = {}
        self._habits: dict[Path, TurnHabits] = {}
        self.latest: tuple[DumpView, str] | None = None
        self.read = 0

    def refresh(self) -> tuple[DumpView, str]:
        """The dump as it is, and its tag; DumpError where it can't be read."""
        with self._lock:
            try:
                files = (file for path in self._paths.values() for file in dump_files(path))
                stats = [(str(file), file.stat()) for file in files]
            except OSError as e:
                raise DumpError(f"can't read {e.filename}: {e.strerror}") from e
            state = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
            tag = hashlib.sha256(state.encode()).hexdigest()[:16]
            if self.latest is None or tag != self.latest[1]:
                self.read = 0
                shown = {name: DumpView.of(self._show_all(path)) for name, path in self._paths.items()}
                self.latest = DumpView.beside(shown), tag
            return self.latest

    def _show_all(self, path: Path) -> list[ShownSample]:
        habits, before = dump_habits(path, self._retokeniser), self.read
        known = self._shown.get(path, {}) if habits == self._habits.get(path) else {}
        shown: dict[tuple[str, bytes], ShownSample] = {}
        for sample in unread_samples(path):
            if sample.key in known:
                shown[sample.key] = known[sample.key]
            elif record := sample.read():
                shown[sample.key] = show(record, habits, self._retokeniser)
            self.read = before + len(shown)
        self._shown[path], self._habits[path] = shown, habits
        return list(shown.values())


@asynccontextmanager
async def live_server(dump: LiveDump, title: str, port: int = 0) -> AsyncIterator[str]:
    """Serve one dump on 127.0.0.1 while the block lasts, and yield the page's URL; ConfigError if the port is taken."""
    try:
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as e:
        raise ConfigError(f"can't listen at port {port}: {e.strerror}; choose another --port") from e
    with listening:
        port = listening.getsockname()[1]
        root = f"/{secrets.token_urlsafe(12)}/"
        app = web.Application(middlewares=[_only_for(root, port)])
        for path, handler in _handlers(dump, title).items():
            app.router.add_get(root + path, handler, allow_head=False)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=_STOP_TIMEOUT_S)
        await runner.setup()
        try:
            await web.SockSite(runner, listening).start()
            yield f"http://127.0.0.1:{port}{root}"
        finally:
            await runner.cleanup()


def _only_for(root: str, port: int) -> Middleware:
    """Answer requests under `root` that were sent to this machine by its own page, or by no page."""
    hosts = {*_HOSTS, *(f"{name}:{port}" for name in _HOSTS)}

    @web.middleware
    async def refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
        host, origin = request.headers.get("Host", "").lower(), request.headers.get("Origin")
        is_foreign = host not in hosts or origin not in (None, f"http://{host}")
        if is_foreign or not request.raw_path.startswith(root):
            return _answer(b"not here", "text/plain", status=404)
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return _answer(b"not here", "text/plain", status=404)
        except DumpError as e:
            return _answer(str(e).encode(), "text/plain", status=409)

    return refuse


def _handlers(dump: LiveDump, title: str) -> dict[str, Handler]:
    """What answers, by the path below the root."""
    whole_page = live_page(title).encode()

    async def page(_: web.Request) -> web.Response:
        return _answer(whole_page, "text/html")

    async def index(request: web.Request) -> web.Response:
        # in a thread that does not hold up the end of the process
        view, tag = await in_own_thread(dump.refresh, has_last_moment=False)()
        tag = f'"{tag}"'
        if request.headers.get("If-None-Match") == tag:
            return _answer(b"", "application/json", tag, status=304)
        return _answer(json_bytes(view.index(title, live=True)), "application/json", tag)

    async def progress(_: web.Request) -> web.Response:
        return _answer(str(dump.read).encode(), "text/plain")

    async def sample(request: web.Request) -> web.Response:
        # of those that the page's list was made with: opening a sample waits for no reading
        position = int(request.match_info["position"])
        details = dump.latest[0].details if dump.latest else []
        if position >= len(details):
            raise web.HTTPNotFound
        return _answer(details[position], "application/octet-stream")

    return {"": page, "index.json": index, "progress": progress, "sample/{position:[0-9]{1,9}}": sample}


def _answer(body: bytes, kind: str, tag: str | None = None, *, status: int = 200) -> web.Response:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    headers |= {"Content-Type": f"{kind}; charset=utf-8"} | ({"ETag": tag} if tag else {})
    return web.Response(body=body, status=status, headers=headers)


def print_dump(console: Console, path: Path, retokeniser: Retokeniser | None, wanted: Collection[int]) -> None:
    """Print the list, then transcripts of the samples at the positions `wanted`; none for all.

    Without a retokeniser there is no drift, and no texts but the dump's. For what is raised see `read_dump`.
    """
    view = view_dump(path, retokeniser)
    table = Table(*_TEXT_COLUMNS, box=None, header_style="bold")
    for position, row in enumerate(view.rows):
        named = (row[name] for name in ("index", "status", "stop", "reward", "advantage", "turns", "calls", "length"))
        cells = (position, *named, row["drift"], ", ".join(row["problems"]))
        table.add_row(*(Text(_cell(cell)) for cell in cells))
    console.print(table)
    if absent := sorted(set(wanted) - set(range(len(view.rows)))):
        raise ConfigError(f"got --sample {absent[0]}; {path} has {len(view.rows)} samples, counted from 0")
    for position, record in enumerate(read_dump(path)):
        if not wanted or position in wanted:
            console.rule(Text(printable(f"{position}: {record.where}")))
            for problem in view.rows[position]["problems"]:
                console.print(Text(printable(f"problem: {problem}"), style="bold red"))
            with foreign_code("one odd sample must not hide the others") as outcome:
                _print_sample(console, record, retokeniser)
            if (error := outcome.error) is not None:
                console.print(Text(printable(f"it can't be shown: {type(error).__name__}: {error}"), style="bold red"))


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else printable(str(value))


def _print_sample(console: Console, record: DumpRecord, retokeniser: Retokeniser | None) -> None:
    mask, length = (record.values.get(name) for name in ("loss_mask", "response_length"))
    if not record.has_tokens or not isinstance(mask, list) or len(mask) != length:
        console.print(Text(printable(str(record.values.get("response") or "")), style="dim"))
        return
    texts = record.token_texts if retokeniser is None else retokeniser.texts

    def decode(ids: Sequence[int]) -> str:
        return b"".join(texts.get(token, f"<{token}>".encode()) for token in ids).decode("utf-8", "replace")

    print_transcript(console, record.to_sample(), decode)
