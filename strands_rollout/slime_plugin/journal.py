"""The journal of an episode: one journal record per step, so that another process can continue the episode.

`record.saved` defines the content of a record and rebuilds an episode from its records. A `RecordStore` stores the
records in `journal_dir`, where they outlive the process. An episode worker sends its records to the driver, and also
writes them to a file on its node. An episode is continued from its last recorded step, in the same way as an aborted
episode is resumed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

from strands_rollout.aio import run_once
from strands_rollout.code_tool.tool import CODE_TOOL_NAME, CodeCallTotals
from strands_rollout.errors import LostEpisodeError, ResumeError
from strands_rollout.log_once import log_once
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.record.record import UNPARSED
from strands_rollout.record.saved import EpisodeProgress, SavedEpisode, StepWriter, closing_record, load_steps
from strands_rollout.record.store import EpisodeRecords, RecordStore
from strands_rollout.samples import SampleLike, statuses_of
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.conditions import digest_of, row_values
from strands_rollout.slime_plugin.resume import EpisodeStart

logger = logging.getLogger(__name__)


class RecordSink(Protocol):
    """Protocol of stores for an episode's journal records, which survive the death of the episode's process.

    Attributes:
        records: The records of an earlier attempt whose process died; may be empty.
        may_have_acted: True if the tool calls without a result in the last recorded turn may have begun.
        is_latest: True if `records` are known to be from this sample's latest attempt. Otherwise, the sample itself may
            hold a newer state.
    """

    records: Sequence[bytes]
    may_have_acted: bool
    is_latest: bool

    def write(self, record: bytes) -> None:
        """Store a record."""

    async def write_before_tools(self, record: bytes) -> None:
        """Store a record; return once the record would survive the death of this process."""

    def begin(self) -> None:
        """Begin an attempt; its first record replaces all records of earlier attempts."""

    def close(self, *, keep: bool) -> None:
        """End the attempt; `keep` is True if the episode will be continued later from the records."""


class EpisodeJournal:
    """Implementation of `agent.run.Journal` for one episode.

    Args:
        sink: Store for the journal records.
        model: The main agent's model.
        code: The counts and seconds of the code tool, which grow as the episode runs.
        sub_agents: The models of sub-agents, in a list that grows as the episode makes them.
        fans_out: True if tokens of sub-agents and side conversations become samples of their own; a record can't hold
            such samples.
        start: The state that the episode started from.
    """

    def __init__(
        self,
        sink: RecordSink,
        model: SGLangModel,
        code: CodeCallTotals,
        sub_agents: Sequence[SGLangModel],
        *,
        fans_out: bool,
        start: EpisodeStart,
    ) -> None:
        self._sink = sink
        self._model = model
        self._code = code
        self._sub_agents = sub_agents
        self._fans_out = fans_out
        self._resumes = start.resumes
        self._earlier_aborts = start.resume.engine_aborts if start.resume else 0
        self._is_closed = False
        self._writer = StepWriter(is_continued=start.resume is not None)

    async def turn_ended(self, progress: EpisodeProgress) -> None:
        """Write a journal record if possible, and wait until it would outlive this process: tools run next."""
        self._writer.on_turn_end()
        if (record := self._build_record(progress)) is not None:
            await self._sink.write_before_tools(record)

    def call_ended(self, progress: EpisodeProgress) -> None:
        """Write a journal record if possible."""
        if (record := self._build_record(progress)) is not None:
            self._sink.write(record)

    def close(self, reason: str) -> None:
        """If the journal is open, end it with the reason why the episode can't be continued."""
        if not self._is_closed:
            self._is_closed = True
            self._sink.write(closing_record(reason))

    def _build_record(self, progress: EpisodeProgress) -> bytes | None:
        """Return the record of the episode's last step; if it can't be built, close the journal and return None."""
        model = self._model
        is_single = not self._sub_agents and not model.record.others  # the episode has only its main conversation
        dropped = 0 if is_single else self._count_other_tokens()
        if dropped and self._fans_out:
            self.close("the samples of its sub-agents and side conversations are not saved")
        if self._is_closed:
            return None
        aborts = model.engine_aborts + self._earlier_aborts
        state = SavedEpisode(model.trajectory, progress, aborts, asdict(self._code))
        record = self._writer.record(state, dropped=dropped, resumes=self._resumes)
        if record is None:
            self.close("its messages can't be written as JSON, for example because of images")
        return record

    def _count_other_tokens(self) -> int:
        """Count the tokens that were sampled outside the main conversation: by sub-agents and in side conversations."""
        others = [*self._model.record.others, *(each for model in self._sub_agents for each in model.record)]
        return sum(branch.trajectory.sampled_length for conversation in others for branch in conversation)


