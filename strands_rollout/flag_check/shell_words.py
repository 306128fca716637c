"""Shell text -> its words, with their lines. Reads and never runs; expansions stay as they are written."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_PLAIN: Final = re.compile(r"[^\s'\"\\$`;&|<>()]+")
_NAME: Final = re.compile(r"\w+|[@*#?$!-]")
_OPERATOR: Final = re.compile(r"<<<|<<-|&&|\|\||;;|<<|>>|[;&|<>()\n]")
_SPLITTING: Final = re.compile(r"\[[@*]\]|\$[@*]|\$\{[@*]")
_BLANK: Final = " \t\r"
_PAIRS: Final = {"(": ")", "{": "}"}
_ESCAPES: Final = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


@dataclass(frozen=True, slots=True)
class Word:
    """A word or an operator of shell text.

    Attributes:
        text: What the shell would pass on, with expansions as they are written.
        place: "FILE:LINE".
        dynamic: Whether it has expansions, so that its text is not known.
        splits: Whether it may become any number of words.
        operator: Whether it is one, such as a parenthesis, a pipe or the end of a line.
    """

    text: str
    place: str | None = None
    dynamic: bool = False
    splits: bool = False
    operator: bool = False


def shell_words(text: str, name: str, *, first_line: int = 1) -> list[Word]:
    """The words and operators of shell text; comments and here-documents are left out.

    Args:
        text: The script.
        name: Its name, for the places.
        first_line: The number of its first line.
    """
    return list(_Scan(text, name, first_line).words())


class _Scan:
    def __init__(self, text: str, name: str, first_line: int) -> None:
        self._text = text
        self._name = name
        self._first_line = first_line
        self._ends = [found.start() for found in re.finditer("\n", text)]
        self._at = 0
        self._here_documents: list[str] = []

    def words(self) -> Iterator[Word]:
        while self._at < len(self._text):
            here = self._text[self._at]
            if here in _BLANK:
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif here == "#":
                self._skip_to("\n")
            elif operator := _OPERATOR.match(self._text, self._at):
                yield self._operator(operator.group())
            else:
                yield self._word()

    def _place(self, at: int) -> str:
        return f"{self._name}:{self._first_line + bisect_left(self._ends, at)}"

    def _operator(self, operator: str) -> Word:
        found = Word(operator, self._place(self._at), operator=True)
        self._at += len(operator)
        if operator in ("<<", "<<-"):
            self._skip_blank()
            self._here_documents.append(self._word().text)
        elif operator == "\n":
            for end in self._here_documents:
                body = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(self._text, self._at)
                self._at = body.end() if body else len(self._text)
            self._here_documents.clear()
        return found

    def _skip_blank(self) -> None:
        while self._at < len(self._text) and self._text[self._at] in _BLANK:
            self._at += 1

    def _skip_to(self, end: str) -> None:
        found = self._text.find(end, self._at)
        self._at = len(self._text) if found < 0 else found

    def _word(self) -> Word:
        """The word that begins here: its pieces up to a blank or an operator."""
        begin, pieces, dynamic, splits = self._at, [], False, False
        while self._at < len(self._text):
            here = self._text[self._at]
            if here in _BLANK or (
                _OPERATOR.match(self._text, self._at) and not self._text.startswith("\\\n", self._at)
            ):
                break
            piece, expands = self._piece(here)
            pieces.append(piece)
            dynamic = dynamic or expands
            splits = splits or (expands and (here != '"' or bool(_SPLITTING.search(piece))))
        return Word("".join(pieces), self._place(begin), dynamic=dynamic, splits=splits)

    def _piece(self, here: str) -> tuple[str, bool]:
        """The next piece of a word, and whether it has expansions."""
        if here == "'":
            return self._quoted("'"), False
        if here == '"':
            return self._double()
        if here == "\\":
            return self._escaped(), False
        if self._text.startswith("$'", self._at):
            self._at += 1
            return re.sub(
                r"\\(.)", lambda found: _ESCAPES.get(found[1], found[0]), self._quoted("'", escapes=True)
            ), False
        if here in "$`":
            return self._expansion()
        plain = _PLAIN.match(self._text, self._at)
        piece = plain.group() if plain else here
        self._at += len(piece)
        return piece, False

    def _escaped(self) -> str:
        escaped = self._text[self._at + 1 : self._at + 2]
        self._at += 2
        return "" if escaped == "\n" else escaped

    def _quoted(self, quote: str, *, escapes: bool = False) -> str:
        """The text within single quotes or backticks, as it stands there."""
        begin = self._at = self._at + 1
        while self._at < len(self._text) and self._text[self._at] != quote:
            self._at += 2 if escapes and self._text[self._at] == "\\" else 1
        self._at += 1
        return self._text[begin : self._at - 1]

    def _double(self) -> tuple[str, bool]:
        pieces, dynamic = [], False
        self._at += 1
        while self._at < len(self._text) and self._text[self._at] != '"':
            here = self._text[self._at]
            if here == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`", "\n"):
                pieces.append(self._escaped())
            elif here in "$`":
                piece, expands = self._expansion()
                pieces.append(piece)
                dynamic = dynamic or expands
            else:
                pieces.append(here)
                self._at += 1
        self._at += 1
        return "".join(pieces), dynamic

    def _expansion(self) -> tuple[str, bool]:
        """`$NAME`, `${...}`, `$(...)` or backticks, as written; a lone `$` is itself."""
        begin = self._at
        if self._text[begin] == "`":
            self._quoted("`", escapes=True)
            return self._text[begin : self._at], True
        self._at += 1
        opened = self._text[self._at : self._at + 1]
        if opened in _PAIRS:
            self._skip_balanced(opened)
        elif name := _NAME.match(self._text, self._at):
            self._at = name.end()
        return self._text[begin : self._at], self._at > begin + 1

    def _skip_balanced(self, opened: str) -> None:
        depth = 0
        while self._at < len(self._text):
            here = self._text[self._at]
            if here == "'" and opened == "(":
                self._quoted("'")
                continue
            if here == '"':
                self._double()
                continue
            depth += (here == opened) - (here == _PAIRS[opened])
            self._at += 2 if here == "\\" else 1
            if depth == 0:
                return
