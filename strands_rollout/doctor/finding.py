"""One line of a diagnosis: what was looked at, what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warning", "error", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        name: Of what was looked at.
        status: "error": a run would fail, or train on something else than was meant. "warning": it may, or a part of
            what a run needs is not here. "skipped": not asked for.
        found: In words, with the names and numbers that were found.
        remedy: What to do, with the command to type where there is one; None where nothing is to be done.
        facts: What programs may want to know besides, by name; JSON values.
    """

    name: str
    status: Status
    found: str
    remedy: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def good(name: str, found: str, **facts: Any) -> Finding:  # noqa: ANN401 - any JSON value
    """All is well."""
    return Finding(name, "ok", found, facts=facts)


def warning(name: str, found: str, remedy: str) -> Finding:
    """Something may go wrong."""
    return Finding(name, "warning", found, remedy)


def lacking(name: str, found: str, remedy: str, *, training: bool) -> Finding:
    """What a training run can't do without is not here: an error where one is meant, else a warning."""
    return (error if training else warning)(name, found, remedy)


def error(name: str, found: str, remedy: str) -> Finding:
    """Something will go wrong."""
    return Finding(name, "error", found, remedy)


def skipped(name: str, found: str) -> Finding:
    """Not looked at, or not asked for."""
    return Finding(name, "skipped", found)
