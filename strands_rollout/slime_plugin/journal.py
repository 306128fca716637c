"""An episode's journal: a record of each of its steps, with which another process can continue it.

A record holds what is new since the last one: turns, messages and results of tool calls as JSON, and their tokens. It
outlives the process in a `RecordLog` in `journal_dir`, or in the driver of an episode worker. An episode is
continued from its last finished turn, as an aborted one is, and gives the same sample.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from strands_rollout.agent.episode import STEP_COUNTS, Step
from strands_rollout.agent.limits import EpisodeProgress
from strands_rollout.aio import once
from strands_rollout.code_tool.tool import CODE_TOOL_NAME, CodeCalls
from strands_rollout.errors import LostEpisodeError, PromptError, ResumeError, foreign_code
from strands_rollout.files import EpisodeRecords, RecordLog, decode_json, encode_json
from strands_rollout.model.history import UNPARSED
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.model.trajectory import Trajectory
from strands_rollout.samples import SampleLike, statuses_of
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.conditions import digest_of, row_of
from strands_rollout.slime_plugin.resume import (
    RESUME_VERSION,
    Beginning,
    ResumeState,
    load_resume_state,
    saved_message,
    saved_result,
    tokens_crc32,
)

logger = logging.getLogger(__name__)
_CLOSED: Final = b'{"closed":'


class RecordSink(Protocol):
    """Keeps an episode's records where they outlive its process.

    Attributes:
        records: Those of an attempt whose process died; none of the first.
        may_have_acted: Whether calls of the last turn may have begun that have no result.
        is_certain: Whether that attempt is known to be this sample's last; else the sample may have gone further since.
    """

    records: Sequence[bytes]
    may_have_acted: bool
    is_certain: bool

    def write(self, record: bytes) -> None:
        """Take a record."""

    async def write_before_tools(self, record: bytes) -> None:
        """Take a record, and return when it would outlive this process."""

    def begin(self) -> None:
        """An attempt begins, whose first record says all that the earlier ones did."""

    def close(self, *, keep: bool) -> None:
        """The episode is over; `keep` says whether it will be continued later."""


class EpisodeJournal:
    """Writes one episode's records; see `agent.episode.Journal`.

    Args:
        kept: Where they go.
        model: The main agent's.
        code: What the code tool has done, counted as the episode goes.
        made: The models of further agents, as they are made.
        fans_out: Whether what those sample becomes samples, which no record holds.
        beginning: How it began.
    """

    def __init__(
        self,
        kept: RecordSink,
        model: SGLangModel,
        code: CodeCalls,
        made: Sequence[SGLangModel],
        *,
        fans_out: bool,
        beginning: Beginning,
    ) -> None:
        self._kept = kept
        self._model = model
        self._code = code
        self._made = made
        self._fans_out = fans_out
        self._resumes = beginning.resumes
        self._earlier_aborts = beginning.resume.engine_aborts if beginning.resume else 0
        self._may_be_masked = beginning.resume is not None  # by slime
        self._is_closed = False
        self._tokens = self._turns = self._messages = self._calls = 0
        self._finished: set[str] = set()

    async def turn_ended(self, step: Step) -> None:
        """Write a record; return when it is kept, so that no tool acts before."""
        self._finished.clear()
        if (record := self._record(step)) is not None:
            await self._kept.write_before_tools(record)

    def call_ended(self, step: Step) -> None:
        """Write a record."""
        if (record := self._record(step)) is not None:
            self._kept.write(record)

    def close(self, reason: str) -> None:
        """Write that the episode can't be continued, and nothing more."""
        if not self._is_closed:
            self._is_closed = True
            self._kept.write(orjson.dumps({"closed": reason}))

    def _record(self, step: Step) -> bytes | None:
        model, trajectory = self._model, self._model.trajectory
        is_alone = not self._made and not model.conversations.others
        dropped = 0 if is_alone else self._sampled_beside()
        if dropped and self._fans_out:
            self.close("its further agents' samples are not kept")
        if self._is_closed:
            return None
        aborts = model.conversation.sampler.engine_aborts if is_alone else model.engine_aborts
        head: dict[str, Any] = {"counts": step.counts, "aborts": aborts + self._earlier_aborts}
        tail = b""
        if len(trajectory.turns) > self._turns:
            tail = self._add_turns(head, trajectory)
        if len(step.messages) > self._messages:
            head["messages"] = step.messages[self._messages :]
        if len(step.calls) > self._calls:
            head["calls"] = step.calls[self._calls :]
            head["code"] = _CODE(self._code)
        if step.finished:
            head["finished"] = {one: step.finished[one] for one in step.finished if one not in self._finished}
        if dropped or self._resumes:
            head |= {"dropped": dropped, "resumes": self._resumes}
        if (line := _as_json(head)) is None:
            self.close("its messages can't be written as JSON, as those with images")
            return None
        self._tokens, self._turns = len(trajectory.token_ids), len(trajectory.turns)
        self._messages, self._calls = len(step.messages), len(step.calls)
        self._finished.update(step.finished)
        return line + tail

    def _add_turns(self, head: dict[str, Any], trajectory: Trajectory) -> bytes:
        """Add new turns to the head; the bytes that follow it: ids as int32, logprobs of sampled ones as float64."""
        turns, ids = trajectory.turns[self._turns :], trajectory.token_ids[self._tokens :]
        sampled: list[float] = []
        for turn in turns:
            for part in turn.parts:
                sampled += trajectory.logprobs[part.start : part.end]
        head["turns"] = [[_PART(part) for part in turn.parts] for turn in turns]
        head["lengths"] = len(ids), len(sampled)
        if self._may_be_masked:
            self._may_be_masked = False
            head["mask"] = trajectory.loss_mask
        return b"\n" + struct.pack(f"<{len(ids)}i{len(sampled)}d", *ids, *sampled)

    def _sampled_beside(self) -> int:
        """Tokens that other agents, and side conversations, have sampled."""
        conversations = [*self._model.conversations.others, *(one for each in self._made for one in each.conversations)]
        return sum(segment.trajectory.sampled_length for one in conversations for segment in one)


