"""The embedded engine as a child process of its own, so that its arithmetic never delays the rollout's event loop.

The child lives as long as its standard input stays open: it ends with its parent, however that ends.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Final

from strands_rollout.errors import EngineUnavailableError

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 5.0
_LOG_TAIL_BYTES: Final = 2000


@asynccontextmanager
async def engine_process(model_dir: Path | None = None, *, start_timeout_s: float = 60.0) -> AsyncIterator[str]:
    """Start `strands-rollout serve` on a free port of 127.0.0.1, yield its URL, and stop it when the block ends.

    Raises:
        EngineUnavailableError: It ended, or accepted no requests in time; the message holds the end of what it printed.
    """
    model = [] if model_dir is None else ["--model", str(model_dir)]
    command = [sys.executable, "-m", "strands_rollout.cli", "serve", "--port", "0", "--stop-with-stdin", *model]
    with tempfile.TemporaryFile() as log:
        # a session of its own: Ctrl-C must reach the parent only, which stops the child when its samples are done with
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True
        )
        try:
            yield await _ready_url(process, start_timeout_s, log)
            if process.returncode is not None:
                logger.error("event=engine_died exit_code=%s output=%s", process.returncode, _tail(log))
        finally:
            await _stop(process)


def announce(base_url: str) -> None:
    """Print the line of JSON by which the parent, or any program, learns that requests are accepted, and where."""
    print(json.dumps({"base_url": base_url}), flush=True)


def stop_with_stdin() -> None:
    """Send SIGTERM to this process when its standard input closes; for a child whose parent may vanish."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stop-with-stdin", daemon=True).start()


async def _ready_url(process: asyncio.subprocess.Process, timeout_s: float, log: IO[bytes]) -> str:
    line, said = b"", f"was not ready within {timeout_s:g} s"
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            if process.stdout is not None:
                line = await process.stdout.readline()
            if not line:
                said = f"ended with exit code {await process.wait()} before it was ready"
    if not line:
        raise EngineUnavailableError(f"the embedded engine {said}. It printed: {_tail(log)}")
    return str(json.loads(line)["base_url"])


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _tail(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
    return log.read().decode(errors="replace").strip() or "nothing"
