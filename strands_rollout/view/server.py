"""Serve a dump to a browser on this machine, and follow a run that is still writing.

The server answers only below the URL that `live_server` yields. This URL has a random part. The server checks Host and
Origin, so that pages of other sites can't reach it.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from strands_rollout.dump.files import dump_files, unread_samples
from strands_rollout.errors import ConfigError, DumpError
from strands_rollout.own_thread import in_own_thread
from strands_rollout.view.page import DumpView, SampleView, json_bytes, learn_dump_habits, live_page, view_record
from strands_rollout.view.sample import Retokenizer
from strands_rollout.view.tokens import TurnHabits

_HOSTS: Final = ("127.0.0.1", "localhost", "[::1]")
_STOP_TIMEOUT_S: Final = 0.1


class LiveDump:
    """The current state of a dump, or of several dumps by name.

    If there is no retokenizer, drift is not marked.

    Attributes:
        latest: Result of the last successful `refresh`: the view, and a tag that changes with the files. None before
            the first `refresh`.
        read_count: Number of samples that the current or last refresh has gone through.
    """

    def __init__(self, path: Path | Mapping[str, Path], retokenizer: Retokenizer | None) -> None:
        self._paths = {path.name: path} if isinstance(path, Path) else path
        self._retokenizer = retokenizer
        self._lock = threading.Lock()
        self._shown: dict[Path, dict[tuple[str, bytes], SampleView]] = {}
        self._habits: dict[Path, TurnHabits] = {}
        self.latest: tuple[DumpView, str] | None = None
        self.read_count = 0

    def refresh(self) -> tuple[DumpView, str]:
        """Return the view with its tag; read the dumps again if a file has changed.

        Raises:
            DumpError: A dump can't be read; see `read_dump`.
        """
        with self._lock:
            try:
                files = (file for path in self._paths.values() for file in dump_files(path))
                stats = [(str(file), file.stat()) for file in files]
            except OSError as e:
                raise DumpError(f"can't read {e.filename}: {e.strerror}") from e
            state = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
            tag = hashlib.sha256(state.encode()).hexdigest()[:16]
            if self.latest is None or tag != self.latest[1]:
                self.read_count = 0
                shown = {name: DumpView.from_samples(self._view_all(path)) for name, path in self._paths.items()}
                self.latest = DumpView.side_by_side(shown), tag
            return self.latest

    def _view_all(self, path: Path) -> list[SampleView]:
        habits, before = learn_dump_habits(path, self._retokenizer), self.read_count
        known = self._shown.get(path, {}) if habits == self._habits.get(path) else {}
        shown: dict[tuple[str, bytes], SampleView] = {}
        for sample in unread_samples(path):
            if sample.key in known:
                shown[sample.key] = known[sample.key]
            elif record := sample.read():
                shown[sample.key] = view_record(record, habits, self._retokenizer)
            self.read_count = before + len(shown)
        self._shown[path], self._habits[path] = shown, habits
        return list(shown.values())


@asynccontextmanager
async def live_server(dump: LiveDump, title: str, port: int = 0) -> AsyncIterator[str]:
    """Serve a dump on 127.0.0.1 until the block ends, and yield the page's URL.

    Raises:
        ConfigError: The port can't be used.
    """
    try:
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as e:
        raise ConfigError(f"can't listen on port {port}: {e.strerror}; choose another --port") from e
    with listening:
        port = listening.getsockname()[1]
        root = f"/{secrets.token_urlsafe(12)}/"
        app = web.Application(middlewares=[_refuse_foreign_requests(root, port)])
        for path, handler in _handlers(dump, title).items():
            app.router.add_get(root + path, handler, allow_head=False)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=_STOP_TIMEOUT_S)
        await runner.setup()
        try:
            await web.SockSite(runner, listening).start()
            yield f"http://127.0.0.1:{port}{root}"
        finally:
            await runner.cleanup()


def _refuse_foreign_requests(root: str, port: int) -> Middleware:
    hosts = {*_HOSTS, *(f"{name}:{port}" for name in _HOSTS)}

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        host, origin = request.headers.get("Host", "").lower(), request.headers.get("Origin")
        is_foreign = host not in hosts or origin not in (None, f"http://{host}")
        if is_foreign or not request.raw_path.startswith(root):
            return _response(b"not found", "text/plain", status=404)
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return _response(b"not found", "text/plain", status=404)
        except DumpError as e:
            return _response(str(e).encode(), "text/plain", status=409)

    return handle


def _handlers(dump: LiveDump, title: str) -> dict[str, Handler]:
    whole_page = live_page(title).encode()

    async def page(_: web.Request) -> web.Response:
        return _response(whole_page, "text/html")

    async def index(request: web.Request) -> web.Response:
        # refresh in a thread that does not delay the exit of the process
        view, tag = await in_own_thread(dump.refresh, has_grace_period=False)()
        tag = f'"{tag}"'
        if request.headers.get("If-None-Match") == tag:
            return _response(b"", "application/json", tag, status=304)
        return _response(json_bytes(view.start_values(title, live=True)), "application/json", tag)

    async def progress(_: web.Request) -> web.Response:
        return _response(str(dump.read_count).encode(), "text/plain")

    async def sample(request: web.Request) -> web.Response:
        # serve details of the view that the page lists, without waiting for a refresh
        position = int(request.match_info["position"])
        details = dump.latest[0].details if dump.latest else []
        if position >= len(details):
            raise web.HTTPNotFound
        return _response(details[position], "application/octet-stream")

    return {"": page, "index.json": index, "progress": progress, "sample/{position:[0-9]{1,9}}": sample}


def _response(body: bytes, kind: str, tag: str | None = None, *, status: int = 200) -> web.Response:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    headers |= {"Content-Type": f"{kind}; charset=utf-8"} | ({"ETag": tag} if tag else {})
    return web.Response(body=body, status=status, headers=headers)
