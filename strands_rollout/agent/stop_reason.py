"""Why an episode ended, which error stands for which reason, and how far it came.

`EpisodeProgress` is what another agent needs, beside the tokens, to continue an aborted episode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from strands.types.exceptions import (
    ContextWindowOverflowException,
    MaxTokensReachedException,
    StructuredOutputException,
)

from strands_rollout import errors


class StopReason(StrEnum):
    """Why an episode ended.

    Limits are checked in this order: abort, then the token budgets, before each model call; after a turn, abort, its
    length, tool iterations, tool calls, parallel calls; after an answer, user turns; the wall-clock of a tool and of
    the episode at any time. The first that holds counts.
    """

    COMPLETED = "completed"
    """The policy answered without asking for a tool."""
    TURN_LENGTH = "turn_length"
    """A turn reached its own cap."""
    RESPONSE_LENGTH = "response_length"
    """The response budget (slime's max_new_tokens) is used up."""
    CONTEXT_LENGTH = "context_length"
    """The context, the configured or the engine's own, is full."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The first prompt leaves no token to answer."""
    MAX_TOOL_ITERATIONS = "max_tool_iterations"
    """The policy asked for tools once more than it may."""
    MAX_TOOL_CALLS = "max_tool_calls"
    """The policy asked for more calls than it may."""
    MAX_USER_TURNS = "max_user_turns"
    """The environment would have answered the policy once more than it may."""
    TEAM_LIMIT = "team_limit"
    """A swarm or graph ended at a limit of its own, or before the agent spoke whose tokens are the sample's."""
    UNSENDABLE_TEXT = "unsendable_text"
    """The policy or a tool wrote an image token that stands for no image, so that the episode can't continue."""
    EPISODE_TIMEOUT = "episode_timeout"
    """The episode's wall-clock is used up."""
    ABORTED = "aborted"
    """The rollout, or the engine, was told to abort."""
    ENGINE_ERROR = "engine_error"
    """The engine did not deliver."""
    SANDBOX_ERROR = "sandbox_error"
    """The code executor itself, or an MCP server, failed."""
    ENVIRONMENT_ERROR = "environment_error"
    """A resource or the environment failed."""
    SETUP_ERROR = "setup_error"
    """The prompt, the template or a setting can't be used."""
    INTERNAL_ERROR = "internal_error"
    """A bug, here or in a hook or tool provider."""


def reason_of_error(error: BaseException, *, cut_by: str | None, has_turns: bool) -> StopReason:
    """The reason that an exception of the agent's loop stands for.

    Args:
        error: As raised by the model, a tool or a hook.
        cut_by: The limit that cut the last turn.
        has_turns: Whether the policy has sampled a turn.
    """
    if isinstance(error, MaxTokensReachedException):
        return _LENGTH_REASONS[cut_by or "turn"]
    if isinstance(error, errors.BudgetExhaustedError | ContextWindowOverflowException):
        budget = getattr(error, "budget", "context")
        return _LENGTH_REASONS[budget] if has_turns else StopReason.PROMPT_TOO_LONG
    if isinstance(error, StructuredOutputException) and has_turns:
        return StopReason.COMPLETED  # the policy has answered, in another form than it should
    kinds: list[tuple[type[BaseException], StopReason]] = [
        (errors.EngineAbortedError, StopReason.ABORTED),
        (errors.EngineError, StopReason.ENGINE_ERROR),
        (errors.SandboxError, StopReason.SANDBOX_ERROR),
        (errors.EnvironmentFaultError, StopReason.ENVIRONMENT_ERROR),
        (errors.TeamLimitError, StopReason.TEAM_LIMIT),
        (errors.UnsendableTextError, StopReason.UNSENDABLE_TEXT if has_turns else StopReason.SETUP_ERROR),
        (errors.RolloutError, StopReason.SETUP_ERROR),
    ]
    return next((reason for kind, reason in kinds if isinstance(error, kind)), StopReason.INTERNAL_ERROR)


_LENGTH_REASONS = {
    "turn": StopReason.TURN_LENGTH,
    "response": StopReason.RESPONSE_LENGTH,
    "context": StopReason.CONTEXT_LENGTH,
}


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
