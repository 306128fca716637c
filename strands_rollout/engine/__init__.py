"""The embedded engine: a small Qwen3 on NumPy behind SGLang's API, with the model that ships with the package.

This module starts the HTTP server on an event loop (`running_engine`), as a program (`serve`) or as a child process
(`engine_process`). Importing it is cheap: aiohttp and NumPy are imported when an engine starts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, TypedDict, Unpack

from strands_rollout.errors import ConfigError, EngineUnavailableError

if TYPE_CHECKING:
    from aiohttp.web import AbstractRouteDef, BaseSite

SHIPPED_MODEL_DIR = Path(__file__).parent / "checkpoint"

_MIN_CONTEXT_TOKENS = 8
logger = logging.getLogger(__name__)
_BLAS_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
# The thread switch interval that `serve` sets: Python's default of 5 ms is longer than a decode step.
_SWITCH_INTERVAL_S = 0.0005
_SELF_KILL_TIMEOUT_S = 4


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine.

    Attributes:
        model_dir: A Qwen3 folder in Hugging Face layout.
        served_model_name: The model's name at /v1/models; None for the path of `model_dir`, as in SGLang. After an
            update of the weights, the name is the path of the new weights' folder.
        context_length: Maximum tokens of prompt plus output; None for the model config's value.
        max_running_requests: Maximum generations that decode together; further generations are queued.
        prefill_chunk_tokens: Maximum prompt tokens in one forward pass. Between two decode steps, several such passes
            may run; together they compute fewer than twice this number of prompt tokens.
        prefix_cache_mb: Maximum size of the prefix cache in MB (10**6 bytes).
        random_seed: Seed of generations without a sampling_seed, so that the same requests in the same order get the
            same tokens; None for a random seed.

    Raises:
        ConfigError: A maximum is not positive, or the context length is less than 8.
    """

    model_dir: Path = SHIPPED_MODEL_DIR
    served_model_name: str | None = None
    context_length: int | None = None
    max_running_requests: int = 32
    prefill_chunk_tokens: int = 256
    prefix_cache_mb: int = 512
    random_seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_running_requests", "prefill_chunk_tokens", "prefix_cache_mb"):
            if getattr(self, name) < 1:
                raise ConfigError(f"got {name}={getattr(self, name)}; expected at least 1")
        if self.context_length is not None and self.context_length < _MIN_CONTEXT_TOKENS:
            raise ConfigError(f"got context_length={self.context_length}; expected at least {_MIN_CONTEXT_TOKENS}")


class EngineOptions(TypedDict, total=False):
    """Keyword arguments of functions that start an engine; see `EngineSettings`."""

    served_model_name: str | None
    context_length: int | None
    max_running_requests: int
    prefill_chunk_tokens: int
    prefix_cache_mb: int
    random_seed: int | None


@asynccontextmanager
async def running_engine(
    model_dir: Path | str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    routes: Sequence[AbstractRouteDef] = (),
    **options: Unpack[EngineOptions],
) -> AsyncIterator[str]:
    """Serve an engine on this event loop until the context exits.

    Args:
        model_dir: A Qwen3 folder in Hugging Face layout; None for the shipped model.
        host: Address to listen on.
        port: Port to listen on; 0 for a free port.
        routes: Additional aiohttp routes of the server.
        **options: The other fields of `EngineSettings`.

    Yields:
        The base URL, such as "http://127.0.0.1:43211".

    Raises:
        ConfigError: The model folder is missing or can't be used, a setting is invalid, or the host and port can't be
            used.
    """
    from aiohttp import web

    from strands_rollout.engine.engine import load_engine
    from strands_rollout.engine.http_server import engine_app

    settings = EngineSettings(Path(model_dir or SHIPPED_MODEL_DIR), **options)
    engine = await asyncio.to_thread(load_engine, settings)
    app = engine_app(engine, host)
    app.add_routes(routes)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        await _listen(web.TCPSite(runner, host, port), host, port)
        engine.worker.start()
        stack.push_async_callback(asyncio.to_thread, engine.worker.stop)
        yield f"http://{host}:{runner.addresses[0][1]}"


