"""Run the tests of this folder with episode workers on Ray: `STRANDS_ROLLOUT_TEST_WORKERS=2`."""

import asyncio
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COUNT = int(os.environ.get("STRANDS_ROLLOUT_TEST_WORKERS", "0"))
_DRIVER = "STRANDS_ROLLOUT_TEST_DRIVER"
_QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


async def _sleep_at_most(most_s: float, seconds: float) -> None:
    await asyncio.sleep(min(most_s, seconds))


def give_up_soon(set_item: Callable[[Any, Any, Any], object]) -> None:
    """Shorten waits between requests to 0.1 s, so that engines that abort or are unavailable are soon given up."""
    from strands_rollout.client.client import SGLangClient

    # a wait of 0.1 s is still long enough to be interrupted
    set_item(SGLangClient.__init__.__kwdefaults__, "sleep", functools.partial(_sleep_at_most, 0.1))


def prepare_worker() -> None:
    """Prepare the process of a worker, which imports the tools, as the fixtures prepare the driver."""
    if os.environ.get(_DRIVER) not in (None, str(os.getpid())):
        give_up_soon(dict.__setitem__)


@contextmanager
def cluster(*paths: Path) -> Iterator[None]:
    """Start a Ray whose workers can import modules from these folders; do nothing if no workers are wanted."""
    if not COUNT:
        yield
        return
    from strands_rollout.slime_plugin.workers import local_workers

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets must be short
    tests = Path(__file__).parents[1]
    here = [str(path) for path in (tests / "slime", tests / "support", tests / "environments", *paths)]
    path = os.pathsep.join([*here, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.update(_QUIET | {"PYTHONPATH": path, _DRIVER: str(os.getpid()), "RAY_TMPDIR": folder})
    try:
        with local_workers(COUNT):
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
