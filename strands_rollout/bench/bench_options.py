"""What a run of the benchmark was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

VARIANTS: Final = ("ours", "floor", "strands-sglang", "openai")
SHIPPED_TOKENIZER_DIR: Final = Path(__file__).parents[1] / "engine" / "checkpoint"
MEASURES: Final = ("cpu", "lag", "code", "memory")
_LEAST_EPISODES: Final = 64
_TOOL_TURNS: Final = 640
# One streamed turn costs as much as twenty others.
_STREAMED_TOOL_TURNS: Final = 160
_LEAST_STREAMED: Final = 2
_REPEATED_TURNS: Final = {"openai": 0, "strands-sglang": 40}


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
        detail_turns: Tool turns in the passes for loop lag and memory.
        profile_turns: Tool turns in the profile.
        code_episodes: Episodes at once in the pass with the real code tool.
    """

    turns: tuple[int, ...]
    concurrency: tuple[int, ...]
    episodes: int | None
    repeats: int
    variants: tuple[str, ...]
    measures: tuple[str, ...]
    tokenizer_dir: Path
    detail_turns: int = 5
    profile_turns: int = 20
    code_episodes: int = 256

    def episodes_of(self, variant: str, turns: int, concurrency: int) -> int:
        """How many episodes one measurement plays."""
        if self.episodes is not None:
            return self.episodes
        if variant == "openai":
            return min(concurrency, max(_LEAST_STREAMED, _STREAMED_TOOL_TURNS // turns))
        return max(concurrency, _LEAST_EPISODES, _TOOL_TURNS // turns)

    def rounds_of(self, variant: str, turns: int) -> int:
        """In how many rounds a variant plays episodes of so many turns: one where that takes minutes."""
        return self.repeats if turns <= _REPEATED_TURNS.get(variant, turns) else 1
