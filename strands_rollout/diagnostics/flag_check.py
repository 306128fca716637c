"""Check the arguments of a training command as slime, Megatron-LM, SGLang and its router would parse them.

slime parses with `parse_known_args` everywhere, so it silently drops a misspelled flag. This module finds misspelled
flags, words that no flag takes, and flags that contradict each other or this package. It does not repeat the checks
that slime makes at its start. The installed parsers are read in a child process. If a package's flags can't be read
there, they come from `data/slime_flags.json`, which `scripts/record_flags.py` wrote.

A launch script of this package, or a project's `run_slime.sh`, is run with --dry-run, which prints its command. Other
scripts are neither run nor parsed: only a shell knows which arguments they pass on. The error shows how to make such a
script print its arguments.
"""

import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from textwrap import shorten
from typing import Final, Literal

from pydantic import BaseModel

from strands_rollout.diagnostics import count_of, flag_probe, package_folders, run_program
from strands_rollout.dump.terminal import PlainConsole
from strands_rollout.errors import ConfigError
from strands_rollout.files.json_codec import Json

RECORD: Final = Path(__file__).parents[1] / "data" / "slime_flags.json"
TITLES: Final = {"slime": "slime", "megatron": "Megatron-LM", "sglang": "SGLang", "router": "SGLang's router"}
_TIMEOUT_S: Final = 180.0
_DRY_RUN_TIMEOUT_S: Final = 60.0
_MIN_PREFIX: Final = 6
_MAX_NOTE_CHARS: Final = 160
_SECRET_FLAG: Final = re.compile(r"key|token|secret|password")
# Replacements for the flags of SGLang that slime sets itself (slime/backends/sglang_utils).
_REPLACEMENTS: Final = {
    "--sglang-model-path": "--hf-checkpoint",
    "--sglang-tp-size": "--rollout-num-gpus-per-engine",
    "--sglang-tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "--sglang-random-seed": "--seed",
}

_TRAIN_PROGRAM: Final = re.compile(r"\btrain(?:_async)?\.py['\"]?(?=\s)")
_QUOTED: Final = re.compile(r"""'[^']*'|\\.|"(?:\\.|[^"\\$`])*"|\$'(?P<ansi>(?:\\.|[^'\\])*)'""", re.DOTALL)
_SHELL_CODE: Final = re.compile(r"[$`|&;<>()]")
_SOURCES_LIBRARY: Final = re.compile(r"^\s*(?:source|\.)\s.*\b(?P<library>slime_launch|train)\.sh\b", re.MULTILINE)
_NEGATIVE_NUMBER: Final = re.compile(r"-\d+|-\d*\.\d+")
_PLACEHOLDER: Final = re.compile(r"<SLIME_DIR>|<MODEL_ARGS of scripts/models/[^/<>]+\.sh in slime>")
# Prints what a script submits to Ray, and keeps slime's own scripts from ending processes here and on other nodes.
_PRINT_ARGUMENTS: Final = (
    """bash -c 'pkill() { :; }; ssh() { :; }; sleep() { :; }; """
    """ray() { [[ "$1 $2" != "job submit" ]] || printf "%q " "$@"; }; source "$0"'"""
)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of slime's train.py or train_async.py, and where they come from."""

    words: tuple[str, ...]
    source: str  # for reports, such as "bash FILE --dry-run"