_PART_NAMES: Final = (
    *("start", "end", "finish_reason", "matched", "rid", "latency_s", "at_s", "prompt_tokens", "cached_tokens"),
    *("meta_info", "weight_spans"),
)
_PART: Final = attrgetter(*_PART_NAMES)
_CODE_NAMES: Final = tuple(one.name for one in fields(CodeCalls))
_CODE: Final = attrgetter(*_CODE_NAMES)


def _as_json(record: dict[str, Any]) -> bytes | None:
    """None where it can't be written, as with the bytes of an image."""
    try:
        return orjson.dumps(record)
    except TypeError:
        pass
    with suppress(TypeError, ValueError, KeyError, PromptError):  # a tool's result need not be JSON
        finished = {one: saved_result(result) for one, result in record.get("finished", {}).items()}
        messages = list(map(saved_message, record.get("messages", ())))
        return encode_json({**record, "messages": messages, "finished": finished})
    return None


@dataclass(frozen=True, slots=True)
class Recovered:
    """An episode as its records leave it.

    Attributes:
        dropped: Tokens of other agents, which are in no sample.
        resumes: How often it was resumed before.
    """

    state: ResumeState
    dropped: int
    resumes: int


def recovered(records: Sequence[bytes]) -> Recovered:
    """The state that an episode's records describe, of which there is at least one.

    Raises:
        ResumeError: They say that it can't be continued, or are damaged.
    """
    if records[-1].startswith(_CLOSED):
        raise ResumeError(str(orjson.loads(records[-1])["closed"]))
    with foreign_code("a damaged file may make anything fail") as outcome:
        lines = [_read(record) for record in records]
        tokens = _all(lines, "tokens")
        turns = [[dict(zip(_PART_NAMES, part, strict=True)) for part in turn] for turn in _all(lines, "turns")]
        saved = _saved(lines, turns) | {"tokens_crc32": tokens_crc32(tokens)}
        prompt_length = turns[0][0]["start"]
        mask, logprobs = [0] * len(tokens), [0.0] * len(tokens)
        given = iter(_all(lines, "logprobs"))
        for part in (part for turn in turns for part in turn):
            start, end = part["start"], part["end"]
            mask[start:end], logprobs[start:end] = [1] * (end - start), islice(given, end - start)
        early = lines[0].get("mask", ())
        mask[: len(early)] = early
        last = lines[-1]
        state = load_resume_state(saved, tokens, mask[prompt_length:], logprobs[prompt_length:])
        return Recovered(state, last.get("dropped", 0), last.get("resumes", 0))
    raise ResumeError(f"got a damaged journal: {outcome.error!r}") from outcome.error


def _read(record: bytes) -> dict[str, Any]:
    head, _, tail = record.partition(b"\n")
    line: dict[str, Any] = decode_json(head)
    if tail:
        count, sampled = line["lengths"]
        numbers = struct.unpack(f"<{count}i{sampled}d", tail)
        line |= {"tokens": numbers[:count], "logprobs": numbers[count:]}
    return line


