"""A launch script's text -> the commands that start training, without running anything.

Follows the arrays that are passed to `train.py` and the files that are sourced. What only the shell could say, such as
the words of a variable, is named in the notes and not judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strands_rollout.flag_check.shell_words import Word, shell_words

PROGRAMS: Final = ("train.py", "train_async.py")
_ARRAY: Final = re.compile(r"^(\w+)(\+?)=$")
_STRING: Final = re.compile(r"^(\w+)\+?=(.*(?:^|[\s=])--\w.*)$", re.DOTALL)
_REFERENCE: Final = re.compile(r"^\$\{?(\w+)(?:\[[@*]\])?(?:[}+:-].*)?$", re.DOTALL)
_VARIABLE: Final = re.compile(r"^\$(?:[\w@*]+|\{[^/]*\})$")
_STARTER: Final = re.compile(r"^(?:python|pypy|torchrun|uv$)|\$")
_PLACEHOLDER: Final = re.compile(r"<SLIME_DIR>|<MODEL_ARGS of scripts/models/[^/<>]+\.sh in slime>")
_PARENTS: Final = 3
_DEEPEST: Final = 5


@dataclass(frozen=True, slots=True)
class Command:
    """A command that starts training.

    Attributes:
        program: "train.py", "train_async.py", or None where none was found.
        words: What follows the program, in order.
        further: Words that may be added: those of arrays that are set more than once.
        exact: Whether `words` is the whole command, with nothing left to the shell.
    """

    program: str | None
    words: tuple[Word, ...]
    further: tuple[tuple[Word, ...], ...] = ()
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Reading:
    """What a script says.

    Attributes:
        how: How it was read, for the report.
        commands: The commands that start training.
        notes: What could not be read, a sentence each.
    """

    how: str
    commands: tuple[Command, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Array:
    name: str
    words: tuple[Word, ...]
    appended: bool


class ScriptText:
    """The words and arrays of a script and of the files that it sources.

    Args:
        text: The script.
        path: Where it lies, or None for a text from elsewhere.
        slime_dir: slime's checkout, whose files scripts source.
    """

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
        for at, word in enumerate(words[:-1]):
            if word.text == "source" or (word.text == "." and _begins_command(words[:at])):
                found += self._sourced(words[at + 1], path, depth)
        return [*found, *words]

    def _sourced(self, word: Word, path: Path | None, depth: int) -> list[Word]:
        file = self._find(word.text, path)
        if file is None or depth == _DEEPEST:
            self.notes.append(f"{word.place}: {word.text} was not found, so it was not read")
            return []
        if file in self.sourced:
            return []
        self.sourced.append(file)
        return self._followed(shell_words(_read(file), _shown(file)), file, depth + 1)

    def _find(self, named: str, path: Path | None) -> Path | None:
        # "${SCRIPT_DIR}/models/x.sh": the directory is an expansion, the rest is tried beside the script and above it
        rest = re.split(r"[})]/|^\$\w+/", named)[-1]
        folders = [path.resolve().parent, *path.resolve().parents[1 : _PARENTS + 1]] if path else []
        files = [folder / rest for folder in folders]
        if self._slime_dir is not None:
            files += [self._slime_dir / rest, self._slime_dir / "scripts" / rest.rpartition("scripts/")[2]]
        return next((file.resolve() for file in files if file.is_file()), None)

    def commands(self) -> list[Command]:
        """The commands that start training; else one of all arrays, or of the text where it is no file's."""
        found = [self._command(program, words) for program, words in _invocations(self.words)]
        if any(_has_flags(command) for command in found) or (found and self._path is None):
            return found
        if self._path is None:
            return [self._command(None, [word for word in self.words if not word.operator])]
        literals = tuple(
            array.words for array in self.arrays if any(word.text.startswith("--") for word in array.words)
        )
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
            elif arrays:
                further += [tuple(self._expanded(array.words, further, within | {name})) for array in arrays]
                yield word
            else:
                if name not in within and _is_opaque(word, before, flag_before=flag_before):
                    self.notes.append(
                        f"{word.place}: {word.text} stands for words that could not be read, so they are not judged"
                    )
                yield word
            before, flag_before = word, flag_before or word.text.startswith("--")


def _has_flags(command: Command) -> bool:
    return any(word.text.startswith("--") for words in (command.words, *command.further) for word in words)


def is_placeholder(word: Word) -> bool:
    """Whether a word is what a dry run prints for words that it could not find."""
    return _PLACEHOLDER.fullmatch(word.text) is not None


def _is_opaque(word: Word, before: Word | None, *, flag_before: bool) -> bool:
    """Whether a word may be flags; what stands right after a flag is taken for its value."""
    if is_placeholder(word):
        return True
    if not word.splits or (before is not None and before.text.startswith("--") and "[" not in word.text):
        return False
    return bool(_VARIABLE.match(word.text)) or (word.text.startswith("$(") and not flag_before)


def _arrays(words: Sequence[Word]) -> Iterator[_Array]:
    """Each assignment of an array, and of a string that holds flags."""
    for at, word in enumerate(words[:-1]):
        head = None if word.operator else _ARRAY.match(word.text)
        if head and words[at + 1].text == "(" and words[at + 1].operator:
            yield _Array(head[1], tuple(_until_closed(words, at + 2)), appended=bool(head[2]))
        elif not word.operator and (string := _STRING.match(word.text)):
            line = int((word.place or ":1").rpartition(":")[2])
            name = (word.place or "").rpartition(":")[0]
            inner = shell_words(string[2], name, first_line=line)
            yield _Array(string[1], tuple(part for part in inner if not part.operator), appended=False)


def _until_closed(words: Sequence[Word], begin: int) -> Iterator[Word]:
    for word in words[begin:]:
        if word.operator and word.text == ")":
            return
        if not word.operator:
            yield word


def _invocations(words: Sequence[Word]) -> Iterator[tuple[str, list[Word]]]:
    """Each program and the words after it, up to the end of its command."""
    for at, word in enumerate(words):
        program = Path(word.text).name
        if word.operator or program not in PROGRAMS or not _is_started(words[:at]):
            continue
        end = next((later for later in range(at + 1, len(words)) if words[later].operator), len(words))
        found = list(words[at + 1 : end])
        if end < len(words) and words[end].text in (">", ">>", "<") and found and found[-1].text.isdigit():
            found.pop()  # the 2 of 2>&1
        yield program, found


def _is_started(before: Sequence[Word]) -> bool:
    """Whether the words before a program on its line run it; `[ -f train.py ]` does not."""
    for word in reversed(before):
        if word.operator:
            break
        if _STARTER.search(Path(word.text).name):
            return True
    return _begins_command(before)


def _begins_command(before: Sequence[Word]) -> bool:
    return not before or before[-1].operator or before[-1].text in ("then", "do", "else")


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _shown(file: Path) -> str:
    """A path as short as it can be named from here."""
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


def read_text(text: str, path: Path | None, slime_dir: Path | None) -> Reading:
    """Read a script's text; nothing of it is run.

    Args:
        text: The script, or a command.
        path: Where it lies, or None.
        slime_dir: slime's checkout, or None.
    """
    script = ScriptText(text, path, slime_dir)
    commands = script.commands()
    notes = list(dict.fromkeys(script.notes))
    if path is not None and all(command.program is None for command in commands):
        notes.append(
            f"no command with {' or '.join(PROGRAMS)} and flags was found; the flags of all arrays were judged"
        )
    return Reading("its text was read, nothing was run", tuple(commands), tuple(notes))