def _check_unfinished_calls(progress: EpisodeProgress, settings: RolloutSettings) -> None:
    calls = [block["toolUse"] for block in progress.messages[-1]["content"] if "toolUse" in block]
    unfinished = [call for call in calls if call["toolUseId"] not in progress.finished]
    # without a session, the code tool's code changes nothing that outlives the call
    harmless = set() if settings.code_session else {CODE_TOOL_NAME}
    names = sorted({call["name"] for call in unfinished if not call["toolUseId"].endswith(UNPARSED)} - harmless)
    if names:
        raise LostEpisodeError(
            f"the process that ran the episode died while tools ran ({', '.join(names)}); they may have acted and are "
            "not called again; if calling them twice does no harm, set repeat_interrupted_tools: true"
        )


def continue_from_journal(start: EpisodeStart, sink: RecordSink | None, settings: RolloutSettings) -> EpisodeStart:
    """Begin an attempt in the sink, and return the state recorded there, or `start`.

    Return `start` if the sink is None, there are no records, the records can't be used, or the aborted sample's own
    state may be newer.

    Raises:
        LostEpisodeError: A tool may have acted (see `_check_unfinished_calls`), or the records are known to be this
            sample's latest, and the episode can't be continued from them.
    """
    if sink is None:
        return start
    records = sink.records
    sink.begin()
    if not records or (start.resume is not None and not sink.is_latest):
        return start
    try:
        loaded = load_steps(records)
    except ResumeError as e:
        if sink.is_latest:
            raise LostEpisodeError(
                f"the process that ran the episode died, and the episode can't be continued: {e}"
            ) from e
        logger.warning("an episode starts from scratch, since its journal can't be used: %s", e)
        return start
    # a program repeats all of its calls, finished calls too, which `resumable: replay` allows
    if sink.may_have_acted and not settings.repeat_interrupted_tools and not settings.has_program:
        _check_unfinished_calls(loaded.state.progress, settings)
    dropped = start.dropped_tokens + loaded.dropped
    return replace(start, resume=loaded.state, resumes=loaded.resumes + 1, dropped_tokens=dropped)


async def open_journal(
    sample: SampleLike, settings: RolloutSettings, conditions: Callable[[], Mapping[str, str]], *, evaluation: bool
) -> EpisodeRecords | None:
    """Open the journal records of this sample in the folder `journal_dir`.

    Return None if `journal_dir` is null, `resume_aborted` is off, the folder can't be used, or another episode of the
    same sample has the records open.

    Records belong to this sample if they have its index, its row, the conditions of the episode and the same
    `evaluation`. For an aborted sample, other records with its index are removed, since the sample itself holds a newer
    state. Each process reads the records of dead processes only once, in a thread.

    Raises:
        ConfigError: `conditions` finds no usable tokenizer.
    """
    folder = settings.journal_dir
    if folder is None or not settings.resume_aborted:
        return None
    name = digest_of([await asyncio.to_thread(conditions), row_values(sample), evaluation])
    try:
        await run_once(("journal", os.getpid(), folder), functools.partial(_open_store, os.getpid(), folder))
        store, name = _open_store(os.getpid(), folder), f"{sample.index}-{name}"
        if sample.index is not None and sample.status is statuses_of(sample).ABORTED:
            store.end_others(f"{sample.index}-", name)
        return store.open(name)
    except OSError as e:
        message = "episodes may have no journal, since journal_dir=%s can't be used: %s: %s"
        log_once(logger, logging.WARNING, message, folder, type(e).__name__, e)
        return None


@functools.cache
def _open_store(_pid: int, folder: str) -> RecordStore:
    return RecordStore(Path(folder))
