"""All flags that a training command can have, and where that is known from.

The recorded list `data/slime_flags.json` was made by `scripts/record_flags.py` from the parsers themselves.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strands_rollout.errors import ConfigError
from strands_rollout.flag_check.flag import Flag

RECORD: Final = Path(__file__).parents[1] / "data" / "slime_flags.json"
SYSTEMS: Final = ("slime", "megatron", "sglang", "router")
TITLES: Final = {"slime": "slime", "megatron": "Megatron-LM", "sglang": "SGLang", "router": "SGLang's router"}
_SHORTEST_PREFIX: Final = 6


@dataclass(frozen=True, slots=True)
class Source:
    """Where a system's flags are known from.

    Attributes:
        system: One of SYSTEMS.
        how: "parser" if the parser itself was asked, "record" if the recorded list was read.
        version: What was asked or recorded: a commit, a version or a path.
        note: Why the parser was not asked, or None.
    """

    system: str
    how: str
    version: str
    note: str | None = None

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
    """The recorded list.

    Raises:
        ConfigError: The file is no recorded list.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"got {path}; expected the recorded list of flags: {e}") from e
    if record.get("format") != 1:
        raise ConfigError(f"got format {record.get('format')!r} in {path}; expected 1; record it again")
    return record


def recorded_sources(record: Mapping[str, Any], notes: Mapping[str, str | None]) -> list[Source]:
    """A source for each system of the record, with the reason why its parser was not asked."""
    return [Source(system, "record", record["sources"][system]["version"], notes.get(system)) for system in SYSTEMS]


def recorded_table(record: Mapping[str, Any], note: str | None = None) -> FlagTable:
    """The table of the recorded list alone; `note` says why no parser was asked."""
    return FlagTable(
        map(Flag.read, record["flags"]),
        left_out=record["left_out"],
        abbreviating=record["abbreviating"],
        sources=recorded_sources(record, dict.fromkeys(SYSTEMS, note)),
    )
