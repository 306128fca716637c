"""The layers that confine model-written code: which of them this machine has, and how a child puts them on.

Decided once in the template process; a forked child calls `apply` and can't take anything of it off again. The layers:
`limits` (rlimits), `user` (a user of its own, where we are root), `files` (Landlock, or a change of root where the
kernel has no Landlock and we are root) and `syscalls` (seccomp).
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from strands_rollout.sandbox.inside import landlock
from strands_rollout.sandbox.inside.child_limits import OPEN_FILES, ChildLimits
from strands_rollout.sandbox.inside.importing import DirectoryDescriptors
from strands_rollout.sandbox.inside.libc import prctl
from strands_rollout.sandbox.inside.privileges import (
    become,
    become_reading_as_root,
    can_become,
    drop_capabilities,
)
from strands_rollout.sandbox.inside.readable_files import (
    DEVICES,
    others_can_read,
    readable_files,
    standard_library_folders,
)
from strands_rollout.sandbox.inside.seccomp import SyscallFilter, install, is_supported

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_SIGKILL: Final = 9
_T = TypeVar("_T")


class LayerError(Exception):
    """A layer could not be put on.

    Attributes:
        layer: Its name.
    """

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(reason)
        self.layer = layer


@dataclass(frozen=True, slots=True)
class Place:
    """Where one process at a time works.

    Attributes:
        folder: A directory that is its alone.
        user: The user that it becomes; None for the one that it is.
        ruleset: What admits it to the directory and to what everybody may read; None without Landlock.
    """

    folder: str
    user: int | None
    ruleset: landlock.Ruleset | None


class Confinement:
    """What is enforced on this machine.

    Args:
        libraries: Folder -> names in it that code may import.
        limits: Of each process.
        disabled: Layers to leave out although the machine has them; "landlock" leaves `files` to a change of root.

    Attributes:
        enforced: Layer -> how, in words.
        missing: Layer -> why not, in words.
        descriptors: Folders that are reached through descriptors, because the code's user can't reach them otherwise.
    """

    def __init__(
        self, libraries: Mapping[str, Sequence[str]], limits: ChildLimits, disabled: Collection[str] = ()
    ) -> None:
        self._libraries = libraries
        self._limits = limits
        self._disabled = disabled
        self._filter: SyscallFilter | None = None
        self._landlock_abi = 0
        self._first_user: int | None = None
        self._readable: list[str] = []
        self._reads_as_root = False
        self.descriptors = DirectoryDescriptors()
        self.enforced: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        for layer, decide in {
            "limits": self._decide_limits,
            "user": self._decide_user,
            "files": self._decide_files,
            "syscalls": self._decide_syscalls,
        }.items():
            if layer in disabled:
                self.missing[layer] = "left out by the setting disabled_layers"
            else:
                decide()

    @property
    def changes_root(self) -> bool:
        """Whether files are confined by a change of root: only what has been imported before can be imported then."""
        return "files" in self.enforced and not self._landlock_abi

    def give_up(self, layer: str, reason: str) -> None:
        """Count a layer as missing, because it turned out not to work."""
        self.enforced.pop(layer, None)
        self.missing[layer] = reason
        if layer == "files" and self._landlock_abi:
            self._landlock_abi = 0
            self._decide_change_of_root(reason)

    def may_read_as_root(self) -> bool:
        """Have code keep root's right to files under a user of its own, where Landlock says which files those are."""
        if self._reads_as_root or not self._landlock_abi or "files" not in self.enforced:
            return False
        self._reads_as_root = True
        self.enforced["user"] += ", with root's right to the files that it may read: others may not read Python's own"
        return True

    def open_folders(self) -> None:
        """Open descriptors of the folders that the code's user could not reach, and import through them from now on."""
        if "user" not in self.enforced or self.changes_root or sys.platform != "linux":
            return
        for folder in dict.fromkeys([*standard_library_folders(), *self._libraries]):
            if not others_can_read(folder):
                self.descriptors.add(folder)
        self.descriptors.reroute_imports()

    def library_folders(self) -> dict[str, Sequence[str]]:
        """The libraries, by the paths that lead confined code to them."""
        return {self.descriptors.reach(folder): names for folder, names in self._libraries.items()}

    def sample_files(self) -> list[str]:
        """A file of each folder that code must be able to import from, by the path that leads confined code to it."""
        listings = [Path(folder).glob("*.py") for folder in standard_library_folders()]
        listings += [
            Path(self.descriptors.reach(folder), name).glob("*.py")
            for folder, names in self._libraries.items()
            for name in names
        ]
        return [str(file) for listing in listings if (file := next(listing, None)) is not None]

    def kept_descriptors(self) -> list[int]:
        """The descriptors that stay open in a child; none where one could lead out of a changed root."""
        return [] if self.changes_root else self.descriptors.numbers

    def make_place(self, folder: str, index: int) -> Place:
        """Make the directory, and the ruleset that admits to it.

        Raises:
            LayerError: The kernel refuses the ruleset.
            OSError: The directory can't be made.
        """
        with contextlib.suppress(FileExistsError):  # left by an attempt that failed later on
            os.mkdir(folder, 0o700)  # noqa: PTH102
        user = None
        if "user" in self.enforced and self._first_user is not None:
            user = self._first_user + index
            if not self._reads_as_root:
                os.chown(folder, user, user)
        ruleset = None
        if "files" in self.enforced and self._landlock_abi:
            ruleset = _attempt("files", lambda: self._make_ruleset(folder))
        return Place(folder, user, ruleset)

    def apply(self, place: Place) -> None:
        """Confine the calling process, which must have one thread, for good.

        Raises:
            LayerError: A layer that was promised does not work.
        """
        template = os.getppid()
        os.chdir(place.folder)
        os.umask(0o077)
        if sys.platform == "linux":
            with contextlib.suppress(OSError), Path("/proc/self/oom_score_adj").open("w") as score:
                score.write("1000")
        if "limits" in self.enforced:
            _attempt("limits", lambda: self._limits.impose(own_user=place.user is not None))
        if self.changes_root:
            _attempt("files", lambda: _change_root(place.folder))
        _attempt("user", lambda: self._change_user(place.user))
        if sys.platform == "linux":  # now, since a change of user takes both back
            prctl(_PR_SET_PDEATHSIG, _SIGKILL)
            # with files confined nobody can look, but for the supervisor, who looks for deleted files that are open
            prctl(_PR_SET_DUMPABLE, int("files" in self.enforced))
            if os.getppid() != template:
                os._exit(1)  # it died before it could kill us
        if place.ruleset is not None:
            _attempt("files", place.ruleset.restrict_self)
        if self._filter is not None and "syscalls" in self.enforced:
            program = self._filter.program(os.getpid())
            _attempt("syscalls", lambda: install(program))

    def _decide_limits(self) -> None:
        limits = self._limits
        self.enforced["limits"] = f"{limits.memory_mb} MiB of memory, {limits.file_mb} MiB a file, {OPEN_FILES} files"

    def _decide_user(self) -> None:
        if os.geteuid() != 0:
            return  # not missing: an ordinary user has no other to become, and the other layers protect what is its own
        # far from everybody's users, and different for each template: threads are counted by user
        candidates = (0x7000_0000 + secrets.randbelow(1 << 16) * 1024, 60_000)
        self._first_user = next(filter(can_become, candidates), None)
        if self._first_user is None:
            self.missing["user"] = "root may not change its user here (no CAP_SETUID, or the user namespace maps none)"
        else:
            self.enforced["user"] = f"from number {self._first_user}"

    def _decide_files(self) -> None:
        self._landlock_abi = 0 if "landlock" in self._disabled else landlock.abi_version()
        if self._landlock_abi:
            self.enforced["files"] = f"Landlock, ABI {self._landlock_abi}"
            self._readable = readable_files(self._libraries)
        elif "landlock" in self._disabled:
            self._decide_change_of_root("left out by the setting disabled_layers")
        else:
            self._decide_change_of_root(
                "the kernel offers no Landlock (Linux 5.13 or newer has it where it is enabled)"
            )

    def _decide_change_of_root(self, reason: str) -> None:
        if "user" in self.enforced and "chroot" not in self._disabled:
            self.enforced["files"] = "an empty root directory, since " + reason
            self.missing.pop("files", None)
        else:
            self.missing["files"] = reason

    def _decide_syscalls(self) -> None:
        if sys.platform != "linux" or not is_supported():
            self.missing["syscalls"] = f"no seccomp filter on {sys.platform}, {platform.machine()}"
            return
        self._filter = SyscallFilter.for_machine(platform.machine())
        self.enforced["syscalls"] = "seccomp, a list of what is allowed"

    def _make_ruleset(self, folder: str) -> landlock.Ruleset:
        ruleset = landlock.Ruleset(self._landlock_abi)
        for path in self._readable:
            ruleset.allow_read(path)
        for path in DEVICES:
            with contextlib.suppress(FileNotFoundError):
                ruleset.allow_device(path)
        ruleset.allow_scratch(folder)
        return ruleset

    def _change_user(self, user: int | None) -> None:
        if user is not None and "user" in self.enforced:
            (become_reading_as_root if self._reads_as_root else become)(user)
        elif sys.platform == "linux" and os.geteuid() == 0:
            drop_capabilities()


def _change_root(folder: str) -> None:
    os.chroot(folder)
    os.chdir("/")


def _attempt(layer: str, step: Callable[[], _T]) -> _T:
    try:
        return step()
    except (OSError, ValueError) as e:
        raise LayerError(layer, f"{type(e).__name__}: {e}") from e
