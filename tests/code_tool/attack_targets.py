"""Targets of attacks: files and folders, and the host's checks for damage.

The output of an attack proves success only if it contains a secret.

A target is created just before an attack and closed after it, and leaves nothing behind.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strands_rollout.code_tool import CodeExecutor, ExecutionResult

_NAMED_LEVELS: Final = 5  # levels whose names the host searches: executor, slot, and three of the code's own


@dataclass(frozen=True)
class Stage:
    """Environment of an attack."""

    executor: CodeExecutor  # runs the attack; may be called from other threads at the same time
    folder: Path  # empty, outside of all scratch directories, accessible to everybody
    scratch_root: Path  # contains only the scratch directories of this executor
    secret: str  # value of an environment variable of this process
    has_helpers: bool  # the code's parent is a process of the executor, not this process

    def start(self, code: str, timeout_s: float = 20.0) -> Future[ExecutionResult]:
        """Start code, before the attack or in parallel to it, and return the future of its result."""
        pool = ThreadPoolExecutor(1)
        try:
            return pool.submit(lambda: asyncio.run(self.executor.run(code, timeout_s=timeout_s)))
        finally:
            pool.shutdown(wait=False)


class Target:
    """What an attack tries to read, damage or obtain, with the checks that show its success.

    Attributes:
        name: Unique name, short enough to be the name of a process (at most 15 bytes).
        facts: What the attacker knows, as values for JSON.
    """

    def __init__(self, stage: Stage) -> None:
        del stage  # most targets don't need it
        self.name = f"atk-{secrets.token_hex(5)}"
        self.secret = f"secret-{secrets.token_hex(16)}"
        self.facts: dict[str, Any] = {"name": self.name}

    def check_damage(self) -> bool:
        """Return whether the host sees damage. Called often during the attack, then after `finish` if it saw none."""
        return False

    def reveals_secret(self, result: ExecutionResult) -> bool:
        """Return whether the result contains a secret that sandboxed code must not read."""
        return self.secret in result.stdout + result.stderr

    def finish(self) -> None:
        """Prepare the last check; called once after the end of the attack."""

    def close(self) -> None:
        """Undo all changes, also after a successful attack."""


class EnvironmentVariable(Target):
    """Environment variable of the process that owns the executor."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.secret = stage.secret


class SecretFile(Target):
    """File that sandboxed code must not read, with the mode of an ssh key (0600) or of labels (0644)."""

    def __init__(self, stage: Stage, mode: int = 0o644) -> None:
        super().__init__(stage)
        folder = stage.folder / f"folder-{secrets.token_hex(8)}"
        folder.mkdir()
        folder.chmod(0o755)
        path = folder / "labels.jsonl"
        path.write_text(f'{{"label": "{self.secret}"}}\n')
        path.chmod(mode)
        self.facts |= {"path": str(path), "folder": str(folder)}


class FileFact(SecretFile):
    """Metadata of a file: a name, an attribute, or the target of a link."""

    def __init__(self, stage: Stage, fact: str) -> None:
        super().__init__(stage)
        path = Path(self.facts["path"])
        if fact == "link":
            (path.parent / "link").symlink_to(self.secret)
        elif fact == "attribute":
            with contextlib.suppress(OSError):  # some file systems have no attributes
                os.setxattr(path, "user.label", self.secret.encode())
        elif fact == "name":
            (path.parent / self.secret).touch()


class WatchedFolder(Target):
    """Folder in which a file appears repeatedly; the sandbox must not learn the file's name."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._folder = stage.folder / f"watched-{secrets.token_hex(4)}"
        self._folder.mkdir()
        self._folder.chmod(0o755)
        self.facts |= {"folder": str(self._folder)}

    def check_damage(self) -> bool:
        (self._folder / self.secret).touch()
        (self._folder / self.secret).unlink()
        return False  # `reveals_secret` finds the name in the output

    def close(self) -> None:
        shutil.rmtree(self._folder)


class ExistingFile(Target):
    """File of the machine or of this package; the longest of its first lines proves that it was read."""

    def __init__(self, stage: Stage, path: Path) -> None:
        super().__init__(stage)
        self.secret = max(path.read_text().splitlines()[:8], key=len)
        self.facts |= {"path": str(path)}


class ForeignFiles(Target):
    """World-writable folder, with the mode of /tmp, and a file in it; any change is damage."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._folder = stage.folder / f"foreign-{secrets.token_hex(4)}"
        self._folder.mkdir()
        path = self._folder / "file.txt"
        path.write_text("foreign\n" * 100)
        path.chmod(0o666)
        self._folder.chmod(0o1777)
        self._before = self._state()
        self.facts |= {"path": str(path), "folder": str(self._folder)}

    def _state(self) -> dict[str, object]:
        return {str(path): _state_of(path) for path in [self._folder, *sorted(self._folder.rglob("*"))]}

    def check_damage(self) -> bool:
        return self._state() != self._before

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _state_of(path: Path) -> object:
    """Return the file's state without its access time; None if the file was just removed."""
    try:
        facts = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(facts.st_mode) else b""
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:
        return None
    owner = (facts.st_mode, facts.st_uid, facts.st_gid, facts.st_nlink)
    return owner, facts.st_mtime_ns, facts.st_ctime_ns, content, names


class ExistingFolder(Target):
    """Folder of the machine in which no new file may appear."""

    def __init__(self, stage: Stage, folder: str | Path) -> None:
        super().__init__(stage)
        self._path = Path(folder, self.name)
        self.facts |= {"folder": str(folder), "path": str(self._path)}

    def check_damage(self) -> bool:
        return os.path.lexists(self._path)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


class ScratchRoot(Target):
    """Folder of all scratch directories; soon after a run it contains no path with the attack's name."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._root = stage.scratch_root
        self._cleanup_timeout_s = 30 if stage.has_helpers else 0  # helpers clean up after the result
        self._is_finished = False
        self.facts |= {"root": str(self._root)}

    def _remaining(self) -> list[Path]:
        return [path for path in shallow_paths(self._root) if self.name in path.name]

    def finish(self) -> None:
        deadline = time.monotonic() + self._cleanup_timeout_s
        while self._remaining() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._is_finished = True

    def check_damage(self) -> bool:
        return self._is_finished and bool(self._remaining())

    def close(self) -> None:
        for path in self._remaining():
            remove_tree(path)


def shallow_paths(root: Path, levels: int = _NAMED_LEVELS) -> Iterator[Path]:
    """Yield the paths in the first `levels` levels below a folder; other processes may delete and move trees there.

    If a folder is moved during the search, this function skips it, while `find` would find nothing and `rglob` raise.
    """
    try:
        entries = [(Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in os.scandir(root)]
    except OSError:  # the folder was just removed
        return
    for path, is_folder in entries:
        yield path
        if is_folder and levels > 1:
            yield from shallow_paths(path, levels - 1)


def remove_tree(path: Path) -> None:
    """Delete an attack's files of any permissions and depth, for which `rmtree` fails."""
    for command in (["chattr", "-R", "-i"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        with contextlib.suppress(FileNotFoundError):
            subprocess.run([*command, path], check=False, capture_output=True)
