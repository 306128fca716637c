"""Save and load unfinished episodes.

An episode is saved as a whole, next to the tokens of an aborted sample (`save_episode`, `load_episode`), or step by
step in a journal (`StepWriter`, `load_steps`). Both load as a `SavedEpisode`. The attributes `calls`, `parse_failures`
and `final_text` of a `Branch` are not saved: they are read from the tokens again.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from strands_rollout.errors import PromptError, ResumeError, TrajectoryError
from strands_rollout.files.json_codec import decode_json, encode_json
from strands_rollout.record.tokens import Part, Trajectory
from strands_rollout.template.messages import to_chat_messages, tool_result_text

VERSION: Final = 1


@dataclass(slots=True)
class EpisodeProgress:
    """The state of an agent between two steps of its episode.

    Attributes:
        messages: The agent's history. It ends with a message for the policy, with an answer that calls tools, or with
            the results of those calls.
        covered: Number of messages that the policy has read.
        finished: Tool-use id -> result, for the ended calls of the last message; a resume does not run these calls
            again.
        tool_iterations: Number of turns whose tools were run; a last turn with unfinished calls is not counted.
        tool_calls: Number of calls that were run in these turns.
        tool_errors: Number of results with status error.
        tool_timeouts: Number of calls that were cut at their time limit.
        tool_s: Seconds spent in tools.
        duration_s: Wall-clock seconds of the episode.
        calls: An entry for each call that ended; see `ToolStats.calls`.
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


@dataclass(frozen=True, slots=True)
class SavedEpisode:
    """An unfinished episode.

    Attributes:
        trajectory: The main agent's tokens.
        progress: The main agent's state.
        engine_aborts: Number of engine aborts after which the turn was continued or repeated.
        code: Counts and times of the code tool, by name; see `CodeCallTotals`.
    """

    trajectory: Trajectory
    progress: EpisodeProgress
    engine_aborts: int
    code: Mapping[str, Any]


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
    numbering: str = ""  # numbering of the weight versions
    meta_info: dict[str, Any] = {}  # only in a journal: a saved slime Sample already has the counts made from it


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
    conditions: dict[str, str] = {}  # empty in a journal: the conditions are part of its name


