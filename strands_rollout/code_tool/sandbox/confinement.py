"""The layers that confine model-written code: the choice of layers on this machine, and their use in a child.

At its start, the fork server decides which layers to use. A forked child calls `apply`, which can't be undone. The
layers are:

- `limits`: rlimits
- `user`: a separate user, if the fork server is root
- `files`: Landlock; or a change of root, if Landlock can't be used and the fork server is root
- `syscalls`: a seccomp filter; if code may start programs, the layer `programs` with another filter replaces it

Confined code can read the standard library, the chosen libraries, shared objects, locales and time zones. It can never
read a whole site-packages folder: that folder contains this package with its labels and rewards.

The sandbox's user may be unable to reach Python's folders by path, for example if Python is in a home directory of mode
0700. Such a user reaches them through directory descriptors opened before the change of user. A path that starts at
/proc/self/fd/N needs no permission on the folders above the opened one. The permissions of the files themselves and the
kernel's confinement still apply.

Code that may start programs can also read and run all files below `_PROGRAMS`.
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
    WITH_PROGRAMS,
    WITH_PROGRAMS_AS_OWNER,
    WITHOUT_PROGRAMS,
    SyscallFilter,
    install,
    is_supported,
)

_DEVICES: Final = ("/dev/null", "/dev/urandom", "/dev/random")
_ZERO_DEVICE: Final = "/dev/zero"  # for programs only: mapping it creates shared memory, see `seccomp.CONDITIONAL`
_NOT_STDLIB: Final = {"site-packages", "dist-packages", "__pycache__"}
_SHARED_OBJECT: Final = re.compile(r"\.so(\.|$)")
_PROGRAMS: Final = (  # programs for a shell, and files that they read
    *(f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin", "/lib64", "/usr/libexec", "/usr/include"),
    "/usr/lib/gcc",
    "/usr/lib/git-core",
    "/usr/share/git-core",
    "/usr/share/perl",
    "/usr/share/perl5",
    *map(str, Path("/usr/lib").glob("python3.*")),
)
_SYSTEM_FILES: Final = ("/etc/ld.so.cache", "/usr/lib/locale", "/usr/share/zoneinfo")


def standard_library_folders() -> list[str]:
    """List the folders of the running Python's standard library, in search order."""
    known = {Path(os.path.realpath(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib")}
    found = {path: Path(os.path.realpath(path)) for path in sys.path if Path(path).is_dir()}
    return [path for path in sys.path if path in found and known & {found[path], *found[path].parents}]


def readable_files(libraries: Mapping[str, Sequence[str]]) -> list[str]:
    """List the files and directories that confined code may read; a directory includes everything below it."""
    paths = [os.path.join(folder, name) for folder, names in libraries.items() for name in names]  # noqa: PTH118
    for folder in standard_library_folders():
        paths += (entry.path for entry in os.scandir(folder) if entry.name not in _NOT_STDLIB)
    for folder in _shared_object_folders():
        paths += _shared_objects(folder)
    paths += (path for path in _SYSTEM_FILES if Path(path).exists())
    return sorted({os.path.realpath(path) for path in paths})


def _shared_object_folders() -> Iterator[str]:
    """Yield the folders in which the dynamic loader finds the shared objects of extension modules."""
    multiarch = sysconfig.get_config_var("MULTIARCH")
    candidates = [os.path.join(sys.base_prefix, "lib"), "/lib64", "/usr/lib64", "/usr/local/lib"]  # noqa: PTH118
    if multiarch:
        candidates += [f"/lib/{multiarch}", f"/usr/lib/{multiarch}"]
    return (folder for folder in dict.fromkeys(map(os.path.realpath, candidates)) if Path(folder).is_dir())


def _shared_objects(folder: str) -> list[str]:
    """Return the folder itself if it is a system folder without Python in it, else its shared objects one by one."""
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
        """Find a library's top-level module; Python's own finders find its submodules."""
        folder = self._folders.get(fullname)
        if path is not None or folder is None:
            return None
        return PathFinder.find_spec(fullname, [folder], target)


class DirectoryDescriptors:
    """Open descriptors of folders, which keep the folders reachable after a change of user."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._paths: dict[str, str] = {}

    def add(self, folder: str) -> None:
        """Open a folder."""
        number = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self.numbers.append(number)
        self._paths[folder] = f"/proc/self/fd/{number}"

    def reach(self, path: str) -> str:
        """Return `path`, rerouted through a descriptor if the path lies in an opened folder."""
        for folder in sorted(self._paths, key=len, reverse=True):
            if path == folder or path.startswith(folder + os.sep):
                return self._paths[folder] + path[len(folder) :]
        return path

    def reroute_imports(self) -> None:
        """Make the import system and imported packages use the descriptors of the opened folders."""
        sys.path[:] = map(self.reach, sys.path)
        for module in list(sys.modules.values()):
            folders = getattr(module, "__path__", None)
            if isinstance(folders, list):
                folders[:] = map(self.reach, folders)
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
    """A layer could not be applied."""

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(reason)
        self.layer = layer


@dataclass(frozen=True, slots=True)
class Workspace:
    """A new directory for one process, with the process's user and Landlock ruleset."""

    folder: str
    user: int | None  # the user to change to; None to stay the same user
    ruleset: kernel.Ruleset | None  # for the directory and the files that all code may use; None without Landlock
    uses: int = 0  # number of earlier directories to which the ruleset grants access

    def retire(self) -> None:
        """Close the ruleset if it wastes disk space. A deleted directory keeps its blocks while a ruleset names it."""
        with contextlib.suppress(OSError):
            has_grown = os.lstat(self.folder).st_blocks > _MAX_FOLDER_BLOCKS
            if self.ruleset is not None and (has_grown or self.uses >= _MAX_RULESET_USES):
                self.ruleset.close()


class Confinement:
    """The layers of confinement to use on this machine, with methods that apply them to a child.

    `enforced` maps a layer to its mechanism; `missing` maps a layer to the reason why it is not enforced.

    Args:
        libraries: Folder -> names in it that code may import.
        limits: Limits of each process.
        disabled: Layers to leave out although the machine supports them; "landlock" and "chroot" each leave out one of
            the two mechanisms of `files`.
        programs: Allow code to start the machine's programs and its own. The layer `syscalls` is then replaced by
            `programs`, a list of refused system calls.
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
        self.descriptors = DirectoryDescriptors()  # for folders that the code's user can't reach by path
        self.enforced: dict[str, str] = {}
        self._filter_layer = "programs" if programs else "syscalls"
        layers = {"limits": "limits", "user": "user", "files": "files", "syscalls": self._filter_layer}
        left_out = [name for layer, name in layers.items() if layer in disabled]
        self.missing: dict[str, str] = dict.fromkeys(left_out, "left out by the setting disabled_layers")
        if "limits" not in disabled:
            sizes = f"{limits.memory_mb} MiB of memory, {limits.file_mb} MiB a file"
            self.enforced["limits"] = f"{sizes}, {kernel.OPEN_FILES} open files"
        if "user" not in disabled:
            self._decide_user()
        if "files" not in disabled:
            self._decide_files()
        if programs:
            self.missing["syscalls"] = "left out by the setting programs: programs need an unknown set of system calls"
        if "syscalls" not in disabled:
            self._decide_syscalls()

    @property
    def changes_root(self) -> bool:
        """Return whether a change of root confines files; code then imports only loaded modules and its own."""
        return "files" in self.enforced and not self._landlock_abi

    def mark_missing(self, layer: str, reason: str) -> None:
        """Mark a layer as missing after its test has failed; if Landlock has failed, try a change of root instead."""
        self.enforced.pop(layer, None)
        self.missing[layer] = reason
        if layer == "files" and self._landlock_abi:
            self._landlock_abi = 0
            self._decide_change_of_root(reason)

    def grant_root_reads(self) -> bool:
        """Let code access files with root's permissions although it runs as another user; Landlock still applies.

        Returns:
            True if code reads as root from now on; False if it did already, or if Landlock does not confine files.
        """
        if self._reads_as_root or not self._landlock_abi or "files" not in self.enforced:
            return False
        self._reads_as_root = True
        if self._filter is not None:
            self._compile_filter()
        self.enforced["user"] += ", reading files as root: other users can't read Python's files"
        return True

    def open_folders(self) -> None:
        """Open the folders that the code's user can't reach by path, and import through their descriptors."""
        if "user" not in self.enforced or self.changes_root or sys.platform != "linux":
            return
        for folder in dict.fromkeys([*standard_library_folders(), *self._libraries]):
            real = Path(os.path.realpath(folder))
            can_pass = all(parent.stat().st_mode & 0o001 for parent in real.parents)
            # the permission bits for others count, since the code's user owns none of these folders
            if real.stat().st_mode & 0o005 != 0o005 or not can_pass:
                self.descriptors.add(folder)
        self.descriptors.reroute_imports()

    def library_folders(self) -> dict[str, Sequence[str]]:
        """Return folder -> names of libraries in it; each folder is a path that confined code can use."""
        return {self.descriptors.reach(folder): names for folder, names in self._libraries.items()}

    def sample_files(self) -> list[str]:
        """Return one Python file of each folder that code imports from, as a path that confined code can use."""
        folders = [Path(folder) for folder in standard_library_folders()]
        folders += [Path(folder, name) for folder, names in self.library_folders().items() for name in names]
        return [str(file) for folder in folders if (file := next(folder.glob("*.py"), None)) is not None]

    def descriptors_to_keep(self) -> list[int]:
        """Return the descriptors that a child keeps open.

        If the child changes its root, the list is empty. Code could leave the new root through such descriptors.
        """
        return [] if self.changes_root else self.descriptors.numbers

    def make_workspace(self, folder: str, slot: int, previous: Workspace | None = None) -> Workspace:
        """Make a directory for a child and, with Landlock, a ruleset that grants access to the directory.

        Args:
            folder: Path of the directory. The directory of an earlier run must have been deleted. Even empty, it would
                reveal something of that run by its times and size.
            slot: The slot's number; with the layer `user`, each slot has a user of its own.
            previous: The previous workspace at this path; its ruleset is reused if it is open.

        Raises:
            LayerError: The ruleset can't be made.
            OSError: The directory can't be made, or its owner can't be changed.
        """
        with contextlib.suppress(FileExistsError):  # an earlier attempt made it and then failed
            os.mkdir(folder, 0o700)  # noqa: PTH102
        user = None
        if "user" in self.enforced and self._first_user is not None:
            user = self._first_user + slot
            if not self._reads_as_root:
                os.chown(folder, user, user)
        if "files" not in self.enforced or not self._landlock_abi:
            return Workspace(folder, user, None)
        if previous is not None and previous.ruleset is not None and previous.ruleset.fd >= 0:
            ruleset, uses = previous.ruleset, previous.uses + 1
            _run_layer_step("files", lambda: ruleset.allow_scratch(folder, run=self._programs))
            return Workspace(folder, user, ruleset, uses)
        return Workspace(folder, user, _run_layer_step("files", lambda: self._make_ruleset(folder)))

    def apply(self, workspace: Workspace) -> None:
        """Confine the calling process, which must have a single thread; this can't be undone.

        Raises:
            LayerError: A layer can't be applied.
        """
        fork_server = os.getppid()
        os.chdir(workspace.folder)
        os.umask(0o077)
        if sys.platform == "linux":
            with contextlib.suppress(OSError), Path("/proc/self/oom_score_adj").open("w") as score:
                score.write("1000")
        if "limits" in self.enforced:
            _run_layer_step("limits", lambda: self._limits.apply(own_user=self._separate_thread_count(workspace)))
            if sys.platform == "linux":  # the kernel keeps a whole huge page, but charges only for its mapped part
                with contextlib.suppress(OSError):  # the kernel has no huge pages
                    kernel.prctl(_PR_SET_THP_DISABLE, 1)
        if self.changes_root:
            _run_layer_step("files", lambda: os.chroot(workspace.folder))
            _run_layer_step("files", lambda: os.chdir("/"))
        _run_layer_step("user", lambda: self._change_user(workspace.user))
        if sys.platform == "linux":  # a change of user resets both attributes, so they are set after it
            kernel.prctl(_PR_SET_PDEATHSIG, _SIGKILL)
            # the supervisor can see a dumpable process's open files; code with confined files can't look into /proc
            kernel.prctl(_PR_SET_DUMPABLE, int("files" in self.enforced or self._programs))
            if os.getppid() != fork_server:
                os._exit(1)  # the fork server died before PDEATHSIG was set
        if workspace.ruleset is not None:
            _run_layer_step("files", workspace.ruleset.restrict_self)
        if self._filter is not None and self._filter_layer in self.enforced:
            program = self._filter.program(os.getpid())
            _run_layer_step(self._filter_layer, lambda: install(program))

    def _separate_thread_count(self, workspace: Workspace) -> bool:
        """Make the kernel count this child's threads separately, if possible; return whether it does.

        If the child has no user of its own and is not root, it enters a user namespace, but only if the layer
        `syscalls` is enforced. Without this layer, code may start programs, which would run as a user without a name.
        """
        if workspace.user is not None:
            return True
        return os.geteuid() != 0 and "syscalls" in self.enforced and kernel.enter_user_namespace()

    def _decide_user(self) -> None:
        if os.geteuid() != 0:
            return  # not missing: only root can change its user; other layers protect this user's files and processes
        # avoid the ids of real users and of other fork servers, since the kernel counts threads by user
        candidates = (0x7000_0000 + secrets.randbelow(1 << 16) * 1024, 60_000)
        self._first_user = next(filter(kernel.can_change_user, candidates), None)
        if self._first_user is None:
            self.missing["user"] = "root may not change its user here (no CAP_SETUID, or no other user is mapped)"
        else:
            self.enforced["user"] = f"user IDs from {self._first_user}"

    def _decide_files(self) -> None:
        self._landlock_abi = 0 if "landlock" in self._disabled else kernel.landlock_abi()
        if self._landlock_abi:
            self.enforced["files"] = f"Landlock, ABI {self._landlock_abi}"
            self._readable = readable_files(self._libraries)
            return
        reason = "the kernel offers no Landlock (needs Linux 5.13 or newer with Landlock enabled)"
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
            self.missing[self._filter_layer] = f"no seccomp filter can be used on {sys.platform}, {platform.machine()}"
            return
        self._compile_filter()
        kind = "refused" if self._programs else "allowed"
        self.enforced[self._filter_layer] = f"seccomp, with a list of {kind} system calls"

    def _compile_filter(self) -> None:
        rules = WITHOUT_PROGRAMS
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
        for path in (*_DEVICES, _ZERO_DEVICE) if self._programs else _DEVICES:
            with contextlib.suppress(FileNotFoundError):
                ruleset.allow_device(path)
        ruleset.allow_scratch(folder, run=self._programs)
        return ruleset

    def _change_user(self, user: int | None) -> None:
        if user is not None and "user" in self.enforced:
            (kernel.change_user_reading_as_root if self._reads_as_root else kernel.change_user)(user)
        elif sys.platform == "linux" and os.geteuid() == 0:
            kernel.set_capabilities(0)


def _run_layer_step(layer: str, step: Callable[[], _T]) -> _T:
    try:
        return step()
    except (OSError, ValueError) as e:
        raise LayerError(layer, f"{type(e).__name__}: {e}") from e
