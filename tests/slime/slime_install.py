"""Finds a checkout of THUDM/slime and makes it importable on a machine without a GPU.

Knows where slime's packages lie and what its rollout side imports but never calls; nothing of our package.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

# Imported at the top of slime's rollout and trainer-side modules; of these the rollout path calls nothing but ray.put.
_NEVER_CALLED = {
    "ray": ("ray", "ray.util", "ray.util.scheduling_strategies"),
    "sglang": ("sglang", "sglang.srt", "sglang.srt.constants", "sglang.srt.server_args", "sglang.srt.utils"),
    "wandb": ("wandb",),
}


def find_slime() -> Path | None:
    """The folder that holds THUDM's package `slime`: `SLIME_PATH`, else where `import slime` would find it."""
    if os.environ.get("SLIME_PATH"):
        root = Path(os.environ["SLIME_PATH"]).resolve()
        return root if _is_slime(root / "slime") else None
    try:
        spec = importlib.util.find_spec("slime")
    except (ImportError, ValueError):
        return None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return next((folder.parent for folder in folders if _is_slime(folder)), None)


def _is_slime(package: Path) -> bool:
    """Whether a folder is THUDM's package: the one of PyPI, and this file's own folder, have the same name."""
    return (package / "rollout" / "sglang_rollout.py").is_file()


@contextmanager
def importable(root: Path) -> Iterator[None]:
    """Put slime on the path, and empty modules in the place of the packages of its cluster that are not installed."""
    absent = [name for package, names in _NEVER_CALLED.items() if not _is_installed(package) for name in names]
    sys.path.insert(0, str(root))
    for name in absent:
        sys.modules[name] = _Placeholder(name)
    try:
        yield
    finally:
        sys.path.remove(str(root))
        for name in absent:
            sys.modules.pop(name, None)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


class _Placeholder(ModuleType):
    """A module whose names are all there, and are decorators that change nothing when they are called."""

    __path__ = []  # noqa: RUF012 - declared by ModuleType

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unchanged


def _unchanged(value: Any = None, **_options: Any) -> Any:
    return value