def _all(lines: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [one for line in lines for one in line.get(name, ())]


def _saved(lines: Sequence[Mapping[str, Any]], turns: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """What `save_resume_state` gives of the same episode, without its checksum."""
    finished: dict[str, Any] = {}
    for line in lines:
        finished = ({} if "messages" in line else finished) | line.get("finished", {})
    code = _all(lines, "code")[-len(_CODE_NAMES) :]
    return {
        "version": RESUME_VERSION,
        "turns": [{"start": turn[0]["start"], "parts": list(map(_saved_part, turn))} for turn in turns],
        "messages": list(map(saved_message, _all(lines, "messages"))),
        "finished": {one: saved_result(result) for one, result in finished.items()},
        **dict(zip(STEP_COUNTS, lines[-1]["counts"], strict=True)),
        "calls": _all(lines, "calls"),
        "engine_aborts": lines[-1]["aborts"],
        "code": dict(zip(_CODE_NAMES, code, strict=True)) if code else {},
    }


def _saved_part(part: Mapping[str, Any]) -> dict[str, Any]:
    start, end, spans = part["start"], part["end"], part["weight_spans"]
    versions = [[span["version"], span["start"] - start, span["end"] - start] for span in spans]
    facts = {name: value for name, value in part.items() if name not in ("start", "end", "weight_spans")}
    return {"length": end - start, **facts, "weight_versions": versions, "numbering": spans[-1].get("numbering", "")}


def _check_unfinished_calls(progress: EpisodeProgress, settings: RolloutSettings) -> None:
    """Raise where a tool may have acted of whose result nothing is known.

    Code without a session acts on nothing that outlives its call.

    Raises:
        LostEpisodeError: Such a tool is among the calls; `repeat_interrupted_tools` allows to call it again.
    """
    calls = [block["toolUse"] for block in progress.messages[-1]["content"] if "toolUse" in block]
    left = [call for call in calls if call["toolUseId"] not in progress.finished]
    harmless = set() if settings.code_session else {CODE_TOOL_NAME}
    named = sorted({call["name"] for call in left if not call["toolUseId"].endswith(UNPARSED)} - harmless)
    if named:
        raise LostEpisodeError(
            f"the process that ran the episode died while tools ran ({', '.join(named)}): they may have acted, and are "
            "not called again; where that does no harm, set repeat_interrupted_tools: true"
        )


def continued(beginning: Beginning, kept: RecordSink | None, settings: RolloutSettings) -> Beginning:
    """How an episode begins that may have records.

    Raises:
        LostEpisodeError: It has, they are known to be this sample's, and it can't be continued from them.
    """
    if kept is None:
        return beginning
    records = kept.records
    kept.begin()
    if not records or (beginning.resume is not None and not kept.is_certain):
        return beginning  # an aborted sample has its own state, which is newer
    try:
        found = recovered(records)
    except ResumeError as e:
        if kept.is_certain:
            raise LostEpisodeError(f"the process that ran the episode died, and it can't be continued: {e}") from e
        logger.warning("an episode of the journal starts afresh: %s", e)
        return beginning
    # a program's calls are made again, those that had ended too: `resumable: replay` says that it may
    if kept.may_have_acted and not settings.repeat_interrupted_tools and not settings.has_program:
        _check_unfinished_calls(found.state.progress, settings)
    dropped = beginning.dropped_tokens + found.dropped
    return replace(beginning, resume=found.state, resumes=found.resumes + 1, dropped_tokens=dropped)


async def open_journal(
    sample: SampleLike, settings: RolloutSettings, conditions: Callable[[], Mapping[str, str]], *, evaluation: bool
) -> EpisodeRecords | None:
    """The records of this sample of this job in the setting's `journal_dir`; None without one, or if it can't be used.

    Those of an episode that was begun under other conditions, or on another row, are not this sample's; of an aborted
    sample, which has gone further, they are ended. What dead processes have left is read once, in a thread. Another
    episode of the same sample keeps them for itself.
    """
    folder = settings.journal_dir
    if folder is None or not settings.resume_aborted:
        return None
    name = digest_of([await asyncio.to_thread(conditions), row_of(sample), evaluation])
    try:
        await once(("journal", os.getpid(), folder), functools.partial(_log_in, os.getpid(), folder))
        log, name = _log_in(os.getpid(), folder), f"{sample.index}-{name}"
        if sample.index is not None and sample.status is statuses_of(sample).ABORTED:
            log.end_others(f"{sample.index}-", name)
        return log.open(name)
    except OSError as e:
        _warn_of_folder(folder, f"{type(e).__name__}: {e}")
        return None


@functools.cache
def _log_in(_pid: int, folder: str) -> RecordLog:
    return RecordLog(Path(folder))


@functools.cache
def _warn_of_folder(folder: str, error: str) -> None:
    logger.warning("episodes have no journal in journal_dir=%s: %s", folder, error)
