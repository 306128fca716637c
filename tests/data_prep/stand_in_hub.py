"""A loopback server for one data set or none; it implements the part of the hub's API that `load_dataset` calls."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REVISION = "0123456789abcdef0123456789abcdef01234567"
Reply = tuple[int, bytes, dict[str, str]]
ABSENT: Reply = (404, b"{}", {"X-Error-Code": "EntryNotFound"})


@dataclass
class Hub:
    """A hub with one repository and its files by path; if `repository` is "", every request gets `refusal`.

    `asked` lists the requests as METHOD path.
    """

    repository: str
    files: dict[str, Path]
    refusal: Reply
    gated: bool = False  # True to list the files but refuse to send them
    base_url: str = ""
    asked: list[str] = field(default_factory=list)

    def reply(self, path: str) -> Reply:
        if not self.repository:
            return self.refusal
        api, resolve = f"/api/datasets/{self.repository}", f"/datasets/{self.repository}/resolve/"
        if path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": name} for name in self.files]
            return _json({"id": self.repository, "sha": REVISION, "siblings": siblings, "private": False})
        if path.startswith(f"{api}/tree/"):
            return self._listing(path.removeprefix(f"{api}/tree/").partition("/")[2])
        name = path.removeprefix(resolve).partition("/")[2] if path.startswith(resolve) else ""
        if name not in self.files:
            return ABSENT
        if self.gated:
            return 403, b"{}", {"X-Error-Code": "GatedRepo"}
        content = self.files[name].read_bytes()
        return 200, content, {"ETag": f'"{len(content):040x}"', "X-Repo-Commit": REVISION}

    def _listing(self, folder: str) -> Reply:
        """List a folder's direct entries."""
        entries: dict[str, dict[str, Any]] = {}
        for name, file in self.files.items():
            first, _, below = name.removeprefix(folder).strip("/").partition("/")
            if name.startswith(folder):
                size = 0 if below else file.stat().st_size
                entries[first] = {"type": "directory" if below else "file", "size": size, "oid": f"{size:040x}"}
        listed = [{"path": f"{folder}/{first}".strip("/"), **entry} for first, entry in entries.items()]
        return _json(listed) if listed else ABSENT


def _json(value: object) -> Reply:
    return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}


@contextmanager
def served(
    dataset: str = "", files: dict[str, Path] | None = None, status: int = 404, error: str = "", *, gated: bool = False
) -> Iterator[Hub]:
    """Serve the files as the repository `dataset`, or answer all requests with `status` and the hub's error code."""
    hub = Hub(dataset, files or {}, (status, b"{}", {"X-Error-Code": error} if error else {}), gated)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            status, body, headers = hub.reply(self.path.partition("?")[0])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - the names of http.server

        def log_message(self, *args: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub.base_url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
