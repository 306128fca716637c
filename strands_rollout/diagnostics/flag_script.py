"""A launch script -> the commands that start training, with the place of each word.

A foreign script is read as text and never run: the arrays that are passed to `train.py` and the files that are sourced
are followed; what only the shell could know, such as the words of a variable, is named in the notes and not judged. A
script that sources this repository's launch library is asked for its own dry run, which writes nothing.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import Final

from strands_rollout.diagnostics.diagnosis import run_program
from strands_rollout.errors import ConfigError

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
