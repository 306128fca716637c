"""An episode as its sample has it: the tokens, and which of them were sampled, turn by turn.

Knows finished samples; nothing of files, tokenizers and engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strands_rollout.finished_sample import FinishedSample


@dataclass(frozen=True, slots=True)
class SampledEpisode:
    """A sample that has tokens and a policy's turn among them.

    Attributes:
        sample: slime's, or ours.
        facts: What `generate` wrote of the episode; empty for a foreign sample.
        turns: Where each of the policy's turns begins and ends in the tokens; at least one, none empty.
    """

    sample: Any
    facts: Mapping[str, Any]
    turns: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, view: FinishedSample) -> SampledEpisode | None:
        """The episode of a sample; None where its facts don't say what was sampled."""
        turns = view.turn_bounds
        return SampledEpisode(view.sample, view.facts, turns) if turns else None

    @property
    def tokens(self) -> list[int]:
        """Prompt and response."""
        return list(self.sample.tokens)

    @property
    def contexts(self) -> Iterator[tuple[int, int]]:
        """Where what the policy read before each of its turns begins and ends; the first is the prompt."""
        end = 0
        for start, next_end in self.turns:
            yield end, start
            end = next_end
