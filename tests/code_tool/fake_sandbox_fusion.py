"""A fake SandboxFusion server on a loopback socket: runs the Python code it receives, and answers as SandboxFusion.

    async with FakeSandboxFusion([Trouble(code=503), None]) as fake:
        ...  # the first request to fake.url gets a 503, the others run

It has the flaws of SandboxFusion: it reads the pipes once, without waiting, after the script has ended; replaces output
that is not UTF-8; ends only the script's process group; does not notice a disconnected client; and limits no memory, as
with `isolation: lite`.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from aiohttp import web


@dataclass(frozen=True, slots=True)
class Trouble:
    """Reaction of the server to a request, instead of running the code.

    Attributes:
        kind: "answer" sends a response with `code`, `body` and `headers`. "reset" closes the connection. "hang" answers
            after a minute. "sandbox_error" sends a 200 with the server's error, which quotes the code. "no_python" runs
            the code in a shell that finds no Python.
    """

    kind: Literal["answer", "reset", "hang", "sandbox_error", "no_python"] = "answer"
    code: int = 200
    body: bytes = b'{"detail": "busy"}'
    headers: dict[str, str] = field(default_factory=dict)


class FakeSandboxFusion:
    """The server, as an async context manager.

    Args:
        troubles: Answers to the first requests, in order; None for a real run. Later requests are run.
        always: Answer to every request, instead of `troubles`.

    Attributes:
        requests: JSON body of every request.
        headers: Headers of every request.
        arrived: Event, set by the first request.
    """

    def __init__(self, troubles: Sequence[Trouble | None] = (), *, always: Trouble | None = None) -> None:
        self._troubles, self._always = troubles, always
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.arrived = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/run_code", self._run_code)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _run_code(self, http: web.Request) -> web.StreamResponse:
        request = await http.json()
        number = len(self.requests)
        self.requests.append(request)
        self.headers.append(dict(http.headers))
        self.arrived.set()
        trouble = self._always or (self._troubles[number] if number < len(self._troubles) else None)
        if trouble is None or trouble.kind == "no_python":
            return web.json_response(await _run(request, with_python=trouble is None))
        return await self._answer_trouble(trouble, http, request)

    async def _answer_trouble(self, trouble: Trouble, http: web.Request, request: dict[str, Any]) -> web.StreamResponse:
        if trouble.kind == "hang":
            await asyncio.sleep(60)
        if trouble.kind == "reset" and http.transport is not None:
            http.transport.close()
        if trouble.kind == "sandbox_error":
            message = f"exception on running command {request['code']}: fork: Resource temporarily unavailable | None"
            return web.json_response(_answer("SandboxError", message, {"status": "Error", "stderr": message}))
        return web.Response(
            body=trouble.body, status=trouble.code, headers=trouble.headers, content_type="application/json"
        )


@contextlib.contextmanager
def served() -> Iterator[str]:
    """Serve on a separate event loop, for tests that each have their own; yield the URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    fake = FakeSandboxFusion()
    try:
        asyncio.run_coroutine_threadsafe(fake.__aenter__(), loop).result()
        yield fake.url
        asyncio.run_coroutine_threadsafe(fake.__aexit__(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _run(request: dict[str, Any], *, with_python: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        script = Path(folder, "script.py")
        await asyncio.to_thread(script.write_text, request["code"])
        command = f"{sys.executable if with_python else 'python_is_not_here'} {script}"
        ran = await _run_command(command, request.get("run_timeout", 10), folder)
    return _answer("Success" if ran["return_code"] == 0 else "Failed", "", ran)


async def _run_command(command: str, timeout_s: float, folder: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_shell(
        command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.close()
    started_at, status, return_code = time.monotonic(), "Finished", None
    try:
        return_code = await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        status = "TimeLimitExceeded"
    finally:
        elapsed_s = time.monotonic() - started_at
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        printed = {"stdout": await _read_available(process.stdout), "stderr": await _read_available(process.stderr)}
        process._transport.close()  # type: ignore[attr-defined] # the rest stays unread
        await process.wait()
    return {"status": status, "execution_time": elapsed_s, "return_code": return_code, **printed}


async def _read_available(stream: Any) -> str:
    try:
        return (await asyncio.wait_for(stream.read(1 << 20), 0.0001)).decode()
    except TimeoutError:
        return ""
    except UnicodeDecodeError as e:
        return f"[DecodeError] {e}"


def _answer(status: str, message: str, ran: dict[str, Any]) -> dict[str, Any]:
    empty = {"execution_time": None, "return_code": None, "stdout": None, "stderr": None}
    return {
        "status": status,
        "message": message,
        "compile_result": None,
        "run_result": {**empty, **ran},
        "executor_pod_name": None,
        "files": {},
    }
