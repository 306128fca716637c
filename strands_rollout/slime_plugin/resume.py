"""Partial rollouts: saves an aborted episode as JSON beside its tokens, and makes a sample ready for `generate`."""

import json
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from strands_rollout.agent.limits import EpisodeProgress
from strands_rollout.errors import PromptError, ResumeError, TrajectoryError
from strands_rollout.model.trajectory import Part, Trajectory
from strands_rollout.samples import (
    METADATA_KEY,
    METADATA_VERSION,
    EpisodeFacts,
    SampleLike,
    facts_of,
    statuses_of,
)
from strands_rollout.slime_plugin.conditions import changed_conditions
from strands_rollout.template.messages import to_chat_messages, tool_result_text

logger = logging.getLogger(__name__)
RESUME_VERSION: Final = 1
# of these, those of the step in which a sample is resumed hold: its budgets, and where code runs
_MAY_CHANGE: Final = frozenset({"max_new_tokens", "min_new_tokens", "executor"})


@dataclass(frozen=True, slots=True)
class ResumeState:
    """An episode to resume: its tokens, and the agent's part."""

    trajectory: Trajectory
    progress: EpisodeProgress
    engine_aborts: int  # requests that the engine aborted and that were continued in place
    code: Mapping[str, Any]  # what its code tool did, by name


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _SavedPart(_Strict):
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
    numbering: str = ""  # of these versions
    meta_info: dict[str, Any] = {}  # in a journal; else the sample has what slime counts of it


class _SavedTurn(_Strict):
    start: PositiveInt
    parts: list[_SavedPart]


class _SavedResult(_Strict, extra="allow"):
    toolUseId: str  # noqa: N815 - Strands' name
    status: Literal["success", "error"]
    content: list[dict[str, Any]]


class _Saved(_Strict):
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
    conditions: dict[str, str] = {}  # none in a journal, whose name has them


