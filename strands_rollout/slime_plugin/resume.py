"""An aborted episode as JSON beside its tokens, and back: what the next call of `generate` needs to go on in mid-agent.

Tokens, mask and logprobs stay on the sample; here is the rest. It survives whatever JSON does: copies, pickles, dumps,
another process. Knows trajectories and Strands messages; nothing of slime's Sample.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from strands_rollout.chat_messages import to_chat_messages, tool_result_text
from strands_rollout.episode_progress import EpisodeProgress
from strands_rollout.errors import PromptError, ResumeError, TrajectoryError
from strands_rollout.trajectory import Part, Trajectory

RESUME_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class ResumeState:
    """An episode to go on with.

    Attributes:
        trajectory: Its tokens; a new object.
        progress: The agent's part.
        engine_aborts: Requests that the engine aborted and that were continued in place.
        code: What its code tool did, by name.
    """

    trajectory: Trajectory
    progress: EpisodeProgress
    engine_aborts: int
    code: Mapping[str, Any]


class _SavedPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    length: PositiveInt
    finish_reason: Literal["stop", "length", "abort"]
    matched: int | str | None
    rid: str
    latency_s: float
    at_s: float | None = None
    prompt_tokens: int | None
    cached_tokens: int | None
    # JSON has no tuples
    weight_versions: list[Annotated[tuple[str | None, int, int], Field(strict=False)]]


class _SavedTurn(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    start: PositiveInt
    parts: list[_SavedPart]


class _SavedResult(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    toolUseId: str  # noqa: N815 - Strands' name
    status: Literal["success", "error"]
    content: list[dict[str, Any]]


class _Saved(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: int
    tokens_crc32: int
    turns: list[_SavedTurn]
    messages: list[dict[str, Any]]
    covered: PositiveInt
    finished: dict[str, _SavedResult]
    tool_iterations: NonNegativeInt
    tool_calls: NonNegativeInt
    tool_errors: NonNegativeInt
    tool_timeouts: NonNegativeInt
    tool_s: NonNegativeFloat
    duration_s: NonNegativeFloat
    calls: list[dict[str, Any]] = []
    engine_aborts: NonNegativeInt
    code: dict[str, int | float]


def save_resume_state(state: ResumeState) -> dict[str, Any]:
    """The state without its tokens, as plain JSON values that share nothing with it.

    Raises:
        ResumeError: A message or a tool's result can't be written as JSON.
    """
    turns = [
        {"start": turn.start, "parts": [_saved_part(part) for part in turn.parts]} for turn in state.trajectory.turns
    ]
    values = {
        "version": RESUME_VERSION,
        "tokens_crc32": _crc32(state.trajectory.token_ids),
        "turns": turns,
        **asdict(state.progress),
        "messages": [_saved_message(message) for message in state.progress.messages],
        "finished": {call_id: _saved_result(result) for call_id, result in state.progress.finished.items()},
        "engine_aborts": state.engine_aborts,
        "code": dict(state.code),
    }
    try:
        return dict(json.loads(json.dumps(values, allow_nan=False)))
    except (TypeError, ValueError, KeyError, PromptError) as e:
        raise ResumeError(f"the agent's history can't be written as JSON: {e}") from e


def load_resume_state(
    saved: object, tokens: Sequence[int], loss_mask: Sequence[int], logprobs: Sequence[float]
) -> ResumeState:
    """The state again.

    Args:
        saved: What `save_resume_state` gave.
        tokens: The sample's: prompt, then response; all of the trajectory's.
        loss_mask: One per response token.
        logprobs: One per response token.

    Raises:
        ResumeError: It is of another version, damaged, or does not fit the tokens.
    """
    if not all(isinstance(given, list) for given in (tokens, loss_mask, logprobs)):
        kinds = [type(given).__name__ for given in (tokens, loss_mask, logprobs)]
        raise ResumeError(f"got tokens, loss_mask and logprobs of the types {kinds}; expected lists")
    version = saved.get("version") if isinstance(saved, Mapping) else None
    if version != RESUME_VERSION:
        raise ResumeError(
            f"got a resume state of version {version!r}; this version of strands_rollout reads {RESUME_VERSION}"
        )
    try:
        return _state(_Saved.model_validate(saved), tokens, loss_mask, logprobs)
    except ResumeError:
        raise
    except Exception as e:  # whatever a damaged state or sample makes go wrong, it means that it can't be used
        raise ResumeError(f"got a damaged resume state: {type(e).__name__}: {e}") from e


def _state(values: _Saved, tokens: Sequence[int], loss_mask: Sequence[int], logprobs: Sequence[float]) -> ResumeState:
    if values.tokens_crc32 != _crc32(tokens):
        raise ResumeError(f"got {len(tokens)} tokens that are not those that the resume state was saved with")
    plain = values.model_dump()
    progress = EpisodeProgress(**{name: plain[name] for name in EpisodeProgress.__dataclass_fields__})
    trajectory = _trajectory(values.turns, tokens, loss_mask, logprobs)
    _check_progress(progress, trajectory)
    return ResumeState(trajectory, progress, values.engine_aborts, values.code)


def _saved_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """What the policy reads of a message, and Strands' count of its tokens, which it would else count anew."""
    saved = {"role": message["role"], "content": [_saved_block(block) for block in message["content"]]}
    metadata = message.get("metadata")
    usage = metadata.get("usage") if isinstance(metadata, Mapping) else None
    return {**saved, "metadata": {"usage": usage}} if usage else saved


