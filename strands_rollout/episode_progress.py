"""How far an episode came before it was cut: what another agent needs, beside the tokens, to go on from there.

Knows Strands' messages; nothing of tokens, samples or slime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class EpisodeProgress:
    """An episode between two of its steps.

    Attributes:
        messages: The agent's history. It ends with a message that the policy has to answer, with an answer that asks
            for tools, or with the results of those.
        covered: How many of the messages the policy has read.
        finished: By tool-use id, results of the calls of the last message that had ended; they are not run again.
        tool_iterations: Turns whose tools were run, that of unfinished calls not counted.
        tool_calls: Calls of those turns.
        tool_errors: Results with status error.
        tool_timeouts: Calls that were cut at their limit.
        tool_s: Seconds in tools.
        duration_s: Wall-clock seconds of the episode.
        calls: What each call that ended came to; see `ToolStats.calls`.
    """

    messages: Sequence[Mapping[str, Any]]
    covered: int
    finished: Mapping[str, Any] = field(default_factory=dict)
    tool_iterations: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    tool_timeouts: int = 0
    tool_s: float = 0.0
    duration_s: float = 0.0
    calls: Sequence[Mapping[str, Any]] = ()


def awaits_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a history ends with calls that have no results yet."""
    return bool(messages) and any("toolUse" in block for block in messages[-1]["content"])
