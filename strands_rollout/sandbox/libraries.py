"""Finds the files of the libraries that model-written code may import.

Knows installed distributions; reads their metadata and imports none of them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from strands_rollout.errors import ConfigError

_EXTRA = re.compile(r";.*\bextra\b")
_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


def library_files(names: Iterable[str]) -> dict[str, list[str]]:
    """What must be readable for these libraries and all that they require.

    Args:
        names: Names of distributions or of top-level modules ("scikit-learn" or "sklearn").

    Returns:
        Folder -> sorted names in it, of files and directories.

    Raises:
        ConfigError: A library is not installed.
    """
    found: dict[str, set[str]] = {}
    for distribution in _closure(names):
        for folder, name in _entries(distribution):
            found.setdefault(folder, set()).add(name)
    return {folder: sorted(entries) for folder, entries in sorted(found.items())}


def _closure(names: Iterable[str]) -> Iterator[metadata.Distribution]:
    """The distributions behind the names, then what they require and is installed."""
    pending = [_distribution(name) for name in names]
    seen: set[str] = set()
    while pending:
        distribution = pending.pop()
        if distribution.name in seen:
            continue
        seen.add(distribution.name)
        yield distribution
        for requirement in distribution.requires or ():
            name = _NAME.match(requirement)
            if name is None or _EXTRA.search(requirement):
                continue
            try:
                pending.append(metadata.distribution(name[1]))
            except metadata.PackageNotFoundError:
                continue  # its marker is for another platform or Python


def _distribution(name: str) -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        pass
    owners = metadata.packages_distributions().get(name)
    if not owners:
        raise ConfigError(
            f"libraries names {name!r}, which is not installed for this Python; install it (pip install {name}) or "
            "take it off the list"
        )
    return metadata.distribution(owners[0])


def _entries(distribution: metadata.Distribution) -> Iterator[tuple[str, str]]:
    """The top-level entries of a distribution: (folder, name)."""
    for file in distribution.files or ():
        if not file.is_absolute() and ".." not in file.parts and file.parts[:1] not in {(), ("__pycache__",)}:
            yield str(distribution.locate_file("")), file.parts[0]
    # its modules are asked for as well: a distribution of the operating system's has no list of files, and an editable
    # one lists only the file that leads to its sources
    for module in _top_level_modules(distribution):
        spec = importlib.util.find_spec(module)
        if spec is None:
            continue
        for place in spec.submodule_search_locations or [spec.origin or ""]:
            path = Path(place)
            if path.exists():
                yield str(path.parent), path.name


def _top_level_modules(distribution: metadata.Distribution) -> list[str]:
    listed = distribution.read_text("top_level.txt")
    if listed is not None:
        return [name for name in listed.split() if name.isidentifier()]
    name = distribution.name.replace("-", "_")
    return [name] if name.isidentifier() else []
