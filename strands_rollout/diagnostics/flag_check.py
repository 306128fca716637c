"""A launch script's flags, judged as slime, Megatron-LM, SGLang and its router would read them.

slime parses with `parse_known_args` everywhere: it silently drops a misspelled flag. This finds it, and values that no
parser takes, and flags that slime refuses together, as far as the command line alone decides.
Source: slime_validate_args and _resolve_eval_datasets in slime/utils/arguments.py, train_async.py,
slime/utils/dp_schedule.py, slime/ray/rollout.py, slime/rollout/fully_async_rollout.py.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from strands_rollout.diagnostics import flag_script
from strands_rollout.diagnostics.flag_script import Command, Reading, Word
from strands_rollout.diagnostics.flag_table import TITLES, Flag, FlagTable, find_slime, table_of
from strands_rollout.dump.terminal import PlainConsole
from strands_rollout.errors import ConfigError

Severity = Literal["error", "warning"]

_SECRET: Final = re.compile(r"key|token|secret|password")
# What is to be set instead of a flag of SGLang's that slime keeps to itself (slime/backends/sglang_utils).
_INSTEAD: Final = {
    "--sglang-model-path": "--hf-checkpoint",
    "--sglang-tp-size": "--rollout-num-gpus-per-engine",
    "--sglang-tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "--sglang-random-seed": "--seed",
}
_FULLY_ASYNC: Final = "slime.rollout.fully_async_rollout."
_WITH_SUFFIX: Final = re.compile(r"\s*\d+(?:(?:\.\d+)?[kMGT]|[KMGT]i)\s*")
_EXPANSION: Final = re.compile(r"[$`]")  # only the shell knows the text
_MOST_VALUES: Final = 8  # that any flag must have


def _readable_int(text: str) -> int | None:
    """As SGLang's human_readable_int (sglang/srt/utils/common.py): 131072, 128Ki or 25.6k."""
    return None if _WITH_SUFFIX.fullmatch(text) else int(text)


def _not_false(text: str) -> str:
    if text.lower() in ("false", "0", "no", "off", "none"):
        raise ValueError
    return text


_CONVERSIONS: Final[Mapping[str | None, tuple[Callable[[str], object], str]]] = {
    "int": (int, "expected a whole number"),
    "float": (float, "expected a number"),
    "loads": (json.loads, "expected JSON"),
    "human_readable_int": (_readable_int, "expected a whole number, such as 131072, 128Ki or 25.6k"),
    "bool": (_not_false, "any word is read as true; leave the flag out"),
}


@dataclass(frozen=True, slots=True)
class FlagFinding:
    """One fault: an error if the run would stop or do something else than was written, a warning if it may."""

    severity: Severity
    flag: str  # as it was written
    where: str | None  # "FILE:LINE", or None where no file is known
    problem: str
    nearest: str | None = None  # the known flag that was likely meant

    def line(self) -> str:
        """The finding in one line of a report."""
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.severity}: {self.flag}: {self.problem}"


@dataclass(frozen=True, slots=True)
class FlagFindings:
    """How many flags were judged, and the faults, errors first."""

    flags: int
    findings: tuple[FlagFinding, ...]

    @property
    def ok(self) -> bool:
        """Whether no fault is an error."""
        return all(finding.severity != "error" for finding in self.findings)


