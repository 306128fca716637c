"""A loopback server with one data set, or none, that speaks as much of the hub's API as `load_dataset` asks for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What it serves, and what it was asked.

    Attributes:
        base_url: The mirror's URL.
        asked: Method and path of each request.
    """

    base_url: str
    asked: list[str] = field(default_factory=list)


@contextmanager
def served(
    dataset: str = "", files: dict[str, Path] | None = None, status: int = 404, error: str = ""
) -> Iterator[Hub]:
    """Serve the files as the repository `dataset`; anything else gets `status` and the hub's error code."""
    hub = Hub("")

    class Handler(_Handler):
        repository = dataset
        contents = files or {}
        refusal = (status, error)
        asked = hub.asked

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.base_url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repository = ""
    contents: dict[str, Path] = {}  # noqa: RUF012 - each server has a class of its own
    refusal = (404, "")
    asked: list[str] = []  # noqa: RUF012 - likewise

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self._answer(body)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def _answer(self, body: dict[str, Any] | None = None) -> None:
        self.asked.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        api, resolve = f"/api/datasets/{self.repository}", f"/datasets/{self.repository}/resolve/"
        if not self.repository:
            self._send(self.refusal[0], b"{}", {"X-Error-Code": self.refusal[1]} if self.refusal[1] else {})
        elif path == api or path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": name} for name in self.contents]
            self._send_json({"id": self.repository, "sha": REVISION, "siblings": siblings, "private": False})
        elif path.startswith(f"{api}/tree/"):
            self._send_tree(path.removeprefix(f"{api}/tree/").partition("/")[2])
        elif path.startswith(f"{api}/paths-info/"):
            asked = (body or {}).get("paths", ())
            self._send_json([_entry(name, file) for name, file in self.contents.items() if name in asked])
        elif path.startswith(resolve) and (name := path.removeprefix(resolve).partition("/")[2]) in self.contents:
            content = self.contents[name].read_bytes()
            self._send(200, content, {"ETag": f'"{_oid(self.contents[name])}"', "X-Repo-Commit": REVISION})
        else:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def _send_tree(self, folder: str) -> None:
        """What lies directly in a folder."""
        below = {name: name[len(folder) :].strip("/") for name in self.contents if name.startswith(folder)}
        folders = dict.fromkeys(name.partition("/")[0] for name in below.values() if "/" in name)
        entries = [_entry(name, self.contents[name]) for name, rest in below.items() if "/" not in rest]
        entries += [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in folders]
        if entries:
            self._send_json(entries)
        else:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _oid(file: Path) -> str:
    return f"{file.stat().st_size:040x}"


def _entry(name: str, file: Path) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": file.stat().st_size, "oid": _oid(file)}
