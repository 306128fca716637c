"""Whether a known flag is used with values that its parser takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from strands_rollout.flag_check.findings import Finding
from strands_rollout.flag_check.flag import Flag
from strands_rollout.flag_check.flag_table import TITLES
from strands_rollout.flag_check.shell_words import Word
from strands_rollout.flag_check.uses import Use

_WITH_SUFFIX: Final = re.compile(r"\s*\d+(?:(?:\.\d+)?[kMGT]|[KMGT]i)\s*")


def _readable_int(text: str) -> None:
    """As SGLang's human_readable_int (sglang/srt/utils/common.py): 131072, 128Ki or 25.6k."""
    if not _WITH_SUFFIX.fullmatch(text):
        int(text)


_CONVERSIONS: Final[Mapping[str, tuple[Callable[[str], object], str]]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "loads": (json.loads, "JSON"),
    "human_readable_int": (_readable_int, "a whole number, such as 131072, 128Ki or 25.6k"),
}
_FALSE: Final = ("false", "0", "no", "off", "none")


def check_values(use: Use, flag: Flag, following: Word | None) -> Iterator[Finding]:
    """The faults of one use.

    Args:
        use: The use.
        flag: The flag that it names.
        following: The word after its values, if any.
    """
    values = [Word(use.joined, use.where, use.dynamic)] if use.joined is not None else list(use.values)
    if use.joined is not None:
        if flag.nargs == 0:
            got = use.shown(use.joined)
            yield _error(use, f"got the value {got}; expected none: {_title(flag)}'s parser stops; remove it")
            return
        yield from _surplus(use, list(use.values))
    else:
        least, most = _bounds(flag.nargs)
        yield from _missing(use, flag, least, following)
        yield from _surplus(use, values[most:] if most is not None else [])
        values = values[:most]
    for value in values:
        if not value.dynamic and flag.nargs != 0:
            yield from _wrong(use, flag, value.text)


def _bounds(nargs: int | str | None) -> tuple[int, int | None]:
    """The least and the most words that argparse takes."""
    if isinstance(nargs, int):
        return nargs, nargs
    bounds: dict[str | None, tuple[int, int | None]] = {None: (1, 1), "?": (0, 1), "*": (0, None), "+": (1, None)}
    return bounds.get(nargs, (0, None))


def _missing(use: Use, flag: Flag, least: int, following: Word | None) -> Iterator[Finding]:
    if len(use.values) >= least or use.splits:
        return
    wanted = "a value" if least == 1 else f"{least} values"
    got = f"the flag {following.text}" if following else "the end of the command"
    is_value = following is not None and not following.text.startswith("--")
    hint = f"; a value that begins with a hyphen needs {use.name}=VALUE" if is_value else ""
    yield _error(use, f"got {got} next; expected {wanted}: {_title(flag)}'s parser stops{hint}")


def _surplus(use: Use, words: list[Word]) -> Iterator[Finding]:
    for word in words:
        if word.splits:
            return  # whether anything is too much is left to the shell
        got = use.shown(word.text)
        yield _error(use, f"got the further word {got}; slime drops it without a word; remove it or name its flag")


def _wrong(use: Use, flag: Flag, value: str) -> Iterator[Finding]:
    """The fault of a value, if it has one."""
    conversion = _CONVERSIONS.get(flag.type_name or "")
    if conversion is not None:
        convert, expected = conversion
        try:
            value = str(convert(value)) if flag.choices else value
            convert(value)
        except ValueError:
            yield _error(use, f"got {use.shown(value)}; expected {expected}: {_title(flag)}'s parser stops")
            return
    if flag.choices and value not in flag.choices:
        yield _error(use, f"got {use.shown(value)}; expected one of {', '.join(flag.choices)}")
    elif flag.type_name == "bool" and value.lower() in _FALSE:
        yield _error(use, f"got {use.shown(value)}; {_title(flag)} reads any word as true; leave the flag out")


def _title(flag: Flag) -> str:
    return TITLES[flag.system]


def _error(use: Use, problem: str) -> Finding:
    return Finding("error", use.name, use.where, problem)
