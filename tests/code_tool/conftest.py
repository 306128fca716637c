"""Fixtures of the attack suite (attacked executors, folders for attacks), and confined children."""

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

_CLEANUP_TIMEOUT_S = 30.0


def _leftovers(scratch_root: Path) -> set[tuple[str, object]]:
    """Return processes, files and shared memory that runs must not leave behind."""
    found: set[tuple[str, object]] = {("process", pid) for pid in descendants(os.getpid()) if Process(pid).is_alive()}
    found |= {("file", path.name) for path in scratch_root.iterdir()}
    return found | {("shared memory", path.name) for path in Path("/dev/shm").glob("atk-*")}


@pytest.fixture
def confined_folder() -> Iterator[str]:
    """Directory that every user can reach and write to."""
    with tempfile.TemporaryDirectory(prefix="confined-") as folder:
        Path(folder).chmod(0o777)
        yield folder


@pytest.fixture
def confined_child(confined_folder: str) -> Callable[..., Any]:
    """Function that runs a script in `confined_folder` and returns its output, parsed as JSON; None without output."""

    def run(script: str, *, exit_code: int = 0) -> Any:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=confined_folder, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == exit_code, done.stderr
        return json.loads(done.stdout) if done.stdout else None

    return run


@pytest.fixture(scope="module")
def attack_secret() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        secret = f"secret-{secrets.token_hex(16)}"
        patch.setenv("STRANDS_ATTACK_SECRET", secret)
        yield secret


@pytest.fixture(scope="module")
def attack_folder(attack_secret: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of all scratch directories; at the end, checks that the isolated backend has left nothing behind."""
    tmp_path_factory.getbasetemp()  # created before `tempdir` changes, so that it outlives the folder
    folder = Path(tempfile.mkdtemp(prefix="attacks-", dir="/tmp"))
    for path in (folder, folder / "plain", folder / "isolated"):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder / "plain"))
        before = _leftovers(folder / "isolated")
        yield folder
        deadline = time.monotonic() + _CLEANUP_TIMEOUT_S
        # processes of earlier tests may still be ending
        while (left := _leftovers(folder / "isolated") - before) and time.monotonic() < deadline:
            time.sleep(0.05)
        remove_tree(folder)
        assert left == set()


def _close_at_end(executor: CodeExecutor) -> Iterator[CodeExecutor]:
    yield executor
    asyncio.run(executor.aclose())


@pytest.fixture(scope="module")
def plain(attack_folder: Path) -> Iterator[CodeExecutor]:
    """Executor without isolation."""
    yield from _close_at_end(
        SubprocessExecutor(timeout_s=TIMEOUT_S, memory_mb=MEMORY_MB, file_mb=DISK_MB, max_concurrency=4)
    )


def _isolated(attack_folder: Path, *disabled_layers: str, **more: Any) -> LocalExecutor:
    return LocalExecutor(
        timeout_s=TIMEOUT_S,
        memory_mb=MEMORY_MB,
        disk_mb=DISK_MB,
        max_files=MAX_FILES,
        max_threads=MAX_THREADS,
        max_concurrency=4,
        scratch_dir=str(attack_folder / "isolated"),
        disabled_layers=disabled_layers,
        **more,
    )


@pytest.fixture(scope="module")
def isolated(attack_folder: Path) -> Iterator[CodeExecutor]:
    yield from _close_at_end(_isolated(attack_folder))


@pytest.fixture(scope="module")
def without_landlock(attack_folder: Path) -> Iterator[CodeExecutor]:
    """Executor with full isolation as on a kernel without Landlock."""
    yield from _close_at_end(_isolated(attack_folder, "landlock"))


@pytest.fixture(scope="module")
def with_programs(attack_folder: Path) -> Iterator[CodeExecutor]:
    yield from _close_at_end(_isolated(attack_folder, isolation="files", programs=True))


@pytest.fixture
def make_stage(attack_folder: Path, attack_secret: str) -> Iterator[Callable[[CodeExecutor], Stage]]:
    """Function that creates the stage of an attack on an executor, with a folder that everybody may enter."""
    folder = Path(tempfile.mkdtemp(prefix="attacked-", dir="/tmp"))
    folder.chmod(0o755)

    def make(executor: CodeExecutor) -> Stage:
        is_plain = isinstance(executor, SubprocessExecutor)
        scratch_root = attack_folder / ("plain" if is_plain else "isolated")
        return Stage(executor, folder, scratch_root, attack_secret, has_helpers=not is_plain)

    yield make
    remove_tree(folder)