def report_flags(
    script: Path, *, as_json: bool, slime_dir: Path | None = None, megatron_dir: Path | None = None
) -> bool:
    """Judge the flags of a launch script, "-" for a command on stdin, and print the faults; whether there was no error.

    Raises:
        ConfigError: The script can't be read or names no flags, its dry run fails, or there is no slime in `slime_dir`.
    """
    slime = find_slime(slime_dir)
    on_stdin = str(script) == "-"
    read = flag_script.read_text(sys.stdin.read(), None, slime) if on_stdin else flag_script.read_script(script, slime)
    with PlainConsole(stderr=True).status("asking the parsers of slime, Megatron-LM and SGLang ..."):
        table = table_of(slime, megatron_dir)
    found = judge_reading(read, table)
    if found.flags == 0:
        raise ConfigError(
            f"nothing was judged: found no flag in {script}; "
            "expected a command with train.py or train_async.py, or arrays of its flags"
        )
    if as_json:
        report = {"ok": found.ok, "script": str(script), "how": read.how, "sources": table.sources}
        report |= {"flags": found.flags, "findings": [asdict(finding) for finding in found.findings]}
        print(json.dumps({**report, "notes": read.notes}))
        return found.ok
    console = PlainConsole(markup=False, highlight=False, soft_wrap=True)
    console.print(f"flags of {script}: {found.flags} ({read.how})")
    for line in (*(f"  {source}" for source in table.sources), *(f"note: {note}" for note in read.notes)):
        console.print(line)
    for finding in found.findings:
        console.print(finding.line(), style="red" if finding.severity == "error" else "yellow")
    errors = sum(finding.severity == "error" for finding in found.findings)
    console.print(f"{errors} errors, {len(found.findings) - errors} warnings" if found.findings else "all known")
    return found.ok


def judge_reading(reading: Reading, table: FlagTable) -> FlagFindings:
    """Judge all commands of a script, and the words that may be added to them."""
    flags, findings = 0, []
    for command in reading.commands:
        before, uses = _uses_of(command.words)
        problem = "no flag before it takes this word; slime silently drops it"
        stray = [word for word in before if not word.splits and not word.is_placeholder]
        findings += [FlagFinding("error", word.text, word.place, problem) for word in stray]
        # a script may add values to an array's last flag elsewhere
        possible = [use for words in command.possible for use in _uses_of((*words, Word("", splits=True)))[1]]
        findings += [finding for use in (*uses, *possible) for finding in _check_use(use, table)]
        findings += _duplicates(uses, table)
        if command.program is not None:
            findings += _conflicts(command, uses, possible, table)
        flags += len(uses) + len(possible)
    in_order = sorted(dict.fromkeys(findings), key=lambda finding: finding.severity != "error")
    return FlagFindings(flags, tuple(in_order))


@dataclass(frozen=True, slots=True)
class _Use:
    """A flag as it is used."""

    flag: str
    where: str | None  # "FILE:LINE"
    joined: tuple[str, ...]  # the value that is joined to it by "=", if there is one
    following: tuple[Word, ...]  # the words up to the next flag

    @property
    def values(self) -> tuple[str, ...]:
        return (*self.joined, *(word.text for word in self.following))

    @property
    def splits(self) -> bool:
        """Whether the number of values is left to the shell."""
        return any(word.splits for word in self.following)

    def shown(self, text: str) -> str:
        """A value as a report may show it: none of a flag that may hold a secret."""
        return "(not shown)" if _SECRET.search(self.flag) else repr(text)

    def error(self, problem: str, nearest: str | None = None) -> FlagFinding:
        return FlagFinding("error", self.flag, self.where, problem, nearest)


def _uses_of(words: Sequence[Word]) -> tuple[tuple[Word, ...], list[_Use]]:
    """The words before the first flag, and the uses of flags in order."""
    before, *parts = flag_script.by_flag(words)
    uses = []
    for word, *following in parts:
        name, equals, joined = word.text.partition("=")
        uses.append(_Use(name, word.place, (joined,) if equals else (), tuple(following)))
    return before, uses


def _check_use(use: _Use, table: FlagTable) -> Iterator[FlagFinding]:
    if use.flag == "--":
        yield use.error("argparse takes no flag after it; remove it")
    elif "$" not in use.flag:
        flags = table.find(use.flag)
        for flag in flags:
            yield from map(use.error, _faults_of_values(use, flag))
        if not flags:
            yield use.error(*_what_is_unknown(use.flag, table))


