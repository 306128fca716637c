"""A launch script's flags, judged as slime, Megatron-LM, SGLang and its router would read them.

A foreign script is read as text and never run: the arrays that are passed to `train.py` and the files that are sourced
are followed; what only the shell could know, such as the words of a variable, is named in the notes and not judged. A
script that sources this repository's launch library is asked for its own dry run, which writes nothing.

slime parses with `parse_known_args` everywhere: it silently drops a misspelled flag. This finds it, words that no flag
takes, and what does not go with this package; what slime refuses at its start is left to it. The parsers that are
installed are asked in a child process; what can't be imported there is taken from `data/slime_flags.json`, which
`scripts/record_flags.py` made from the parsers.
"""

import difflib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise, takewhile
from math import prod
from pathlib import Path
from textwrap import shorten
from typing import Final, Literal

from pydantic import BaseModel

from strands_rollout.diagnostics import flag_probe, package_folders, run_program
from strands_rollout.dump.terminal import PlainConsole
from strands_rollout.errors import ConfigError
from strands_rollout.files.json_codec import Json

RECORD: Final = Path(__file__).parents[1] / "data" / "slime_flags.json"
TITLES: Final = {"slime": "slime", "megatron": "Megatron-LM", "sglang": "SGLang", "router": "SGLang's router"}
_LIMIT_S: Final = 180.0
_SHORTEST_PREFIX: Final = 6
_LONGEST_NOTE: Final = 160
_SECRET: Final = re.compile(r"key|token|secret|password")
# What is to be set instead of a flag of SGLang's that slime keeps to itself (slime/backends/sglang_utils).
_INSTEAD: Final = {
    "--sglang-model-path": "--hf-checkpoint",
    "--sglang-tp-size": "--rollout-num-gpus-per-engine",
    "--sglang-tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "--sglang-random-seed": "--seed",
}

PROGRAMS: Final = ("train.py", "train_async.py")
_LIBRARY: Final = "slime_launch.sh"
_DRY_RUN_LIMIT_S: Final = 60.0
_FOLDERS_ABOVE: Final = 3  # of a script, in which a file is looked for that it sources


def _in_brackets(opened: str, closed: str) -> str:
    """A pattern of brackets with what is in them: brackets again, four levels deep at most."""
    other = rf"[^{opened}{closed}]"
    inside = rf"{other}*+"
    for _ in range(4):
        inside = rf"(?:{other}|\{opened}{inside}\{closed})*+"
    return rf"\{opened}{inside}\{closed}?"


_EXPANSION: Final = rf"\$(?:{_in_brackets('(', ')')}|{_in_brackets('{', '}')}|\w+|[@*#?$!-])|`(?:\\.|[^`\\])*+`?"
_PIECE: Final = re.compile(
    rf"""'(?P<single>[^']*)'?|\$'(?P<ansi>(?:\\.|[^'\\])*+)'?|"(?P<double>(?:\\.|{_EXPANSION}|[^"\\])*+)"?"""
    rf"|\\(?P<escaped>.?)|(?P<expansion>{_EXPANSION})|(?P<plain>\$|[^\s'\"\\$`;&|<>()]+)",
    re.DOTALL,
)
_TOKEN: Final = re.compile(
    r"(?P<between>[ \t\r]+|\\\n|#[^\n]*)|(?P<operator>\d*(?:<<<|<<-?|>>|[<>])|&&|\|\||;;|[;&|()\n])"
    rf"|(?:{re.sub(r'P<[a-z]+>', ':', _PIECE.pattern)})+",
    re.DOTALL,
)
_HERE_DOCUMENT: Final = re.compile(r"(?<!<)<<-?[ \t]*(['\"]?)(\w+)\1[^\n]*\n(?P<body>(?:.*\n)*?)\t*\2$", re.MULTILINE)
_SEVERAL_WORDS: Final = re.compile(r"\[[@*]\]|\$[@*]|\$\{[@*]")  # what splits in double quotes, too

_NEGATIVE_NUMBER: Final = re.compile(r"-\d+|-\d*\.\d+")
_ARRAY: Final = re.compile(r"(\w+)\+?=")
_STRING: Final = re.compile(r"(\w+)\+?=(.*(?:^|[\s=])--\w.*)", re.DOTALL)
_REFERENCE: Final = re.compile(r"\$\{?(\w+|[@*])(?:\[[@*]\])?(?:[+:-][^/]*)?\}?")
_PLACEHOLDER: Final = re.compile(r"<SLIME_DIR>|<MODEL_ARGS of scripts/models/[^/<>]+\.sh in slime>")


