"""What this machine can do for a rollout: versions, and what the code sandbox enforces here.

Knows the sandbox by its public report; starts it, tries it, and stops it again.
"""

from __future__ import annotations

import asyncio
import json
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Final

from rich.console import Console
from rich.table import Table

from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.sandbox.local_executor import LocalExecutor
from strands_rollout.sandbox.sandbox_processes import LAYERS, Isolation, SandboxReport

_PACKAGES: Final = ("strands-rollout", "strands-agents", "transformers", "httpx", "numpy", "sympy", "slime", "torch")
_TRIES: Final = 20
_MEANING: Final = {
    "limits": "memory, disk, files, threads, time",
    "user": "another user than root",
    "files": "no file but its own",
    "syscalls": "no network, process or device",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found.

    Attributes:
        python: Version and path.
        machine: System, kernel and processor.
        versions: Package -> version, None where it is not installed.
        sandbox: What is enforced; None where the sandbox does not start.
        fault: Why it does not, else None.
        call_ms: Median milliseconds of a call that does nothing; None where none was made.
        wanted: The isolation that was asked for.
    """

    python: str
    machine: str
    versions: dict[str, str | None]
    sandbox: SandboxReport | None
    fault: str | None
    call_ms: float | None
    wanted: str

    @property
    def ok(self) -> bool:
        """Whether code can be run here with the isolation that was asked for."""
        return self.fault is None


def to_isolation(name: str) -> Isolation:
    """The mode of that name.

    Raises:
        ConfigError: There is none.
    """
    for isolation in LAYERS:
        if isolation == name:
            return isolation
    raise ConfigError(f"isolation is {name!r}; expected one of {', '.join(LAYERS)}")


def examine(isolation: Isolation) -> Diagnosis:
    """Look at this machine; starts the sandbox with whatever it can enforce, and judges by `isolation`."""
    report, fault, call_ms = asyncio.run(_try_sandbox(isolation))
    uname = platform.uname()
    return Diagnosis(
        python=f"{platform.python_version()} at {sys.executable}",
        machine=f"{uname.system} {uname.release}, {uname.machine}",
        versions={name: _version(name) for name in _PACKAGES},
        sandbox=report,
        fault=fault,
        call_ms=call_ms,
        wanted=isolation,
    )


async def _try_sandbox(isolation: Isolation) -> tuple[SandboxReport | None, str | None, float | None]:
    try:
        async with LocalExecutor(isolation="rlimits") as executor:
            report = await executor.start()
            times_s = [await _time_call(executor) for _ in range(_TRIES)]
    except RolloutError as e:
        return None, str(e), None
    try:
        async with LocalExecutor(isolation=isolation):
            fault = None
    except RolloutError as e:
        fault = str(e)
    return report, fault, statistics.median(times_s) * 1000


async def _time_call(executor: LocalExecutor) -> float:
    started = time.perf_counter()
    await executor.run("pass")
    return time.perf_counter() - started


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis for people."""
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in diagnosis.versions.items())
    console.print(
        f"Python    {diagnosis.python}\nMachine   {diagnosis.machine}\nPackages  {versions}\n", highlight=False
    )
    report = diagnosis.sandbox
    if report is not None:
        table = Table("layer", "protects", "enforced by", title="code sandbox", title_justify="left")
        for layer, meaning in _MEANING.items():
            how = report.enforced.get(layer) or f"MISSING: {report.missing.get(layer, 'not needed: this is not root')}"
            table.add_row(layer, meaning, how)
        console.print(table)
        console.print(
            f"Isolation: {report.isolation}. Started in {report.start_s:.1f} s; an empty call takes "
            f"{diagnosis.call_ms:.1f} ms.",
            highlight=False,
        )
    if diagnosis.fault is not None:
        console.print(f"error: {diagnosis.fault}", style="bold", highlight=False, markup=False)


def to_json(diagnosis: Diagnosis) -> str:
    """A diagnosis for programs, on one line."""
    return json.dumps(asdict(diagnosis) | {"ok": diagnosis.ok})