async def _listen(site: BaseSite, host: str, port: int) -> None:
    try:
        await site.start()
    except OSError as e:
        raise ConfigError(f"can't listen on {host}:{port}: {e.strerror or e}. Choose another host or port") from e


def serve(
    model_dir: Path | str | None = None,
    host: str = "127.0.0.1",
    port: int = 30000,
    *,
    on_ready: Callable[[str], None] | None = None,
    routes: Sequence[AbstractRouteDef] = (),
    **options: Unpack[EngineOptions],
) -> None:
    """Serve an engine until SIGINT or SIGTERM; a process that still runs 4 s after the signal is killed.

    This function sets the process's thread switch interval. It also limits BLAS to one thread by environment variables;
    variables that are set already stay. The variables have no effect if NumPy was imported before.

    `on_ready` is called with the base URL when requests are accepted. By default, the URL is logged. For the other
    arguments and for errors, see `running_engine`.
    """
    # Use one BLAS thread: a small model's matrices are too small to split, and the HTTP server needs a core.
    if "numpy" in sys.modules:
        logger.debug("numpy is already imported; its BLAS keeps its own number of threads")
    for name in _BLAS_THREAD_VARIABLES:
        os.environ.setdefault(name, "1")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        running = running_engine(model_dir, host, port, routes, **options)
        asyncio.run(_serve(running, on_ready or partial(logger.info, "engine ready url=%s")))
    finally:
        signal.alarm(0)


async def _serve(running: AbstractAsyncContextManager[str], on_ready: Callable[[str], None]) -> None:
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()

    def stop(*_: object) -> None:
        # Threads can't be stopped: if a step or a request takes longer than this timeout, SIGALRM kills the process.
        signal.alarm(_SELF_KILL_TIMEOUT_S)
        loop.call_soon_threadsafe(stopping.set)

    # The loop's own signal handlers would not run while the loop is blocked.
    earlier = [(signum, signal.signal(signum, stop)) for signum in (signal.SIGINT, signal.SIGTERM)]
    try:
        async with running as base_url:
            on_ready(base_url)
            await stopping.wait()
    finally:
        for signum, handler in earlier:
            signal.signal(signum, handler)


_TERMINATE_TIMEOUT_S: Final = 5.0
_LOG_TAIL_BYTES: Final = 2000


@asynccontextmanager
async def engine_process(model_dir: Path | None = None, *, start_timeout_s: float = 60.0) -> AsyncIterator[str]:
    """Start `strands-rollout serve` on a free port of 127.0.0.1, yield its URL, and stop it when the block ends.

    If `model_dir` is None, the shipped model is served.

    Raises:
        EngineUnavailableError: The process exited or was not ready in time. The message ends with the last part of its
            stderr.
    """
    model = [] if model_dir is None else ["--model", str(model_dir)]
    command = [sys.executable, "-m", "strands_rollout.cli", "serve", "--port", "0", "--stop-with-stdin", *model]
    with tempfile.TemporaryFile() as log:
        # Start a new session, so that Ctrl-C reaches only this process, not the engine. This process lets its samples
        # end before it stops the engine.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True
        )
        try:
            yield await _read_ready_url(process, start_timeout_s, log)
            if process.returncode is not None:
                logger.error("event=engine_died exit_code=%s output=%s", process.returncode, _read_tail(log))
        finally:
            await _stop_process(process)


def print_ready(base_url: str) -> None:
    """Print the base URL as a line of JSON; the line tells a parent process that requests are accepted."""
    print(json.dumps({"base_url": base_url}), flush=True)


def stop_with_stdin() -> None:
    """End this process with its parent: start a thread that sends SIGTERM when stdin closes."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stop-with-stdin", daemon=True).start()


async def _read_ready_url(process: asyncio.subprocess.Process, timeout_s: float, log: IO[bytes]) -> str:
    line, problem = b"", f"was not ready within {timeout_s:g} s"
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            if process.stdout is not None:
                line = await process.stdout.readline()
            if not line:
                problem = f"exited with code {await process.wait()} before it was ready"
    if not line:
        raise EngineUnavailableError(f"the embedded engine {problem}. It printed: {_read_tail(log)}")
    return str(json.loads(line)["base_url"])


async def _stop_process(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(_TERMINATE_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _read_tail(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
    return log.read().decode(errors="replace").strip() or "nothing"