def _faults_of_values(use: _Use, flag: Flag) -> Iterator[str]:
    """What argparse has against the values of a flag, and the words that it leaves over."""

    def convert(text: str) -> str:
        if _EXPANSION.search(text):
            return text
        conversion, expected = _CONVERSIONS.get(flag.type, (str, ""))
        try:
            value = str(conversion(text))
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {use.shown(text)}; {expected}") from None
        if flag.choices and value not in flag.choices:
            raise argparse.ArgumentTypeError(f"got {use.shown(text)}; expected one of {', '.join(flag.choices)}")
        return text

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    takes: dict[str, Any] = {"action": "store_true"} if flag.nargs == 0 else {"nargs": flag.nargs, "type": convert}
    parser.add_argument(*flag.names, **takes)
    head = "=".join([use.flag, *use.joined])
    values = [word.text for word in use.following]
    if use.splits:
        certain = next(at for at, word in enumerate(use.following) if word.splits)
        values[certain:] = ["$"] * _MOST_VALUES
    try:
        _, surplus = parser.parse_known_args([head, *values])
    except argparse.ArgumentError as e:
        hint = "" if use.values else f"; a value that begins with a hyphen is written {use.flag}=VALUE"
        problem = f"got {use.shown(use.joined[0])}; expected no value" if flag.nargs == 0 else e.message
        yield f"{problem}: {TITLES[flag.system]}'s parser stops{hint}"
        return
    for word in () if use.splits else surplus:
        yield f"got the further word {use.shown(word)}; slime silently drops it; remove it or name its flag"


def _what_is_unknown(name: str, table: FlagTable) -> tuple[str, str | None]:
    """Why a name is no flag, and the flag that was likely meant."""
    if name in table.left_out:
        known = _INSTEAD.get(name)
        known = known if known and table.find(known) else None
        hint = f"use {known}" if known else "leave it out"
        return f"SGLang has this flag, but slime sets it itself and drops yours; {hint}", known
    longer = table.abbreviated_by(name)
    if len(longer) == 1:
        return f"SGLang's parser takes it for {longer[0]} as long as no other flag begins so; write that", longer[0]
    nearest = table.nearest(name)
    meant = f"; nearest known: {nearest} ({table.owners(nearest)})" if nearest else ""
    if longer:
        return f"it begins {len(longer)} flags ({', '.join(longer[:3])} ...): SGLang's parser stops{meant}", nearest
    return f"no parser knows it, and slime silently drops it{meant}", nearest


def _duplicates(uses: Sequence[_Use], table: FlagTable) -> Iterator[FlagFinding]:
    """Flags that are given more than once, under whatever name."""
    seen: dict[tuple[str, ...], list[_Use]] = {}
    for use in uses:
        for flag in table.find(use.flag)[:1]:
            if not flag.repeats:
                seen.setdefault(flag.names, []).append(use)
    for same in seen.values():
        if len(same) > 1:
            places = ", ".join(dict.fromkeys(use.where for use in same if use.where))
            last = " ".join(same[-1].values)
            given = f"given {len(same)} times" + (f" ({places})" if places else "")
            wins = f"; the last wins: {same[-1].shown(last)}" if last else "; once is enough"
            yield FlagFinding("warning", same[-1].flag, same[-1].where, given + wins)


class _Given:
    """The last use of each flag of a command, and its value as far as it is certain.

    `is_whole` says that there are no more uses than these.
    """

    def __init__(self, uses: Sequence[_Use], *, is_whole: bool) -> None:
        self.last = {use.flag: use for use in uses}
        self.is_whole = is_whole

    def has(self, *flags: str) -> bool:
        """Whether all are given; of those with "=VALUE" this value."""
        parts = (flag.partition("=") for flag in flags)
        return all(self.text(name) == value if equals else name in self.last for name, equals, value in parts)

    def lacks(self, *names: str) -> bool:
        """Whether none is given, for certain."""
        return self.is_whole and not any(name in self.last for name in names)

    def text(self, name: str) -> str:
        """A flag's first value; "" if it has none, or only the shell knows it."""
        values = self.last[name].values if name in self.last else ()
        return values[0] if values and not _EXPANSION.search(values[0]) else ""

    def number(self, name: str, default: float | None = None) -> float | None:
        """A flag's value, or its default, as a number; None if it is not known."""
        if name not in self.last:
            return default if self.is_whole else None
        try:
            return float(self.text(name))
        except ValueError:
            return None