def read_script(script: Path, slime_dir: Path | None) -> Arguments:
    """Return the arguments that the script's dry run prints; without a dry run, the arguments in the file.

    Raises:
        ConfigError: The file can't be read, is a script without a dry run, or has an unclosed quote; or the dry run
            fails, or prints no command with train.py or train_async.py.
    """
    if script.exists() and not script.is_file():  # a pipe or a device may never end
        raise ConfigError(f"got {script}; expected a regular file, or - for arguments on stdin")
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        raise ConfigError(f"can't read the script {script}: {e.strerror}") from e
    if not _has_dry_run(script, text):
        return read_arguments(text, str(script))
    environment = {**os.environ, **({} if slime_dir is None else {"SLIME_DIR": str(slime_dir)})}
    result = run_program("bash", str(script), "--dry-run", env=environment, timeout_s=_DRY_RUN_TIMEOUT_S)
    if result is None or result.exit_code is None:
        reason = "there is no bash" if result is None else f"the script did not end within {_DRY_RUN_TIMEOUT_S:g} s"
        raise ConfigError(f"bash {script} --dry-run gave no arguments: {reason}")
    if result.exit_code != 0:
        raise ConfigError(f"bash {script} --dry-run failed with exit code {result.exit_code}: {result.stderr}")
    if not _TRAIN_PROGRAM.search(result.stdout):
        raise ConfigError(
            f"bash {script} --dry-run prints no command with train.py or train_async.py of slime; expected a script "
            "that starts one of them"
        )
    return read_arguments(result.stdout, f"bash {script} --dry-run")


def read_command(script: Path | None, slime_dir: Path | None) -> Arguments:
    """Return the arguments of `script`; the path "-" stands for stdin, and None for no arguments.

    Raises:
        ConfigError: The file can't be read; the text of stdin, or of a file without a dry run, can't be split into
            arguments; the script's dry run fails; or it prints no command with train.py or train_async.py.
    """
    if script is None:
        return Arguments((), "the command line")
    if str(script) == "-":
        return read_arguments(sys.stdin.read(), "stdin")
    return read_script(script, slime_dir)


def _has_dry_run(script: Path, text: str) -> bool:
    """Return True for launch scripts of this package, and for a project's `run_slime.sh`."""
    library = script.resolve().parent / "slime_launch.sh"
    sourced = _SOURCES_LIBRARY.search(text)
    # a script for one model sources train.sh, which reads the options
    reads_options = "\nread_options " in text or (sourced is not None and sourced["library"] == "train")
    is_launch_script = library.is_file() and sourced and reads_options
    is_project_script = "--dry-run)" in text and "| strands-rollout doctor --flags -" in text
    return bool(is_launch_script or is_project_script)


def read_arguments(text: str, source: str) -> Arguments:
    """Split a text into its arguments, which the text quotes as for a shell.

    If the text is a command, skip everything up to train.py or train_async.py.

    Raises:
        ConfigError: The text is a script, contains code that only a shell can expand or run, or has an unclosed quote.
    """
    programs = list(_TRAIN_PROGRAM.finditer(text))
    arguments = _QUOTED.sub(_requote_ansi, text[programs[-1].end() :] if programs else text)
    shell_code = _SHELL_CODE.search(_QUOTED.sub("", arguments))
    if text.startswith("#!") or shell_code:
        got = f"shell code ({shell_code[0]!r})" if shell_code else "a script"
        raise ConfigError(
            f"{source} is {got}, which is neither run nor parsed; expected arguments, each quoted as for a shell, or a "
            f"launch script of this package. To check another script, make it print its arguments:\n"
            f"  {_PRINT_ARGUMENTS} SCRIPT | strands-rollout doctor --flags -"
        )
    try:
        return Arguments(tuple(shlex.split(arguments.replace("\\\n", " "))), source)
    except ValueError as e:
        raise ConfigError(
            f"{source} can't be split into arguments: {e}; expected each argument quoted as for a shell"
        ) from e


def _requote_ansi(quoted: re.Match[str]) -> str:
    r"""Quote text such as $'a\nb', written by bash's `printf %q`, in a form that shlex can parse."""
    if quoted["ansi"] is None:
        return quoted[0]
    unescaped = quoted["ansi"].encode().decode("unicode_escape", "replace")  # UTF-8 is escaped byte by byte
    return shlex.quote(unescaped.encode("latin-1", "replace").decode(errors="replace"))


def is_flag(word: str) -> bool:
    """Return whether argparse reads a word as a flag.

    A flag is a hyphen and at least one other character, has no space before a "=", and is not a negative number.
    Since slime's parsers have no flag that looks like a negative number, argparse reads -1 as a value. But -1e-5 is a
    flag here, because argparse up to CPython 3.13 does not recognize it as a number.
    """
    is_text = len(word) > 1 and word.startswith("-") and " " not in word.split("=")[0]
    return is_text and not _NEGATIVE_NUMBER.fullmatch(word)


