"""Looks before and after a run: the machine, slime's flags, chat templates, data, and saved episodes.

Here is what a diagnosis is asked and what it answers: the question, the findings of checks, and how checks are run.
Imports nothing heavy: the command line reads the question's options before it runs a command.
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
from strands_rollout.play.options import Changes, checked_url

if TYPE_CHECKING:
    from rich.console import Console

MODEL_NAME: Final = "Qwen3-8B"
SHIPPED_TOKENIZER: Final = Path(__file__).parents[1] / "engine" / "checkpoint"
_LIMIT_S: Final = 60.0
_END_S: Final = 1.0  # what a killed process gets to end before it is left behind
_INDENT: Final = 9

Status = Literal["ok", "warning", "error", "skipped"]
_STYLES: Final[dict[Status, str]] = {"ok": "green", "warning": "yellow", "error": "bold red", "skipped": "dim"}
FindPackage = Callable[[str], ModuleSpec | None]
"""Finds what `import` would take, without importing it."""


@dataclass(frozen=True, slots=True)
class Question:
    """What to look at: the options of `strands-rollout doctor`, and the environment that completes them."""

    env: Mapping[str, str]  # of the run
    repository: Path  # where data/, models/ and checkpoints/ are unless `env` names other folders
    base_urls: Annotated[
        list[str] | None,
        Option(
            "--base-url",
            help="An SGLang server or router to ask; may be given more than once.",
            callback=checked_url,
        ),
    ] = None
    max_context_length: Annotated[
        int | None, Option(help="Tokens of prompt and response that the servers must take.", min=1)
    ] = None
    tokenizer: Annotated[
        Path | None, Option(help="Folder of the tokenizer; default: the model's, else the shipped one.")
    ] = None
    model_name: Annotated[
        str | None,
        Option(help="The model's name or id on the hub, such as Qwen/Qwen3-4B; default: MODEL, else Qwen3-8B."),
    ] = None
    config: Annotated[
        Path | None,
        Option(help="The YAML for slime's --custom-config-path; default: ROLLOUT_CONFIG, else configs/math_code.yaml."),
    ] = None
    changes: Changes = None
    data: Annotated[
        list[Path] | None,
        Option(help="A prompt data set; may be given more than once; default: those that the scripts use."),
    ] = None
    slime_dir: Annotated[Path | None, Option(help="slime's checkout; default: SLIME_DIR, else importable.")] = None
    megatron_dir: Annotated[
        Path | None, Option(help="Megatron-LM's; default: MEGATRON_DIR, else beside slime or importable.")
    ] = None
    gpus: Annotated[
        int | None, Option(help="How many GPUs there must be; default: NUM_GPUS, else 8 with --training.", min=0)
    ] = None
    training: Annotated[
        bool, Option("--training", help="Fail on all that a training run on this machine can't do without.")
    ] = False
    isolation: Annotated[
        Literal["full", "files", "seccomp", "rlimits"], Option(help="What the code sandbox must enforce.")
    ] = "full"

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
        return name if "/" in name else f"{'Qwen' if name.startswith('Qwen') else 'OWNER'}/{name}"

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
        """The folder of the tokenizer to check."""
        of_model = self.model if (self.model / "tokenizer.json").is_file() else SHIPPED_TOKENIZER
        return self.tokenizer or of_model

    @property
    def config_file(self) -> Path | None:
        """The configuration to check; None where there is none."""
        default = self.repository / "configs" / "math_code.yaml"
        return self.config or self.named("ROLLOUT_CONFIG") or (default if default.is_file() else None)


def find_repository() -> Path:
    """The checkout that this package is installed from; the current folder where it was installed without one."""
    root = Path(__file__).parents[2]
    return root if (root / "pyproject.toml").is_file() else Path.cwd()


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    An error: a run would fail, or train on something else than was meant. A warning: it may, or something that a run
    needs is missing. Skipped: not asked for.
    """

    name: str  # of what was checked
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


def missing(name: str, found: str, remedy: str, *, needed: bool) -> Finding:
    """Something is not here: an error where the run needs it, else a warning."""
    return (error if needed else warning)(name, found, remedy)


