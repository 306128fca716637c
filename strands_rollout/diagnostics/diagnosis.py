"""What a diagnosis is asked and what it answers: the question, the findings of checks, and how checks are run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Final, Literal

from rich.console import Console
from rich.text import Text

from strands_rollout.code_tool.local.supervisor_link import Isolation
from strands_rollout.errors import foreign_code
from strands_rollout.files import Json

MODEL_NAME: Final = "Qwen3-8B"
SHIPPED_TOKENIZER: Final = Path(__file__).parents[1] / "engine" / "checkpoint"
LIMIT_S: Final = 60.0
_END_S: Final = 1.0  # what a killed process gets to end before it is left alone
_INDENT: Final = 9

Status = Literal["ok", "warning", "error", "skipped"]
_STYLES: Final[dict[Status, str]] = {"ok": "green", "warning": "yellow", "error": "bold red", "skipped": "dim"}
FindPackage = Callable[[str], ModuleSpec | None]
"""Finds what `import` would take, without importing it."""


@dataclass(frozen=True, slots=True)
class Question:
    """What to look at; where the scripts of this repository put things unless it is said otherwise."""

    env: Mapping[str, str]  # of the run
    repository: Path  # where data/, models/ and checkpoints/ are unless `env` says otherwise
    isolation: Isolation = "full"  # what the code sandbox must enforce
    base_urls: tuple[str, ...] = ()  # of SGLang servers or routers
    tokenizer: Path | None = None  # its folder; None for the model's, if it is there, else the shipped one
    config: Path | None = None  # of slime's --custom-config-path; None for ROLLOUT_CONFIG, else the repository's
    data: tuple[Path, ...] = ()  # prompt data sets; none for those that the scripts use
    slime_dir: Path | None = None  # slime's checkout; None for SLIME_DIR, else the importable one
    megatron_dir: Path | None = None  # Megatron-LM's; None for MEGATRON_DIR, else beside slime's or importable
    gpus: int | None = None  # how many there must be; None for NUM_GPUS, else what training needs
    training: bool = False  # whether a training run is to start here, so that what it can't do without is an error
    model_name: str | None = None  # or its id on the hub; None for MODEL, else Qwen3-8B
    max_context_length: int | None = None  # tokens that the servers must take

    def named(self, variable: str) -> Path | None:
        """The path that a variable of the environment names; None where it is not set, or empty."""
        value = self.env.get(variable)
        return Path(value) if value else None

    @property
    def data_dir(self) -> Path:
        """Where the prompt data sets are."""
        return self.named("DATA_DIR") or self.repository / "data"

    @property
    def model_dir(self) -> Path:
        """Where the models are."""
        return self.named("MODEL_DIR") or self.repository / "models"

    @property
    def model_id(self) -> str:
        """The model's id on the hub."""
        name = self.model_name or self.env.get("MODEL") or MODEL_NAME
        return name if "/" in name else f"Qwen/{name}"

    @property
    def model(self) -> Path:
        """The model that a run starts from."""
        return self.named("HF_CHECKPOINT") or self.model_dir / self.model_id.rpartition("/")[2]

    @property
    def converted_model(self) -> Path:
        """The same in Megatron's format."""
        return self.named("REF_LOAD") or Path(f"{self.model}_torch_dist")

    @property
    def prepare_model(self) -> str:
        """The command that fetches and converts the model."""
        other = "" if self.model_id == f"Qwen/{MODEL_NAME}" else f" --model {self.model_id}"
        return f"bash scripts/prepare_model.sh{other}"

    @property
    def tokenizer_dir(self) -> Path:
        """The folder of the tokenizer that is looked at."""
        of_model = self.model if (self.model / "tokenizer.json").is_file() else SHIPPED_TOKENIZER
        return self.tokenizer or of_model


def find_repository() -> Path:
    """The checkout that this package is installed from; the current folder where it was installed without one."""
    root = Path(__file__).parents[2]
    return root if (root / "pyproject.toml").is_file() else Path.cwd()


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    An error: a run would fail, or train on something else than was meant. A warning: it may, or a part of what a run
    needs is not here. Skipped: not asked for.
    """

    name: str  # of what was looked at
    status: Status
    found: str  # with the names and numbers that were found
    remedy: str | None = None  # with the command to type where there is one; None where nothing is to be done
    facts: Mapping[str, Json] = field(default_factory=dict)  # what programs may want to know besides, by name


def good(name: str, found: str, **facts: object) -> Finding:
    """All is well."""
    return Finding(name, "ok", found, facts=facts)


def warning(name: str, found: str, remedy: str) -> Finding:
    """Something may go wrong."""
    return Finding(name, "warning", found, remedy)


def error(name: str, found: str, remedy: str) -> Finding:
    """Something will go wrong."""
    return Finding(name, "error", found, remedy)


def lacking(name: str, found: str, remedy: str, *, training: bool) -> Finding:
    """What a training run can't do without is not here: an error where one is meant, else a warning."""
    return (error if training else warning)(name, found, remedy)