class Flag(BaseModel, frozen=True):
    """A flag of argparse with all its names; the recorded file leaves out fields that have their default value."""

    names: tuple[str, ...]
    system: str  # package that declares the flag: a key of TITLES
    parser: str = "main"  # slime's parser that reads the flag: "main", "sglang" or "pre"
    nargs: int | str | None = None  # as in argparse: None for one value, 0 for none, a number, "?", "*" or "+"


@dataclass(frozen=True)
class FlagTable:
    """All flags that slime's parsers know."""

    flags: tuple[Flag, ...]
    left_out: frozenset[str]  # SGLang's flags that slime does not pass on, in slime's spelling
    abbreviating: frozenset[str]  # parsers that accept an unambiguous prefix of a flag instead of the flag
    sources: tuple[str, ...]  # a line per system: the source of its flags (probed or recorded), and its version

    @cached_property
    def _by_name(self) -> dict[str, list[Flag]]:
        named: dict[str, list[Flag]] = {}
        for flag in self.flags:
            for name in flag.names:
                named.setdefault(name, []).append(flag)
        return named

    def find(self, name: str) -> list[Flag]:
        """Return the flags with exactly this name, one for each parser that has it."""
        return self._by_name.get(name, [])

    def expansions_of(self, name: str) -> list[str]:
        """Return the names of flags that begin with `name`; only parsers that accept abbreviations count."""
        longer = ((known, flags) for known, flags in self._by_name.items() if known.startswith(name))
        return sorted(known for known, flags in longer if any(flag.parser in self.abbreviating for flag in flags))

    def nearest(self, name: str) -> str | None:
        """Return the known flag that was likely meant by `name`; None if none is similar."""
        stem = name.lstrip("-").replace("_", "-")
        for spelled in (f"--{stem}", f"--sglang-{stem}", f"--router-{stem}"):
            if spelled in self._by_name:
                return spelled
        longer = [known for known in self._by_name if known.startswith(name)]
        if len(longer) == 1 or (longer and len(name) >= _MIN_PREFIX):
            return min(longer, key=lambda known: (len(known), known))
        return next(iter(difflib.get_close_matches(f"--{stem}", self._by_name, n=1, cutoff=0.6)), None)


def load_flag_table(
    slime_dir: Path | None, megatron_dir: Path | None = None, *, timeout_s: float = _TIMEOUT_S
) -> FlagTable:
    """Return the flags of the installed packages, and the recorded flags of packages whose flags can't be read.

    If the probe fails or takes longer than `timeout_s` seconds, return the recorded flags alone.
    """
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    try:
        answer = probe_flags(slime_dir, megatron_dir, timeout_s=timeout_s)
    except ConfigError as e:
        answer = {**record, "flags": [], "failed": dict.fromkeys(TITLES, str(e)), "versions": {}}
    failed = answer["failed"]
    recorded = [flag for flag in map(Flag.model_validate, record["flags"]) if flag.system in failed]
    recorded_names = {(name, flag.parser) for flag in recorded for name in flag.names}
    # use the recorded row of a Megatron-LM flag whose default slime changes: without Megatron-LM, the probe reports
    # such a flag as slime's
    probed = [
        flag
        for flag in map(Flag.model_validate, answer["flags"])
        if not {(name, flag.parser) for name in flag.names} & recorded_names
    ]
    versions = {"slime": str(slime_dir), "megatron": "the importable package", **answer["versions"]}
    sources = []
    for system, title in TITLES.items():
        source = f"read from its parser, {versions.get(system) or 'version unknown'}"
        if system in failed:
            note = shorten(failed[system], _MAX_NOTE_CHARS, placeholder="...")
            source = f"recorded, {record['sources'][system]['version']} ({note})"
        sources.append(f"{title}: {source}")
    left_out = (record if "sglang" in failed else answer)["left_out"]
    return FlagTable((*probed, *recorded), frozenset(left_out), frozenset(answer["abbreviating"]), tuple(sources))


