"""What the scripted engine answers, turn by turn, and with it every token of the episode that follows.

A value and its JSON; knows nothing of tokenizers, servers or variants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """One answer, and what the policy reads after it.

    Attributes:
        text: What was sampled, its end of turn included.
        ids: Its tokens.
        logprobs: One per id.
        words: The text without call and end of turn, as pieces of one token each.
        arguments: The call's arguments as JSON, in such pieces; empty for the last turn.
        code: The code that the call asks for; "" for the last turn.
        result: What the tool answers; "" for the last turn.
        context_ids: From the end of this turn to the beginning of the next one; empty for the last turn.
    """

    text: str
    ids: list[int]
    logprobs: list[float]
    words: list[str]
    arguments: list[str]
    code: str
    result: str
    context_ids: list[int]


@dataclass(frozen=True, slots=True)
class AnswerScript:
    """One episode.

    Attributes:
        question: The user's words.
        prompt_ids: All that is read before the first turn.
        turns: The answers; the last one calls no tool.
    """

    question: str
    prompt_ids: list[int]
    turns: list[ScriptedTurn]

    @property
    def tool_turns(self) -> int:
        """Turns that call a tool."""
        return len(self.turns) - 1

    def tokens(self) -> list[int]:
        """The whole episode."""
        return [*self.prompt_ids, *(token for turn in self.turns for token in (*turn.ids, *turn.context_ids))]

    def loss_mask(self) -> list[int]:
        """Of all tokens after the prompt: 1 for sampled ones."""
        return [bit for turn in self.turns for bit in [1] * len(turn.ids) + [0] * len(turn.context_ids)]

    def logprobs(self) -> list[float]:
        """Of the sampled tokens, in order."""
        return [logprob for turn in self.turns for logprob in turn.logprobs]

    def input_lengths(self) -> list[int]:
        """Tokens of each turn's request."""
        growth = (len(turn.ids) + len(turn.context_ids) for turn in self.turns[:-1])
        return list(accumulate(growth, initial=len(self.prompt_ids)))


def save_scripts(scripts: Sequence[AnswerScript], path: Path) -> None:
    """Write scripts for `load_scripts`."""
    path.write_bytes(orjson.dumps([asdict(script) for script in scripts]))


def load_scripts(path: Path) -> list[AnswerScript]:
    """The scripts of a file that `save_scripts` wrote."""
    return [_read_script(found) for found in orjson.loads(path.read_bytes())]


def _read_script(found: dict[str, Any]) -> AnswerScript:
    turns = [ScriptedTurn(**turn) for turn in found["turns"]]
    return AnswerScript(found["question"], found["prompt_ids"], turns)
