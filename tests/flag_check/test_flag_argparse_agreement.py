"""The rules by which values are given to flags are argparse's: real parsers of all recorded flags are the reference."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from strands_rollout.flag_check.flag import Flag
from strands_rollout.flag_check.flag_table import FlagTable, read_record, recorded_table
from strands_rollout.flag_check.judgement import judge
from strands_rollout.flag_check.launch_text import Command
from strands_rollout.flag_check.shell_words import Word

CONVERSIONS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "loads": json.loads}
# each value is made unique by its place, so that argparse's leftovers can be told apart
VALUES = ("{}", "0.{}", "-{}", "-0.5{}", "-{}e-5", "word{}", "[{}]", "1{}e3", "two words{}")


@functools.cache
def the_table() -> FlagTable:
    return recorded_table(read_record())


@functools.cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    made: dict[str, argparse.ArgumentParser] = {}
    for flag in the_table().flags:
        if flag.parser not in made:
            abbreviates = flag.parser in the_table().abbreviating
            made[flag.parser] = argparse.ArgumentParser(add_help=False, allow_abbrev=abbreviates)
        add(made[flag.parser], flag)
    return made


def add(parser: argparse.ArgumentParser, flag: Flag) -> None:
    if flag.nargs == 0:
        parser.add_argument(*flag.names, action="store_true")
        return
    conversion = CONVERSIONS.get(flag.type_name or "", str)
    choices = [conversion(choice) for choice in flag.choices] or None
    parser.add_argument(*flag.names, nargs=flag.nargs, type=conversion, choices=choices)


def accepted_by_argparse(words: list[str]) -> bool:
    """Whether all three parsers read the command, and each word is read by one of them."""
    leftovers: list[Counter[str]] = []
    for parser in parsers().values():
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                _, extra = parser.parse_known_args(words)
            except SystemExit:
                return False
        leftovers.append(Counter(extra))
    return not functools.reduce(lambda one, other: one & other, leftovers)


@st.composite
def commands(draw: st.DrawFn) -> list[str]:
    names = [name for flag in the_table().flags for name in flag.names if name not in ("-h", "--help")]
    words: list[str] = []
    for _ in range(draw(st.integers(1, 5))):
        name = draw(st.sampled_from(names))
        form = draw(st.sampled_from(["separate", "separate", "separate", "joined"]))
        texts = draw(st.lists(st.sampled_from(VALUES), max_size=3))
        flag = the_table().find(name)[0]
        values = [text.format(100 + len(words) + at) for at, text in enumerate(texts)]
        if flag.choices and draw(st.booleans()):
            values = [draw(st.sampled_from(flag.choices))]
        if form == "joined" and values:
            words += [f"{name}={values[0]}", *values[1:]]
        else:
            words += [name, *values]
    return words


@settings(max_examples=150, deadline=None)
@given(commands())
def test_a_command_is_faultless_exactly_if_argparse_reads_all_of_it(words: list[str]) -> None:
    findings = judge(Command(None, tuple(map(Word, words))), the_table())

    assert findings.ok == accepted_by_argparse(words), (words, [finding.line() for finding in findings.findings])


def test_the_reference_refuses_and_accepts() -> None:
    assert accepted_by_argparse(["--lr", "1e-6", "--colocate", "--sglang-mem-fraction-static", "0.7"])
    assert not accepted_by_argparse(["--lr", "1e-6", "--colocat"])
    assert not accepted_by_argparse(["--lr", "fast"])
