"""A launch script -> the commands that start training, with the place of each word.

A foreign script is read as text and never run: the arrays that are passed to `train.py` and the files that are sourced
are followed; what only the shell could say, such as the words of a variable, is named in the notes and not judged. A
script that sources this repository's launch library is asked for its own dry run, which writes nothing.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Final

from strands_rollout.diagnostics.diagnosis import run_program
from strands_rollout.errors import ConfigError

PROGRAMS: Final = ("train.py", "train_async.py")
_LIBRARY: Final = "slime_launch.sh"
_ARGUMENTS: Final = "arguments"  # the library's array of slime's arguments
_DRY_RUN_LIMIT_S: Final = 60.0

_BETWEEN_WORDS: Final = re.compile(r"[ \t\r]+|\\\n|#[^\n]*")
_OPERATOR: Final = re.compile(r"<<<|<<-|&&|\|\||;;|<<|>>|[;&|<>()\n]")
_PIECE: Final = re.compile(
    r"'(?P<single>[^']*)'?|\$'(?P<ansi>(?:\\.|[^'\\])*)'?|\\(?P<escaped>.?)|(?P<plain>[^\s'\"\\$`;&|<>()]+|\s)",
    re.DOTALL,
)
_IN_DOUBLE_QUOTES: Final = re.compile(r'\\(["\\$`\n])|[^"\\$`]+|\\')
_ESCAPES: Final = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_NAME: Final = re.compile(r"\w+|[@*#?$!-]")
_BACKTICKS: Final = re.compile(r"`(?:\\.|[^`\\])*`?", re.DOTALL)
_SINGLE_QUOTES: Final = re.compile(r"'[^']*'?")
_PAIRS: Final = {"(": ")", "{": "}"}
_SPLITTING: Final = re.compile(r"\[[@*]\]|\$[@*]|\$\{[@*]")

_NEGATIVE_NUMBER: Final = re.compile(r"^-\d+$|^-\d*\.\d+$")
_ARRAY: Final = re.compile(r"^(\w+)(\+?)=$")
_STRING: Final = re.compile(r"^(\w+)\+?=(.*(?:^|[\s=])--\w.*)$", re.DOTALL)
_REFERENCE: Final = re.compile(r"^\$\{?(\w+)(?:\[[@*]\])?(?:[}+:-].*)?$", re.DOTALL)
_VARIABLE: Final = re.compile(r"^\$(?:[\w@*]+|\{[^/]*\})$")
_STARTER: Final = re.compile(r"^(?:python|pypy|torchrun|uv$)|\$")
_PLACEHOLDER: Final = re.compile(r"<SLIME_DIR>|<MODEL_ARGS of scripts/models/[^/<>]+\.sh in slime>")
_PARENTS: Final = 3
_DEEPEST: Final = 5


@dataclass(frozen=True, slots=True)
class Word:
    """A word or an operator of shell text."""

    text: str  # what the shell would pass on, with expansions as they are written
    place: str | None = None  # "FILE:LINE"
    dynamic: bool = False  # whether it has expansions, so that its text is not known
    splits: bool = False  # whether it may become any number of words
    operator: bool = False  # such as a parenthesis, a pipe or the end of a line


@dataclass(frozen=True, slots=True)
class Command:
    """A command that starts training."""

    program: str | None  # "train.py", "train_async.py", or None where none was found
    words: tuple[Word, ...]  # what follows the program, in order
    further: tuple[tuple[Word, ...], ...] = ()  # may be added: words of arrays that are set more than once
    exact: bool = True  # whether `words` is the whole command, with nothing left to the shell


@dataclass(frozen=True, slots=True)
class Reading:
    """What a script says: how it was read, the commands that start training, and what could not be read."""

    how: str
    commands: tuple[Command, ...]
    notes: tuple[str, ...] = ()


def looks_like_flag(text: str) -> bool:
    """Whether argparse takes a word for a flag: it begins with a hyphen and is no number.

    The parsers of slime have no flag that looks like a negative number, so that -1 is a value; -1e-5 is none
    (CPython's argparse up to 3.13).
    """
    return len(text) > 1 and text.startswith("-") and " " not in text.split("=")[0] and not _NEGATIVE_NUMBER.match(text)


def is_placeholder(word: Word) -> bool:
    """Whether a word is what a dry run prints for words that it could not find."""
    return _PLACEHOLDER.fullmatch(word.text) is not None


def by_flag(words: Sequence[Word]) -> list[tuple[Word, ...]]:
    """The words that stand before any flag, then each flag with the words that follow it."""
    starts = [at for at, word in enumerate(words) if looks_like_flag(word.text)]
    return [tuple(words[begin:end]) for begin, end in pairwise([0, *starts, len(words)])]


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
    places = {word.text: word.place for word in reversed(script.words) if looks_like_flag(word.text)}
    commands = [
        replace(command, words=tuple(replace(word, place=places.get(word.text)) for word in command.words))
        for command in printed.commands
    ]
    given = {word.text for command in commands for word in command.words}
    # what other options would switch on
    arrays = [array.words for array in script.arrays if array.name == _ARGUMENTS]
    switched = tuple(part for words in arrays for part in by_flag(words)[1:] if part[0].text not in given)
    further = [Command(None, (), switched, exact=False)] if switched else []
    return Reading(f"bash {path} --dry-run, and the arrays it may add", (*commands, *further), printed.notes)


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
    commands = script.commands()
    notes = list(dict.fromkeys(script.notes))
    if path is not None and all(command.program is None for command in commands):
        notes.append(
            f"no command with {' or '.join(PROGRAMS)} and flags was found; the flags of all arrays were judged"
        )
    return Reading("its text was read, nothing was run", tuple(commands), tuple(notes))


@dataclass(frozen=True, slots=True)
class _Array:
    name: str
    words: tuple[Word, ...]
    appended: bool


class _Script:
    """The words and arrays of a script, or of a text where `path` is None, and of the files that it sources."""

    def __init__(self, text: str, path: Path | None, slime_dir: Path | None) -> None:
        self.notes: list[str] = []
        self.sourced: list[Path] = []
        self._slime_dir = slime_dir
        self._path = path
        self.words = self._followed(shell_words(text, str(path) if path else "-"), path, 0)
        self.arrays = list(_arrays(self.words))

    def _followed(self, words: list[Word], path: Path | None, depth: int) -> list[Word]:
        """The words with those of each sourced file before them."""
        found: list[Word] = []
        for at, (word, named) in enumerate(pairwise(words)):
            if word.text != "source" and not (word.text == "." and _begins_command(words[:at])):
                continue
            file = self._find(named.text, path)
            if file is None or depth == _DEEPEST:
                self.notes.append(f"{named.place}: {named.text} was not found, so it was not read")
            elif file not in self.sourced:
                self.sourced.append(file)
                shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
                inner = shell_words(file.read_text("utf-8", "replace"), str(shown))
                found += self._followed(inner, file, depth + 1)
        return [*found, *words]

    def _find(self, named: str, path: Path | None) -> Path | None:
        # "${SCRIPT_DIR}/models/x.sh": the directory is an expansion, the rest is tried beside the script and above it
        rest = re.split(r"[})]/|^\$\w+/", named)[-1]
        files = [folder / rest for folder in path.resolve().parents[: _PARENTS + 1]] if path else []
        if self._slime_dir is not None:
            files += [self._slime_dir / rest, self._slime_dir / "scripts" / rest.rpartition("scripts/")[2]]
        return next((file.resolve() for file in files if file.is_file()), None)

    def commands(self) -> list[Command]:
        """The commands that start training; else one of all arrays, or of the text where it is no file's."""
        found = [self._command(program, words) for program, words in _invocations(self.words)]
        given = [words for command in found for words in (command.words, *command.further)]
        if any(map(_has_flag, given)) or (found and self._path is None):
            return found
        if self._path is None:
            return [self._command(None, [word for word in self.words if not word.operator])]
        literals = tuple(array.words for array in self.arrays if _has_flag(array.words))
        return [Command(None, (), literals, exact=False)] if literals else found

    def _command(self, program: str | None, words: Sequence[Word]) -> Command:
        further: list[tuple[Word, ...]] = []
        known = len(self.notes)
        whole = tuple(self._expanded(words, further, frozenset()))
        return Command(program, whole, tuple(further), exact=not further and known == len(self.notes))

    def _expanded(
        self, words: Sequence[Word], further: list[tuple[Word, ...]], within: frozenset[str]
    ) -> Iterator[Word]:
        """The words with those of the arrays that they name; `within` are the arrays that these words are of."""
        flag_before, before = False, None
        for word in words:
            named = _REFERENCE.match(word.text) if word.dynamic and word.splits else None
            name = named[1] if named else ""
            arrays = [array for array in self.arrays if array.name == name and name not in within]
            if len(arrays) == 1 and not arrays[0].appended:
                yield from self._expanded(arrays[0].words, further, within | {name})
            else:
                further += [tuple(self._expanded(array.words, further, within | {name})) for array in arrays]
                if not arrays and name not in within and _is_opaque(word, before, flag_before=flag_before):
                    self.notes.append(
                        f"{word.place}: {word.text} stands for words that could not be read, so they are not judged"
                    )
                yield word
            before, flag_before = word, flag_before or word.text.startswith("--")


def _has_flag(words: Sequence[Word]) -> bool:
    return any(word.text.startswith("--") for word in words)


def _is_opaque(word: Word, before: Word | None, *, flag_before: bool) -> bool:
    """Whether a word may be flags; what stands right after a flag is taken for its value."""
    if is_placeholder(word):
        return True
    if not word.splits or (before is not None and before.text.startswith("--") and "[" not in word.text):
        return False
    return bool(_VARIABLE.match(word.text)) or (word.text.startswith("$(") and not flag_before)


def _arrays(words: Sequence[Word]) -> Iterator[_Array]:
    """Each assignment of an array, and of a string that holds flags."""
    for at, (word, following) in enumerate(pairwise(words)):
        if word.operator:
            continue
        head = _ARRAY.match(word.text)
        if head and following.text == "(" and following.operator:
            closed = next((n for n in range(at + 2, len(words)) if words[n].operator and words[n].text == ")"), None)
            inside = tuple(inner for inner in words[at + 2 : closed] if not inner.operator)
            yield _Array(head[1], inside, appended=bool(head[2]))
        elif string := _STRING.match(word.text):
            name, _, line = (word.place or ":1").rpartition(":")
            parts = shell_words(string[2], name, first_line=int(line))
            yield _Array(string[1], tuple(part for part in parts if not part.operator), appended=False)


def _invocations(words: Sequence[Word]) -> Iterator[tuple[str, list[Word]]]:
    """Each program and the words after it, up to the end of its command."""
    for at, word in enumerate(words):
        program = Path(word.text).name
        if word.operator or program not in PROGRAMS:
            continue
        before = list(takewhile(lambda earlier: not earlier.operator, reversed(words[:at])))
        started = any(_STARTER.search(Path(earlier.text).name) for earlier in before)  # not by `[ -f train.py ]`
        if not started and not _begins_command(words[:at]):
            continue
        found = list(takewhile(lambda later: not later.operator, words[at + 1 :]))
        following = words[at + 1 + len(found) :]
        if following and following[0].text in (">", ">>", "<") and found and found[-1].text.isdigit():
            found.pop()  # the 2 of 2>&1
        yield program, found


def _begins_command(before: Sequence[Word]) -> bool:
    return not before or before[-1].operator or before[-1].text in ("then", "do", "else")


def shell_words(text: str, name: str, *, first_line: int = 1) -> list[Word]:
    """The words and operators of shell text, each with the file's name and its line.

    Comments and here-documents are left out, expansions stay as written.
    """
    line_ends = [found.start() for found in re.finditer("\n", text)]
    words: list[Word] = []
    here_documents: list[str] = []
    at = 0
    while at < len(text):
        place = f"{name}:{first_line + bisect_left(line_ends, at)}"
        if between := _BETWEEN_WORDS.match(text, at):
            at = between.end()
        elif operator := _OPERATOR.match(text, at):
            words.append(Word(operator[0], place, operator=True))
            at = operator.end()
            if operator[0] in ("<<", "<<-"):
                while at < len(text) and text[at] in " \t\r":
                    at += 1
                at, delimiter = _word_at(text, at, place)
                here_documents.append(delimiter.text)
            elif operator[0] == "\n":
                for end in here_documents:
                    body = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(text, at)
                    at = body.end() if body else len(text)
                here_documents.clear()
        else:
            at, word = _word_at(text, at, place)
            words.append(word)
    return words


def _word_at(text: str, at: int, place: str) -> tuple[int, Word]:
    """The word that begins at a position, up to a blank or an operator, and where it ends."""
    pieces, dynamic, splits = [], False, False
    while at < len(text) and text[at] not in " \t\r" and not _OPERATOR.match(text, at):
        found = _PIECE.match(text, at)
        if found is None:
            quoted = text[at] == '"'
            at, piece, expands = _double_quoted(text, at) if quoted else _expansion(text, at)
            dynamic = dynamic or expands
            splits = splits or (expands and (not quoted or bool(_SPLITTING.search(piece))))
        else:
            at, piece = found.end(), found[found.lastgroup or 0]
            if found.lastgroup == "ansi":
                piece = re.sub(r"\\(.)", lambda escaped: _ESCAPES.get(escaped[1], escaped[0]), piece)
            elif found.lastgroup == "escaped" and piece == "\n":
                piece = ""
        pieces.append(piece)
    return at, Word("".join(pieces), place, dynamic=dynamic, splits=splits)


def _double_quoted(text: str, at: int) -> tuple[int, str, bool]:
    """Where double quotes end, what is in them, and whether that has expansions."""
    pieces, dynamic = [], False
    at += 1
    while at < len(text) and text[at] != '"':
        if found := _IN_DOUBLE_QUOTES.match(text, at):
            at, piece = found.end(), found[0] if found[1] is None else found[1].replace("\n", "")
        else:
            at, piece, expands = _expansion(text, at)
            dynamic = dynamic or expands
        pieces.append(piece)
    return at + 1, "".join(pieces), dynamic


def _expansion(text: str, begin: int) -> tuple[int, str, bool]:
    """Where `$NAME`, `${...}`, `$(...)` or backticks end, as written; a lone `$` is itself and expands nothing."""
    if backticks := _BACKTICKS.match(text, begin):
        return backticks.end(), backticks[0], True
    at = begin + 1
    opened = text[at : at + 1]
    if opened not in _PAIRS:
        name = _NAME.match(text, at)
        return (name.end(), text[begin : name.end()], True) if name else (at, "$", False)
    depth = 0
    while at < len(text):
        here = text[at]
        if here == '"':
            at = _double_quoted(text, at)[0]
        elif opened == "(" and (quoted := _SINGLE_QUOTES.match(text, at)):
            at = quoted.end()
        else:
            depth += (here == opened) - (here == _PAIRS[opened])
            at += 2 if here == "\\" else 1
            if depth == 0:
                break
    return at, text[begin:at], True