@dataclass(frozen=True, slots=True)
class Word:
    """A word or an operator of shell text."""

    text: str  # what the shell would pass on, with expansions as they are written
    place: str | None = None  # "FILE:LINE"
    splits: bool = False  # whether it may become any number of words
    operator: bool = False  # such as a parenthesis, a pipe or the end of a line

    @property
    def is_flag(self) -> bool:
        """Whether argparse takes it for a flag: it begins with a hyphen and is no number.

        The parsers of slime have no flag that looks like a negative number, so that -1 is a value; -1e-5 is none
        (CPython's argparse up to 3.13).
        """
        is_text = len(self.text) > 1 and self.text.startswith("-") and " " not in self.text.split("=")[0]
        return is_text and not _NEGATIVE_NUMBER.fullmatch(self.text)

    @property
    def is_placeholder(self) -> bool:
        """Whether a dry run printed it for words that it could not find."""
        return _PLACEHOLDER.fullmatch(self.text) is not None


UNREAD: Final = Word("", splits=True)
"""What only the shell knows."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a script holds: how it was read, the words after the programs that start training, and what is not known.

    Words that may be added to a command, as those of arrays that are set more than once, are commands of their own
    between two that are unread.
    """

    how: str
    commands: tuple[tuple[Word, ...], ...]
    notes: tuple[str, ...] = ()


def read_script(path: Path, slime_dir: Path | None) -> Reading:
    """Read a launch script; slime's checkout holds files that scripts source.

    Raises:
        ConfigError: The file can't be read, or its dry run fails.
    """
    if path.exists() and not path.is_file():  # a pipe or a device may never end
        raise ConfigError(f"got {path}; expected a regular file, or - for a command on stdin")
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        raise ConfigError(f"got the script {path}; expected a file that can be read: {e}") from e
    script = _Script(text, path, slime_dir)
    library = (path.resolve().parent / _LIBRARY).resolve()
    if library not in script.sourced or not {"read_options", "--dry-run"} <= {word.text for word in script.words}:
        return read_text(text, path, slime_dir)
    printed = read_text(_dry_run(path, slime_dir), path, slime_dir)
    # each flag's place in the script instead of in the printed text
    places = {word.text: word.place for word in reversed(script.words) if word.is_flag}
    commands = [tuple(replace(word, place=places.get(word.text)) for word in words) for words in printed.commands]
    return Reading(f"bash {path} --dry-run", tuple(commands), printed.notes)


def _dry_run(path: Path, slime_dir: Path | None) -> str:
    environment = {**os.environ, **({} if slime_dir is None else {"SLIME_DIR": str(slime_dir)})}
    done = run_program("bash", str(path), "--dry-run", env=environment, limit_s=_DRY_RUN_LIMIT_S)
    if done is None or done.exit_code is None:
        reason = "there is no bash" if done is None else f"it did not end within {_DRY_RUN_LIMIT_S:g} s"
        raise ConfigError(f"bash {path} --dry-run could not be run: {reason}")
    if done.exit_code != 0:
        raise ConfigError(f"bash {path} --dry-run ended with {done.exit_code}; expected a command: {done.stderr}")
    return done.stdout


def read_text(text: str, path: Path | None, slime_dir: Path | None) -> Reading:
    """Read a script's text, or a command's where `path` is None; nothing of it is run."""
    script = _Script(text, path, slime_dir)
    commands = tuple(script.commands())
    return Reading("its text was read, nothing was run", commands, tuple(dict.fromkeys(script.notes)))


