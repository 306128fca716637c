"""An aborted episode as JSON beside its tokens, and back: what the next call of `generate` needs to go on in mid-agent.

Tokens, mask and logprobs stay on the sample; here is the rest. It survives whatever JSON does: copies, pickles, dumps,
another process. Knows trajectories and Strands messages; nothing of slime's Sample.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from strands_rollout.episode_progress import EpisodeProgress
from strands_rollout.errors import ResumeError, TrajectoryError
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

    length: int
    finish_reason: Literal["stop", "length", "abort"]
    matched: int | str | None
    rid: str
    latency_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    weight_versions: list[tuple[str | None, int, int]]


class _SavedTurn(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    start: int
    parts: list[_SavedPart]


class _Saved(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: int
    tokens_crc32: int
    turns: list[_SavedTurn]
    messages: list[dict[str, Any]]
    covered: int
    finished: dict[str, dict[str, Any]]
    tool_iterations: int
    tool_calls: int
    tool_errors: int
    tool_timeouts: int
    tool_s: float
    duration_s: float
    engine_aborts: int
    code: dict[str, Any]


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
        "messages": [{"role": message["role"], "content": message["content"]} for message in state.progress.messages],
        "engine_aborts": state.engine_aborts,
        "code": dict(state.code),
    }
    try:
        return dict(json.loads(json.dumps(values, allow_nan=False)))
    except (TypeError, ValueError) as e:
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
    version = saved.get("version") if isinstance(saved, Mapping) else None
    if version != RESUME_VERSION:
        raise ResumeError(
            f"got a resume state of version {version!r}; this version of strands_rollout reads {RESUME_VERSION}"
        )
    try:
        values = _Saved.model_validate_json(orjson.dumps(saved))
    except (ValidationError, TypeError) as e:
        raise ResumeError(f"got a damaged resume state: {e}") from e
    if values.tokens_crc32 != _crc32(tokens):
        raise ResumeError(f"got {len(tokens)} tokens that are not those that the resume state was saved with")
    progress = EpisodeProgress(**{name: getattr(values, name) for name in EpisodeProgress.__dataclass_fields__})
    trajectory = _trajectory(values.turns, tokens, loss_mask, logprobs)
    _check_progress(progress, trajectory)
    return ResumeState(trajectory, progress, values.engine_aborts, values.code)


def _saved_part(part: Part) -> dict[str, Any]:
    return {
        "length": part.end - part.start,
        "finish_reason": part.finish_reason,
        "matched": part.matched,
        "rid": part.rid,
        "latency_s": part.latency_s,
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
