"""The layers that confine model-written code: which of them this machine has, and how a child puts them on.

Decided once in the fork server; a forked child calls `apply` and can't take anything of it off again. The layers:
`limits` (rlimits), `user` (a user of its own, where we are root), `files` (Landlock, or a change of root where the
kernel has no Landlock and we are root) and `syscalls` (seccomp), or `programs` where code may start some.

Confined code reads the standard library, the chosen libraries, shared objects and some of /etc; never a whole
site-packages folder: this package, its labels and its reward lie there, among others. Where the sandbox's user can't
traverse to Python's folders (a Python under a 0700 home), they are reached through directory descriptors that were
opened before the user changed: a walk that starts at /proc/self/fd/N needs no right on what lies above N. The rights on
the files themselves still hold, and so do the kernel's confinements.
"""

import contextlib
import os
import platform
import re
import secrets
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Final, TypeVar

from strands_rollout.code_tool.sandbox import kernel
from strands_rollout.code_tool.sandbox.seccomp import (
    ALONE,
    WITH_PROGRAMS,
    WITH_PROGRAMS_AS_OWNER,
    SyscallFilter,
    install,
    is_supported,
)

_DEVICES: Final = ("/dev/null", "/dev/urandom", "/dev/random")
_ZEROS: Final = "/dev/zero"  # for programs alone: to map it makes shared memory, see `seccomp.CONDITIONAL`
_NOT_STDLIB: Final = {"site-packages", "dist-packages", "__pycache__"}
_SHARED_OBJECT: Final = re.compile(r"\.so(\.|$)")
_PROGRAMS: Final = (  # what a shell finds, and what its programs read
    *(f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin", "/lib64", "/usr/libexec", "/usr/include"),
    "/usr/lib/gcc",
    "/usr/lib/git-core",
    "/usr/share/git-core",
    "/usr/share/perl",
    "/usr/share/perl5",
    *map(str, Path("/usr/lib").glob("python3.*")),
)
_SYSTEM: Final = ("/etc/ld.so.cache", "/usr/lib/locale", "/usr/share/zoneinfo")


def standard_library_folders() -> list[str]:
    """The folders of the standard library in use, in the order in which they are searched."""
    known = {Path(os.path.realpath(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib")}
    found = {path: Path(os.path.realpath(path)) for path in sys.path if Path(path).is_dir()}
    return [path for path in sys.path if path in found and known & {found[path], *found[path].parents}]


def readable_files(libraries: Mapping[str, Sequence[str]]) -> list[str]:
    """Every file and directory that confined code may read, with all that lies beneath."""
    paths = [os.path.join(folder, name) for folder, names in libraries.items() for name in names]  # noqa: PTH118
    for folder in standard_library_folders():
        paths += (entry.path for entry in os.scandir(folder) if entry.name not in _NOT_STDLIB)
    for folder in _shared_object_folders():
        paths += _shared_objects(folder)
    paths += (path for path in _SYSTEM if Path(path).exists())
    return sorted({os.path.realpath(path) for path in paths})


def _shared_object_folders() -> Iterator[str]:
    """Where the dynamic loader finds what extension modules link to."""
    multiarch = sysconfig.get_config_var("MULTIARCH")
    candidates = [os.path.join(sys.base_prefix, "lib"), "/lib64", "/usr/lib64", "/usr/local/lib"]  # noqa: PTH118
    if multiarch:
        candidates += [f"/lib/{multiarch}", f"/usr/lib/{multiarch}"]
    return (folder for folder in dict.fromkeys(map(os.path.realpath, candidates)) if Path(folder).is_dir())


def _shared_objects(folder: str) -> list[str]:
    """The folder itself where it holds shared objects alone, else these one by one: Python may live beside them."""
    entries = list(os.scandir(folder))
    has_python = any(entry.name.startswith("python") and entry.is_dir() for entry in entries)
    if not has_python and folder.startswith(("/lib", "/usr/lib")):
        return [folder]
    return [entry.path for entry in entries if _SHARED_OBJECT.search(entry.name) and entry.is_file()]


class LibraryFinder:
    """A meta path finder for the top-level modules of the chosen libraries."""

    def __init__(self, libraries: Mapping[str, Sequence[str]]) -> None:
        self._folders = {
            name.partition(".")[0]: folder
            for folder, names in libraries.items()
            for name in names
            if not name.endswith((".dist-info", ".libs", ".egg-info"))
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a library's own top-level module; its submodules are found as usual."""
        folder = self._folders.get(fullname)
        if path is not None or folder is None:
            return None
        return PathFinder.find_spec(fullname, [folder], target)


class DirectoryDescriptors:
    """Folders that stay reachable after a change of user."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._paths: dict[str, str] = {}

    def add(self, folder: str) -> None:
        """Open a folder."""
        number = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self.numbers.append(number)
        self._paths[folder] = f"/proc/self/fd/{number}"

    def reach(self, path: str) -> str:
        """The path through a descriptor, where one of the opened folders leads to it; else the path itself."""
        for folder in sorted(self._paths, key=len, reverse=True):
            if path == folder or path.startswith(folder + os.sep):
                return self._paths[folder] + path[len(folder) :]
        return path

    def reroute_imports(self) -> None:
        """Make the import system, and packages that have been imported, reach the opened folders this way."""
        sys.path[:] = map(self.reach, sys.path)
        for module in list(sys.modules.values()):
            places = getattr(module, "__path__", None)
            if isinstance(places, list):
                places[:] = map(self.reach, places)
            if isinstance(getattr(module, "__file__", None), str):
                module.__file__ = self.reach(module.__file__)  # type: ignore[arg-type]
        sys.path_importer_cache.clear()


_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_THP_DISABLE: Final = 41
_SIGKILL: Final = 9
_MAX_RULESET_USES: Final = 64
_MAX_FOLDER_BLOCKS: Final = 8
_T = TypeVar("_T")


class LayerError(Exception):
    """A layer could not be put on."""

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(reason)
        self.layer = layer


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where one process works, in a directory that is its alone, and new."""

    folder: str
    user: int | None  # that it becomes; None for the one that it is
    ruleset: kernel.Ruleset | None  # admits it to the directory and to what everybody may read
    uses: int = 0  # directories before this one that the ruleset admits to

    def retire(self) -> None:
        """Give up the ruleset where that costs space: deleted directories keep theirs while a ruleset names them."""
        with contextlib.suppress(OSError):
            has_grown = os.lstat(self.folder).st_blocks > _MAX_FOLDER_BLOCKS
            if self.ruleset is not None and (has_grown or self.uses >= _MAX_RULESET_USES):
                self.ruleset.close()


class Confinement:
    """What is enforced on this machine, and what is missing: layer -> how, or why not.

    Args:
        libraries: Folder -> names in it that code may import.
        limits: Of each process.
        disabled: Layers to leave out although the machine has them; "landlock" leaves `files` to a change of root.
        programs: Whether code may start the machine's programs, and its own; in place of `syscalls` there is then a
            layer `programs`, a list of refused system calls.
    """

    def __init__(
        self,
        libraries: Mapping[str, Sequence[str]],
        limits: kernel.ChildLimits,
        disabled: Collection[str] = (),
        *,
        programs: bool = False,
    ) -> None:
        self._libraries = libraries
        self._limits = limits
        self._disabled = disabled
        self._programs = programs
        self._filter: SyscallFilter | None = None
        self._landlock_abi = 0
        self._first_user: int | None = None
        self._readable: list[str] = []
        self._reads_as_root = False
        self.descriptors = DirectoryDescriptors()  # of folders that the code's user can't reach otherwise
        self.enforced: dict[str, str] = {}
        self._filter_layer = "programs" if programs else "syscalls"
        layers = {"limits": "limits", "user": "user", "files": "files", "syscalls": self._filter_layer}
        left_out = [name for layer, name in layers.items() if layer in disabled]
        self.missing: dict[str, str] = dict.fromkeys(left_out, "left out by the setting disabled_layers")
        if "limits" not in disabled:
            sizes = f"{limits.memory_mb} MiB of memory, {limits.file_mb} MiB a file"
            self.enforced["limits"] = f"{sizes}, {kernel.OPEN_FILES} files"
        if "user" not in disabled:
            self._decide_user()
        if "files" not in disabled:
            self._decide_files()
        if programs:
            self.missing["syscalls"] = "left out by the setting programs: no list of what programs need is known"
        if "syscalls" not in disabled:
            self._decide_syscalls()

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
        if self._filter is not None:
            self._compile_filter()
        self.enforced["user"] += ", with root's right to the files that it may read: others may not read Python's own"
        return True

    def open_folders(self) -> None:
        """Open descriptors of the folders that the code's user could not reach, and import through them from now on."""
        if "user" not in self.enforced or self.changes_root or sys.platform != "linux":
            return
        for folder in dict.fromkeys([*standard_library_folders(), *self._libraries]):
            here = Path(os.path.realpath(folder))
            can_pass = all(parent.stat().st_mode & 0o001 for parent in here.parents)
            if here.stat().st_mode & 0o005 != 0o005 or not can_pass:  # for a user who owns nothing
                self.descriptors.add(folder)
        self.descriptors.reroute_imports()

    def library_folders(self) -> dict[str, Sequence[str]]:
        """The libraries, by the paths that lead confined code to them."""
        return {self.descriptors.reach(folder): names for folder, names in self._libraries.items()}

    def sample_files(self) -> list[str]:
        """A file of each folder that code must be able to import from, by the path that leads confined code to it."""
        folders = [Path(folder) for folder in standard_library_folders()]
        folders += [Path(folder, name) for folder, names in self.library_folders().items() for name in names]
        return [str(file) for folder in folders if (file := next(folder.glob("*.py"), None)) is not None]

    def kept_descriptors(self) -> list[int]:
        """The descriptors that stay open in a child; none where one could lead out of a changed root."""
        return [] if self.changes_root else self.descriptors.numbers

    def make_place(self, folder: str, index: int, before: Workplace | None = None) -> Workplace:
        """Make a directory, and a ruleset that admits to it; that of the last place at this path can be used again.

        A directory of an earlier run shows things of it by its times and size even when it is empty, so it must have
        been deleted. The index decides the user.
        """
        with contextlib.suppress(FileExistsError):  # left by an attempt that failed later on
            os.mkdir(folder, 0o700)  # noqa: PTH102
        user = None
        if "user" in self.enforced and self._first_user is not None:
            user = self._first_user + index
            if not self._reads_as_root:
                os.chown(folder, user, user)
        if "files" not in self.enforced or not self._landlock_abi:
            return Workplace(folder, user, None)
        if before is not None and before.ruleset is not None and before.ruleset.fd >= 0:
            ruleset, uses = before.ruleset, before.uses + 1
            _attempt("files", lambda: ruleset.allow_scratch(folder, run=self._programs))
            return Workplace(folder, user, ruleset, uses)
        return Workplace(folder, user, _attempt("files", lambda: self._make_ruleset(folder)))

    def apply(self, place: Workplace) -> None:
        """Confine the calling process, which must have one thread, for good."""
        fork_server = os.getppid()
        os.chdir(place.folder)
        os.umask(0o077)
        if sys.platform == "linux":
            with contextlib.suppress(OSError), Path("/proc/self/oom_score_adj").open("w") as score:
                score.write("1000")
        if "limits" in self.enforced:
            _attempt("limits", lambda: self._limits.impose(own_user=self._is_counted_alone(place)))
            if sys.platform == "linux":  # of a huge page the kernel keeps all, and charges for what is mapped of it
                with contextlib.suppress(OSError):  # a kernel that has none
                    kernel.prctl(_PR_SET_THP_DISABLE, 1)
        if self.changes_root:
            _attempt("files", lambda: os.chroot(place.folder))
            _attempt("files", lambda: os.chdir("/"))
        _attempt("user", lambda: self._change_user(place.user))
        if sys.platform == "linux":  # now, since a change of user takes both back
            kernel.prctl(_PR_SET_PDEATHSIG, _SIGKILL)
            # with files confined no other code can look; the supervisor looks for deleted files that are open
            kernel.prctl(_PR_SET_DUMPABLE, int("files" in self.enforced or self._programs))
            if os.getppid() != fork_server:
                os._exit(1)  # it died before it could kill us
        if place.ruleset is not None:
            _attempt("files", place.ruleset.restrict_self)
        if self._filter is not None and self._filter_layer in self.enforced:
            program = self._filter.program(os.getpid())
            _attempt(self._filter_layer, lambda: install(program))

    def _is_counted_alone(self, place: Workplace) -> bool:
        """Whether the kernel counts a child's threads apart; an ordinary user's child is made so where that works.

        Not where code may start programs: they would find a user without a name.
        """
        if place.user is not None:
            return True
        return os.geteuid() != 0 and "syscalls" in self.enforced and kernel.be_counted_alone()

    def _decide_user(self) -> None:
        if os.geteuid() != 0:
            return  # not missing: an ordinary user has no other to become, and the other layers protect what is its own
        # far from everybody's users, and different for each fork server: threads are counted by user
        candidates = (0x7000_0000 + secrets.randbelow(1 << 16) * 1024, 60_000)
        self._first_user = next(filter(kernel.can_become, candidates), None)
        if self._first_user is None:
            self.missing["user"] = "root may not change its user here (no CAP_SETUID, or the user namespace maps none)"
        else:
            self.enforced["user"] = f"user IDs from {self._first_user}"

    def _decide_files(self) -> None:
        self._landlock_abi = 0 if "landlock" in self._disabled else kernel.landlock_abi()
        if self._landlock_abi:
            self.enforced["files"] = f"Landlock, ABI {self._landlock_abi}"
            self._readable = readable_files(self._libraries)
            return
        reason = "the kernel offers no Landlock (Linux 5.13 or newer has it where it is enabled)"
        if "landlock" in self._disabled:
            reason = "left out by the setting disabled_layers"
        self._decide_change_of_root(reason)

    def _decide_change_of_root(self, reason: str) -> None:
        if "user" in self.enforced and "chroot" not in self._disabled:
            self.enforced["files"] = "an empty root directory, since " + reason
            self.missing.pop("files", None)
        else:
            self.missing["files"] = reason

    def _decide_syscalls(self) -> None:
        if sys.platform != "linux" or not is_supported():
            self.missing[self._filter_layer] = f"no seccomp filter on {sys.platform}, {platform.machine()}"
            return
        self._compile_filter()
        self.enforced[self._filter_layer] = f"seccomp, a list of what is {'refused' if self._programs else 'allowed'}"

    def _compile_filter(self) -> None:
        rules = ALONE
        if self._programs:
            rules = WITH_PROGRAMS_AS_OWNER if self._reads_as_root else WITH_PROGRAMS
        self._filter = SyscallFilter.for_machine(platform.machine(), rules)

    def _make_ruleset(self, folder: str) -> kernel.Ruleset:
        ruleset = kernel.Ruleset(self._landlock_abi)
        for path in self._readable:
            ruleset.allow_read(path, run=self._programs)
        for path in _PROGRAMS if self._programs else ():
            with contextlib.suppress(FileNotFoundError):
                ruleset.allow_read(path, run=True)
        for path in (*_DEVICES, _ZEROS) if self._programs else _DEVICES:
            with contextlib.suppress(FileNotFoundError):
                ruleset.allow_device(path)
        ruleset.allow_scratch(folder, run=self._programs)
        return ruleset

    def _change_user(self, user: int | None) -> None:
        if user is not None and "user" in self.enforced:
            (kernel.become_reading_as_root if self._reads_as_root else kernel.become)(user)
        elif sys.platform == "linux" and os.geteuid() == 0:
            kernel.set_capabilities(0)


def _attempt(layer: str, step: Callable[[], _T]) -> _T:
    try:
        return step()
    except (OSError, ValueError) as e:
        raise LayerError(layer, f"{type(e).__name__}: {e}") from e