class _Script:
    """The words and arrays of a script, or of a text where `path` is None, and of the files that it sources."""

    def __init__(self, text: str, path: Path | None, slime_dir: Path | None) -> None:
        self.notes: list[str] = []
        self.sourced: list[Path] = []
        self._possible: dict[tuple[Word, ...], None] = {}
        self._slime_dir = slime_dir
        self._is_file = path is not None
        self.words = self._with_sourced(shell_words(text, str(path) if path else "-"), path)
        self._arrays = _arrays_of(self.words)

    def _with_sourced(self, words: list[Word], path: Path | None) -> list[Word]:
        """The words with those of each sourced file before them."""
        found: list[Word] = []
        for before, word, named in zip([Word("\n", operator=True), *words], words, words[1:], strict=False):
            if word.text != "source" and not (word.text == "." and before.operator):
                continue
            file = self._find(named.text, path)
            if file is None:
                self.notes.append(f"{named.place}: {named.text} was not found, so it was not read")
            elif file not in self.sourced:
                self.sourced.append(file)
                shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
                found += self._with_sourced(shell_words(file.read_text("utf-8", "replace"), str(shown)), file)
        return [*found, *words]

    def _find(self, named: str, path: Path | None) -> Path | None:
        # "${SCRIPT_DIR}/models/x.sh": the directory is an expansion, the rest is tried beside the script and above it
        rest = re.split(r"[})]/|^\$\w+/", named)[-1]
        files = [folder / rest for folder in path.resolve().parents[: _FOLDERS_ABOVE + 1]] if path else []
        if self._slime_dir is not None:
            files += [self._slime_dir / rest, self._slime_dir / "scripts" / rest.rpartition("scripts/")[2]]
        return next((file.resolve() for file in files if file.is_file()), None)

    def commands(self) -> list[tuple[Word, ...]]:
        """The commands that start training; else all arrays, or the whole text where it is no file's."""
        found = [tuple(self._expanded(words, frozenset())) for words in _invocations(self.words)]
        found += self._possible
        if found and (not self._is_file or any(map(_has_flag, found))):
            return found
        if not self._is_file:
            return [tuple(word for word in self.words if not word.operator)]
        programs = " or ".join(PROGRAMS)
        self.notes.append(f"no command with {programs} and flags was found; the flags of all arrays were judged")
        return [(UNREAD, *words, UNREAD) for values in self._arrays.values() for words in values if _has_flag(words)]

    def _expanded(self, words: Sequence[Word], within: frozenset[str]) -> Iterator[Word]:
        """The words with those of the arrays that they name; `within` are the arrays that these words are of."""
        for before, word in zip([Word(""), *words], words, strict=False):
            named = _REFERENCE.fullmatch(word.text) if word.splits else None
            name = named[1] if named else ""
            values = self._arrays.get(name, []) if name not in within else []
            if len(values) == 1:
                yield from self._expanded(values[0], within | {name})
                continue
            for value in values:  # a script may add values to an array's last flag elsewhere
                self._possible[(UNREAD, *self._expanded(value, within | {name}), UNREAD)] = None
            # right after a flag an expansion is taken for the flag's value, if it is no array
            may_be_flags = named and ("[" in word.text or not before.text.startswith("--"))
            if not values and name not in within and (word.is_placeholder or may_be_flags):
                said = f"{word.text} stands for words that could not be read, so they are not judged"
                self.notes.append(f"{word.place}: {said}")
            yield word


def _has_flag(words: Sequence[Word]) -> bool:
    return any(word.text.startswith("--") for word in words)


def _arrays_of(words: Sequence[Word]) -> dict[str, list[tuple[Word, ...]]]:
    """What each array, and each string with flags in it, is assigned: one item for each assignment."""
    arrays: dict[str, list[tuple[Word, ...]]] = {}
    for at, (word, following) in enumerate(pairwise(words)):
        if (head := _ARRAY.fullmatch(word.text)) and following.operator and following.text == "(":
            inside = takewhile(lambda word: not (word.operator and word.text == ")"), words[at + 2 :])
            value = tuple(word for word in inside if not word.operator)
        elif head := _STRING.fullmatch(word.text):
            file, _, line = (word.place or ":1").rpartition(":")
            value = tuple(part for part in shell_words(head[2], file, int(line)) if not part.operator)
        else:
            continue
        arrays.setdefault(head[1], []).append(value)
    return arrays


def _invocations(words: Sequence[Word]) -> Iterator[list[Word]]:
    """The words after each program that gets a flag or an expansion, up to the end of its command."""
    for is_operator, group in groupby(words, key=lambda word: word.operator):
        command = list(group)
        at = next((at for at, word in enumerate(command) if Path(word.text).name in PROGRAMS), None)
        if not is_operator and at is not None and any(word.is_flag or "$" in word.text for word in command[at + 1 :]):
            yield command[at + 1 :]


