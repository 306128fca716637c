"""Which files confined code may read: the standard library, the chosen libraries, shared objects, some of /etc.

Never a whole site-packages folder: this package, its labels and its reward lie there, among others.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_NOT_STDLIB: Final = {"site-packages", "dist-packages", "__pycache__"}
_SHARED_OBJECT: Final = re.compile(r"\.so(\.|$)")
_SYSTEM: Final = ("/etc/ld.so.cache", "/usr/share/zoneinfo")


def standard_library_folders() -> list[str]:
    """The folders of the standard library in use, in the order in which they are searched."""
    known = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    return [path for path in sys.path if Path(path).is_dir() and _is_in(os.path.realpath(path), known)]


def readable_files(libraries: Mapping[str, Sequence[str]]) -> list[str]:
    """Every file and directory that confined code may read, with all that lies beneath.

    Args:
        libraries: Folder -> names in it, as `sandbox.libraries.library_files` gives them.
    """
    paths = [os.path.join(folder, name) for folder, names in libraries.items() for name in names]  # noqa: PTH118
    for folder in standard_library_folders():
        paths += (entry.path for entry in os.scandir(folder) if entry.name not in _NOT_STDLIB)
    for folder in _shared_object_folders():
        paths += _shared_objects(folder)
    paths += (path for path in _SYSTEM if Path(path).exists())
    return sorted({os.path.realpath(path) for path in paths})


def others_can_read(path: str) -> bool:
    """Whether a user who owns nothing can reach a directory and list it."""
    here = Path(os.path.realpath(path))
    return here.stat().st_mode & 0o005 == 0o005 and all(parent.stat().st_mode & 0o001 for parent in here.parents)


def _is_in(path: str, folders: set[str]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


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
    if not any(entry.name.startswith("python") and entry.is_dir() for entry in entries):
        is_system = folder.startswith(("/lib", "/usr/lib"))
        if is_system:
            return [folder]
    return [entry.path for entry in entries if _SHARED_OBJECT.search(entry.name) and entry.is_file()]