def _saved_block(block: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**block, "toolResult": _saved_result(block["toolResult"])} if "toolResult" in block else block


def _saved_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's result whose JSON is the text that the policy reads of it: not every value of it can be kept."""
    content = [{"text": tool_result_text([block])} if "json" in block else block for block in result["content"]]
    return {"toolUseId": result["toolUseId"], "status": result["status"], "content": content}


def _saved_part(part: Part) -> dict[str, Any]:
    return {
        "length": part.end - part.start,
        "finish_reason": part.finish_reason,
        "matched": part.matched,
        "rid": part.rid,
        "latency_s": part.latency_s,
        "at_s": part.at_s,
        "prompt_tokens": part.prompt_tokens,
        "cached_tokens": part.cached_tokens,
        "weight_versions": [
            [span.version, span.start - part.start, span.end - part.start] for span in part.weight_spans
        ],
    }


def _trajectory(
    turns: Sequence[_SavedTurn], tokens: Sequence[int], loss_mask: Sequence[int], logprobs: Sequence[float]
) -> Trajectory:
    """Built turn by turn as it was the first time, with the same checks; then with the sample's mask."""
    prompt_length = len(tokens) - len(loss_mask)
    if len(logprobs) != len(loss_mask):
        raise ResumeError(f"got {len(logprobs)} logprobs and a loss_mask of {len(loss_mask)}; expected the same length")
    trajectory = Trajectory()
    try:
        for turn in turns:
            start = turn.start
            for part in turn.parts:
                facts = part.model_dump(exclude={"length", "weight_versions"})
                end = start + part.length
                context = tokens[len(trajectory.token_ids) : start]
                own = logprobs[start - prompt_length : end - prompt_length] if start >= prompt_length else ()
                trajectory.append_turn(context, tokens[start:end], own, weight_versions=part.weight_versions, **facts)
                start = end
    except TrajectoryError as e:
        raise ResumeError(f"got turns that don't fit the sample: {e}") from e
    fits = trajectory.token_ids == list(tokens) and trajectory.prompt_length == prompt_length
    if not fits or not turns or len(trajectory.turns) != len(turns):
        raise ResumeError(
            f"got {len(turns)} turns for {len(trajectory.token_ids)} tokens with a prompt of "
            f"{trajectory.prompt_length}; expected the sample's {len(tokens)} with a prompt of {prompt_length}"
        )
    trajectory.loss_mask[prompt_length:] = loss_mask
    return trajectory


def _check_progress(progress: EpisodeProgress, trajectory: Trajectory) -> None:
    messages, covered = progress.messages, progress.covered
    to_chat_messages(messages)  # all of them can be rendered
    for message in messages:
        if message.get("role") not in ("user", "assistant") or not isinstance(message.get("content"), list):
            raise ResumeError(f"got the message {message!r:.200}; expected a role and a list of content")
    after = messages[covered:]
    roles = [message["role"] for message in after]
    expected: list[list[str]] = [[]] if trajectory.is_open else [[], ["assistant"], ["assistant", "user"]]
    if not 0 < covered <= len(messages) or roles not in expected:
        raise ResumeError(
            f"got {len(messages)} messages of which {covered} are covered by the tokens, then {roles}; expected one of "
            f"{expected} after those"
        )


def _crc32(tokens: Sequence[int]) -> int:
    return zlib.crc32(orjson.dumps(list(tokens)))
