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
from typing import Any

import orjson

from strands_rollout.dump import read_dump
from strands_rollout.dump.reader import dump_files
from strands_rollout.errors import DumpError
from strands_rollout.view.dump_view import DumpView, dump_habits, view_records
from strands_rollout.view.page import live_page
from strands_rollout.view.sample_view import Retokeniser
from strands_rollout.view.turn_habits import TurnHabits

logger = logging.getLogger(__name__)


class LiveDump:
    """A dump as it is now; what was judged once is not judged again while its files only grow.

    Args:
        path: See `read_dump`.
        retokeniser: None for no marks of drift.
    """

    def __init__(self, path: Path, retokeniser: Retokeniser | None) -> None:
        self._path = path
        self._retokeniser = retokeniser
        self._lock = threading.Lock()
        self._sizes: dict[tuple[str, int], tuple[int, int]] = {}
        self._habits: TurnHabits | None = None
        self._view = DumpView()

    def view(self) -> tuple[DumpView, str]:
        """The dump, and a tag that changes with it.

        Raises:
            DumpError: It can't be read.
        """
        with self._lock:
            sizes = self._now()
            if sizes != self._sizes or self._habits is None:
                habits = dump_habits(read_dump(self._path), self._retokeniser)
                grown = all(key in sizes and sizes[key][0] >= size for key, (size, _) in self._sizes.items())
                known = self._view if grown and habits == self._habits else None
                self._view = view_records(read_dump(self._path), habits, self._retokeniser, known)
                self._sizes, self._habits = sizes, habits
            return self._view, hashlib.sha256(repr(sorted(sizes.items())).encode()).hexdigest()[:16]

    def _now(self) -> dict[tuple[str, int], tuple[int, int]]:
        try:
            stats = [(str(file), file.stat()) for file in dump_files(self._path)]
        except OSError as e:
            raise DumpError(f"can't read {self._path}: {e.strerror}") from e
        return {(name, stat.st_ino): (stat.st_size, stat.st_mtime_ns) for name, stat in stats}


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
        view, tag = self.server.dump.view()
        position = name.removeprefix("sample/")
        if name == "index.json":
            self._send_index(view, f'"{tag}"')
        elif position.isdecimal() and int(position) < len(view.details):
            self._send(HTTPStatus.OK, view.details[int(position)], "application/octet-stream")
        else:
            self._send(HTTPStatus.NOT_FOUND, b"not here", "text/plain")

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
