"""Checks before and after a run: machine, servers, slime's flags, chat templates, data, rewards and saved episodes.

This module contains the doctor's options, `Finding`, `run_checks`, and functions that several checks use. It imports
no large packages, because the command line reads the options before it runs any command.
"""

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Final, Literal

from typer import Option

from strands_rollout.files.json_codec import Json
from strands_rollout.play.options import Changes, check_url

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_MODEL_NAME: Final = "Qwen3-8B"
SHIPPED_TOKENIZER: Final = Path(__file__).parents[1] / "engine" / "checkpoint"
_CHECKS_TIMEOUT_S: Final = 60.0
_KILL_WAIT_S: Final = 1.0
_INDENT: Final = 9

Status = Literal["ok", "warning", "error", "skipped"]
_STYLES: Final[dict[Status, str]] = {"ok": "green", "warning": "yellow", "error": "bold red", "skipped": "dim"}
FindPackage = Callable[[str], ModuleSpec | None]
"""Function that finds a package without importing it, such as `importlib.util.find_spec`."""


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """The options of `strands-rollout doctor`, and the environment variables that set their defaults."""

    env: Mapping[str, str]  # environment variables of the run
    repository: Path  # contains configs/, scripts/ and, unless `env` names other folders, data/, models/, checkpoints/
    base_urls: Annotated[
        list[str] | None,
        Option(
            "--base-url",
            help="URL of an SGLang server or router to check; may be repeated.",
            callback=check_url,
        ),
    ] = None
    max_context_length: Annotated[
        int | None, Option(help="Tokens of prompt plus response that the servers must accept.", min=1)
    ] = None
    tokenizer: Annotated[
        Path | None,
        Option(
            help="Folder of the run's tokenizer. Default: the model's folder if it has a tokenizer.json, else the "
            "folder of the shipped model."
        ),
    ] = None
    model_name: Annotated[
        str | None,
        Option(
            help="Name of the model, or its id on the Hugging Face Hub, such as Qwen/Qwen3-4B. Default: with "
            "--training the command's model, else $MODEL, else Qwen3-8B."
        ),
    ] = None
    config: Annotated[
        Path | None,
        Option(
            help="Settings file, as for slime's --custom-config-path; with --training, the command's own settings "
            "file overrides it. Default: $ROLLOUT_CONFIG, else configs/math_code.yaml."
        ),
    ] = None
    changes: Changes = None
    data: Annotated[
        list[Path] | None,
        Option(
            help="Prompt data set to check; may be repeated. Default: with --training the command's data sets, else "
            "the data sets of the launch scripts."
        ),
    ] = None
    slime_dir: Annotated[
        Path | None, Option(help="Checkout of slime. Default: $SLIME_DIR, else the importable package.")
    ] = None
    megatron_dir: Annotated[
        Path | None,
        Option(help="Checkout of Megatron-LM. Default: $MEGATRON_DIR, else beside slime, else the importable package."),
    ] = None
    prompt_key: str = "prompt"  # key of the prompt in the data sets
    label_key: str | None = None  # key of the label; "label" if this is None
    gpus: Annotated[
        int | None,
        Option(
            help="Number of GPUs required on this machine. Default: 0 if $RAY_ADDRESS is set, else with --training "
            "the command's GPUs per node, else $NUM_GPUS, else 8 with --training and 0 without.",
            min=0,
        ),
    ] = None
    training: Annotated[
        bool,
        Option(
            "--training",
            help="Check the command of a training run too, and report missing requirements of the run as errors.",
        ),
    ] = False
    isolation: Annotated[
        Literal["full", "files", "seccomp", "rlimits"],
        Option(help="Isolation that the code sandbox must enforce for code that starts no programs."),
    ] = "full"

    def path_in_env(self, variable: str) -> Path | None:
        """Return the path in an environment variable; None if the variable is unset or empty."""
        value = self.env.get(variable)
        return Path(value) if value else None

    @property
    def data_dir(self) -> Path:
        """Folder of the prompt data sets."""
        return self.path_in_env("DATA_DIR") or self.repository / "data"

    @property
    def model_dir(self) -> Path:
        """Folder of the models."""
        return self.path_in_env("MODEL_DIR") or self.repository / "models"

    @property
    def model_id(self) -> str:
        """The model's id on the Hugging Face Hub.

        If the name has no owner, the owner is "Qwen" if the name begins with "Qwen", else "OWNER".
        """
        name = self.model_name or self.env.get("MODEL") or DEFAULT_MODEL_NAME
        return name if "/" in name else f"{'Qwen' if name.startswith('Qwen') else 'OWNER'}/{name}"

    @property
    def model(self) -> Path:
        """Folder of the model that a run starts from."""
        return self.path_in_env("HF_CHECKPOINT") or self.model_dir / self.model_id.rpartition("/")[2]

    @property
    def converted_model(self) -> Path:
        """Folder of the model in Megatron's format."""
        return self.path_in_env("REF_LOAD") or Path(f"{self.model}_torch_dist")

    @property
    def prepare_model_command(self) -> str:
        """The command that downloads and converts the model."""
        # a name that begins with a lower-case letter names a file in slime's scripts/models, so it gets no owner
        bare = self.model_id.removeprefix("OWNER/")
        name = bare if bare[:1].islower() else self.model_id
        model_option = "" if self.model_id == f"Qwen/{DEFAULT_MODEL_NAME}" else f" --model {name}"
        return f"bash scripts/prepare_model.sh{model_option}"

    @property
    def tokenizer_dir(self) -> Path:
        """Folder of the tokenizer to check."""
        default = self.model if (self.model / "tokenizer.json").is_file() else SHIPPED_TOKENIZER
        return self.tokenizer or default

    @property
    def config_file(self) -> Path | None:
        """The settings file to check; None if there is none."""
        default = self.repository / "configs" / "math_code.yaml"
        return self.config or self.path_in_env("ROLLOUT_CONFIG") or (default if default.is_file() else None)


