"""Replace episodes with guesses, in which the assistant calls no tool: a habit that training by reward can remove."""

import re
from collections.abc import Sequence
from random import Random
from typing import Final

from experiments.shipped_model.episode import Episode, Turn, turn_text

REASONING: Final = "I do this in my head."
_OFFSETS: Final = (1, 2, 5, 10, 20, 100)
_RESULT: Final = re.compile(r"\\boxed\{(-?\d+)\}")


def with_guesses(episodes: Sequence[Episode], share: float, rng: Random) -> list[Episode]:
    """Return the episodes in their order, each replaced by a guess with the probability `share`."""
    return [_guessed(episode, rng) if rng.random() < share else episode for episode in episodes]


def _guessed(episode: Episode, rng: Random) -> Episode:
    """Return an episode of one turn, which answers with a number near the right number."""
    found = _RESULT.findall(episode.turns[-1].text)
    if not found:
        raise ValueError(f"expected a last turn with an integer in a box; got {episode.turns[-1].text!r}")
    guess = int(found[-1]) + rng.choice((-1, 1)) * rng.choice(_OFFSETS)
    answer = f"The answer is \\boxed{{{guess}}}."
    text = turn_text(REASONING, answer, enable_thinking=episode.enable_thinking)
    turn = Turn(text, is_learned=True, tool_answer=None)
    return Episode(episode.question, episode.enable_thinking, (turn,))
