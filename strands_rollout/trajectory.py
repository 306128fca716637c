"""The one mutable accumulator of an episode: token ids, loss mask and logprobs, and per-turn facts.

Knows integers and floats only: no tokenizer, no text, no slime. Appending is all-or-nothing, so that a request
that failed leaves no trace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strands_rollout.errors import TrajectoryError


@dataclass(frozen=True, slots=True)
class Turn:
    """Facts of one accepted generation.

    Attributes:
        start: Index in `Trajectory.token_ids` of its first sampled token.
        end: Index after its last sampled token; equal to `start` when nothing was sampled.
        finish_reason: "stop", "length" or "abort", as SGLang reports it.
        rid: The request's id at the engine.
        latency_s: Wall-clock seconds of the request, as the client saw it.
        prompt_tokens: Tokens that the engine read, where it says so.
        cached_tokens: Of these, tokens served from the prefix cache, where it says so.
        weight_version: The engine's weight version, where it says so.
        meta_info: SGLang's `meta_info` without its logprob lists.
    """

    start: int
    end: int
    finish_reason: str
    rid: str
    latency_s: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    weight_version: str | None = None
    meta_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Trajectory:
    """Exactly the tokens that the policy read and wrote, in order.

    `token_ids`, `loss_mask` and `logprobs` always have the same length. The mask is 1 and the logprob the sampled one
    where the policy wrote the token; context (prompt, tool results, template text) has mask 0 and logprob 0.0.

    Attributes:
        token_ids: Prompt, then response.
        loss_mask: 0 or 1 per token.
        logprobs: One finite float per token, at the sampling temperature.
        prompt_length: Tokens of the first prompt.
        turns: One entry per accepted generation.
    """

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_length: int = 0
    turns: list[Turn] = field(default_factory=list)

    @property
    def response_length(self) -> int:
        """Tokens after the first prompt, context between the turns included."""
        return len(self.token_ids) - self.prompt_length

    @property
    def sampled_length(self) -> int:
        """Tokens that the policy wrote."""
        return sum(turn.end - turn.start for turn in self.turns)

    def append_turn(
        self,
        context_ids: Sequence[int],
        sampled_ids: Sequence[int],
        sampled_logprobs: Sequence[float],
        **facts: Any,  # noqa: ANN401 - the fields of Turn
    ) -> Turn:
        """Append what a request added to the last one, and what the policy answered.

        Args:
            context_ids: New context tokens; on the first call the whole prompt, which must not be empty.
            sampled_ids: The tokens as the engine returned them.
            sampled_logprobs: One per sampled token; empty if logprobs were not asked for (recorded as 0.0).
            **facts: The further fields of `Turn`.

        Returns:
            The recorded turn.

        Raises:
            TrajectoryError: The lengths disagree, a logprob is not finite, or the first prompt is empty. Nothing is
                appended then.
        """
        self._check(context_ids, sampled_ids, sampled_logprobs)
        is_first = not self.turns
        start = len(self.token_ids) + len(context_ids)
        turn = Turn(start=start, end=start + len(sampled_ids), **facts)
        self.token_ids += [*context_ids, *sampled_ids]
        self.loss_mask += [0] * len(context_ids) + [1] * len(sampled_ids)
        self.logprobs += [0.0] * len(context_ids)
        self.logprobs += sampled_logprobs or [0.0] * len(sampled_ids)
        self.turns.append(turn)
        if is_first:
            self.prompt_length = len(context_ids)
        return turn

    def _check(self, context_ids: Sequence[int], sampled_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        if not self.turns and not context_ids:
            raise TrajectoryError("got an empty first prompt; expected at least one prompt token")
        if logprobs and len(logprobs) != len(sampled_ids):
            raise TrajectoryError(
                f"got {len(logprobs)} logprobs for {len(sampled_ids)} sampled tokens; expected one each"
            )
        if not all(map(math.isfinite, logprobs)):
            raise TrajectoryError("got a logprob that is not finite; the response must be rejected, not stored")
