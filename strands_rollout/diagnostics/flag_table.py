"""All flags that a training command can have, as the parsers that read it declare them, and where that is known from.

The parsers of the slime, Megatron-LM, SGLang and router that are installed are asked in a child process. What can't be
imported there is taken from `data/slime_flags.json`, which `scripts/record_flags.py` made from the parsers themselves.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strands_rollout.diagnostics import flag_probe
from strands_rollout.errors import ConfigError

RECORD: Final = Path(__file__).parents[1] / "data" / "slime_flags.json"
SYSTEMS: Final = ("slime", "megatron", "sglang", "router")
TITLES: Final = {"slime": "slime", "megatron": "Megatron-LM", "sglang": "SGLang", "router": "SGLang's router"}
LIMIT_S: Final = 180.0
_SHORTEST_PREFIX: Final = 6
_LONGEST_NOTE: Final = 160


@dataclass(frozen=True, slots=True)
class Flag:
    """One argument of argparse, under all its names."""

    names: tuple[str, ...]
    system: str  # who declares it: one of SYSTEMS
    parser: str  # which of slime's three parsers reads it: "main", "sglang" or "pre"
    nargs: int | str | None = None  # argparse's: None for one value, 0 for none, a number, "?", "*" or "+"
    type_name: str | None = None  # of the function that converts a value
    choices: tuple[str, ...] = ()  # the values that are allowed, as text; empty if any is
    required: bool = False  # whether slime stops without it
    repeats: bool = False  # whether each use adds a value; otherwise the last use wins

    @classmethod
    def read(cls, row: dict[str, Any]) -> Flag:
        """A flag from a row of the record or of the probe's answer; what a row lacks is the default."""
        return cls(
            names=tuple(row["names"]),
            system=row["system"],
            parser=row.get("parser") or "main",
            nargs=row.get("nargs"),
            type_name=row.get("type"),
            choices=tuple(row.get("choices") or ()),
            required=bool(row.get("required")),
            repeats=bool(row.get("repeats")),
        )

    def row(self) -> dict[str, Any]:
        """The flag as a row of the record: what is the default is left out."""
        whole = {
            "names": list(self.names),
            "system": self.system,
            "parser": None if self.parser == "main" else self.parser,
            "nargs": self.nargs,
            "type": self.type_name,
            "choices": list(self.choices) or None,
            "required": self.required or None,
            "repeats": self.repeats or None,
        }
        return {key: value for key, value in whole.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a system's flags are known from."""

    system: str  # one of SYSTEMS
    how: str  # "parser" if the parser itself was asked, "record" if the record was read
    version: str  # what was asked or recorded: a commit, a version or a path
    note: str | None = None  # why the parser was not asked

    def line(self) -> str:
        """The source in one line of a report."""
        way = "its parser was asked" if self.how == "parser" else "recorded"
        return f"{TITLES[self.system]}: {way}, {self.version}" + (f" ({self.note})" if self.note else "")


class FlagTable:
    """Flags by name.

    Args:
        flags: All flags.
        left_out: Flags of SGLang's, in slime's spelling, that slime does not pass on.
        abbreviating: The parsers that read an unambiguous beginning of a flag as that flag.
        sources: Where this is known from, one for each system.
    """

    def __init__(
        self, flags: Iterable[Flag], *, left_out: Iterable[str], abbreviating: Iterable[str], sources: Iterable[Source]
    ) -> None:
        self.flags = tuple(flags)
        self.left_out = frozenset(left_out)
        self.abbreviating = frozenset(abbreviating)
        self.sources = tuple(sources)
        self._by_name: dict[str, list[Flag]] = {}
        for flag in self.flags:
            for name in flag.names:
                self._by_name.setdefault(name, []).append(flag)

    def find(self, name: str) -> list[Flag]:
        """The flags of that exact name, one for each parser that reads it."""
        return self._by_name.get(name, [])

    def abbreviated_by(self, name: str) -> list[str]:
        """The names that an abbreviating parser would take `name` for."""
        return sorted(
            known
            for known, flags in self._by_name.items()
            if known.startswith(name) and any(flag.parser in self.abbreviating for flag in flags)
        )

    def nearest(self, name: str) -> str | None:
        """The known flag that was likely meant."""
        stem = name.lstrip("-").replace("_", "-")
        for spelled in (f"--{stem}", f"--sglang-{stem}", f"--router-{stem}"):
            if spelled in self._by_name:
                return spelled
        longer = [known for known in self._by_name if known.startswith(name)]
        if len(longer) == 1 or (longer and len(name) >= _SHORTEST_PREFIX):
            return min(longer, key=lambda known: (len(known), known))
        close = difflib.get_close_matches(f"--{stem}", self._by_name, n=1, cutoff=0.6)
        return close[0] if close else None

    def title_of(self, name: str) -> str:
        """Who declares a known flag."""
        return " and ".join(TITLES[flag.system] for flag in self.find(name))


def read_record(path: Path = RECORD) -> dict[str, Any]:
    """The record.

    Raises:
        ConfigError: The file is no record.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"got {path}; expected the recorded list of flags: {e}") from e
    if record.get("format") != 1:
        raise ConfigError(f"got format {record.get('format')!r} in {path}; expected 1; record it again")
    return record


def recorded_table(record: Mapping[str, Any], note: str | None = None) -> FlagTable:
    """The table of the record alone; `note` says why no parser was asked."""
    return FlagTable(
        map(Flag.read, record["flags"]),
        left_out=record["left_out"],
        abbreviating=record["abbreviating"],
        sources=[Source(system, "record", record["sources"][system]["version"], note) for system in SYSTEMS],
    )


def table_of(slime_dir: Path | None, megatron_dir: Path | None = None, *, limit_s: float = LIMIT_S) -> FlagTable:
    """The flags of what is installed, and of the record where that can't be asked."""
    record = read_record()
    if slime_dir is None:
        return recorded_table(record, "no slime is importable")
    try:
        answer = ask(slime_dir, megatron_dir, limit_s=limit_s)
    except ConfigError as e:
        return recorded_table(record, _short(str(e)))
    failed: Mapping[str, str] = answer["failed"]
    missing = [flag for flag in map(Flag.read, record["flags"]) if flag.system in failed]
    theirs = {(name, flag.parser) for flag in missing for name in flag.names}
    # where Megatron-LM declares a flag too, slime changes its default only
    asked = [
        flag for flag in map(Flag.read, answer["flags"]) if not {(name, flag.parser) for name in flag.names} & theirs
    ]
    versions = {"slime": str(slime_dir), "megatron": "the importable one", **answer["versions"]}
    return FlagTable(
        [*asked, *missing],
        left_out=record["left_out"] if "sglang" in failed else answer["left_out"],
        abbreviating=answer["abbreviating"],
        sources=[
            Source(system, "record", record["sources"][system]["version"], _short(failed[system]))
            if system in failed
            else Source(system, "parser", versions.get(system) or "version unknown")
            for system in SYSTEMS
        ],
    )


def ask(
    slime_dir: Path, megatron_dir: Path | None = None, *, python: str = sys.executable, limit_s: float = LIMIT_S
) -> dict[str, Any]:
    """The probe's answer for a checkout.

    Args:
        slime_dir: slime's checkout.
        megatron_dir: Megatron-LM's; otherwise MEGATRON_DIR's, the one beside slime's, or the importable one.
        python: The Python that has SGLang and what Megatron-LM imports.
        limit_s: How long it may take.

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
    try:
        done = subprocess.run(  # noqa: S603 - our own file, with the Python that runs this
            [python, "-W", "ignore", flag_probe.__file__, str(slime_dir)],
            capture_output=True, text=True, timeout=limit_s, check=False, env=environment, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        raise ConfigError(f"its parsers did not answer within {limit_s:g} s") from e
    except OSError as e:
        raise ConfigError(f"its parsers could not be asked: {e}") from e
    if done.returncode != 0:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise ConfigError(f"its parsers could not be asked: {reason}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def find_slime(named: Path | None) -> Path | None:
    """The checkout of slime: the named one, else SLIME_DIR's, else that of the importable slime.

    Raises:
        ConfigError: A checkout was named that is none.
    """
    wanted = named or (Path(os.environ["SLIME_DIR"]) if os.environ.get("SLIME_DIR") else None)
    if wanted is not None:
        if not _is_slime(wanted):
            raise ConfigError(
                f"got slime at {wanted}; expected a checkout of THUDM/slime, which has {flag_probe.MAIN_ARGUMENTS}"
            )
        return wanted
    try:
        spec = importlib.util.find_spec("slime")
    except (ImportError, ValueError):
        return None
    folders = [Path(folder).parent for folder in (spec.submodule_search_locations or [])] if spec else []
    return next((folder for folder in folders if _is_slime(folder)), None)


def _is_slime(folder: Path) -> bool:
    # the slime of PyPI is another package of the same name
    return all((folder / name).is_file() for name in (flag_probe.MAIN_ARGUMENTS, flag_probe.SGLANG_ARGUMENTS))


def _short(note: str) -> str:
    return note if len(note) <= _LONGEST_NOTE else f"{note[:_LONGEST_NOTE]}..."
