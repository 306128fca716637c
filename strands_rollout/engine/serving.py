"""Starting an engine's HTTP server: inside another program, or as a program of its own.

Imports the engine only when one is started, because NumPy reads its thread settings when it is first imported.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from strands_rollout.engine.settings import SHIPPED_MODEL_DIR, EngineOptions, EngineSettings
from strands_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

logger = logging.getLogger(__name__)

_BLAS_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
# Seconds until a thread that waits for the interpreter gets it; Python's 5 ms are longer than a decode step.
_SWITCH_INTERVAL_S = 0.0005


@asynccontextmanager
async def running_engine(
    model_dir: Path | str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    **options: Unpack[EngineOptions],
) -> AsyncIterator[str]:
    """Serve an engine on this event loop while the context lasts.

    Args:
        model_dir: A Qwen3 folder in Hugging Face layout; None: the shipped model.
        host: The address to listen on.
        port: The port; 0: a free one.
        **options: Limits and names; see `EngineSettings`.

    Yields:
        The base URL, such as "http://127.0.0.1:43211".

    Raises:
        ConfigError: The model folder is missing or foreign, or the port is taken.
    """
    from aiohttp import web

    from strands_rollout.engine.engine import load_engine
    from strands_rollout.engine.http_server import engine_app

    engine = await asyncio.to_thread(load_engine, _settings(model_dir, options))
    runner = web.AppRunner(engine_app(engine), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as e:
            raise ConfigError(f"can't listen on {host}:{port}: {e.strerror or e}. Choose another port") from e
        engine.start()
        try:
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            await asyncio.to_thread(engine.stop)
    finally:
        await runner.cleanup()


def serve(
    model_dir: Path | str | None = None,
    host: str = "127.0.0.1",
    port: int = 30000,
    *,
    on_ready: Callable[[str], None] | None = None,
    **options: Unpack[EngineOptions],
) -> None:
    """Serve an engine until interrupted (SIGINT or SIGTERM).

    Args:
        model_dir: A Qwen3 folder in Hugging Face layout; None: the shipped model.
        host: The address to listen on.
        port: The port; 0: a free one.
        on_ready: Called with the base URL once requests are accepted.
        **options: Limits and names; see `EngineSettings`.

    Raises:
        ConfigError: The model folder is missing or foreign, or the port is taken.
    """
    _bound_blas_threads()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    asyncio.run(_serve(running_engine(model_dir, host, port, **options), on_ready or _log_ready))


async def _serve(running: AbstractAsyncContextManager[str], on_ready: Callable[[str], None]) -> None:

    stopping = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    async with running as base_url:
        on_ready(base_url)
        await stopping.wait()


def _log_ready(base_url: str) -> None:
    logger.info("engine ready url=%s", base_url)


def _settings(model_dir: Path | str | None, options: EngineOptions) -> EngineSettings:
    return EngineSettings(model_dir=Path(model_dir) if model_dir else SHIPPED_MODEL_DIR, **options)


def _bound_blas_threads() -> None:
    """Let BLAS use one thread: a small model's matrices are too small to share, and the HTTP side needs a core."""
    if "numpy" in sys.modules:
        logger.debug("numpy is already imported; its BLAS keeps its own number of threads")
    for name in _BLAS_THREAD_VARIABLES:
        os.environ.setdefault(name, "1")
