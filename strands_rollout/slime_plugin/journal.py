"""An episode's journal: a record of each of its steps, with which another process can continue it.

`record.saved` says what a record holds, and makes the episode of them again. A record
outlives the process in a `RecordStore` in `journal_dir`, or in the driver of an episode worker. An episode is
continued from its last finished turn, as an aborted one is, and gives the same sample.
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

from strands_rollout.aio import once
from strands_rollout.code_tool.tool import CODE_TOOL_NAME, CodeCalls
from strands_rollout.errors import LostEpisodeError, ResumeError
from strands_rollout.log_once import log_once
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.record.branch import UNPARSED
from strands_rollout.record.saved import EpisodeProgress, SavedEpisode, StepWriter, closing_record, load_steps
from strands_rollout.record.store import EpisodeRecords, RecordStore
from strands_rollout.samples import SampleLike, statuses_of
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.conditions import digest_of, row_values
from strands_rollout.slime_plugin.resume import EpisodeStart

logger = logging.getLogger(__name__)


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
        beginning: EpisodeStart,
    ) -> None:
        self._kept = kept
        self._model = model
        self._code = code
        self._made = made
        self._fans_out = fans_out
        self._resumes = beginning.resumes
        self._earlier_aborts = beginning.resume.engine_aborts if beginning.resume else 0
        self._is_closed = False
        self._writer = StepWriter(is_continued=beginning.resume is not None)

    async def turn_ended(self, progress: EpisodeProgress) -> None:
        """Write a record; return when it is kept, so that no tool acts before."""
        self._writer.begin_turn()
        if (record := self._record(progress)) is not None:
            await self._kept.write_before_tools(record)

    def call_ended(self, progress: EpisodeProgress) -> None:
        """Write a record."""
        if (record := self._record(progress)) is not None:
            self._kept.write(record)

    def close(self, reason: str) -> None:
        """Write that the episode can't be continued, and nothing more."""
        if not self._is_closed:
            self._is_closed = True
            self._kept.write(closing_record(reason))

    def _record(self, progress: EpisodeProgress) -> bytes | None:
        model = self._model
        is_alone = not self._made and not model.record.others
        dropped = 0 if is_alone else self._sampled_beside()
        if dropped and self._fans_out:
            self.close("its further agents' samples are not kept")
        if self._is_closed:
            return None
        aborts = model.conversation.sampler.engine_aborts if is_alone else model.engine_aborts
        state = SavedEpisode(model.trajectory, progress, aborts + self._earlier_aborts, asdict(self._code))
        record = self._writer.record(state, dropped=dropped, resumes=self._resumes)
        if record is None:
            self.close("its messages can't be written as JSON, as those with images")
        return record

    def _sampled_beside(self) -> int:
        """Tokens that other agents, and side conversations, have sampled."""
        conversations = [*self._model.record.others, *(one for each in self._made for one in each.record)]
        return sum(segment.trajectory.sampled_length for one in conversations for segment in one)


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


def continue_from_journal(beginning: EpisodeStart, kept: RecordSink | None, settings: RolloutSettings) -> EpisodeStart:
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
        found = load_steps(records)
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
    name = digest_of([await asyncio.to_thread(conditions), row_values(sample), evaluation])
    try:
        await once(("journal", os.getpid(), folder), functools.partial(_store_in, os.getpid(), folder))
        store, name = _store_in(os.getpid(), folder), f"{sample.index}-{name}"
        if sample.index is not None and sample.status is statuses_of(sample).ABORTED:
            store.end_others(f"{sample.index}-", name)
        return store.open(name)
    except OSError as e:
        words = "episodes have no journal in journal_dir=%s: %s: %s"
        log_once(logger, logging.WARNING, words, folder, type(e).__name__, e)
        return None


@functools.cache
def _store_in(_pid: int, folder: str) -> RecordStore:
    return RecordStore(Path(folder))
