"""A launch script's flags, judged as slime, Megatron-LM, SGLang and its router would read them.

slime parses with `parse_known_args` everywhere: a misspelled flag is dropped without a word. This finds it, and values
that no parser takes, and what slime refuses of several flags together, as far as the command line alone decides.
Source: slime_validate_args and _resolve_eval_datasets in slime/utils/arguments.py, train_async.py,
slime/utils/dp_schedule.py, slime/ray/rollout.py, slime/rollout/fully_async_rollout.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal

from strands_rollout.diagnostics import flag_script
from strands_rollout.diagnostics.flag_script import Command, Reading, Word
from strands_rollout.diagnostics.flag_table import TITLES, Flag, FlagTable, find_slime, table_of
from strands_rollout.dump.terminal import PlainConsole
from strands_rollout.errors import ConfigError

Severity = Literal["error", "warning"]

_SECRET: Final = re.compile(r"key|token|secret|password")
# a script may add values to an array's last flag elsewhere
_ANYTHING: Final = Word("", dynamic=True, splits=True)
# What is to be set instead of a flag of SGLang's that slime keeps to itself (slime/backends/sglang_utils).
_INSTEAD: Final = {
    "--sglang-model-path": "--hf-checkpoint",
    "--sglang-model": "--hf-checkpoint",
    "--sglang-tp-size": "--rollout-num-gpus-per-engine",
    "--sglang-tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "--sglang-random-seed": "--seed",
    "--sglang-enable-memory-saver": "--offload-rollout",
    "--sglang-enable-return-routed-experts": "--use-rollout-routing-replay",
    "--sglang-no-experts-shared-outer-loras": "--no-sglang-experts-shared-outer-loras",
    "--sglang-no-lora-strict-loading": "--no-sglang-lora-strict-loading",
}
_DEFAULTS: Final = {
    "--n-samples-per-prompt": 1.0,
    "--kl-coef": 0.0,
    "--kl-loss-coef": 0.0,
    "--rollout-num-gpus-per-engine": 1.0,
}
_FULLY_ASYNC: Final = "slime.rollout.fully_async_rollout."
_WITH_SUFFIX: Final = re.compile(r"\s*\d+(?:(?:\.\d+)?[kMGT]|[KMGT]i)\s*")
_FALSE: Final = ("false", "0", "no", "off", "none")
_BOUNDS: Final[Mapping[object, tuple[int, int | None]]] = {None: (1, 1), "?": (0, 1), "*": (0, None), "+": (1, None)}
"""The least and the most words that argparse takes, by nargs."""


def _readable_int(text: str) -> None:
    """As SGLang's human_readable_int (sglang/srt/utils/common.py): 131072, 128Ki or 25.6k."""
    if not _WITH_SUFFIX.fullmatch(text):
        int(text)


