"""Runs checks: those that wait beside each other, those that compute one after the other; none can stop the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Final

from strands_rollout.doctor.finding import Finding, error

LIMIT_S: Final = 60.0
_REPORT: Final = "report it, with the output of: strands-rollout doctor --json"
_REINSTALL: Final = "install this package again, with what it requires: pip install -e /path/to/strands-rollout"


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """One look at the machine.

    Attributes:
        name: Of the line that is shown if it fails itself.
        look: Makes its findings; may raise anything.
        waits: For something outside this process, so that others may go on meanwhile. Only one of those that do not
            runs at a time: they import the same large packages.
    """

    name: str
    look: Callable[[], Sequence[Finding]]
    waits: bool = False


def run_checks(checks: Sequence[Check], limit_s: float = LIMIT_S) -> list[Finding]:
    """What all checks found, in their order.

    Args:
        checks: To run.
        limit_s: Seconds after which those that have not ended, as on a file system that hangs, are given up.
    """
    ends: dict[Check, Future[list[Finding]]] = {check: Future() for check in checks}
    groups = [[check] for check in checks if check.waits] + [[check for check in checks if not check.waits]]
    for group in groups:
        # daemons: a check that hangs must not keep the process from ending
        threading.Thread(target=_run, args=(group, ends), name="doctor", daemon=True).start()
    deadline_s = time.monotonic() + limit_s
    return [finding for check, end in ends.items() for finding in _wait(check, end, deadline_s, limit_s)]


def _run(checks: Sequence[Check], ends: dict[Check, Future[list[Finding]]]) -> None:
    for check in checks:
        ends[check].set_result(_look(check))


def _look(check: Check) -> list[Finding]:
    try:
        return list(check.look())
    except ImportError as e:
        return [error(check.name, f"{e.name or 'a package'} can't be imported: {e}", _REINSTALL)]
    except Exception as e:  # one broken check must not hide what the others found
        return [error(check.name, f"this is a bug in the check: {type(e).__name__}: {e}", _REPORT)]


def _wait(check: Check, end: Future[list[Finding]], deadline_s: float, limit_s: float) -> list[Finding]:
    try:
        return end.result(max(0.0, deadline_s - time.monotonic()))
    except FutureTimeoutError:
        remedy = "look for a disk, mount or driver that hangs: the processes in state D of: ps aux"
        return [error(check.name, f"did not end within {limit_s:g} s, and was given up", remedy)]
