"""Fixtures of the attack suite: the executors that are attacked, and the ground on which it happens."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attack_targets import Stage
from host_view import Process, descendants
from sandbox_limits import DISK_MB, MAX_FILES, MAX_THREADS, MEMORY_MB, TIMEOUT_S

from strands_rollout.sandbox import CodeExecutor, LocalExecutor, SubprocessExecutor

_ENDING_S = 3.0


def _leftovers(scratch_root: Path) -> dict[str, object]:
    """What a run may not leave behind, on the whole machine."""
    return {
        "processes": sorted(pid for pid in descendants(os.getpid()) if Process(pid).is_alive()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "files": sorted(os.listdir(scratch_root)),
        "shared memory": [Path("/proc/sysvipc", kind).read_text().count("\n") for kind in ("shm", "msg", "sem")],
        "shared memory files": sorted(os.listdir("/dev/shm")),
    }


@pytest.fixture(scope="module")
def attack_secret() -> Iterator[str]:
    """The value of an environment variable of this process, set before any executor starts."""
    with pytest.MonkeyPatch.context() as patch:
        secret = f"secret-{secrets.token_hex(16)}"
        patch.setenv("STRANDS_ATTACK_SECRET", secret)
        yield secret


@pytest.fixture(scope="module")
def scratch_root(attack_secret: str) -> Iterator[Path]:
    """The temporary directory of the executors. When the module is over, nothing may be left there or elsewhere."""
    folder = Path(tempfile.mkdtemp(prefix="attacks-", dir="/tmp"))
    folder.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        before = _leftovers(folder)
        yield folder
        give_up_at = time.monotonic() + _ENDING_S
        while (after := _leftovers(folder)) != before and time.monotonic() < give_up_at:
            time.sleep(0.05)
        shutil.rmtree(folder, ignore_errors=True)
        assert after == before


def _closed_later(executor: CodeExecutor) -> Iterator[CodeExecutor]:
    yield executor
    asyncio.run(executor.aclose())


@pytest.fixture(scope="module")
def plain(scratch_root: Path) -> Iterator[CodeExecutor]:
    """The backend without isolation."""
    yield from _closed_later(
        SubprocessExecutor(timeout_s=TIMEOUT_S, memory_mb=MEMORY_MB, file_mb=DISK_MB, max_concurrency=4)
    )


@pytest.fixture(scope="module")
def isolated(scratch_root: Path) -> Iterator[CodeExecutor]:
    """The backend with full isolation."""
    yield from _closed_later(
        LocalExecutor(
            timeout_s=TIMEOUT_S,
            memory_mb=MEMORY_MB,
            disk_mb=DISK_MB,
            max_files=MAX_FILES,
            max_threads=MAX_THREADS,
            max_concurrency=4,
        )
    )


@pytest.fixture
def make_stage(scratch_root: Path, attack_secret: str) -> Iterator[Callable[[CodeExecutor], Stage]]:
    """Makes the stage of one attack on an executor, with a folder that anybody may enter."""
    folder = Path(tempfile.mkdtemp(prefix="attacked-", dir="/tmp"))
    folder.chmod(0o755)
    yield lambda executor: Stage(executor, folder, scratch_root, attack_secret)
    shutil.rmtree(folder)
