"""One flag of a training command, as the parser that reads it declares it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Flag:
    """One argument of argparse, under all its names.

    Attributes:
        names: All spellings, the first one first.
        system: Who declares it: "slime", "megatron", "sglang" or "router".
        parser: Which of slime's three parsers reads it: "main", "sglang" or "pre".
        nargs: argparse's: None for one value, 0 for none, a number, "?", "*" or "+".
        type_name: The name of the function that converts a value, or None.
        choices: The values that are allowed, as text; empty if any is.
        required: Whether slime stops without it.
        repeats: Whether each use adds a value; otherwise the last use wins.
    """

    names: tuple[str, ...]
    system: str
    parser: str
    nargs: int | str | None = None
    type_name: str | None = None
    choices: tuple[str, ...] = ()
    required: bool = False
    repeats: bool = False

    @classmethod
    def read(cls, row: dict[str, Any]) -> Flag:
        """A flag from a row of the recorded list or of the probe's answer; what a row lacks is the default."""
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
        """The flag as a row of the recorded list: what is the default is left out."""
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
