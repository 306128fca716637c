"""Fixtures of the attack suite: the executors that are attacked, and the folders in which attacks run."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attack import DISK_MB, MAX_FILES, MAX_THREADS, MEMORY_MB, TIMEOUT_S
from attack_targets import Stage, remove_tree
from host_view import Process, descendants

from strands_rollout.code_tool import CodeExecutor, LocalExecutor, SubprocessExecutor

_ENDING_S = 30.0


def _leftovers(scratch_root: Path) -> set[tuple[str, object]]:
    """Names of things that a run must not leave behind; other programs leave things under other names."""
    found: set[tuple[str, object]] = {("process", pid) for pid in descendants(os.getpid()) if Process(pid).is_alive()}
    found |= {("file", path.name) for path in scratch_root.iterdir()}
    return found | {("shared memory", path.name) for path in Path("/dev/shm").glob("atk-*")}


@pytest.fixture
def confined_folder() -> Iterator[str]:
    """A directory that every user can work in and reach."""
    with tempfile.TemporaryDirectory(prefix="confined-") as folder:
        Path(folder).chmod(0o777)
        yield folder


@pytest.fixture
def confined_child(confined_folder: str) -> Callable[..., Any]:
    """Runs a script that confines itself, in that directory; returns what it printed as JSON, None if nothing."""

    def run(script: str, *, ends_with: int = 0) -> Any:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=confined_folder, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == ends_with, done.stderr
        return json.loads(done.stdout) if done.stdout else None

    return run


@pytest.fixture(scope="module")
def attack_secret() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        secret = f"secret-{secrets.token_hex(16)}"
        patch.setenv("STRANDS_ATTACK_SECRET", secret)
        yield secret


@pytest.fixture(scope="module")
def ground(attack_secret: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for the scratch directories. When the module is over, the isolated backend has left nothing anywhere."""
    tmp_path_factory.getbasetemp()  # made now, it lies outside of the folder and outlives it
    folder = Path(tempfile.mkdtemp(prefix="attacks-", dir="/tmp"))
    for place in (folder, folder / "plain", folder / "isolated"):
        place.mkdir(exist_ok=True)
        place.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder / "plain"))
        before = _leftovers(folder / "isolated")
        yield folder
        give_up_at = time.monotonic() + _ENDING_S
        # what earlier tests had left may end meanwhile
        while (left := _leftovers(folder / "isolated") - before) and time.monotonic() < give_up_at:
            time.sleep(0.05)
        remove_tree(folder)
        assert left == set()


def _closed_later(executor: CodeExecutor) -> Iterator[CodeExecutor]:
    yield executor
    asyncio.run(executor.aclose())


@pytest.fixture(scope="module")
def plain(ground: Path) -> Iterator[CodeExecutor]:
    """The backend without isolation."""
    yield from _closed_later(
        SubprocessExecutor(timeout_s=TIMEOUT_S, memory_mb=MEMORY_MB, file_mb=DISK_MB, max_concurrency=4)
    )


def _isolated(ground: Path, *disabled_layers: str, **more: Any) -> LocalExecutor:
    return LocalExecutor(
        timeout_s=TIMEOUT_S,
        memory_mb=MEMORY_MB,
        disk_mb=DISK_MB,
        max_files=MAX_FILES,
        max_threads=MAX_THREADS,
        max_concurrency=4,
        scratch_dir=str(ground / "isolated"),
        disabled_layers=disabled_layers,
        **more,
    )


@pytest.fixture(scope="module")
def isolated(ground: Path) -> Iterator[CodeExecutor]:
    yield from _closed_later(_isolated(ground))


@pytest.fixture(scope="module")
def without_landlock(ground: Path) -> Iterator[CodeExecutor]:
    """The backend with full isolation, as it is on a kernel that has no Landlock."""
    yield from _closed_later(_isolated(ground, "landlock"))


@pytest.fixture(scope="module")
def with_programs(ground: Path) -> Iterator[CodeExecutor]:
    yield from _closed_later(_isolated(ground, isolation="files", programs=True))


@pytest.fixture
def make_stage(ground: Path, attack_secret: str) -> Iterator[Callable[[CodeExecutor], Stage]]:
    """Makes the stage of one attack on an executor, with a folder that anybody may enter."""
    folder = Path(tempfile.mkdtemp(prefix="attacked-", dir="/tmp"))
    folder.chmod(0o755)

    def make(executor: CodeExecutor) -> Stage:
        is_plain = isinstance(executor, SubprocessExecutor)
        scratch_root = ground / ("plain" if is_plain else "isolated")
        return Stage(executor, folder, scratch_root, attack_secret, has_helpers=not is_plain)

    yield make
    remove_tree(folder)