_Fault = tuple[str, str]
"""A flag, and what is wrong with it."""
_RULES: Final[Sequence[tuple[str, str, str, str]]] = [
    ("--use-rollout-logprobs", "--use-tis --use-rollout-logprobs", "",
     "it can't be set with --use-tis; leave one of them out"),
    ("--eval-interval", "--eval-interval", "--eval-prompt-data --eval-config",
     "it needs data: add --eval-prompt-data NAME PATH, or --eval-config"),
    ("--save-interval", "--save-interval", "--save", "it needs a folder: add --save"),
    ("--use-dynamic-batch-size", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "it needs --max-tokens-per-gpu"),
    ("--num-rollout", "", "--num-rollout --num-epoch",
     "neither it nor --num-epoch is given, and slime stops without; add one"),
    ("--advantage-estimator", "--advantage-estimator=reinforce_plus_plus", "--normalize-advantages",
     "reinforce_plus_plus needs --normalize-advantages; add it"),
    ("--advantage-estimator", "--advantage-estimator=reinforce_plus_plus_baseline", "--normalize-advantages",
     "reinforce_plus_plus_baseline needs --normalize-advantages; add it"),
    ("--opd-teacher-load", "--opd-teacher-load", "--use-opd",
     "it is refused without --use-opd; add that, or leave it out"),
    ("--use-opd", "--use-opd", "--opd-type", "it needs --opd-type sglang or megatron; add it"),
    ("--opd-type", "--use-opd --opd-type=megatron", "--opd-teacher-load",
     "megatron needs --opd-teacher-load; add it"),
    ("--opd-teacher-load", "--use-opd --opd-type=sglang --opd-teacher-load", "",
     "it is refused with --opd-type sglang; leave it out"),
    # of these the file of --custom-config-path may say otherwise
    ("--update-weight-transport", "--update-weight-transport=disk", "--update-weight-disk-dir --custom-config-path",
     "disk needs --update-weight-disk-dir; add it"),
    ("--update-weight-mode", "--update-weight-mode=delta", "--update-weight-transport --custom-config-path",
     "delta needs --update-weight-transport disk"),
    ("--update-weight-mode", "--update-weight-mode=delta --update-weight-transport=nccl", "--custom-config-path",
     "delta needs --update-weight-transport disk"),
    ("--update-weight-mode", "--update-weight-mode=delta --colocate", "--debug-rollout-only --custom-config-path",
     "delta is refused with --colocate; leave one of them out"),
    ("--update-weight-mode", "--update-weight-mode=delta", "--update-weight-local-checkpoint-dir --custom-config-path",
     "delta needs --update-weight-local-checkpoint-dir; add it"),
]  # fmt: skip
"""The flag at fault; those that are given, some with "=VALUE"; those of which none is; and what is wrong."""


def _conflicts(
    command: Command, certain: Sequence[_Use], possible: Sequence[_Use], table: FlagTable
) -> Iterator[FlagFinding]:
    """Flags that contradict each other, or that are missing though slime does not start without them.

    `possible` are uses that may be added to the `certain` ones.
    """
    is_whole = command.is_whole and not any(word.is_placeholder for word in command.words)
    given = _Given(certain, is_whole=is_whole)
    faults = [
        (flag, problem)
        for flag, with_these, without, problem in _RULES
        if given.has(*with_these.split()) and (not without or given.lacks(*without.split()))
    ]
    names = {use.flag for use in (*certain, *possible)}
    missing = [
        flag.names[0] for flag in table.flags if flag.required and is_whole and not names.intersection(flag.names)
    ]
    faults += [(name, "it is not given, and slime stops without it; add it") for name in missing]
    faults += [*_refused(given, command.program), *_refused_numbers(given)]
    by_severity: dict[Severity, Sequence[_Fault]] = {"error": faults, "warning": [*_unused(given)]}
    for severity, found in by_severity.items():
        for name, problem in found:
            use = given.last.get(name)
            yield FlagFinding(severity, name, use.where if use else None, problem)


