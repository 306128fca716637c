"""What a run measures, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final

from strands_rollout.bench.bench_options import BenchOptions
from strands_rollout.bench.job import JobKind

_ALL_AT_ONCE: Final[tuple[JobKind, ...]] = ("rss", "traced")


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement that is to be made.

    Attributes:
        kind: What is measured.
        variant: Who plays.
        turns: Tool turns of an episode.
        concurrency: Episodes at once, where there are as many.
        episodes: How many are measured.
        round: The repeat, from 0.
        runs_code: Whether the real code tool runs.
    """

    kind: JobKind
    variant: str
    turns: int
    concurrency: int
    episodes: int
    round: int
    runs_code: bool = False

    @property
    def label(self) -> str:
        """What is measured, in words."""
        tool = ", code tool" if self.runs_code else ""
        return f"{self.kind}: {self.variant}, {self.turns} tool turns, {self.concurrency} at once{tool}"


def planned_steps(options: BenchOptions) -> Iterator[Step]:
    """All measurements of a run, round by round; what is measured once comes last."""
    for number in range(options.repeats):
        if "cpu" in options.measures:
            for turns, concurrency in product(options.turns, options.concurrency):
                yield from _round(options, "cpu", number, turns, concurrency)
    if "code" in options.measures and "ours" in options.variants:
        at_once = options.code_episodes
        yield Step("lag", "ours", options.detail_turns, at_once, at_once, 0, runs_code=True)
    kinds: list[JobKind] = ["lag"] if "lag" in options.measures else []
    kinds += ["rss", "traced"] if "memory" in options.measures else []
    concurrency = max(options.concurrency)
    for kind in kinds:
        yield from _round(options, kind, 0, options.detail_turns, concurrency)
    if "profile" in options.measures:
        yield from _round(options, "profile", 0, options.profile_turns, concurrency)


def _round(options: BenchOptions, kind: JobKind, number: int, turns: int, concurrency: int) -> Iterator[Step]:
    """Each variant once, another one first each round."""
    first = number % len(options.variants)
    for variant in (*options.variants[first:], *options.variants[:first]):
        if number < options.rounds_of(variant, turns) and options.plays(variant, turns, kind):
            episodes = options.episodes_of(variant, turns, concurrency)
            if kind in _ALL_AT_ONCE:
                episodes = min(episodes, concurrency)
            yield Step(kind, variant, turns, concurrency, episodes, number)