def find_repository() -> Path:
    """Return the checkout that this package is installed from; without a checkout, the current folder."""
    root = Path(__file__).parents[2]
    return root if (root / "pyproject.toml").is_file() else Path.cwd()


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    Its status is one of:

    - "error": a run would fail, or train on something other than intended.
    - "warning": a run may fail or train on something else, or something is missing that only some runs need.
    - "skipped": nothing was checked, or the problem does not matter on this machine or for the requested isolation.
    - "ok": otherwise.
    """

    name: str  # the checked part, such as "disk: checkpoints"
    status: Status
    found: str  # the result, with names and numbers
    remedy: str | None = None  # what to do, with the command to run if there is one; None if nothing is to be done
    facts: Mapping[str, Json] = field(default_factory=dict)  # values for programs that read the JSON, by name


def good(name: str, found: str, **facts: object) -> Finding:
    """Return a finding without a problem."""
    return Finding(name, "ok", found, facts=facts)


def warning(name: str, found: str, remedy: str) -> Finding:
    """Return a finding for something that may fail."""
    return Finding(name, "warning", found, remedy)


def error(name: str, found: str, remedy: str) -> Finding:
    """Return a finding for something that will fail."""
    return Finding(name, "error", found, remedy)


def missing(name: str, found: str, remedy: str, *, needed: bool) -> Finding:
    """Return a finding for something missing: an error if the run needs it, else a warning."""
    return (error if needed else warning)(name, found, remedy)


def count_of(number: float, noun: str) -> str:
    """Return the number and the noun, such as "1 GPU" or "2 GPUs"."""
    shown = f"{number:g}" if isinstance(number, float) else str(number)
    return f"{shown} {noun}" if number == 1 else f"{shown} {noun}s"


def skipped(name: str, found: str) -> Finding:
    """Return a finding for something unchecked, or for something absent that does not matter here."""
    return Finding(name, "skipped", found)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings, in the order of the checks."""

    findings: Sequence[Finding]

    def ok(self, *, strict: bool = False) -> bool:
        """Return whether there is no error and, if `strict`, no warning."""
        bad = {"error", "warning"} if strict else {"error"}
        return not any(finding.status in bad for finding in self.findings)

    def to_json(self, *, strict: bool = False) -> str:
        """Return one line of JSON: the verdict, each finding, and the findings' facts by name."""
        checks = [
            {key: getattr(finding, key) for key in ("name", "status", "found", "remedy")} for finding in self.findings
        ]
        facts = {key: value for finding in self.findings for key, value in finding.facts.items()}
        return json.dumps({"ok": self.ok(strict=strict), "checks": checks, **facts})

    def show(self, console: Console) -> None:
        """Print the findings, then the number of findings by status; skipped warnings about training share one line."""
        from rich.text import Text

        # a skipped finding has a remedy only if it was a warning about training
        about_training = [finding for finding in self.findings if finding.status == "skipped" and finding.remedy]
        shown = [finding for finding in self.findings if finding not in about_training]
        if about_training:
            names = ", ".join(dict.fromkeys(finding.name.partition(":")[0] for finding in about_training))
            found = (
                f"warnings about training are not shown, since there is no GPU: {names}; to show them, run: "
                "strands-rollout doctor --training"
            )
            shown.append(skipped("training", found))
        for finding in shown:
            text = f"{finding.name}: {finding.found}"
            width = max(console.width - _INDENT, 1)
            first, *rest = wrap(text, width, break_long_words=False, break_on_hyphens=False)
            status = (f"{finding.status:<{_INDENT}}", _STYLES[finding.status])
            console.print(Text.assemble(status, first), soft_wrap=True)
            for line in rest:
                console.print(Text(f"{'':<{_INDENT}}{line}"), soft_wrap=True)
            if finding.remedy is not None:  # on one line, so that it can be copied
                console.print(Text(f"{'':<{_INDENT}}-> {finding.remedy}"), soft_wrap=True)
        counts = Counter(finding.status for finding in shown)
        totals = ", ".join(f"{status}: {counts[status]}" for status in _STYLES if counts[status])
        console.print(f"\n{totals}", highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """A function that checks one thing, such as the GPUs, a server or a command's flags."""

    name: str  # name of the finding if the check raises or does not end in time
    run: Callable[[DoctorOptions], Iterable[Finding]]  # may raise any Exception
    waits: bool = False  # True if the check mostly waits, such as for a process or a disk: other checks run meanwhile


def run_checks(checks: Sequence[Check], options: DoctorOptions, timeout_s: float = _CHECKS_TIMEOUT_S) -> list[Finding]:
    """Run all checks and return their findings, in the order of the checks.

    Each check that waits runs in a thread of its own. The other checks import large packages and share one thread.
    Checks that still run after `timeout_s` seconds are abandoned; a file system may hang, for example. If a check
    raises, is abandoned, or has not started by then, its finding is an error.
    """
    findings: dict[Check, list[Finding]] = {}
    started: list[Check] = []

    def run(group: Sequence[Check]) -> None:
        for check in group:
            started.append(check)
            findings[check] = _run_check(check, options)

    groups = [[check] for check in checks if check.waits] + [[check for check in checks if not check.waits]]
    # use daemon threads: a hanging check must not keep the process alive
    threads = [threading.Thread(target=run, args=(group,), name="doctor", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    ended, begun = dict(findings), list(started)  # copies: an abandoned check may still end
    return [finding for check in checks for finding in ended.get(check, [_unfinished(check, begun, timeout_s)])]


def _unfinished(check: Check, begun: Sequence[Check], timeout_s: float) -> Finding:
    within = f"did not end within {timeout_s:g} s"
    if check in begun:
        remedy = "see whether a disk, mount or driver hangs: look for processes in state D in the output of ps aux"
        return error(check.name, f"the check {within}", remedy)
    blocker = next((f"the check {other.name!r}" for other in reversed(begun) if not other.waits), "an earlier check")
    remedy = "follow the remedy of that check, then run strands-rollout doctor again"
    return error(check.name, f"the check did not start, because {blocker} {within}", remedy)


def _run_check(check: Check, options: DoctorOptions) -> list[Finding]:
    try:
        return list(check.run(options))
    except ImportError as e:
        reinstall = "reinstall this package with its requirements: pip install -e /path/to/strands-rollout"
        return [error(check.name, f"{e.name or 'a package'} can't be imported: {e}", reinstall)]
    except Exception as e:  # a broken check must not hide the findings of other checks
        report = "report this bug, with the output of: strands-rollout doctor --json"
        return [error(check.name, f"this is a bug in the check: {type(e).__name__}: {e}", report)]


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The exit code and output of a program; after a timeout, the exit code is None and the output is empty."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""

    @property
    def printed(self) -> str:
        """Standard error, then standard output, on one line, cut to 300 characters; the exit code if both are empty."""
        text = " ".join(f"{self.stderr} {self.stdout}".split())
        return text[:300] or f"exit code {self.exit_code}"


def run_program(*command: str, env: Mapping[str, str], timeout_s: float) -> ProgramResult | None:
    """Run a program from the PATH in `env`, without input; return None if the PATH has no such program.

    After `timeout_s` seconds the program's process group is killed, and the result has no exit code and no output.
    """
    program = shutil.which(command[0], path=env.get("PATH", ""))
    if program is None:
        return None
    process = subprocess.Popen(  # noqa: S603 - the checks name the programs
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
        stdout, stderr = process.communicate(timeout=timeout_s)
        return ProgramResult(process.returncode, stdout.strip(), stderr.strip())
    except subprocess.TimeoutExpired:
        return ProgramResult(None)
    finally:
        # a process that hangs inside a driver can't be killed, so abandon it
        with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            # Don't call `poll`: it would reap a program that has ended before its children. The kernel could then give
            # the group's id to other processes, and `killpg` would kill them.
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate(timeout=_KILL_WAIT_S)


def package_folders(name: str, find_package: FindPackage = importlib.util.find_spec) -> list[Path]:
    """Return what an import would find: the folders of a package, or the file of a module; empty if not found."""
    try:
        spec = find_package(name)
    except (ImportError, ValueError):
        return []
    if spec is None or (spec.origin is None and name == "slime"):
        return []  # a namespace package: just a folder named slime, which need not contain slime's code
    return [Path(folder) for folder in spec.submodule_search_locations or [str(spec.origin)]]