def shell_words(text: str, name: str, line: int = 1) -> list[Word]:
    """The words and operators of shell text, each with the file's name and its line, from the given one on.

    Comments and here-documents are left out, expansions stay as written.
    """
    text = _HERE_DOCUMENT.sub(lambda found: found[0].splitlines()[0] + "\n" * found[0].count("\n"), text)
    words = []
    for token in _TOKEN.finditer(text):
        place = f"{name}:{line}"
        line += token[0].count("\n")
        if token["operator"]:
            words.append(Word(token[0], place, operator=True))
        elif not token["between"]:
            pieces = list(_PIECE.finditer(token[0]))
            splits = any(piece["expansion"] or _SEVERAL_WORDS.search(piece["double"] or "") for piece in pieces)
            words.append(Word("".join(map(_text_of, pieces)), place, splits=splits))
    return words


def _text_of(piece: re.Match[str]) -> str:
    """A piece of a word as the shell passes it on."""
    kind, text = piece.lastgroup, piece[piece.lastgroup or 0]
    if kind == "ansi":
        return text.encode("raw_unicode_escape").decode("unicode_escape", "replace")
    if kind == "double":
        return re.sub(r"\\(?:\n|([\"\\$`]))", r"\1", text)
    return "" if kind == "escaped" and text == "\n" else text


class Flag(BaseModel, frozen=True):
    """One argument of argparse, under all its names; a row of the record, where what is the default is left out."""

    names: tuple[str, ...]
    system: str  # who declares it: one of TITLES
    parser: str = "main"  # which of slime's three parsers reads it: "main", "sglang" or "pre"
    nargs: int | str | None = None  # argparse's: None for one value, 0 for none, a number, "?", "*" or "+"


@dataclass(frozen=True)
class FlagTable:
    """Flags by name."""

    flags: tuple[Flag, ...]
    left_out: frozenset[str]  # flags of SGLang's, in slime's spelling, that slime does not pass on
    abbreviating: frozenset[str]  # the parsers that read an unambiguous beginning of a flag as that flag
    sources: tuple[str, ...]  # where this is known from, a line for each system

    @cached_property
    def _by_name(self) -> dict[str, list[Flag]]:
        named: dict[str, list[Flag]] = {}
        for flag in self.flags:
            for name in flag.names:
                named.setdefault(name, []).append(flag)
        return named

    def find(self, name: str) -> list[Flag]:
        """The flags of that exact name, one for each parser that reads it."""
        return self._by_name.get(name, [])

    def abbreviated_by(self, name: str) -> list[str]:
        """The names that an abbreviating parser would take `name` for."""
        longer = ((known, flags) for known, flags in self._by_name.items() if known.startswith(name))
        return sorted(known for known, flags in longer if any(flag.parser in self.abbreviating for flag in flags))

    def nearest(self, name: str) -> str | None:
        """The known flag that was likely meant."""
        stem = name.lstrip("-").replace("_", "-")
        for spelled in (f"--{stem}", f"--sglang-{stem}", f"--router-{stem}"):
            if spelled in self._by_name:
                return spelled
        longer = [known for known in self._by_name if known.startswith(name)]
        if len(longer) == 1 or (longer and len(name) >= _SHORTEST_PREFIX):
            return min(longer, key=lambda known: (len(known), known))
        return next(iter(difflib.get_close_matches(f"--{stem}", self._by_name, n=1, cutoff=0.6)), None)