def probe_flags(
    slime_dir: Path | None,
    megatron_dir: Path | None = None,
    *,
    python: str = sys.executable,
    timeout_s: float = _TIMEOUT_S,
) -> Json:
    """Run the probe on a checkout of slime and return its answer, as `flag_probe.read_all_flags` describes it.

    `python` should have SGLang and the packages that Megatron-LM requires. Megatron-LM is imported from `megatron_dir`,
    else from MEGATRON_DIR, else from the folder beside slime; if it is not there, the installed package is imported.

    Raises:
        ConfigError: `slime_dir` is None, or the probe failed or took longer than `timeout_s` seconds.
    """
    if slime_dir is None:
        raise ConfigError("no checkout of slime was found")
    megatron = megatron_dir or os.environ.get("MEGATRON_DIR") or slime_dir.resolve().parent / "Megatron-LM"
    paths = [str(megatron), str(slime_dir), os.environ.get("PYTHONPATH")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONHASHSEED": "0",  # the parsers turn sets into lists, whose order must not vary
    }
    answer = run_program(
        python, "-W", "ignore", flag_probe.__file__, str(slime_dir), env=environment, timeout_s=timeout_s
    )
    if answer is None:
        raise ConfigError(f"slime's parsers could not be read: there is no program {python}")
    if answer.exit_code is None:
        raise ConfigError(f"slime's parsers could not be read within {timeout_s:g} s")
    if answer.exit_code != 0:
        reason = (answer.stderr or f"exit code {answer.exit_code}").splitlines()[-1]
        raise ConfigError(f"slime's parsers could not be read: {reason}")
    return json.loads(answer.stdout)


def find_slime_checkout(named: Path | None) -> Path | None:
    """Return slime's checkout: `named`, else SLIME_DIR, else the importable slime's; None if there is none.

    Raises:
        ConfigError: `named` is not a checkout of slime; or `named` is None, and SLIME_DIR is not a checkout of slime.
    """
    # PyPI has an unrelated package named slime, so look for files of THUDM's slime
    files = (flag_probe.MAIN_ARGUMENTS, flag_probe.SGLANG_ARGUMENTS)
    wanted = named or (Path(os.environ["SLIME_DIR"]) if os.environ.get("SLIME_DIR") else None)
    folders = [wanted] if wanted else [package.parent for package in package_folders("slime")]
    found = next((folder for folder in folders if all((folder / name).is_file() for name in files)), None)
    if wanted and not found:
        raise ConfigError(f"got slime at {wanted}; expected a checkout of THUDM/slime, which has {' and '.join(files)}")
    return found


@dataclass(frozen=True, slots=True)
class FlagFinding:
    """A problem of a flag, of a word after it, or of a word before the first flag.

    The problem is an error in these cases: the flag would end the run or make its episodes fail; the flag or the word
    would be ignored; the flag is abbreviated. Any other problem is a warning.
    """

    severity: Literal["error", "warning"]
    flag: str  # the flag as written in the command, or the word before the first flag
    problem: str
    nearest: str | None = None  # the known flag that was likely meant

    def line(self) -> str:
        """Return the finding as a line of a report."""
        return f"{self.severity}: {self.flag}: {self.problem}"


@dataclass(frozen=True, slots=True)
class FlagFindings:
    """The problems of a command's flags."""

    flags: int  # number of flags in the command
    findings: tuple[FlagFinding, ...]  # errors first
    unread: tuple[str, ...] = ()  # placeholders that a dry run printed for arguments that it could not read

    @property
    def ok(self) -> bool:
        """True if there is no error."""
        return all(finding.severity != "error" for finding in self.findings)


