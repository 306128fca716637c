"""One measurement as JSON: what a worker process is asked for, and what it answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import orjson

JobKind = Literal["cpu", "lag", "rss", "traced", "profile"]
Collector = Literal["own", "frozen", "unfrozen"]
"""What is done about the garbage collector: what each variant does itself (ours freezes what its first sample leaves,
as its settings say; no other does); all are frozen after the warm-up (`gc.freeze`); or none is."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is asked for.

    Attributes:
        variant: Who plays.
        kind: What is measured.
        scripts: The file of the scripts to play.
        warm_up_scripts: The file of short scripts that open the connections.
        tokenizer: The tokenizer's folder.
        port: The engine's.
        concurrency: Episodes at once.
        episodes: How many are measured.
        core: The core to stay on; None for any.
        runs_code: Whether the real code tool runs.
        collector: What is done about the garbage collector.
    """

    variant: str
    kind: JobKind
    scripts: str
    warm_up_scripts: str
    tokenizer: str
    port: int
    concurrency: int
    episodes: int
    core: int | None
    runs_code: bool = False
    collector: Collector = "own"

    def to_json(self) -> str:
        """For `from_json`."""
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`."""
        return cls(**orjson.loads(text))


Figures = dict[str, Any]
"""A worker's answer: figures by name, units in the names."""
