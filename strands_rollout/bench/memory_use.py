"""Memory of this process: what it takes at its peak, what was allocated, and how large a sample's arrays are."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")
_FORGET_PEAK: Final = "5"


def rss_bytes() -> int:
    """Resident memory now; the peak so far where the system does not tell."""
    return _status_bytes("VmRSS") or _peak_so_far()


def forget_peak() -> bool:
    """Begin a new peak of resident memory; whether the system can do that."""
    try:
        _CLEAR.write_text(_FORGET_PEAK)
    except OSError:
        return False
    return True


def peak_rss_bytes() -> int:
    """The peak of resident memory, since `forget_peak` where that could be done."""
    return _status_bytes("VmHWM") or _peak_so_far()


def array_bytes(arrays: Iterable[list[int] | list[float] | None]) -> int:
    """Memory of lists and of the numbers in them, each number counted once; what other lists share counts as well."""
    lists = [array for array in arrays if array is not None]
    numbers = {id(number): number for array in lists for number in array}
    return sum(map(sys.getsizeof, lists)) + sum(map(sys.getsizeof, numbers.values()))


def _status_bytes(name: str) -> int:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    found = next((line for line in lines if line.startswith(f"{name}:")), f"{name}: 0 kB")
    return int(found.split()[1]) * 1024


def _peak_so_far() -> int:
    """Linux tells KiB, macOS bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