def report_flags(
    script: Path | None,
    arguments: Sequence[str] = (),
    *,
    as_json: bool,
    strict: bool = False,
    slime_dir: Path | None = None,
    megatron_dir: Path | None = None,
) -> bool:
    """Check `arguments` and the arguments of a launch script, a file or stdin ("-"), and print the problems.

    Returns:
        True if there is no error and, if `strict`, no warning.

    Raises:
        ConfigError: The arguments have no flag, `slime_dir` or SLIME_DIR is not a checkout of slime, or
            `read_command` can't read the arguments.
    """
    slime = find_slime_checkout(slime_dir)
    read = read_command(script, slime)
    with PlainConsole(stderr=True).status("reading the parsers of slime, Megatron-LM and SGLang ..."):
        table = load_flag_table(slime, megatron_dir)
    found = check_flags((*read.words, *arguments), table)
    if found.flags == 0:
        raise ConfigError(
            f"nothing was checked: found no flag in {read.source}; expected arguments of slime's train.py"
        )
    is_ok = not found.findings if strict else found.ok
    notes = [f"{word} stands for arguments that could not be read, so they are not checked" for word in found.unread]
    if as_json:
        shown = {"ok": is_ok, "script": None if script is None else str(script), "how": read.source}
        known = {"sources": table.sources, "flags": found.flags, "notes": notes}
        print(json.dumps({**shown, **known, "findings": [asdict(finding) for finding in found.findings]}))
        return is_ok
    console = PlainConsole(markup=False, highlight=False, soft_wrap=True)
    console.print(f"flags of {read.source}: {found.flags}")
    for line in (*(f"  {source}" for source in table.sources), *(f"note: {note}" for note in notes)):
        console.print(line)
    for finding in found.findings:
        console.print(finding.line(), style="red" if finding.severity == "error" else "yellow")
    errors = sum(finding.severity == "error" for finding in found.findings)
    console.print(f"errors: {errors}, warnings: {len(found.findings) - errors}" if found.findings else "all known")
    return is_ok


def check_flags(words: Sequence[str], table: FlagTable) -> FlagFindings:
    """Check the arguments of one command."""
    starts = [at for at, word in enumerate(words) if is_flag(word)]
    before, *parts = [words[begin:end] for begin, end in pairwise([0, *starts, len(words)])]
    unread = tuple(word for word in before if _PLACEHOLDER.fullmatch(word))
    uses = [_FlagUse.of(word, following) for word, *following in parts]
    problem = "no flag precedes this word; slime silently drops it"
    findings = [FlagFinding("error", word, problem) for word in before if word not in unread]
    findings += [finding for use in uses for finding in _check_use(use, table)]
    findings += _find_conflicts(uses)
    in_order = sorted(dict.fromkeys(findings), key=lambda finding: finding.severity != "error")
    return FlagFindings(len(uses), tuple(in_order), unread)


@dataclass(frozen=True, slots=True)
class _FlagUse:
    flag: str
    values: tuple[str, ...]  # a value joined to the flag by "=", and the words up to the next flag

    @classmethod
    def of(cls, word: str, following: Sequence[str]) -> "_FlagUse":
        flag, equals, joined = word.partition("=")
        return cls(flag, (joined, *following) if equals else tuple(following))

    def shown(self, text: str) -> str:
        return "(not shown)" if _SECRET_FLAG.search(self.flag) else repr(text)

    def fault(
        self, problem: str, nearest: str | None = None, *, severity: Literal["error", "warning"] = "error"
    ) -> FlagFinding:
        return FlagFinding(severity, self.flag, problem, nearest)


def _check_use(use: _FlagUse, table: FlagTable) -> Iterator[FlagFinding]:
    if use.flag == "--":
        yield use.fault("argparse reads no flag after this word; remove it")
        return
    flags = table.find(use.flag)
    for flag in flags:
        yield from map(use.fault, _extra_word_problems(use, flag))
    if not flags:
        yield use.fault(*_explain_unknown(use.flag, table))


def _extra_word_problems(use: _FlagUse, flag: Flag) -> Iterator[str]:
    max_values = flag.nargs if isinstance(flag.nargs, int) else 1 if flag.nargs in (None, "?") else len(use.values)
    for value in use.values[max_values:]:
        yield f"got the extra word {use.shown(value)}, which slime silently drops; remove it, or put its flag before it"