def table_of(slime_dir: Path | None, megatron_dir: Path | None = None, *, limit_s: float = _LIMIT_S) -> FlagTable:
    """The flags of what is installed, and of the record where that can't be asked."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    try:
        answer = ask(slime_dir, megatron_dir, limit_s=limit_s)
    except ConfigError as e:
        answer = {**record, "flags": [], "failed": dict.fromkeys(TITLES, str(e)), "versions": {}}
    failed = answer["failed"]
    missing = [flag for flag in map(Flag.model_validate, record["flags"]) if flag.system in failed]
    theirs = {(name, flag.parser) for flag in missing for name in flag.names}
    # where Megatron-LM declares a flag too, slime changes its default only
    asked = map(Flag.model_validate, answer["flags"])
    flags = [flag for flag in asked if not {(name, flag.parser) for name in flag.names} & theirs]
    versions = {"slime": str(slime_dir), "megatron": "the importable one", **answer["versions"]}
    sources = []
    for system, title in TITLES.items():
        known = f"its parser was asked, {versions.get(system) or 'version unknown'}"
        if system in failed:
            note = shorten(failed[system], _LONGEST_NOTE, placeholder="...")
            known = f"recorded, {record['sources'][system]['version']} ({note})"
        sources.append(f"{title}: {known}")
    left_out = (record if "sglang" in failed else answer)["left_out"]
    return FlagTable((*flags, *missing), frozenset(left_out), frozenset(answer["abbreviating"]), tuple(sources))


def ask(
    slime_dir: Path | None,
    megatron_dir: Path | None = None,
    *,
    python: str = sys.executable,
    limit_s: float = _LIMIT_S,
) -> Json:
    """The probe's answer for a checkout, by a Python that has SGLang and what Megatron-LM imports.

    Megatron-LM is otherwise MEGATRON_DIR's, the one beside slime's, or the importable one.

    Raises:
        ConfigError: There is no checkout, or the probe failed or took longer than `limit_s` seconds.
    """
    if slime_dir is None:
        raise ConfigError("no slime is importable")
    megatron = megatron_dir or os.environ.get("MEGATRON_DIR") or slime_dir.resolve().parent / "Megatron-LM"
    paths = [str(megatron), str(slime_dir), os.environ.get("PYTHONPATH")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONHASHSEED": "0",  # some choices are lists made of sets
    }
    answer = run_program(python, "-W", "ignore", flag_probe.__file__, str(slime_dir), env=environment, limit_s=limit_s)
    if answer is None:
        raise ConfigError(f"its parsers could not be asked: there is no program {python}")
    if answer.exit_code is None:
        raise ConfigError(f"its parsers did not answer within {limit_s:g} s")
    if answer.exit_code != 0:
        reason = (answer.stderr or f"exit code {answer.exit_code}").splitlines()[-1]
        raise ConfigError(f"its parsers could not be asked: {reason}")
    return json.loads(answer.stdout)


def find_slime(named: Path | None) -> Path | None:
    """The checkout of slime: the named one, else SLIME_DIR's, else that of the importable slime.

    Raises:
        ConfigError: A checkout was named that is none.
    """
    # the slime of PyPI is another package of the same name
    files = (flag_probe.MAIN_ARGUMENTS, flag_probe.SGLANG_ARGUMENTS)
    wanted = named or (Path(os.environ["SLIME_DIR"]) if os.environ.get("SLIME_DIR") else None)
    folders = [wanted] if wanted else [package.parent for package in package_folders("slime")]
    found = next((folder for folder in folders if all((folder / name).is_file() for name in files)), None)
    if wanted and not found:
        raise ConfigError(f"got slime at {wanted}; expected a checkout of THUDM/slime, which has {files[0]}")
    return found


@dataclass(frozen=True, slots=True)
class FlagFinding:
    """One fault: an error if the run would stop or do something else than was written, a warning if it may."""

    severity: Literal["error", "warning"]
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
    read = read_text(sys.stdin.read(), None, slime) if on_stdin else read_script(script, slime)
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
    console.print(f"errors: {errors}, warnings: {len(found.findings) - errors}" if found.findings else "all known")
    return found.ok


def judge_reading(reading: Reading, table: FlagTable) -> FlagFindings:
    """Judge all commands of a script."""
    flags, findings = 0, []
    for words in reading.commands:
        before, uses = _uses_of(words)
        problem = "no flag before it takes this word; slime silently drops it"
        stray = takewhile(lambda word: not word.splits and not word.is_placeholder, before)
        findings += [FlagFinding("error", word.text, word.place, problem) for word in stray]
        findings += [finding for use in uses for finding in _check_use(use, table)]
        findings += _conflicts(uses)
        flags += len(uses)
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

    def fault(
        self, problem: str, nearest: str | None = None, *, severity: Literal["error", "warning"] = "error"
    ) -> FlagFinding:
        return FlagFinding(severity, self.flag, self.where, problem, nearest)


def _uses_of(words: Sequence[Word]) -> tuple[tuple[Word, ...], list[_Use]]:
    """The words before the first flag, and the uses of flags in order."""
    starts = [at for at, word in enumerate(words) if word.is_flag]
    before, *parts = [tuple(words[begin:end]) for begin, end in pairwise([0, *starts, len(words)])]
    uses = []
    for word, *following in parts:
        name, equals, joined = word.text.partition("=")
        uses.append(_Use(name, word.place, (joined,) if equals else (), tuple(following)))
    return before, uses


def _check_use(use: _Use, table: FlagTable) -> Iterator[FlagFinding]:
    if use.flag == "--":
        yield use.fault("argparse takes no flag after it; remove it")
    elif "$" not in use.flag:
        flags = table.find(use.flag)
        for flag in flags:
            yield from map(use.fault, _further_words(use, flag))
        if not flags:
            yield use.fault(*_what_is_unknown(use.flag, table))


def _further_words(use: _Use, flag: Flag) -> Iterator[str]:
    """What is wrong with words after a flag that its parser leaves over."""
    most = flag.nargs if isinstance(flag.nargs, int) else 1 if flag.nargs in (None, "?") else len(use.values)
    for value in () if use.splits else use.values[most:]:
        yield f"got the further word {use.shown(value)}; slime silently drops it; remove it or name its flag"


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
    owners = " and ".join(TITLES[flag.system] for flag in table.find(nearest or ""))
    meant = f"; nearest known: {nearest} ({owners})" if nearest else ""
    if longer:
        return f"it begins {len(longer)} flags ({', '.join(longer[:3])} ...): SGLang's parser stops{meant}", nearest
    return f"no parser knows it, and slime silently drops it{meant}", nearest


def _conflicts(uses: Sequence[_Use]) -> Iterator[FlagFinding]:
    """What this package refuses later, and what slime neither refuses at its start nor uses.

    slime checks at its start which flags go together (slime_validate_args in slime/utils/arguments.py).
    """
    last = {use.flag: use for use in uses}
    values = {name: use.values[0] for name, use in last.items() if use.values}
    generate = values.get("--custom-generate-function-path", "")
    if "--apply-chat-template" in last and generate.startswith("strands_rollout."):
        refused = f"{generate} renders messages itself and refuses prompts that are rendered; leave it out"
        yield last["--apply-chat-template"].fault(refused)
    yield from _batch_faults(last, values)


def _batch_faults(last: Mapping[str, _Use], values: Mapping[str, str]) -> Iterator[FlagFinding]:
    """Batches that a rollout does not fill, or that Megatron's replicas can't share evenly.

    Megatron asks for the second at its start and also with slime's dynamic batch sizes, where the micro batch is 1
    (`init_num_microbatches_calculator` in slime/backends/megatron_utils/initialize.py).
    """

    def size(name: str, default: int = 0) -> int:
        """The flag's value, 0 where only the shell knows it."""
        text = values.get(name, str(default))
        return int(text) if text.isdecimal() else 0

    samples = size("--rollout-batch-size") * size("--n-samples-per-prompt")
    batch, at, steps = size("--global-batch-size"), "--global-batch-size", size("--num-steps-per-rollout")
    if "--num-steps-per-rollout" in last:
        batch, at = (samples // steps if steps else 0), "--num-steps-per-rollout"
    # --num-rollout 0 only evaluates
    if batch and samples and values.get("--num-rollout") != "0":
        if samples < batch:
            yield last[at].fault(f"got {batch}; expected at most the {samples} samples of a rollout, or training stops")
        elif samples % batch and at == "--global-batch-size":
            rest = f"the last {samples % batch} are not trained on"
            yield last[at].fault(f"a rollout has {samples} samples, no multiple of {batch}: {rest}", severity="warning")
    world = size("--actor-num-nodes", 1) * size("--actor-num-gpus-per-node")
    replica = prod(size(f"--{kind}-parallel-size") for kind in ("tensor-model", "pipeline-model", "context"))
    if not world or not replica:
        return
    if world % replica:
        yield last["--actor-num-gpus-per-node"].fault(
            f"{world} GPUs train; expected a multiple of the {replica} of a replica "
            "(tensor x pipeline x context parallel sizes), or Megatron stops"
        )
        return
    replicas, each = world // replica, size("--micro-batch-size", 1)
    if batch and each and batch % (replicas * each) and "--decrease-batch-size-if-needed" not in last:
        micro = f" x micro batches of {each} samples" if each > 1 else ""
        yield last[at].fault(
            f"an optimizer step has {batch} samples; expected a multiple of {replicas * each} "
            f"({replicas} replicas{micro}), or Megatron stops"
        )
