"""Token budgets of an episode, and how many tokens the next turn may still take."""

from __future__ import annotations

from dataclasses import dataclass

from strands_rollout.errors import BudgetExhaustedError, ConfigError
from strands_rollout.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Budgets in tokens; None means no limit of ours (the engine's own context always holds).

    Attributes:
        max_response_tokens: Of everything after the first prompt, tool results included. slime's `max_new_tokens`.
        max_context_tokens: Of prompt and response together.
        max_turn_tokens: Sampled in one turn.
        min_turn_tokens: Room that a tool result leaves for the turn after it: a result that would leave less is cut.
    """

    max_response_tokens: int | None = None
    max_context_tokens: int | None = None
    max_turn_tokens: int | None = None
    min_turn_tokens: int = 16

    def __post_init__(self) -> None:
        for name in ("max_response_tokens", "max_context_tokens", "max_turn_tokens", "min_turn_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"got {name}={value!r}; expected an integer of at least 1, or none for no limit")


@dataclass(frozen=True, slots=True)
class Room:
    """Tokens left for new context and the next turn together.

    Attributes:
        tokens: None when nothing limits it.
        budget: "response" or "context", whichever is smaller.
    """

    tokens: int | None
    budget: str


def room_left(limits: TokenLimits, trajectory: Trajectory, engine_context: int | None) -> Room:
    """What the budgets leave after `trajectory`.

    Args:
        limits: The budgets.
        trajectory: The episode so far; before the first turn only the context budget applies, since the prompt is no
            response.
        engine_context: The engine's own context length in tokens, where known. One token of it is never asked for:
            SGLang 0.5.x refuses a request that would fill it.
    """
    candidates: list[tuple[int, str]] = []
    if limits.max_response_tokens is not None and trajectory.turns:
        candidates.append((limits.max_response_tokens - trajectory.response_length, "response"))
    if limits.max_context_tokens is not None:
        candidates.append((limits.max_context_tokens - len(trajectory.token_ids), "context"))
    if engine_context is not None:
        candidates.append((engine_context - 1 - len(trajectory.token_ids), "context"))
    if not candidates:
        return Room(None, "context")
    tokens, budget = min(candidates)
    return Room(tokens, budget)


def turn_allowance(
    limits: TokenLimits,
    room: Room,
    context_length: int,
    *,
    is_first: bool,
    turn_so_far: int = 0,
    turn_cap: int | None = None,
) -> tuple[int | None, str]:
    """Tokens that the next turn may sample, and the limit that will cut it: "turn", "response" or "context".

    Args:
        limits: The budgets.
        room: What is left before the new context.
        context_length: New context tokens of this request; on the first turn the whole prompt.
        is_first: Whether this is the first turn, whose prompt does not count as response.
        turn_so_far: Tokens that the turn has already, where it was aborted and is continued.
        turn_cap: A further limit on the tokens of one turn.

    Raises:
        BudgetExhaustedError: Not one token is left.
    """
    candidates: list[tuple[int, str]] = []
    if room.tokens is not None:
        candidates.append((room.tokens - context_length, room.budget))
    if is_first and limits.max_response_tokens is not None:
        candidates.append((limits.max_response_tokens, "response"))
    caps = [cap for cap in (limits.max_turn_tokens, turn_cap) if cap is not None]
    candidates += [(cap - turn_so_far, "turn") for cap in caps]
    if candidates and min(candidates)[0] < 1:
        left, budget = min(candidates)
        raise BudgetExhaustedError(
            f"no token of the {budget} budget is left for another turn: {context_length} new context tokens leave "
            f"{left}. "
            "Raise the budget, shorten the prompt, or let tools return less.",
            budget=budget,
        )
    return min(candidates) if candidates else (None, "turn")