def save_episode(state: SavedEpisode, conditions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return `state` without its tokens, as JSON values that share no object with `state`.

    Args:
        state: The episode.
        conditions: The conditions of the episode (see `slime_plugin.conditions`), which a resume checks.

    Raises:
        ResumeError: A message or a tool's result can't be written as JSON.
    """
    turns = state.trajectory.turns
    values = {
        "version": VERSION,
        "tokens_crc32": tokens_crc32(state.trajectory.token_ids),
        "turns": [{"start": turn.start, "parts": list(map(_part_as_json, turn.parts))} for turn in turns],
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


def load_episode(
    saved: object, tokens: Sequence[int], loss_mask: Sequence[int], logprobs: Sequence[float]
) -> SavedEpisode:
    """Load an episode that `save_episode` saved.

    Args:
        saved: The saved state.
        tokens: The sample's tokens, prompt and response.
        loss_mask: The sample's loss mask, one number per response token.
        logprobs: The sample's logprobs, one per response token.

    Raises:
        ResumeError: The state is of another version, is damaged, or does not fit the tokens.
    """
    if not all(isinstance(given, list) for given in (tokens, loss_mask, logprobs)):
        kinds = [type(given).__name__ for given in (tokens, loss_mask, logprobs)]
        raise ResumeError(f"got tokens, loss_mask and logprobs of the types {kinds}; expected lists")
    version = saved.get("version") if isinstance(saved, Mapping) else None
    if version != VERSION:
        raise ResumeError(f"got a resume state of version {version!r}; this version of strands_rollout reads {VERSION}")
    try:
        values = _Saved.model_validate(saved)
        plain = values.model_dump()
        progress = EpisodeProgress(**{name: plain[name] for name in EpisodeProgress.__dataclass_fields__})
        trajectory = _build_trajectory(values, tokens, loss_mask, logprobs)
        _check_progress(progress, trajectory)
        return SavedEpisode(trajectory, progress, values.engine_aborts, values.code)
    except ResumeError:
        raise
    except Exception as e:  # a damaged state or sample may fail anywhere
        raise ResumeError(f"got a damaged resume state: {type(e).__name__}: {e}") from e


def saved_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message reduced to what the policy reads and, if the message has it, Strands' `usage`."""
    content = [
        {**block, "toolResult": saved_result(block["toolResult"])} if "toolResult" in block else block
        for block in message["content"]
    ]
    saved = {"role": message["role"], "content": content}
    metadata = message.get("metadata")
    usage = metadata.get("usage") if isinstance(metadata, Mapping) else None
    return {**saved, "metadata": {"usage": usage}} if usage else saved


def saved_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's result for saving: its `json` blocks become the text that the policy reads."""
    content = [{"text": tool_result_text([block])} if "json" in block else block for block in result["content"]]
    return {"toolUseId": result["toolUseId"], "status": result["status"], "content": content}


_SAVED_PART_FIELDS: Final = _SavedPart.model_fields.keys() - {"length", "weight_versions", "numbering", "meta_info"}


def _part_as_json(part: Part) -> dict[str, Any]:
    versions = [[span.version, span.start - part.start, span.end - part.start] for span in part.weight_spans]
    facts = {name: getattr(part, name) for name in _SAVED_PART_FIELDS}
    numbering = part.weight_spans[-1].numbering
    return {"length": part.end - part.start, **facts, "weight_versions": versions, "numbering": numbering}


def _build_trajectory(
    saved: _Saved, tokens: Sequence[int], loss_mask: Sequence[int], logprobs: Sequence[float]
) -> Trajectory:
    """Build the trajectory turn by turn, with the same checks as in sampling; then apply the sample's loss mask."""
    if saved.tokens_crc32 != tokens_crc32(tokens):
        raise ResumeError(f"got {len(tokens)} tokens that differ from the tokens of the saved resume state")
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
                part_logprobs = logprobs[start - prompt_length : end - prompt_length] if start >= prompt_length else ()
                trajectory.append_turn(
                    context, tokens[start:end], part_logprobs, weight_versions=part.weight_versions, **facts
                )
                start = end
    except TrajectoryError as e:
        raise ResumeError(f"got turns that don't fit the sample: {e}") from e
    fits = trajectory.token_ids == list(tokens) and trajectory.prompt_length == prompt_length
    if not fits or not turns or len(trajectory.turns) != len(turns):
        raise ResumeError(
            f"got {len(turns)} turns for {len(trajectory.token_ids)} tokens with a prompt of "
            f"{trajectory.prompt_length}; expected the sample's {len(tokens)} tokens with a prompt of {prompt_length}"
        )
    trajectory.loss_mask[prompt_length:] = loss_mask
    return trajectory


def _check_progress(progress: EpisodeProgress, trajectory: Trajectory) -> None:
    messages, covered = progress.messages, progress.covered
    to_chat_messages(messages)  # raises if a message can't be rendered
    for message in messages:
        if message.get("role") not in ("user", "assistant") or not isinstance(message.get("content"), list):
            raise ResumeError(
                f"got the message {message!r:.200}; expected the role 'user' or 'assistant', and a list as content"
            )
    after = messages[covered:]
    roles = [message["role"] for message in after]
    expected: list[list[str]] = [[]] if trajectory.is_open else [[], ["assistant"], ["assistant", "user"]]
    if not 0 < covered <= len(messages) or roles not in expected:
        raise ResumeError(
            f"got {len(messages)} messages, and tokens for {covered}; the remaining messages have the roles {roles}, "
            f"expected one of {expected}"
        )


def tokens_crc32(tokens: Sequence[int]) -> int:
    """Return a checksum of token ids."""
    return zlib.crc32(orjson.dumps(list(tokens)))


_CLOSED: Final = b'{"closed":'
_COUNTS: Final = (
    "covered",
    "tool_iterations",
    "tool_calls",
    "tool_errors",
    "tool_timeouts",
    "tool_s",
    "duration_s",
)
_counts_of: Final = attrgetter(*_COUNTS)
_JOURNAL_PART_FIELDS: Final = (
    "start",
    "end",
    "finish_reason",
    "matched",
    "rid",
    "latency_s",
    "at_s",
    "prompt_tokens",
    "cached_tokens",
    "meta_info",
    "weight_spans",
)
_fields_of_part: Final = attrgetter(*_JOURNAL_PART_FIELDS)


class StepWriter:
    """Encoder of an episode's journal records; each has the current counts, and what is new since the previous one.

    A record is a line of JSON. If it has turns, the ids of all new tokens follow as int32, and the logprobs of the
    sampled tokens among them as float64.

    Args:
        is_continued: True if another attempt began the trajectory. slime may then have masked parts of it.
    """

    def __init__(self, *, is_continued: bool) -> None:
        self._may_be_masked = is_continued
        self._tokens = self._turns = self._messages = self._calls = 0
        self._finished: set[str] = set()

    def on_turn_end(self) -> None:
        """Note that a turn has ended: the next records get the results of its calls."""
        self._finished.clear()

    def record(self, state: SavedEpisode, *, dropped: int = 0, resumes: int = 0) -> bytes | None:
        """Return the journal record of a step; None if JSON can't express it, for example an image's bytes.

        Args:
            state: The episode after this step.
            dropped: Number of tokens that other agents have sampled; they are in no record.
            resumes: Number of earlier resumes of the episode.
        """
        progress, trajectory = state.progress, state.trajectory
        head: dict[str, Any] = {"counts": _counts_of(progress), "aborts": state.engine_aborts}
        tail = b""
        if len(trajectory.turns) > self._turns:
            tail = self._add_turns(head, trajectory)
        if len(progress.messages) > self._messages:
            head["messages"] = progress.messages[self._messages :]
        if len(progress.calls) > self._calls:
            head["calls"] = progress.calls[self._calls :]
            head["code"] = state.code
        if progress.finished:
            new = progress.finished.keys() - self._finished
            head["finished"] = {call_id: result for call_id, result in progress.finished.items() if call_id in new}
        if dropped or resumes:
            head |= {"dropped": dropped, "resumes": resumes}
        if (line := _as_json(head)) is None:
            return None
        self._tokens, self._turns = len(trajectory.token_ids), len(trajectory.turns)
        self._messages, self._calls = len(progress.messages), len(progress.calls)
        self._finished.update(progress.finished)
        return line + tail

    def _add_turns(self, head: dict[str, Any], trajectory: Trajectory) -> bytes:
        """Add new turns to the head of a record; return their token ids and logprobs as the record's tail."""
        turns, ids = trajectory.turns[self._turns :], trajectory.token_ids[self._tokens :]
        sampled: list[float] = []
        for turn in turns:
            for part in turn.parts:
                sampled += trajectory.logprobs[part.start : part.end]
        head["turns"] = [[_fields_of_part(part) for part in turn.parts] for turn in turns]
        head["lengths"] = len(ids), len(sampled)
        if self._may_be_masked:
            self._may_be_masked = False
            head["mask"] = trajectory.loss_mask
        return b"\n" + struct.pack(f"<{len(ids)}i{len(sampled)}d", *ids, *sampled)


def closing_record(reason: str) -> bytes:
    """Return the record that ends a journal, with the reason why its episode can't be continued."""
    return orjson.dumps({"closed": reason})


def _as_json(record: dict[str, Any]) -> bytes | None:
    """Return a record as JSON; None if messages or results, even reduced to what the policy reads, can't be written."""
    try:
        return orjson.dumps(record)
    except TypeError:
        pass
    with suppress(TypeError, ValueError, KeyError, PromptError):  # a tool's result need not be JSON
        finished = {call_id: saved_result(result) for call_id, result in record.get("finished", {}).items()}
        messages = list(map(saved_message, record.get("messages", ())))
        return encode_json({**record, "messages": messages, "finished": finished})
    return None


@dataclass(frozen=True, slots=True)
class LoadedSteps:
    """An episode loaded from its journal records.

    Attributes:
        state: The episode.
        dropped: Number of other agents' sampled tokens that are in no sample.
        resumes: Number of earlier resumes.
    """

    state: SavedEpisode
    dropped: int
    resumes: int


def load_steps(records: Sequence[bytes]) -> LoadedSteps:
    """Load an episode from its journal records; there must be at least one.

    Raises:
        ResumeError: The episode can't be continued, or a journal record is damaged.
    """
    if records[-1].startswith(_CLOSED):
        raise ResumeError(str(orjson.loads(records[-1])["closed"]))
    try:
        lines = [_read_record(record) for record in records]
        tokens = _concatenate(lines, "tokens")
        turns = [
            [dict(zip(_JOURNAL_PART_FIELDS, part, strict=True)) for part in turn]
            for turn in _concatenate(lines, "turns")
        ]
        saved = _merge_steps(lines, turns) | {"tokens_crc32": tokens_crc32(tokens)}
        prompt_length = turns[0][0]["start"]
        mask, logprobs = [0] * len(tokens), [0.0] * len(tokens)
        sampled_logprobs = iter(_concatenate(lines, "logprobs"))
        for part in (part for turn in turns for part in turn):
            start, end = part["start"], part["end"]
            mask[start:end], logprobs[start:end] = [1] * (end - start), islice(sampled_logprobs, end - start)
        first_mask = lines[0].get("mask", ())  # slime may have masked tokens of an earlier attempt
        mask[: len(first_mask)] = first_mask
        last = lines[-1]
        state = load_episode(saved, tokens, mask[prompt_length:], logprobs[prompt_length:])
        return LoadedSteps(state, last.get("dropped", 0), last.get("resumes", 0))
    except ResumeError:
        raise
    except Exception as e:  # a damaged record may fail anywhere
        raise ResumeError(f"got a damaged journal: {e!r}") from e


def _read_record(record: bytes) -> dict[str, Any]:
    head, _, tail = record.partition(b"\n")
    line: dict[str, Any] = decode_json(head)
    if tail:
        count, sampled = line["lengths"]
        numbers = struct.unpack(f"<{count}i{sampled}d", tail)
        line |= {"tokens": numbers[:count], "logprobs": numbers[count:]}
    return line


def _concatenate(lines: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [item for line in lines for item in line.get(name, ())]


def _merge_steps(lines: Sequence[Mapping[str, Any]], turns: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the values that `save_episode` would return after the last step, without checksum and conditions."""
    finished: dict[str, Any] = {}
    for line in lines:  # once there are new messages, they contain the results of the previous turn
        finished = ({} if "messages" in line else finished) | line.get("finished", {})
    code: dict[str, Any] = next((line["code"] for line in reversed(lines) if "code" in line), {})
    return {
        "version": VERSION,
        "turns": [{"start": turn[0]["start"], "parts": list(map(_recorded_part_as_json, turn))} for turn in turns],
        "messages": list(map(saved_message, _concatenate(lines, "messages"))),
        "finished": {call_id: saved_result(result) for call_id, result in finished.items()},
        **dict(zip(_COUNTS, lines[-1]["counts"], strict=True)),
        "calls": _concatenate(lines, "calls"),
        "engine_aborts": lines[-1]["aborts"],
        "code": code,
    }


def _recorded_part_as_json(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a journal's record as `_part_as_json` returns a `Part`."""
    start, end, spans = part["start"], part["end"], part["weight_spans"]
    versions = [[span["version"], span["start"] - start, span["end"] - start] for span in spans]
    facts = {name: value for name, value in part.items() if name not in ("start", "end", "weight_spans")}
    return {"length": end - start, **facts, "weight_versions": versions, "numbering": spans[-1].get("numbering", "")}
