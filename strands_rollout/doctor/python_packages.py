"""Are Python and the installed packages those that this package was written for?

The ranges are those of its own metadata, read where it is installed; nothing is imported to find a version.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Final

from strands_rollout.doctor.finding import Finding, error, good, warning

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OURS: Final = "strands-rollout"
_NOT_FOR_A_RUN: Final = ("dev", "bench")  # extras of those who work on this package
_REINSTALL: Final = "install this package again: pip install -e /path/to/strands-rollout"


def check_python(version: str | None = None, path: Sequence[str] | None = None) -> list[Finding]:
    """Whether Python is new enough.

    Args:
        version: None for that of this process.
        path: Where packages are looked for; None for this process's `sys.path`.
    """
    from packaging.specifiers import SpecifierSet

    version = version or platform.python_version()
    ours = _distribution(OURS, path)
    wanted = _field(ours, "Requires-Python") if ours else None
    if wanted and not SpecifierSet(wanted).contains(version, prereleases=True):
        remedy = f"make an environment with a Python {wanted} and install this package there"
        return [error("python", f"Python {version} at {sys.executable}; expected {wanted}", remedy)]
    uname = platform.uname()
    found = f"Python {version} at {sys.executable}, on {uname.system} {uname.release}, {uname.machine}"
    return [good("python", found, python=version, machine=f"{uname.system} {uname.release}, {uname.machine}")]


def check_packages(path: Sequence[str] | None = None) -> list[Finding]:
    """Whether what this package requires is there, in the versions that it takes; optional packages where installed.

    Args:
        path: Where packages are looked for; None for this process's `sys.path`.
    """
    ours = _distribution(OURS, path)
    if ours is None:
        return [error("packages", f"{OURS} is not installed: its requirements are not known", _REINSTALL)]
    faults: dict[str, Finding] = {}
    fine: dict[str, str] = {OURS: _field(ours, "Version")}
    for requirement, extra in _requirements(ours):
        if extra in _NOT_FOR_A_RUN:
            continue
        for wanted in (requirement, *_of_extras(requirement, path)):
            version = installed_version(wanted.name, path)
            fault = _fault(wanted, version, optional=extra is not None)
            if fault is not None:
                faults.setdefault(fault.name, fault)
            elif version is not None:
                fine[wanted.name] = version
    shown = ", ".join(f"{name} {version}" for name, version in sorted(fine.items()))
    return [good("packages", f"as required: {shown}", versions=fine), *faults.values()]


def installed_version(name: str, path: Sequence[str] | None = None) -> str | None:
    """The version of a distribution, "" where its metadata has none; None where it is not installed."""
    found = _distribution(name, path)
    return None if found is None else _field(found, "Version")


def _field(distribution: metadata.Distribution, name: str) -> str:
    """A field of its metadata; "" where it has none, or no metadata at all."""
    return next(iter(distribution.metadata.get_all(name) or []), "")


def _distribution(name: str, path: Sequence[str] | None) -> metadata.Distribution | None:
    return next(iter(metadata.distributions(name=name, path=list(sys.path if path is None else path))), None)


def _requirements(distribution: metadata.Distribution) -> Iterator[tuple[Requirement, str | None]]:
    """What a distribution requires here, each with the extra that asks for it."""
    from packaging.requirements import Requirement

    extras = distribution.metadata.get_all("Provides-Extra") or []
    for line in distribution.requires or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement, None
            continue
        for extra in extras:
            if requirement.marker.evaluate({"extra": extra}):
                yield requirement, extra


def _of_extras(requirement: Requirement, path: Sequence[str] | None) -> Iterator[Requirement]:
    """What the extras of a requirement require in turn, such as the one ANTLR that math-verify's grammar works with."""
    from packaging.utils import canonicalize_name

    asked = {canonicalize_name(extra) for extra in requirement.extras}
    found = _distribution(requirement.name, path) if asked else None
    for inner, extra in _requirements(found) if found else ():
        if extra is not None and canonicalize_name(extra) in asked:
            yield inner
            yield from _of_extras(inner, path)


def _fault(wanted: Requirement, version: str | None, *, optional: bool) -> Finding | None:
    """What is wrong with a package; an optional one that is too old fails only those who use it."""
    from packaging.version import InvalidVersion, Version

    name, remedy = f"package {wanted.name}", f"pip install '{wanted.name}{wanted.specifier}'"
    if version is None:
        return None if optional else error(name, f"not installed; expected {wanted.specifier or 'any'}", remedy)
    found = f"{wanted.name} {version or 'without a version'}; expected {wanted.specifier or 'any'}"
    try:
        number = Version(version)
    except InvalidVersion:
        return error(name, f"{found}: its metadata can't be read", f"pip install --force-reinstall '{wanted.name}'")
    if wanted.specifier.contains(number, prereleases=True):
        return None
    operators = (">=", "~=", "==", ">")
    bounds = [Version(part.version.removesuffix(".*")) for part in wanted.specifier if part.operator in operators]
    too_old = any(number < bound for bound in bounds)
    if too_old and not optional:
        return error(name, f"{found}: too old", remedy)
    return warning(name, f"{found}: {'too old' if too_old else 'newer than what was tested'}", remedy)
