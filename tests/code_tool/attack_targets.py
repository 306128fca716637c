"""Targets of attacks, and the host's checks for damage: files and folders. An attack's own word is never evidence.

Knows the host's side only. A target is made just before an attack and closed after it, and leaves nothing behind.
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

_NAMED_LEVELS: Final = 5  # executor, place, and what code makes there under names that the host looks for


@dataclass(frozen=True)
class Stage:
    """The environment of an attack."""

    executor: CodeExecutor  # what runs the attack; safe to call from other threads meanwhile
    folder: Path  # empty, outside of every scratch directory, and anybody may enter it
    scratch_root: Path  # where this executor makes its scratch directories, and no other
    secret: str  # the value of an environment variable of this process
    has_helpers: bool  # the parent of what runs is a process of the executor, and not this one

    def start(self, code: str, timeout_s: float = 20.0) -> Future[ExecutionResult]:
        """Run something beside the attack, or before it."""
        with_thread = ThreadPoolExecutor(1)
        try:
            return with_thread.submit(lambda: asyncio.run(self.executor.run(code, timeout_s=timeout_s)))
        finally:
            with_thread.shutdown(wait=False)


class Target:
    """Something outside of the sandbox.

    Attributes:
        name: Unique, and short enough for a process (15 bytes).
        facts: The attacker's knowledge, as JSON.
    """

    def __init__(self, stage: Stage) -> None:
        del stage  # most need no more than themselves
        self.name = f"atk-{secrets.token_hex(5)}"
        self.secret = f"secret-{secrets.token_hex(16)}"
        self.facts: dict[str, Any] = {"name": self.name}

    def seen(self) -> bool:
        """Return whether the host sees damage now; called repeatedly during the attack, and once more at its end."""
        return False

    def told(self, result: ExecutionResult) -> bool:
        """Return whether the result contains a secret that the sandbox must not know."""
        return self.secret in result.stdout + result.stderr

    def finish(self) -> None:
        """Called once between the end of the attack and the last look."""

    def close(self) -> None:
        """Undo whatever was done; must work after a successful attack too."""


class EnvironmentVariable(Target):
    """A variable of the process that owns the executor."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.secret = stage.secret


class SecretFile(Target):
    """A file that the sandbox must not read: an ssh key (0600), labels (0644)."""

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
    """The metadata of a file."""

    def __init__(self, stage: Stage, fact: str) -> None:
        super().__init__(stage)
        path = Path(self.facts["path"])
        if fact == "link":
            (path.parent / "link").symlink_to(self.secret)
        elif fact == "attribute":
            with contextlib.suppress(OSError):  # where files have no attributes
                os.setxattr(path, "user.label", self.secret.encode())
        elif fact == "name":
            (path.parent / self.secret).touch()


class WatchedFolder(Target):
    """A folder of somebody else, in which a file appears again and again; its name is not for the sandbox."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._folder = stage.folder / f"watched-{secrets.token_hex(4)}"
        self._folder.mkdir()
        self._folder.chmod(0o755)
        self.facts |= {"folder": str(self._folder)}

    def seen(self) -> bool:
        (self._folder / self.secret).touch()
        (self._folder / self.secret).unlink()
        return False  # who was told is seen by what it prints

    def close(self) -> None:
        shutil.rmtree(self._folder)


class WordsOf(Target):
    """A file of the machine or of this package; the longest of its first lines is the proof."""

    def __init__(self, stage: Stage, path: Path) -> None:
        super().__init__(stage)
        self.secret = max(path.read_text().splitlines()[:8], key=len)
        self.facts |= {"path": str(path)}


class Possessions(Target):
    """A folder of somebody else, with a file in it; any change of them is seen. Such modes has /tmp."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._folder = stage.folder / f"theirs-{secrets.token_hex(4)}"
        self._folder.mkdir()
        path = self._folder / "file.txt"
        path.write_text("theirs\n" * 100)
        path.chmod(0o666)
        self._folder.chmod(0o1777)
        self._before = self._state()
        self.facts |= {"path": str(path), "folder": str(self._folder)}

    def _state(self) -> dict[str, object]:
        return {str(path): _state_of(path) for path in [self._folder, *sorted(self._folder.rglob("*"))]}

    def seen(self) -> bool:
        return self._state() != self._before

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _state_of(path: Path) -> object:
    """Return the file's state without its access time; None if the file has just been removed."""
    try:
        facts = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(facts.st_mode) else b""
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:
        return None
    owner = (facts.st_mode, facts.st_uid, facts.st_gid, facts.st_nlink)
    return owner, facts.st_mtime_ns, facts.st_ctime_ns, content, names


class ForeignFolder(Target):
    """A folder that exists anyway, in which nothing new may appear."""

    def __init__(self, stage: Stage, folder: str | Path) -> None:
        super().__init__(stage)
        self._path = Path(folder, self.name)
        self.facts |= {"folder": str(folder), "path": str(self._path)}

    def seen(self) -> bool:
        return os.path.lexists(self._path)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


class ScratchRoot(Target):
    """The folder of all scratch directories: soon after a run, nothing is left there that bears the attack's name."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._root = stage.scratch_root
        self._patience_s = 30 if stage.has_helpers else 0  # they clean up when the result has been given
        self._over = False
        self.facts |= {"root": str(self._root)}

    def _left(self) -> list[Path]:
        return [path for path in shallow_paths(self._root) if self.name in path.name]

    def finish(self) -> None:
        give_up_at = time.monotonic() + self._patience_s
        while self._left() and time.monotonic() < give_up_at:
            time.sleep(0.02)
        self._over = True

    def seen(self) -> bool:
        return self._over and bool(self._left())

    def close(self) -> None:
        for path in self._left():
            remove_tree(path)


def shallow_paths(root: Path, levels: int = _NAMED_LEVELS) -> Iterator[Path]:
    """Return the paths below a folder, to this depth, while others delete and move whole trees there.

    `find` gives up everything at the first folder that is moved while it is in it, and says that it found nothing;
    `rglob` raises.
    """
    try:
        inner = [(Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in os.scandir(root)]
    except OSError:  # it has just gone
        return
    for path, is_folder in inner:
        yield path
        if is_folder and levels > 1:
            yield from shallow_paths(path, levels - 1)


def remove_tree(path: Path) -> None:
    """Delete an attack's files, whatever their permissions or depth; `rmtree` would give up."""
    for command in (["chattr", "-R", "-i"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        with contextlib.suppress(FileNotFoundError):
            subprocess.run([*command, path], check=False, capture_output=True)