def _explain_unknown(name: str, table: FlagTable) -> tuple[str, str | None]:
    """Return what happens to a flag outside of the table, and the flag that was likely meant, if any."""
    if name in table.left_out:
        replacement = _REPLACEMENTS.get(name)
        replacement = replacement if replacement and table.find(replacement) else None
        hint = f"use {replacement}" if replacement else "leave it out"
        return f"SGLang has this flag, but slime sets it itself and drops yours; {hint}", replacement
    longer = table.expansions_of(name)
    if len(longer) == 1:
        problem = f"SGLang's parser reads it as {longer[0]} only while no other flag begins like this"
        return f"{problem}; write {longer[0]}", longer[0]
    nearest = table.nearest(name)
    owners = " and ".join(TITLES[flag.system] for flag in table.find(nearest or ""))
    meant = f"; nearest known: {nearest} ({owners})" if nearest else ""
    if longer:
        matches = ", ".join(longer[:3]) + (" ..." if len(longer) > 3 else "")
        return f"it abbreviates {len(longer)} flags ({matches}), so SGLang's parser ends the run{meant}", nearest
    return f"no parser knows it, and slime silently drops it{meant}", nearest


def _find_conflicts(uses: Sequence[_FlagUse]) -> Iterator[FlagFinding]:
    """Find contradictions that slime does not refuse at its start (slime_validate_args in slime/utils/arguments.py)."""
    last = {use.flag: use for use in uses}
    values = {name: use.values[0] for name, use in last.items() if use.values}
    generate = values.get("--custom-generate-function-path", "")
    if "--apply-chat-template" in last and generate.startswith("strands_rollout."):
        problem = f"{generate} renders messages itself and refuses rendered prompts; leave this flag out"
        yield last["--apply-chat-template"].fault(problem)
    yield from _batch_faults(last, values)


def _batch_faults(last: Mapping[str, _FlagUse], values: Mapping[str, str]) -> Iterator[FlagFinding]:
    """Yield findings about numbers of samples, optimizer steps and GPUs that don't fit together.

    Megatron checks at its start that its replicas share a batch evenly. It does so even with slime's dynamic batch
    sizes; the micro batch is then 1 (`init_num_microbatches_calculator` in
    slime/backends/megatron_utils/initialize.py).
    """

    def size(name: str, default: int = 0) -> int:
        text = values.get(name, str(default))
        return int(text) if text.isdecimal() else 0

    samples = size("--rollout-batch-size") * size("--n-samples-per-prompt")
    batch, at, steps = size("--global-batch-size"), "--global-batch-size", size("--num-steps-per-rollout")
    if "--num-steps-per-rollout" in last:
        batch, at = (samples // steps if steps else 0), "--num-steps-per-rollout"
        if samples and steps > samples and values.get("--num-rollout") != "0":
            yield last[at].fault(
                f"got {steps} optimizer steps; expected at most {samples}, the number of samples of a rollout"
            )
    # --num-rollout 0 only evaluates
    if batch and samples and values.get("--num-rollout") != "0":
        if samples < batch:
            yield last[at].fault(
                f"got {batch}; expected at most {samples}, the number of samples of a rollout; with more, training "
                "fails"
            )
        elif samples % batch and at == "--global-batch-size":
            rest = f"the last {samples % batch} of a rollout's {samples} samples are not trained on"
            yield last[at].fault(f"got {batch}; expected a divisor of {samples}: {rest}", severity="warning")
    world = size("--actor-num-nodes", 1) * size("--actor-num-gpus-per-node")
    replica = prod(size(f"--{kind}-parallel-size", 1) for kind in ("tensor-model", "pipeline-model", "context"))
    if not world or not replica or "--debug-rollout-only" in last:
        return
    if world % replica:
        yield last["--actor-num-gpus-per-node"].fault(
            f"got {count_of(world, 'GPU')} for training; expected a multiple of the {replica} GPUs of a replica "
            "(tensor x pipeline x context parallel sizes); otherwise, Megatron stops"
        )
        return
    replicas, each = world // replica, size("--micro-batch-size", 1)
    if batch and each and batch % (replicas * each) and "--decrease-batch-size-if-needed" not in last:
        micro = f" x micro batches of {each} samples" if each > 1 else ""
        yield last[at].fault(
            f"got {batch} samples in an optimizer step; expected a multiple of {replicas * each} "
            f"({count_of(replicas, 'replica')}{micro}); otherwise, Megatron stops"
        )
