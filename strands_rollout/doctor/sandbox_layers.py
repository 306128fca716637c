"""What the code sandbox enforces on this machine: starts it, tries it, and stops it again.

Knows the sandbox by its public report.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import asdict
from typing import Final

from strands_rollout.doctor.finding import Finding, error, good, skipped
from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.sandbox.local_executor import LocalExecutor
from strands_rollout.sandbox.sandbox_processes import LAYERS, Isolation, SandboxReport

MEANING: Final = {
    "limits": "memory, disk, files, threads, time",
    "user": "another user than root",
    "files": "no file but its own",
    "syscalls": "no network, process or device",
}
_TRIES: Final = 20
_REMEDIES: Final = {
    "limits": "run on Linux or macOS, where a process can be limited",
    "user": "run as an ordinary user, or let the container change users (docker run --cap-add SETUID --cap-add SETGID)",
    "files": "use a kernel with Landlock (Linux 5.13 or newer), or run as root",
    "syscalls": "use Linux with seccomp on x86-64 or aarch64",
}
_OTHERS: Final = "free the temporary folder, or name another executor in the settings, such as sandbox_fusion"


def to_isolation(name: str) -> Isolation:
    """The mode of that name.

    Raises:
        ConfigError: There is none.
    """
    for isolation in LAYERS:
        if isolation == name:
            return isolation
    raise ConfigError(f"isolation is {name!r}; expected one of {', '.join(LAYERS)}")


def check_sandbox(isolation: Isolation) -> list[Finding]:
    """Whether model-written code can be run with this isolation; starts the sandbox with all that it can enforce."""
    try:
        report, call_ms = asyncio.run(_try())
    except RolloutError as e:
        return [error("sandbox", f"the code sandbox does not start: {e}", _OTHERS)]
    return judge(report, isolation, call_ms)


def judge(report: SandboxReport, isolation: Isolation, call_ms: float) -> list[Finding]:
    """A line for the sandbox and one for each of its layers.

    Args:
        report: What is enforced.
        isolation: What was asked for.
        call_ms: What a call that does nothing takes.
    """
    found = (
        f"the strongest isolation here is {report.isolation}, {isolation} was asked for; started in "
        f"{report.start_s:.1f} s, an empty call takes {call_ms:.1f} ms"
    )
    whole = good("sandbox", found, sandbox=asdict(report), call_ms=call_ms, wanted=isolation)
    return [whole, *(_layer(layer, report, isolation) for layer in MEANING)]


def _layer(layer: str, report: SandboxReport, isolation: Isolation) -> Finding:
    name, meaning = f"sandbox {layer}", MEANING[layer]
    if layer in report.enforced:
        return good(name, f"{meaning}: {report.enforced[layer]}")
    if layer not in report.missing:
        return good(name, f"{meaning}: not needed, this is not root")
    found = f"MISSING ({meaning}): {report.missing[layer]}"
    if layer not in LAYERS[isolation]:
        return skipped(name, f"{found}; isolation {isolation} does not ask for it")
    weaker = next(mode for mode, layers in LAYERS.items() if layer not in layers or mode == "rlimits")
    accept = f"; or accept less in the settings: executor: {{name: local, isolation: {weaker}}}"
    return error(name, found, f"{_REMEDIES[layer]}{accept}")


async def _try() -> tuple[SandboxReport, float]:
    """What is enforced, and the median milliseconds of an empty call."""
    async with LocalExecutor(isolation="rlimits") as executor:
        report = await executor.start()
        times_s = [await _time_call(executor) for _ in range(_TRIES)]
    return report, statistics.median(times_s) * 1000


async def _time_call(executor: LocalExecutor) -> float:
    started = time.perf_counter()
    await executor.run("pass")
    return time.perf_counter() - started
