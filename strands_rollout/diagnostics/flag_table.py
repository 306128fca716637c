"""All flags that a training command can have, as the parsers that read it declare them, and where that is known from.

The parsers of the slime, Megatron-LM, SGLang and router that are installed are asked in a child process. What can't be
imported there is taken from `data/slime_flags.json`, which `scripts/record_flags.py` made from the parsers themselves.
"""

import difflib
import json
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Final

from pydantic import BaseModel

from strands_rollout.diagnostics import flag_probe
from strands_rollout.diagnostics.diagnosis import package_folders, run_program
from strands_rollout.errors import ConfigError
from strands_rollout.files import Json

RECORD: Final = Path(__file__).parents[1] / "data" / "slime_flags.json"
SYSTEMS: Final = ("slime", "megatron", "sglang", "router")
TITLES: Final = {"slime": "slime", "megatron": "Megatron-LM", "sglang": "SGLang", "router": "SGLang's router"}
LIMIT_S: Final = 180.0
_SHORTEST_PREFIX: Final = 6
_LONGEST_NOTE: Final = 160


class Flag(BaseModel, frozen=True):
    """One argument of argparse, under all its names; a row of the record, where what is the default is left out."""

    names: tuple[str, ...]
    system: str  # who declares it: one of SYSTEMS
    parser: str = "main"  # which of slime's three parsers reads it: "main", "sglang" or "pre"
    nargs: int | str | None = None  # argparse's: None for one value, 0 for none, a number, "?", "*" or "+"
    type: str | None = None  # the name of the function that converts a value
    choices: tuple[str, ...] = ()  # the values that are allowed, as text; empty if any is
    required: bool = False  # whether slime stops without it
    repeats: bool = False  # whether each use adds a value; otherwise the last use wins


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

    def owners(self, name: str) -> str:
        """Whose parsers read a flag."""
        return " and ".join(TITLES[flag.system] for flag in self.find(name))

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


def read_record(path: Path = RECORD) -> Json:
    """The record; a ConfigError where the file is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"got {path}; expected the recorded list of flags: {e}") from e
    if record.get("format") != 1:
        raise ConfigError(f"got format {record.get('format')!r} in {path}; expected 1; record it again")
    return record


def table_of(slime_dir: Path | None, megatron_dir: Path | None = None, *, limit_s: float = LIMIT_S) -> FlagTable:
    """The flags of what is installed, and of the record where that can't be asked."""
    if slime_dir is None:
        return recorded_table(read_record(), "no slime is importable")
    try:
        answer = ask(slime_dir, megatron_dir, limit_s=limit_s)
    except ConfigError as e:
        return recorded_table(read_record(), str(e))
    versions = {"slime": str(slime_dir), "megatron": "the importable one", **answer["versions"]}
    return _table(read_record(), answer, versions)


def recorded_table(record: Json, note: str = "") -> FlagTable:
    """The table of the record alone; `note` says why no parser was asked."""
    nothing = {"flags": [], "abbreviating": record["abbreviating"], "failed": dict.fromkeys(SYSTEMS, note)}
    return _table(record, nothing, {})


def _table(record: Json, answer: Json, versions: dict[str, str | None]) -> FlagTable:
    """The flags that the probe answered with, and of the systems that it names under `failed` those of the record."""
    failed = answer["failed"]
    missing = [flag for flag in map(Flag.model_validate, record["flags"]) if flag.system in failed]
    theirs = {(name, flag.parser) for flag in missing for name in flag.names}
    # where Megatron-LM declares a flag too, slime changes its default only
    asked = map(Flag.model_validate, answer["flags"])
    flags = [flag for flag in asked if not {(name, flag.parser) for name in flag.names} & theirs]
    sources = []
    for system in SYSTEMS:
        known = f"its parser was asked, {versions.get(system) or 'version unknown'}"
        if system in failed:
            note = f" ({shorten(failed[system], _LONGEST_NOTE, placeholder='...')})" if failed[system] else ""
            known = f"recorded, {record['sources'][system]['version']}{note}"
        sources.append(f"{TITLES[system]}: {known}")
    left_out = (record if "sglang" in failed else answer)["left_out"]
    return FlagTable((*flags, *missing), frozenset(left_out), frozenset(answer["abbreviating"]), tuple(sources))


def ask(
    slime_dir: Path, megatron_dir: Path | None = None, *, python: str = sys.executable, limit_s: float = LIMIT_S
) -> Json:
    """The probe's answer for a checkout, by a Python that has SGLang and what Megatron-LM imports.

    Megatron-LM is otherwise MEGATRON_DIR's, the one beside slime's, or the importable one.

    Raises:
        ConfigError: The probe failed or took longer than `limit_s` seconds.
    """
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
    wanted = named or (Path(os.environ["SLIME_DIR"]) if os.environ.get("SLIME_DIR") else None)
    if wanted is None:
        return next(filter(_is_slime, (package.parent for package in package_folders("slime"))), None)
    if not _is_slime(wanted):
        raise ConfigError(
            f"got slime at {wanted}; expected a checkout of THUDM/slime, which has {flag_probe.MAIN_ARGUMENTS}"
        )
    return wanted


def _is_slime(folder: Path) -> bool:
    # the slime of PyPI is another package of the same name
    return all((folder / name).is_file() for name in (flag_probe.MAIN_ARGUMENTS, flag_probe.SGLANG_ARGUMENTS))
