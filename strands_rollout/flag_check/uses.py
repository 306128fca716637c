"""The words of a command -> uses of flags, each with its values, as argparse would split them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from strands_rollout.flag_check.flag_table import FlagTable
from strands_rollout.flag_check.shell_words import Word

_SECRET: Final = re.compile(r"key|token|secret|password")
_NEGATIVE_NUMBER: Final = re.compile(r"^-\d+$|^-\d*\.\d+$")


@dataclass(frozen=True, slots=True)
class Use:
    """A flag as it is used.

    Attributes:
        name: The flag, without a value that is joined to it by "=".
        joined: That value, or None.
        values: The words that follow, up to the next flag.
        where: "FILE:LINE", or None.
        dynamic: Whether the joined value is left to the shell.
    """

    name: str
    joined: str | None
    values: tuple[Word, ...]
    where: str | None
    dynamic: bool = False

    @property
    def splits(self) -> bool:
        """Whether the number of values is left to the shell."""
        return any(word.splits for word in self.values)

    def shown(self, text: str) -> str:
        """A value as a report may show it: none of a flag that may hold a secret."""
        return "(not shown)" if _SECRET.search(self.name) else repr(text)


def looks_like_flag(text: str) -> bool:
    """Whether argparse takes a word for a flag: it begins with a hyphen and is no number.

    The parsers of slime have no flag that looks like a negative number, so that -1 is a value; -1e-5 is none
    (CPython's argparse up to 3.13).
    """
    return len(text) > 1 and text.startswith("-") and " " not in text.split("=")[0] and not _NEGATIVE_NUMBER.match(text)


def uses_of(words: Sequence[Word], table: FlagTable) -> tuple[list[Word], list[Use]]:
    """The words before the first flag, and the uses of flags in order."""
    starts = [at for at, word in enumerate(words) if looks_like_flag(word.text)]
    if not starts:
        return list(words), []
    ends = [*starts[1:], len(words)]
    uses = [_use(words[begin], words[begin + 1 : end], table) for begin, end in zip(starts, ends, strict=True)]
    return list(words[: starts[0]]), uses


def _use(word: Word, values: Sequence[Word], table: FlagTable) -> Use:
    name, equals, joined = word.text.partition("=")
    if not equals or table.find(word.text):
        return Use(word.text, None, tuple(values), word.place)
    return Use(name, joined, tuple(values), word.place, dynamic=word.dynamic and "$" in joined)