_CONVERSIONS: Final[Mapping[str | None, tuple[Callable[[str], object], str]]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "loads": (json.loads, "JSON"),
    "human_readable_int": (_readable_int, "a whole number, such as 131072, 128Ki or 25.6k"),
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
        before, uses = _uses_of(command.words, table)
        problem = "no flag before it takes this word; slime drops it without a word"
        findings += [
            FlagFinding("error", word.text, word.place, problem)
            for word in before
            if not word.splits and not flag_script.is_placeholder(word)
        ]
        further = [use for words in command.further for use in _uses_of((*words, _ANYTHING), table)[1]]
        findings += [*_check_uses(uses, table), *_check_uses(further, table), *_duplicates(uses, table)]
        if command.program is not None:
            findings += _contradictions(command, {use.name for use in (*uses, *further)}, uses, table)
        flags += len(uses) + len(further)
    in_order = sorted(dict.fromkeys(findings), key=lambda finding: finding.severity != "error")
    return FlagFindings(flags, tuple(in_order))


@dataclass(frozen=True, slots=True)
class _Use:
    """A flag as it is used."""

    name: str  # without a value that is joined to it by "="
    joined: str | None  # that value
    values: tuple[Word, ...]  # the words that follow, up to the next flag
    where: str | None  # "FILE:LINE"
    dynamic: bool = False  # whether the joined value is left to the shell

    @property
    def splits(self) -> bool:
        """Whether the number of values is left to the shell."""
        return any(word.splits for word in self.values)

    def shown(self, text: str) -> str:
        """A value as a report may show it: none of a flag that may hold a secret."""
        return "(not shown)" if _SECRET.search(self.name) else repr(text)

    def error(self, problem: str, nearest: str | None = None) -> FlagFinding:
        return FlagFinding("error", self.name, self.where, problem, nearest)


def _uses_of(words: Sequence[Word], table: FlagTable) -> tuple[tuple[Word, ...], list[_Use]]:
    """The words before the first flag, and the uses of flags in order, each with its values as argparse splits them."""
    before, *parts = flag_script.by_flag(words)
    uses = []
    for word, *values in parts:
        name, equals, joined = word.text.partition("=")
        if not equals or table.find(word.text):
            uses.append(_Use(word.text, None, tuple(values), word.place))
        else:
            uses.append(_Use(name, joined, tuple(values), word.place, dynamic=word.dynamic and "$" in joined))
    return before, uses


def _check_uses(uses: Sequence[_Use], table: FlagTable) -> Iterator[FlagFinding]:
    for use, after in zip(uses, [*uses[1:], None], strict=False):
        if use.name == "--":
            yield use.error("argparse takes no flag after it; remove it")
        elif "$" not in use.name:
            flags = table.find(use.name)
            for flag in flags:
                yield from _check_values(use, flag, after.name if after else None)
            if not flags:
                yield use.error(*_what_is_unknown(use.name, table))
        if after is not None and _swallows(use, after, table):
            yield after.error(f"with a blank in it, it is a value to {use.name} before it; write it as two words")


def _swallows(use: _Use, after: _Use, table: FlagTable) -> bool:
    """Whether argparse takes the flag after a use for one of its values.

    A word with a blank is a flag only to the parser that knows the flag; slime's others read the same words.
    """
    if use.joined is not None or after.joined is None or " " not in after.joined:
        return False
    readers = {flag.parser for flag in table.find(after.name)}
    return any(
        flag.parser not in readers and (flag.nargs in ("*", "+") or (flag.nargs == "?" and not use.values))
        for flag in table.find(use.name)
    )


def _what_is_unknown(name: str, table: FlagTable) -> tuple[str, str | None]:
    """Why a name is no flag, and the flag that was likely meant."""
    if name in table.left_out:
        instead = _INSTEAD.get(name, "")
        known = instead if table.find(instead) else None
        hint = f"use {known}" if known else "leave it out"
        return f"SGLang has this flag, but slime sets it itself and drops yours; {hint}", known
    read_as = table.abbreviated_by(name)
    if len(read_as) == 1:
        said = f"it is no flag; SGLang's parser takes it for {read_as[0]}, until another begins so; write that"
        return said, read_as[0]
    nearest, meant = table.nearest(name), ""
    if nearest:
        owners = " and ".join(TITLES[flag.system] for flag in table.find(nearest))
        meant = f"; nearest known: {nearest} ({owners})"
    if read_as:
        few = ", ".join(read_as[:3])
        return f"it begins {len(read_as)} flags ({few} ...): SGLang's parser stops{meant}", nearest
    return f"no parser knows it, and slime drops it without a word{meant}", nearest


def _duplicates(uses: Sequence[_Use], table: FlagTable) -> Iterator[FlagFinding]:
    """Flags that are given more than once, under whatever name."""
    seen: dict[tuple[str, ...], list[_Use]] = {}
    for use in uses:
        for flag in table.find(use.name)[:1]:
            if not flag.repeats:
                seen.setdefault(flag.names, []).append(use)
    for same in seen.values():
        if len(same) > 1:
            places = ", ".join(dict.fromkeys(use.where for use in same if use.where))
            last = " ".join([same[-1].joined or "", *(word.text for word in same[-1].values)]).strip()
            given = f"given {len(same)} times" + (f" ({places})" if places else "")
            wins = f"; the last wins: {same[-1].shown(last)}" if last else "; once is enough"
            yield FlagFinding("warning", same[-1].name, same[-1].where, given + wins)


def _check_values(use: _Use, flag: Flag, following: str | None) -> Iterator[FlagFinding]:
    """Whether a flag is used with values that its parser takes; `following` is the flag after them."""
    parser = f"{TITLES[flag.system]}'s parser"
    if use.joined is not None:
        if flag.nargs == 0:
            yield use.error(f"got the value {use.shown(use.joined)}; expected none: {parser} stops; remove it")
            return
        values, surplus = [Word(use.joined, use.where, use.dynamic)], list(use.values)
    else:
        least, most = (flag.nargs, flag.nargs) if isinstance(flag.nargs, int) else _BOUNDS.get(flag.nargs, (0, None))
        if len(use.values) < least and not use.splits:
            wanted = "a value" if least == 1 else f"{least} values"
            got = f"the flag {following}" if following else "the end of the command"
            is_value = following is not None and not following.startswith("--")
            hint = f"; a value that begins with a hyphen needs {use.name}=VALUE" if is_value else ""
            yield use.error(f"got {got} next; expected {wanted}: {parser} stops{hint}")
        values = list(use.values[:most])
        surplus = list(use.values[len(values) :])
    for word in surplus:
        if word.splits:
            break  # whether anything is too much is left to the shell
        got = use.shown(word.text)
        yield use.error(f"got the further word {got}; slime drops it without a word; remove it or name its flag")
    for value in values:
        if not value.dynamic and flag.nargs != 0 and (problem := _fault_of_value(use, flag, value.text)):
            yield use.error(problem)


def _fault_of_value(use: _Use, flag: Flag, value: str) -> str | None:
    if conversion := _CONVERSIONS.get(flag.type):
        convert, expected = conversion
        try:
            value = str(convert(value)) if flag.choices else value
            convert(value)
        except ValueError:
            return f"got {use.shown(value)}; expected {expected}: {TITLES[flag.system]}'s parser stops"
    if flag.choices and value not in flag.choices:
        return f"got {use.shown(value)}; expected one of {', '.join(flag.choices)}"
    if flag.type == "bool" and value.lower() in _FALSE:
        return f"got {use.shown(value)}; {TITLES[flag.system]} reads any word as true; leave the flag out"
    return None


class _Given:
    """The last use of each flag of a command, and its value as far as it is certain.

    `complete` says that there are no more uses than these.
    """

    def __init__(self, uses: Sequence[_Use], *, complete: bool) -> None:
        self.last = {use.name: use for use in uses}
        self.complete = complete

    def has(self, *flags: str) -> bool:
        """Whether all are given; of those with "=VALUE" this value."""
        parts = (flag.partition("=") for flag in flags)
        return all(self.text(name) == value if equals else name in self.last for name, equals, value in parts)

    def lacks(self, *names: str) -> bool:
        """Whether none is given, for certain."""
        return self.complete and not any(name in self.last for name in names)

    def text(self, name: str) -> str | None:
        """A flag's value, if it is known."""
        use = self.last.get(name)
        if use is None or use.dynamic or any(word.dynamic for word in use.values[:1]):
            return None
        return use.joined if use.joined is not None else (use.values[0].text if use.values else None)

    def number(self, name: str) -> float | None:
        """A flag's value or default as a number, if it is known."""
        if name not in self.last:
            return _DEFAULTS.get(name) if self.complete else None
        try:
            return float(self.text(name) or "")
        except ValueError:
            return None


_Fault = tuple[str, str]
"""A flag, and what is wrong with it."""
_Rule = tuple[str, str, str, str]
"""The flag at fault; those that are given, some with "=VALUE"; those of which none is; and what is wrong."""

_RULES: Final[Sequence[_Rule]] = [
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
]  # fmt: skip
# What slime looks at after it has read the file of --custom-config-path.
_RULES_AFTER_OVERRIDES: Final[Sequence[_Rule]] = [
    ("--update-weight-transport", "--update-weight-transport=disk", "--update-weight-disk-dir",
     "disk needs --update-weight-disk-dir; add it"),
    ("--update-weight-mode", "--update-weight-mode=delta", "--update-weight-transport",
     "delta needs --update-weight-transport disk"),
    ("--update-weight-mode", "--update-weight-mode=delta --colocate", "--debug-rollout-only",
     "delta is refused with --colocate; leave one of them out"),
    ("--update-weight-mode", "--update-weight-mode=delta", "--update-weight-local-checkpoint-dir",
     "delta needs --update-weight-local-checkpoint-dir; add it"),
]  # fmt: skip


def _contradictions(
    command: Command, possible: set[str], certain: Sequence[_Use], table: FlagTable
) -> Iterator[FlagFinding]:
    """Flags that contradict each other, or leave out what slime asks for when it starts.

    `possible` are the flags that the command uses, or that may be added; `certain` are its uses of flags.
    """
    open_ended = not command.exact or any(map(flag_script.is_placeholder, command.words))
    given = _Given(certain, complete=not open_ended)

    def found(fault: _Fault, severity: Severity = "error") -> FlagFinding:
        name, problem = fault
        use = given.last.get(name)
        return FlagFinding(severity, name, use.where if use else None, problem)

    for flag in table.flags:
        if flag.required and not open_ended and not possible.intersection(flag.names):
            yield found((flag.names[0], "it is not given, and slime stops without it; add it"))
    yield from map(found, (*_broken(_RULES, given), *_refused(given, command.program)))
    for finding in map(found, (*_broken(_RULES_AFTER_OVERRIDES, given), *_refused_after_overrides(given))):
        if given.lacks("--custom-config-path"):
            yield finding
        else:
            problem = f"{finding.problem}, unless the file of --custom-config-path says otherwise"
            yield replace(finding, severity="warning", problem=problem)
    gpus, each = given.number("--rollout-num-gpus"), given.number("--rollout-num-gpus-per-engine")
    elsewhere = not given.lacks("--sglang-config", "--rollout-external-engine-addrs")
    if gpus and each and gpus % each and not elsewhere:
        problem = f"got {gpus:g}, no multiple of --rollout-num-gpus-per-engine {each:g}: {gpus % each:g} stay unused"
        yield found(("--rollout-num-gpus", problem), "warning")
    for fault, severity in _batches(given) if command.exact else ():
        yield found(fault, severity)


def _broken(rules: Sequence[_Rule], given: _Given) -> Iterator[_Fault]:
    for flag, with_these, without, problem in rules:
        if given.has(*with_these.split()) and (not without or given.lacks(*without.split())):
            yield flag, problem


def _refused(given: _Given, program: str | None) -> Iterator[_Fault]:
    """What is refused at the start, or at the first evaluation, for more than the flags that are there."""
    if program == "train_async.py" and given.has("--colocate"):
        yield "--colocate", "train_async.py refuses it; use train.py, or leave it out"
    if given.number("--kl-coef") and given.number("--kl-loss-coef"):
        yield "--kl-loss-coef", "it can't be set with --kl-coef; leave one of them out"
    generate = given.text("--custom-generate-function-path") or ""
    if given.has("--apply-chat-template") and generate.startswith("strands_rollout."):
        refused = f"{generate} renders messages itself and refuses prompts that are rendered; leave it out"
        yield "--apply-chat-template", refused
    temperature = given.number("--rollout-temperature")
    if temperature is not None and temperature <= 0:
        yield "--rollout-temperature", f"got {temperature:g}; expected a number above 0"
    data = given.last.get("--eval-prompt-data")
    if data is not None and not data.splits and given.lacks("--eval-config"):
        words = len(data.values) if data.joined is None else 1
        if words > 1 and words % 2:
            yield "--eval-prompt-data", f"got {words} words; expected pairs of a name and a path"
    inherits = given.lacks("--eval-function-path")
    evaluates = given.text("--rollout-function-path" if inherits else "--eval-function-path") or ""
    if given.has("--eval-interval") and evaluates.startswith(_FULLY_ASYNC):
        yield "--eval-interval", f"{evaluates} has no evaluation; leave it out, or name another --eval-function-path"


def _refused_after_overrides(given: _Given) -> Iterator[_Fault]:
    prompt, context = given.number("--rollout-max-prompt-len"), given.number("--rollout-max-context-len")
    if prompt is not None and context is not None and prompt >= context:
        expected = f"expected less than --rollout-max-context-len {context:g}"
        yield "--rollout-max-prompt-len", f"got {prompt:g}; {expected}"
    if given.has("--update-weight-mode=delta") and given.text("--update-weight-transport") not in (None, "", "disk"):
        yield "--update-weight-mode", "delta needs --update-weight-transport disk"


def _batches(given: _Given) -> Iterator[tuple[_Fault, Severity]]:
    prompts, begun = given.number("--rollout-batch-size"), given.number("--over-sampling-batch-size")
    if prompts and begun and begun < prompts:
        expected = f"expected at least --rollout-batch-size {prompts:g}"
        yield ("--over-sampling-batch-size", f"got {begun:g}; {expected}"), "error"
    each, batch = given.number("--n-samples-per-prompt"), given.number("--global-batch-size")
    steps = given.number("--num-steps-per-rollout")
    if not (prompts and each and batch) or given.number("--num-rollout") == 0:  # 0: slime only evaluates
        return
    samples = prompts * each
    if steps and samples // steps != batch:
        expected = f"expected {samples // steps:g}, as --num-steps-per-rollout {steps:g} says"
        yield ("--global-batch-size", f"got {batch:g}; {expected}"), "error"
    elif samples < batch:
        expected = f"expected at most the {samples:g} samples of a rollout, or training stops"
        yield ("--global-batch-size", f"got {batch:g}; {expected}"), "error"
    elif samples % batch:
        rest = f"the last {samples % batch:g} are not trained on"
        problem = f"a rollout has {samples:g} samples, no multiple of {batch:g}: {rest}"
        yield ("--global-batch-size", problem), "warning"