def skipped(name: str, found: str) -> Finding:
    """Not checked, or not asked for."""
    return Finding(name, "skipped", found)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found, in the order of the checks."""

    findings: Sequence[Finding]

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
        """Print it for people; what was set aside, with remedies that nobody needs now, is one line."""
        from rich.text import Text

        aside = [one for one in self.findings if one.status == "skipped" and one.remedy is not None]
        shown = [one for one in self.findings if one not in aside]
        if aside:
            kinds = ", ".join(dict.fromkeys(one.name.partition(":")[0] for one in aside))
            found = f"not asked for, and no GPU here: {kinds}; `strands-rollout doctor --training` says what is missing"
            shown.append(skipped("training", found))
        for finding in shown:
            words = f"{finding.name}: {finding.found}"
            width = max(console.width - _INDENT, 1)
            first, *rest = wrap(words, width, break_long_words=False, break_on_hyphens=False)
            status = (f"{finding.status:<{_INDENT}}", _STYLES[finding.status])
            console.print(Text.assemble(status, first), soft_wrap=True)
            for line in rest:
                console.print(Text(f"{'':<{_INDENT}}{line}"), soft_wrap=True)
            if finding.remedy is not None:  # whole, to be copied
                console.print(Text(f"{'':<{_INDENT}}-> {finding.remedy}"), soft_wrap=True)
        counts = Counter(finding.status for finding in shown)
        totals = ", ".join(f"{status}: {counts[status]}" for status in _STYLES if counts[status])
        console.print(f"\n{totals}", highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """One look at the machine."""

    name: str  # of the finding if the check itself fails
    look: Callable[[Question], Iterable[Finding]]  # may raise anything
    # for something outside this process. Those that don't wait run one at a time: they import the same large packages
    waits: bool = False


def run_checks(checks: Sequence[Check], question: Question, limit_s: float = _LIMIT_S) -> list[Finding]:
    """What all checks found, in their order; none can stop the rest.

    Checks that wait run beside each other and beside the others. One that has not ended after `limit_s` seconds, as on
    a file system that hangs, is given up.
    """
    findings: dict[Check, list[Finding]] = {}

    def run(group: Sequence[Check]) -> None:
        for check in group:
            findings[check] = _look(check, question)

    groups = [[check] for check in checks if check.waits] + [[check for check in checks if not check.waits]]
    # daemons: a check that hangs must not keep the process from ending
    threads = [threading.Thread(target=run, args=(group,), name="doctor", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    given_up = f"did not end within {limit_s:g} s, and was given up"
    remedy = "look for a disk, mount or driver that hangs: the processes in state D of: ps aux"
    return [one for check in checks for one in findings.get(check, [error(check.name, given_up, remedy)])]


def _look(check: Check, question: Question) -> list[Finding]:
    try:
        return list(check.look(question))
    except ImportError as e:
        reinstall = "install this package again, with what it requires: pip install -e /path/to/strands-rollout"
        return [error(check.name, f"{e.name or 'a package'} can't be imported: {e}", reinstall)]
    except Exception as e:  # one broken check must not hide what the others found
        report = "report it, with the output of: strands-rollout doctor --json"
        return [error(check.name, f"this is a bug in the check: {type(e).__name__}: {e}", report)]


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended and what it printed; its exit code is None where it did not end in time."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""

    @property
    def printed(self) -> str:
        """What it printed, on one line, errors first; its exit code where it printed nothing."""
        text = " ".join(f"{self.stderr} {self.stdout}".split())
        return text[:300] or f"exit code {self.exit_code}"


def run_program(*command: str, env: Mapping[str, str], limit_s: float) -> ProgramResult | None:
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
        return ProgramResult(process.returncode, stdout.strip(), stderr.strip())
    except subprocess.TimeoutExpired:
        return ProgramResult(None)
    finally:
        # one that waits inside a driver can't be killed, and is left behind
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate(timeout=_END_S)


def package_folders(name: str, find_package: FindPackage = importlib.util.find_spec) -> list[Path]:
    """The folders of the package that would be imported; none where there is none."""
    try:
        spec = find_package(name)
    except (ImportError, ValueError):
        return []
    if spec is None or (spec.origin is None and name == "slime"):
        return []  # slime is no namespace package: an empty folder of that name hides nothing
    return [Path(folder) for folder in spec.submodule_search_locations or [str(spec.origin)]]
