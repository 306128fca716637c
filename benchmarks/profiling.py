"""Profile a thread's CPU time by package and function.

Uses cProfile with a clock of the thread's CPU time. Profiling slows small functions down more than large ones, so read
shares, not times. A C function counts for the package that `_NATIVE_PACKAGES` gives for the function's
module, else for the caller's package.
"""

import cProfile
import re
import sysconfig
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any, Final

import strands_rollout

_STANDARD_LIBRARY: Final = "standard library"
_NATIVE_PACKAGES: Final = {
    "orjson": "orjson",
    "tokenizers": "tokenizers",
    "_json": "json",
    "_socket": "sockets",
    "select": "asyncio",
    "_asyncio": "asyncio",
    "_contextvars": "asyncio",
    "aiohttp": "aiohttp",
    "frozenlist": "aiohttp",
    "multidict": "aiohttp",
    "yarl": "aiohttp",
    "pydantic_core": "pydantic",
}
_LISTED_MODULES: Final = ("asyncio", "copy", "json", "threading", "concurrent", "logging", "uuid", "ssl", "contextlib")
_SPLIT_PACKAGES: Final = ("strands", "opentelemetry")
_NATIVE_MODULE: Final = re.compile(r"^<(\w+)\.|built-in method (\w+)\.|' of '(\w+)\.")
_SITE: Final = sysconfig.get_paths()["purelib"]
_STDLIB: Final = sysconfig.get_paths()["stdlib"]
_BENCHMARKS: Final = str(Path(__file__).parent)
_OURS: Final = str(Path(strands_rollout.__file__).parent)


def start_profile() -> cProfile.Profile:
    """Start a profiler of this thread and return it."""
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    return profiler


def profile_figures(profiler: cProfile.Profile, functions: int = 25) -> dict[str, Any]:
    """Return the shares by package, in percent, and the functions with the largest shares.

    Args:
        profiler: A stopped profiler.
        functions: Number of functions to return.
    """
    packages: dict[str, float] = defaultdict(float)
    places: dict[str, float] = defaultdict(float)
    for entry in profiler.getstats():
        if not isinstance(entry.code, CodeType):
            continue
        package = _package_of(entry.code)
        packages[package] += entry.inlinetime
        places[_function_label(entry.code)] += entry.inlinetime
        for call in entry.calls or ():
            if not isinstance(call.code, CodeType):
                packages[_native_package(call.code) or package] += call.inlinetime
                places[str(call.code)] += call.inlinetime
    total = sum(packages.values()) or 1.0
    return {
        "share_percent_by_package": _shares(packages, total, len(packages)),
        "share_percent_by_function": _shares(places, total, functions),
    }


def _shares(times: Mapping[str, float], total: float, count: int) -> dict[str, float]:
    largest = sorted(times.items(), key=lambda one: -one[1])[:count]
    return {name: round(100 * spent / total, 2) for name, spent in largest}


def _package_of(code: CodeType) -> str:
    name = code.co_filename
    if name.startswith(_BENCHMARKS):
        return "the benchmark"
    if name.startswith(_OURS):
        return "strands_rollout"
    if name.startswith(_SITE):
        parts = Path(name).relative_to(_SITE).with_suffix("").parts
        return ".".join(parts[: 2 if parts[0] in _SPLIT_PACKAGES else 1])
    if name == "<template>":
        return "jinja2"
    first = Path(name).relative_to(_STDLIB).parts[0].removesuffix(".py") if name.startswith(_STDLIB) else ""
    return first if first in _LISTED_MODULES else _STANDARD_LIBRARY


def _native_package(code: Any) -> str | None:
    found = _NATIVE_MODULE.search(str(code))
    return _NATIVE_PACKAGES.get(found[found.lastindex or 0]) if found else None


def _function_label(code: CodeType) -> str:
    path = Path(code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{code.co_firstlineno} {code.co_qualname}"