def save_resume_state(state: ResumeState, conditions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The state without its tokens, as plain JSON values that share nothing with it.

    `conditions` are those that the episode was played under, and is to be resumed under.

    Raises:
        ResumeError: A message or a tool's result can't be written as JSON.
    """
    turns = state.trajectory.turns
    values = {
        "version": RESUME_VERSION,
        "tokens_crc32": tokens_crc32(state.trajectory.token_ids),
        "turns": [{"start": turn.start, "parts": list(map(_saved_part, turn.parts))} for turn in turns],
        **asdict(state.progress),
        "messages": [saved_message(message) for message in state.progress.messages],
        "finished": {call_id: saved_result(result) for call_id, result in state.progress.finished.items()},
        "engine_aborts": state.engine_aborts,
        "code": dict(state.code),
        "conditions": dict(conditions or {}),
    }
    try:
        return dict(json.loads(json.dumps(values, allow_nan=False)))
    except (TypeError, ValueError, KeyError, RecursionError, PromptError) as e:
        raise ResumeError(f"the agent's history can't be written as JSON: {e}") from e


def load_resume_state(
    saved: object, tokens: Sequence[int], loss_mask: Sequence[int], logprobs: Sequence[float]
) -> ResumeState:
    """What `save_resume_state` gave, with the sample's tokens (prompt and response), mask and logprobs (response).

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
        values = _Saved.model_validate(saved)
        plain = values.model_dump()
        progress = EpisodeProgress(**{name: plain[name] for name in EpisodeProgress.__dataclass_fields__})
        trajectory = _trajectory(values, tokens, loss_mask, logprobs)
        _check_progress(progress, trajectory)
        return ResumeState(trajectory, progress, values.engine_aborts, values.code)
    except ResumeError:
        raise
    except Exception as e:  # whatever a damaged state or sample makes fail, it can't be used
        raise ResumeError(f"got a damaged resume state: {type(e).__name__}: {e}") from e


def saved_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """What the policy reads of a message, and Strands' count of its tokens, so that it need not count again."""
    content = [
        {**block, "toolResult": saved_result(block["toolResult"])} if "toolResult" in block else block
        for block in message["content"]
    ]
    saved = {"role": message["role"], "content": content}
    metadata = message.get("metadata")
    usage = metadata.get("usage") if isinstance(metadata, Mapping) else None
    return {**saved, "metadata": {"usage": usage}} if usage else saved


def saved_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's result with its JSON values as the text that the policy reads, since not every value can be kept."""
    content = [{"text": tool_result_text([block])} if "json" in block else block for block in result["content"]]
    return {"toolUseId": result["toolUseId"], "status": result["status"], "content": content}


_PART_FACTS: Final = _SavedPart.model_fields.keys() - {"length", "weight_versions", "numbering", "meta_info"}


def _saved_part(part: Part) -> dict[str, Any]:
    versions = [[span.version, span.start - part.start, span.end - part.start] for span in part.weight_spans]
    facts = {name: getattr(part, name) for name in _PART_FACTS}
    numbering = part.weight_spans[-1].numbering
    return {"length": part.end - part.start, **facts, "weight_versions": versions, "numbering": numbering}


def _trajectory(
    saved: _Saved, tokens: Sequence[int], loss_mask: Sequence[int], logprobs: Sequence[float]
) -> Trajectory:
    """Built turn by turn as it was the first time, with the same checks; then with the sample's mask."""
    if saved.tokens_crc32 != tokens_crc32(tokens):
        raise ResumeError(f"got {len(tokens)} tokens that are not those that the resume state was saved with")
    turns, prompt_length = saved.turns, len(tokens) - len(loss_mask)
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


def tokens_crc32(tokens: Sequence[int]) -> int:
    """A checksum of token ids."""
    return zlib.crc32(orjson.dumps(list(tokens)))


# response-side fields of slime 0.3's Sample and what a new sample has there; those that a Sample lacks are skipped
_NONE_AT_FIRST: Final = (
    *("loss_mask", "rollout_log_probs", "reward", "rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
    *("rollout_routed_experts", "teacher_log_probs", "multimodal_train_inputs"),
)
_FRESH: Final[dict[str, Callable[[], object]]] = {
    **dict.fromkeys(_NONE_AT_FIRST, lambda: None),
    "tokens": list,
    "response": str,
    "response_length": int,
    "weight_versions": list,
    "remove_sample": bool,
    "non_generation_time": float,
}


@dataclass(frozen=True, slots=True)
class Beginning:
    """How an episode begins: from what it is resumed, and the attempts before it."""

    resume: ResumeState | None = None  # None to start afresh
    aborts: int = 0  # how often the sample has come back ABORTED
    resumes: int = 0  # how often it was resumed, this time included
    question: str | None = None  # what an environment had asked in place of the row
    dropped_tokens: int = 0  # tokens that earlier attempts sampled and that are in no sample


def begin_sample(sample: SampleLike, conditions: Mapping[str, str] | None, *, may_resume: bool) -> Beginning:
    """Make a sample ready: an ABORTED one keeps its tokens if it can be resumed, any other starts afresh.

    None is resumed that was begun under other conditions.
    """
    facts = facts_of(sample)
    aborted = sample.status is statuses_of(sample).ABORTED
    aborts = (facts.aborts or 0) + aborted
    # a sample without a sampled token holds a filler as response
    has_sampled = bool(sample.response_length) and not sample.remove_sample
    resume = _resume_state(sample, facts, conditions or {}) if aborted and may_resume and has_sampled else None
    resumes = (facts.resumes or 0) + (resume is not None)
    dropped = facts.dropped_sampled_tokens or 0
    if resume is None:
        dropped += (facts.sampled_tokens or 0) if aborted else 0
        reset_sample(sample)
        return Beginning(aborts=aborts, resumes=resumes, dropped_tokens=dropped)
    # slime may have masked what older weights sampled; masked tokens have no logprobs
    sample.rollout_log_probs = [
        logprob if mask else 0.0 for mask, logprob in zip(sample.loss_mask, sample.rollout_log_probs, strict=True)
    ]
    sample.status, sample.reward, sample.remove_sample = statuses_of(sample).PENDING, None, False
    sample.metadata = {key: value for key, value in sample.metadata.items() if key != METADATA_KEY}
    return Beginning(resume, aborts, resumes, facts.question, dropped)


def _resume_state(sample: SampleLike, facts: EpisodeFacts, conditions: Mapping[str, str]) -> ResumeState | None:
    # facts of another version may mean other things by the same names
    saved: Any = facts.resume if facts.version == METADATA_VERSION else {"version": "unknown"}
    try:
        state = load_resume_state(saved, sample.tokens, sample.loss_mask, sample.rollout_log_probs)
    except ResumeError as e:
        why = str(e)
    else:
        # those of a state that an older version has saved are not known
        changed = changed_conditions(saved.get("conditions") or conditions, conditions)
        changed = [name for name in changed if name not in _MAY_CHANGE]
        if not changed:
            return state
        why = f"it was begun with other values of {', '.join(changed)}"
    logger.warning("aborted sample starts afresh index=%s reason=%s", sample.index, why)
    return None


def reset_sample(sample: SampleLike) -> None:
    """Forget an earlier attempt: a sample that comes back FAILED or ABORTED starts from nothing."""
    for name, fresh in _FRESH.items():
        if hasattr(sample, name):
            setattr(sample, name, fresh())
    for name in ("spec_info", "prefix_cache_info"):
        if hasattr(sample, name):
            setattr(sample, name, type(getattr(sample, name))())
    sample.status = statuses_of(sample).PENDING
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    sample.metadata = {key: value for key, value in metadata.items() if key != METADATA_KEY}