def skipped(name: str, found: str) -> Finding:
    """Not looked at, or not asked for."""
    return Finding(name, "skipped", found)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found, in the order of the checks."""

    findings: tuple[Finding, ...]

    def ok(self, *, strict: bool = False) -> bool:
        """Whether there is no error; nor, if `strict`, a warning."""
        bad = {"error", "warning"} if strict else {"error"}
        return not any(finding.status in bad for finding in self.findings)

    def to_json(self, *, strict: bool = False) -> str:
        """For programs, on one line: the verdict, each check, and the facts that checks found, by name."""
        checks = [{key: getattr(one, key) for key in ("name", "status", "found", "remedy")} for one in self.findings]
        facts = {key: value for finding in self.findings for key, value in finding.facts.items()}
        return json.dumps({"ok": self.ok(strict=strict), "checks": checks, **facts})

    def show(self, console: Console) -> None:
        """Print it for people."""
        for finding in self.findings:
            status = (f"{finding.status:<{_INDENT}}", _STYLES[finding.status])
            console.print(Text.assemble(status, f"{finding.name}: {finding.found}"), soft_wrap=True)
            if finding.remedy is not None:
                console.print(f"{'':<{_INDENT}}-> {finding.remedy}", highlight=False, markup=False, soft_wrap=True)
        counts = Counter(finding.status for finding in self.findings)
        totals = ", ".join(f"{counts[status]} {status}" for status in _STYLES if counts[status])
        console.print(f"\n{totals}", highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """One look at the machine."""

    name: str  # of the line that is shown if it fails itself
    look: Callable[[], Sequence[Finding]]  # may raise anything
    # for something outside this process, so that others may go on meanwhile; only one of those that do not wait runs at
    # a time: they import the same large packages
    waits: bool = False


def run_checks(checks: Sequence[Check], limit_s: float = LIMIT_S) -> list[Finding]:
    """What all checks found, in their order; none can stop the rest.

    Args:
        checks: Those that wait run beside each other, the others one after the other.
        limit_s: Seconds after which those that have not ended, as on a file system that hangs, are given up.
    """
    ends: dict[Check, Future[list[Finding]]] = {check: Future() for check in checks}

    def run(group: Sequence[Check]) -> None:
        for check in group:
            ends[check].set_result(_look(check))

    for group in [[check] for check in checks if check.waits] + [[check for check in checks if not check.waits]]:
        # daemons: a check that hangs must not keep the process from ending
        threading.Thread(target=run, args=(group,), name="doctor", daemon=True).start()
    deadline_s = time.monotonic() + limit_s
    found: list[Finding] = []
    for check, end in ends.items():
        try:
            found += end.result(max(0.0, deadline_s - time.monotonic()))
        except FutureTimeoutError:
            remedy = "look for a disk, mount or driver that hangs: the processes in state D of: ps aux"
            found.append(error(check.name, f"did not end within {limit_s:g} s, and was given up", remedy))
    return found


def _look(check: Check) -> list[Finding]:
    with foreign_code("one broken check must not hide what the others found") as outcome:
        return list(check.look())
    fault = outcome.error
    if isinstance(fault, ImportError):
        reinstall = "install this package again, with what it requires: pip install -e /path/to/strands-rollout"
        return [error(check.name, f"{fault.name or 'a package'} can't be imported: {fault}", reinstall)]
    report = "report it, with the output of: strands-rollout doctor --json"
    return [error(check.name, f"this is a bug in the check: {type(fault).__name__}: {fault}", report)]


@dataclass(frozen=True, slots=True)
class Answer:
    """What another program said; its exit code is None where it did not end in time."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""

    @property
    def words(self) -> str:
        """What it printed, on one line, errors first; its exit code where it printed nothing."""
        text = " ".join(f"{self.stderr} {self.stdout}".split())
        return text[:300] or f"exit code {self.exit_code}"


def run_program(*command: str, env: Mapping[str, str], limit_s: float) -> Answer | None:
    """Run a program of `env`'s PATH without input, for a limited time; None where there is none of that name.

    After `limit_s` seconds it is killed, with all that it started. One that hangs in the kernel must not hang us.
    """
    program = shutil.which(command[0], path=env.get("PATH", ""))
    if program is None:
        return None
    process = subprocess.Popen(  # noqa: S603 - named by our checks
        [program, *command[1:]],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Answer(None)
    finally:
        if process.poll() is None:
            _kill(process)
    return Answer(process.returncode, stdout.strip(), stderr.strip())


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # one that waits inside a driver can't be killed, and is left behind
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def package_folders(name: str, find_package: FindPackage = importlib.util.find_spec) -> list[Path]:
    """The folders of the package that would be imported; none where there is none."""
    try:
        spec = find_package(name)
    except (ImportError, ValueError):
        return []
    if spec is None or (spec.origin is None and name == "slime"):
        return []  # slime is no namespace package: a mere folder of that name stands in nobody's way
    return [Path(folder) for folder in spec.submodule_search_locations or [str(spec.origin)]]
