"""What a run of the benchmark was asked for, and what that is for a variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strands_rollout.bench.job import Collector, JobKind

VARIANTS: Final = ("ours", "floor", "strands-sglang", "openai")
SHIPPED_TOKENIZER_DIR: Final = Path(__file__).parents[1] / "engine" / "checkpoint"
MEASURES: Final = ("cpu", "lag", "code", "memory")
_LEAST_EPISODES: Final = 64
_TOOL_TURNS: Final = 640
# One streamed turn costs as much as twenty others: of these numbers of turns, only those are played that are here.
_STREAMED_TURNS: Final = (5, 20)
_STREAMED_TOOL_TURNS: Final = 80
_LEAST_STREAMED: Final = 2
_REPEATED_TURNS: Final = {"openai": 0, "strands-sglang": 40}
_FEW_EPISODES: Final = {"strands-sglang": 8}
_DETAIL_TURNS: Final = 5
_PROFILE_TURNS: Final = 20


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """See the command's --help.

    Attributes:
        turns: Tool turns of an episode; each is measured.
        concurrency: Episodes at once; each is measured with all `turns`.
        episodes: Measured episodes; None for a number that fits the turns.
        repeats: Rounds; in each of them every variant is measured once.
        variants: Who plays.
        measures: Which passes are made.
        tokenizer_dir: The tokenizer's folder.
        code_episodes: Episodes at once in the pass with the real code tool.
        collector: What is done about Python's garbage collector.
    """

    turns: tuple[int, ...]
    concurrency: tuple[int, ...]
    episodes: int | None
    repeats: int
    variants: tuple[str, ...]
    measures: tuple[str, ...]
    tokenizer_dir: Path
    code_episodes: int = 256
    collector: Collector = "own"

    @property
    def detail_turns(self) -> int:
        """Tool turns in the passes for loop lag and memory."""
        return _usual_or_most(_DETAIL_TURNS, self.turns)

    @property
    def profile_turns(self) -> int:
        """Tool turns in the profile."""
        return _usual_or_most(_PROFILE_TURNS, self.turns)

    def plays(self, variant: str, turns: int, kind: JobKind) -> bool:
        """Whether that is measured of a variant at so many tool turns; not where it takes minutes and adds little."""
        if variant != "openai" or self.variants == (variant,):
            return True
        return kind not in ("rss", "traced") and (turns in _STREAMED_TURNS or not {*_STREAMED_TURNS} & {*self.turns})

    def episodes_of(self, variant: str, turns: int, concurrency: int) -> int:
        """How many episodes one measurement plays."""
        if self.episodes is not None:
            return self.episodes
        if variant == "openai":
            return min(concurrency, max(_LEAST_STREAMED, _STREAMED_TOOL_TURNS // turns))
        if variant in _FEW_EPISODES and turns > _REPEATED_TURNS[variant]:
            return min(concurrency, _FEW_EPISODES[variant])
        return max(concurrency, _LEAST_EPISODES, _TOOL_TURNS // turns)

    def rounds_of(self, variant: str, turns: int) -> int:
        """In how many rounds a variant plays episodes of so many turns: one where that takes minutes."""
        return self.repeats if turns <= _REPEATED_TURNS.get(variant, turns) else 1


def _usual_or_most(usual: int, turns: Sequence[int]) -> int:
    return usual if usual in turns else max(turns)
