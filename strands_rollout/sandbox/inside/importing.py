"""How confined code finds modules: the standard library and the chosen libraries, and nothing else.

Where the sandbox's user can't traverse to them (a Python under a 0700 home), they are reached through directory
descriptors that were opened before the user changed: a walk that starts at /proc/self/fd/N needs no right on what lies
above N. The rights on the files themselves still hold, and so do the kernel's confinements.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class LibraryFinder:
    """A meta path finder for the top-level modules of the chosen libraries.

    Args:
        libraries: Folder -> names in it that may be imported.
    """

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
    """Folders that stay reachable after a change of user.

    Attributes:
        numbers: The descriptors.
    """

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


def allow_imports(libraries: Mapping[str, Sequence[str]]) -> None:
    """Let the chosen libraries be imported in this process."""
    sys.meta_path.append(LibraryFinder(libraries))
