"""Serves the page on this machine while a run writes its dump.

Knows HTTP and when files have changed. Only who knows the URL is answered: it has a part that nobody can guess, and a
page of another site can't be made to reach it, since its Host is checked.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import orjson

from strands_rollout.dump import DumpRecord
from strands_rollout.dump.reader import dump_files, unread_samples
from strands_rollout.errors import DumpError
from strands_rollout.view.dump_view import DumpView, ShownSample, habit_counter, show
from strands_rollout.view.page import live_page
from strands_rollout.view.sample_view import Retokeniser
from strands_rollout.view.turn_habits import TurnHabits

logger = logging.getLogger(__name__)


class LiveDump:
    """A dump as it is now; a sample that was judged once is not judged again while its line stays what it is.

    Args:
        path: See `read_dump`.
        retokeniser: None for no marks of drift.

    Attributes:
        latest: What `refresh` saw last, and a tag that changes with it; None before the first time.
        read: Samples of the dump that a refresh under way has come to.
    """

    def __init__(self, path: Path, retokeniser: Retokeniser | None) -> None:
        self._path = path
        self._retokeniser = retokeniser
        self._lock = threading.Lock()
        self._state: list[tuple[str, int, int]] = []
        self._shown: dict[tuple[str, bytes], ShownSample] = {}
        self._habits: TurnHabits | None = None
        self._counter = habit_counter(retokeniser)
        self._counted: set[tuple[str, bytes]] = set()
        self.latest: tuple[DumpView, str] | None = None
        self.read = 0

    def refresh(self) -> tuple[DumpView, str]:
        """The dump as it is, and its tag.

        Raises:
            DumpError: It can't be read.
        """
        with self._lock:
            state = self._now()
            if self.latest is None or state != self._state:
                self.latest = DumpView.of(self._show_all()), hashlib.sha256(repr(state).encode()).hexdigest()[:16]
                self._state = state
            return self.latest

    def _show_all(self) -> list[ShownSample]:
        self._count_new()
        habits = self._counter.habits()
        known = self._shown if habits == self._habits else {}
        shown: dict[tuple[str, bytes], ShownSample] = {}
        for sample in unread_samples(self._path):
            found = known.get(sample.key)
            record = None if found else sample.read()
            if found or record:
                shown[sample.key] = found or show(cast("DumpRecord", record), habits, self._retokeniser)
            self.read = len(shown)
        self._shown, self._habits = shown, habits
        return list(shown.values())

    def _count_new(self) -> None:
        """Count samples that were not there before; anew where some are gone."""
        keys = {sample.key for sample in unread_samples(self._path)} if self._counted else set()
        if not self._counted <= keys:
            self._counter, self._counted = habit_counter(self._retokeniser), set()
        for sample in unread_samples(self._path):
            record = None if sample.key in self._counted else sample.read()
            if record is not None:
                self._counter.count(record)
                self._counted.add(sample.key)

    def _now(self) -> list[tuple[str, int, int]]:
        try:
            stats = [(str(file), file.stat()) for file in dump_files(self._path)]
        except OSError as e:
            raise DumpError(f"can't read {self._path}: {e.strerror}") from e
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


class LiveServer(ThreadingHTTPServer):
    """Serves one dump on 127.0.0.1.

    Args:
        dump: What it shows.
        title: Of the page.
        port: 0 for a free one.

    Raises:
        OSError: The port is taken.
    """

    daemon_threads = True

    def __init__(self, dump: LiveDump, title: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.dump = dump
        self.page = live_page(title).encode()
        self.title = title
        self.root = f"/{secrets.token_urlsafe(12)}/"

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_port}{self.root}"


class _Handler(BaseHTTPRequestHandler):
    """The page, the rows, and one sample's details."""

    server: LiveServer

    def do_GET(self) -> None:
        """Answer one request."""
        hosts = {f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")}
        if self.headers.get("Host") not in hosts or not self.path.startswith(self.server.root):
            self._send(HTTPStatus.NOT_FOUND, b"not here", "text/plain")
            return
        try:
            self._answer(self.path.removeprefix(self.server.root))
        except DumpError as e:
            self._send(HTTPStatus.CONFLICT, str(e).encode(), "text/plain")

    def _answer(self, name: str) -> None:
        if name == "":
            self._send(HTTPStatus.OK, self.server.page, "text/html")
            return
        position = name.removeprefix("sample/")
        if name == "index.json":
            view, tag = self.server.dump.refresh()
            self._send_index(view, f'"{tag}"')
        elif name == "progress":
            self._send(HTTPStatus.OK, str(self.server.dump.read).encode(), "text/plain")
        elif position.isdecimal() and int(position) < len(details := self._details()):
            self._send(HTTPStatus.OK, details[int(position)], "application/octet-stream")
        else:
            self._send(HTTPStatus.NOT_FOUND, b"not here", "text/plain")

    def _details(self) -> list[bytes]:
        """Those that the page's list was made with: opening a sample waits for no reading."""
        latest = self.server.dump.latest
        return latest[0].details if latest is not None else []

    def _send_index(self, view: DumpView, tag: str) -> None:
        if self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, b"", "application/json", tag)
        else:
            body = orjson.dumps(view.index(self.server.title, live=True))
            self._send(HTTPStatus.OK, body, "application/json", tag)

    def _send(self, status: HTTPStatus, body: bytes, kind: str, tag: str | None = None) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in (headers | ({"ETag": tag} if tag else {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401 - http.server's signature
        """Requests are debugging's business."""
        logger.debug(format, *args)