def _refused(given: _Given, program: str | None) -> Iterator[_Fault]:
    """What is refused at the start, or at the first evaluation, for more than the flags that are there."""
    if program == "train_async.py" and given.has("--colocate"):
        yield "--colocate", "train_async.py refuses it; use train.py, or leave it out"
    generate = given.text("--custom-generate-function-path")
    if given.has("--apply-chat-template") and generate.startswith("strands_rollout."):
        refused = f"{generate} renders messages itself and refuses prompts that are rendered; leave it out"
        yield "--apply-chat-template", refused
    data = given.last.get("--eval-prompt-data")
    if data is not None and not data.splits and given.lacks("--eval-config"):
        words = len(data.values)
        if words > 1 and words % 2:
            yield "--eval-prompt-data", f"got {words} words; expected pairs of a name and a path"
    inherits = given.lacks("--eval-function-path")
    evaluates = given.text("--rollout-function-path" if inherits else "--eval-function-path")
    if given.has("--eval-interval") and evaluates.startswith(_FULLY_ASYNC):
        yield "--eval-interval", f"{evaluates} has no evaluation; leave it out, or name another --eval-function-path"


def _refused_numbers(given: _Given) -> Iterator[_Fault]:
    if given.number("--kl-coef", 0) and given.number("--kl-loss-coef", 0):
        yield "--kl-loss-coef", "it can't be set with --kl-coef; leave one of them out"
    temperature = given.number("--rollout-temperature")
    if temperature is not None and temperature <= 0:
        yield "--rollout-temperature", f"got {temperature:g}; expected a number above 0"
    prompt, context = given.number("--rollout-max-prompt-len"), given.number("--rollout-max-context-len")
    if prompt is not None and context is not None and prompt >= context and given.lacks("--custom-config-path"):
        yield "--rollout-max-prompt-len", f"got {prompt:g}; expected less than --rollout-max-context-len {context:g}"
    prompts, begun = given.number("--rollout-batch-size"), given.number("--over-sampling-batch-size")
    if prompts and begun and begun < prompts and given.is_whole:
        expected = f"expected at least --rollout-batch-size {prompts:g}"
        yield "--over-sampling-batch-size", f"got {begun:g}; {expected}"
    samples, batch, steps = (
        _samples(given),
        given.number("--global-batch-size"),
        given.number("--num-steps-per-rollout"),
    )
    if samples and batch and steps and samples // steps != batch:
        expected = f"expected {samples // steps:g}, as --num-steps-per-rollout {steps:g} says"
        yield "--global-batch-size", f"got {batch:g}; {expected}"
    elif samples and batch and samples < batch:
        expected = f"expected at most the {samples:g} samples of a rollout, or training stops"
        yield "--global-batch-size", f"got {batch:g}; {expected}"


def _samples(given: _Given) -> float | None:
    """The samples of a rollout, where they are certain and trained on: --num-rollout 0 only evaluates."""
    prompts, each = given.number("--rollout-batch-size"), given.number("--n-samples-per-prompt", 1)
    return prompts * each if prompts and each and given.is_whole and given.number("--num-rollout") != 0 else None


def _unused(given: _Given) -> Iterator[_Fault]:
    """What slime accepts, but does not use."""
    samples, batch = _samples(given), given.number("--global-batch-size")
    if samples and batch and samples > batch and samples % batch and not given.has("--num-steps-per-rollout"):
        rest = f"the last {samples % batch:g} are not trained on"
        yield "--global-batch-size", f"a rollout has {samples:g} samples, no multiple of {batch:g}: {rest}"
    gpus, each = given.number("--rollout-num-gpus"), given.number("--rollout-num-gpus-per-engine", 1)
    if gpus and each and gpus % each and given.lacks("--sglang-config", "--rollout-external-engine-addrs"):
        unused = f"{gpus % each:g} stay unused"
        yield "--rollout-num-gpus", f"got {gpus:g}, no multiple of --rollout-num-gpus-per-engine {each:g}: {unused}"
