"""The driver's side of episode workers: the process that calls `generate` assigns episodes to actors on Ray.

Each episode goes to the worker with the lowest load. But the worker of its group's previous episode is preferred if its
load is hardly higher. The driver keeps the journal records of the episode's steps. With these records, another
worker can continue the episode if the first worker dies. All calls of actors are made in the pool's thread, which has
its own event loop. Callers wait in their own event loops.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import importlib.util
import itertools
import json
import logging
import os
import pickle
import re
import threading
import time
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from strands_rollout import errors
from strands_rollout.aio import admit_to_loop, shared_result
from strands_rollout.code_tool.sandbox.code_runner import shorten
from strands_rollout.errors import RolloutError, WorkersLostError
from strands_rollout.record.store import EpisodeRecords
from strands_rollout.record.weight_versions import KNOWN_VERSIONS
from strands_rollout.samples import EpisodeFacts, SampleLike, SlimeArgs, add_facts, statuses_of
from strands_rollout.settings import EpisodeWorkers, RolloutSettings
from strands_rollout.slime_plugin import slime_adapter
from strands_rollout.slime_plugin import worker as remote
from strands_rollout.slime_plugin.conditions import episode_conditions
from strands_rollout.slime_plugin.garbage import freeze_long_lived
from strands_rollout.slime_plugin.inputs import with_row_settings
from strands_rollout.slime_plugin.journal import open_journal
from strands_rollout.slime_plugin.reward_groups import failed_groups_of
from strands_rollout.slime_plugin.sample_writer import is_unfinished
from strands_rollout.slime_plugin.slime_adapter import GenerateCall
from strands_rollout.slime_plugin.worker import (
    AbortNotice,
    AbortSignals,
    ArgsSnapshot,
    Assignment,
    Batch,
    EpisodeWorker,
    LeftoverRecords,
    Packed,
    Ray,
    RemoteCall,
    Result,
    WorkerInfo,
)

logger = logging.getLogger(__name__)
_START_TIMEOUT_S: Final = 120.0
_RETRY_START_S: Final = 30.0  # this long after a failed start of the pool, the next episode starts it again
_ABORT_POLL_S: Final = 0.02
_MAX_DEATHS: Final = 5  # deaths of one worker within `_DEATH_WINDOW_S` that end the run
_DEATH_WINDOW_S: Final = 60.0
_MAX_ATTEMPTS: Final = 3  # attempts in a row at an episode whose workers die before they leave a journal record
_MAX_CAUSE_CHARS: Final = 200
_READ_RECORDS_TIMEOUT_S: Final = 60.0
_NODE_POLL_S: Final = 5.0
_CLOSE_TIMEOUT_S: Final = 3.0
_SEND_DELAY_S: Final = 0.005  # collects several messages into one call of an actor
_SEND_ABORT_TIMEOUT_S: Final = 0.5
_MAX_GROUPS: Final = 4096
_MAX_ARGS: Final = 8
_MAX_GROUP_LOAD_RATIO: Final = 1.25  # maximum load of a group's last worker, relative to the lowest load
_SMOOTHING: Final = 0.1
_ANSI_COLOR: Final = re.compile(r"\x1b\[[0-9;]*m")
_NO_ABORT: Final = AbortSignals(slime=False, user=None)


async def play_on_worker(call: GenerateCall, settings: RolloutSettings) -> SampleLike | list[SampleLike]:
    """Play the episode of a call of `generate` in an episode worker, and fill its sample.

    Args:
        call: slime's call.
        settings: The settings of the run, without the row's.

    Returns:
        The sample or a list of samples, as for `generate`.

    Raises:
        RolloutError: No worker can play the episode; or the rollout was aborted before a worker was free, and slime
            can't take an ABORTED sample.
        WorkersLostError: A worker keeps dying; the run must end.
    """
    if settings.freeze_gc:
        freeze_long_lived()  # full collections would scan the contents of all finished samples
    pool, sample = _get_pool(settings.episode_workers), call.sample
    job = _EpisodeJob(call, settings.should_abort)

    def conditions() -> dict[str, str]:
        return episode_conditions(call, with_row_settings(settings, sample.metadata))

    job.journal = await open_journal(sample, settings, conditions, evaluation=call.evaluation)
    job.records = [] if job.journal is None else [*job.journal.records]  # left by a driver that died
    try:
        job.packed_call = pool.pack_call(job)
        result = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(pool.play(job), pool.loop))
        await admit_to_loop()  # results arrive in batches: fill one sample in each pass of the event loop
        return _fill_samples(job, result)
    except WorkersLostError as e:
        # slime's fully-async rollout loses the exception, so `raise_on_failed_groups` raises it again
        failed_groups_of(call.args).error = e
        raise
    finally:
        if job.journal is not None:
            job.journal.close(keep=is_unfinished(sample))


def _fill_samples(job: _EpisodeJob, result: Result | None) -> SampleLike | list[SampleLike]:
    """Fill the caller's sample from a worker's result, and build its siblings.

    `result` is None if the episode was aborted while waiting for a worker.
    """
    sample = job.call.sample
    if result is None:
        if not slime_adapter.may_return_aborted(job.call.args, sample):
            raise errors.EngineAbortedError("the rollout was aborted before an episode worker was free")
        sample.status = statuses_of(sample).ABORTED
        return sample
    is_list, (main_values, *sibling_values) = remote.unpack(result.data, result.buffers)
    remote.fill_sample(sample, main_values)
    add_facts(sample, EpisodeFacts(queue_s=job.queue_s))
    siblings = []
    for values in sibling_values:
        sibling = copy.copy(sample)
        vars(sibling).pop("trace", None)  # slime's trace belongs to the main sample
        remote.fill_sample(sibling, values)
        siblings.append(sibling)
    return [sample, *siblings] if is_list else sample


@dataclass(eq=False, slots=True)
class _EpisodeJob:
    """An episode to play on a worker; if that worker dies, another worker gets the episode.

    Attributes:
        key: Identifies the episode in this driver.
        args: slime's args as its worker gets them.
        packed_call: The packed `worker.RemoteCall`.
        journal: The journal records of this sample in `journal_dir`; None where `open_journal` returns None.
        done: Future of the worker's result. The result is None if the episode was aborted while waiting for a worker,
            without journal records. Before `WorkerPool.play`, `done` itself is None.
        worker: The worker that plays the episode; None while it waits.
        waits_or_plays_since: The `time.monotonic()` when the episode began to wait for a worker or, once assigned, to
            be played.
        records: The journal records of the last attempt that left any.
        new_records: The journal records of this attempt that have arrived so far.
        may_have_acted: As in `journal.RecordSink`.
        is_latest: As in `journal.RecordSink`.
        sent_aborts: The abort signals that its worker has got, or will get with the assignment.
        attempts: Attempts in a row that left no journal record.
        queue_s: Seconds that the episode has waited for workers.
    """

    call: GenerateCall
    should_abort: str | Callable[[], bool] | None
    key: int = 0
    args: ArgsSnapshot | None = None
    packed_call: Packed = (b"", [])
    journal: EpisodeRecords | None = None
    done: asyncio.Future[Result | None] | None = None
    worker: _Worker | None = None
    waits_or_plays_since: float = 0.0
    records: list[bytes] = field(default_factory=list)
    new_records: list[bytes] = field(default_factory=list)
    may_have_acted: bool = True
    is_latest: bool = False
    sent_aborts: AbortSignals = _NO_ABORT
    attempts: int = 0
    queue_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """True if no caller is waiting: it got a result or an error, was cancelled, or has not begun to wait."""
        return self.done is None or self.done.done()

    def read_aborts(self) -> AbortSignals:
        args, sample = self.call.args, self.call.sample
        slime = slime_adapter.is_aborting(args, sample)
        if self.should_abort is None:
            return AbortSignals(slime, None)
        return AbortSignals(slime, slime or slime_adapter.is_aborting(args, sample, self.should_abort))

    def end(self, outcome: Result | RolloutError | None) -> None:
        if self.done is None or self.done.done():  # not `is_over`, which does not narrow the type
            return
        if isinstance(outcome, RolloutError):
            # Copy the error: several callers may raise it, and each raise would extend its traceback
            self.done.set_exception(copy.copy(outcome))
        else:
            self.done.set_result(outcome)

    def begin_attempt(self, worker: _Worker) -> Assignment:
        now = time.monotonic()
        self.queue_s += now - self.waits_or_plays_since
        self.waits_or_plays_since, self.worker, worker.jobs[self.key] = now, worker, self
        if self.journal is not None:
            self.journal.begin()
        leftover_records = LeftoverRecords(self.records, self.may_have_acted, self.is_latest)
        return Assignment(self.key, *self.packed_call, leftover_records, self.sent_aborts)

    def on_worker_death(self, leftover: Sequence[bytes] | None) -> None:
        """Prepare the next attempt after the worker died, or end the episode after too many attempts without a record.

        Args:
            leftover: The journal records in the worker's file; None if it can't be read.
        """
        # a turn's record goes to the driver first, then to the worker's file; the turn's tools run only after that. The
        # record of a tool's result goes to the file first. So if the driver has exactly one record more than the file,
        # the turn's tools had not begun
        ahead = 0 if leftover is None else len(self.new_records) - len(leftover)
        records = self.new_records if leftover is None or ahead > 0 else [*leftover]
        self.attempts = 0 if records else self.attempts + 1
        if records:
            self.records, self.may_have_acted, self.is_latest = records, ahead != 1, True
        self.new_records, self.waits_or_plays_since, self.worker = [], time.monotonic(), None
        if self.attempts >= _MAX_ATTEMPTS:
            self.end(
                errors.LostEpisodeError(
                    f"{self.attempts} episode workers in a row died while they played the episode; the driver's log "
                    "has the causes (event=episode_worker_died)"
                )
            )

    def add_record(self, record: bytes) -> None:
        self.new_records.append(record)
        if self.journal is not None:
            self.journal.write(record)


@dataclass(eq=False, slots=True)
class _Worker:
    """A worker of the pool; when its actor dies, the worker gets a new actor.

    Attributes:
        node: Ray's id of the node to run on; None to let Ray choose.
        actor: Ray's handle of the current actor.
        info: The actor's process; None until the actor has started.
        jobs: The episodes that it plays, by key.
        assignments: The assignments to send with the next call of `EpisodeWorker.assign`, together with `notices` and
            `cancelled`.
        args_numbers: The numbers of the `ArgsSnapshot`s sent to the actor, oldest first; the dict is an ordered set.
        deaths: The times of the last deaths, by `time.monotonic`.
        busy: The average number of CPU cores used lately.
        episode_s: The smoothed duration of an episode, in seconds; 0 until one has ended.
    """

    number: int
    node: str | None
    actor: Ray = None
    info: WorkerInfo | None = None
    is_ready: bool = False
    jobs: dict[int, _EpisodeJob] = field(default_factory=dict)
    assignments: list[Assignment] = field(default_factory=list)
    notices: list[AbortNotice] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    args_numbers: dict[int, None] = field(default_factory=dict)
    deaths: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_DEATHS))
    restarts: int = 0
    episodes: int = 0
    busy: float = 0.0
    episode_s: float = 0.0

    def __str__(self) -> str:
        where = f" (process {self.info.pid} on {self.info.host})" if self.info else ""
        return f"episode worker {self.number}{where}"

    def add_episode(self, seconds: float) -> None:
        self.episodes += 1
        self.episode_s += (seconds - self.episode_s) * (_SMOOTHING if self.episode_s else 1.0)

    def expected_load_s(self) -> float:
        """Return the estimated seconds of work if one more episode is assigned."""
        return (len(self.jobs) + 1) * (self.episode_s or 1.0)


class WorkerPool:
    """The workers for one value of the setting `episode_workers`; coroutines run in the pool's own thread."""

    def __init__(self, setting: EpisodeWorkers) -> None:
        self._setting = setting
        self._ray = remote.require_ray()
        self._name = uuid.uuid4().hex  # in the names of its workers' record folders, to tell them from other pools'
        self._workers: list[_Worker] = []
        self._queue: deque[_EpisodeJob] = deque()
        self._jobs: defaultdict[Hashable, dict[int, _EpisodeJob]] = defaultdict(dict)  # by `abort_key`, then by key
        self._groups: OrderedDict[Hashable, _Worker] = OrderedDict()  # the worker of a group's last episode
        self._numbers = itertools.count(1)  # of jobs and of args
        self._args: OrderedDict[int, ArgsSnapshot] = OrderedDict()  # by `id` of the args, the latest used last
        self._args_lock = threading.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting: asyncio.Task[None] | None = None
        self.failed_at: float | None = None  # time of a failed start, by `time.monotonic`
        self._error: RolloutError | None = None  # if set, all later episodes fail with it
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="episode-workers", daemon=True)
        self._thread.start()
        slime_adapter.ABORT_LISTENERS.add(self.announce_abort)

    def pack_call(self, job: _EpisodeJob) -> Packed:
        """Return the job's pickled `worker.RemoteCall`; set the job's `key`, `args` and `sent_aborts`.

        From now on, slime's aborts are announced to the workers as soon as slime sets its flag.

        Raises:
            ConfigError: The args or the sample can't be pickled.
        """
        args, sample = job.call.args, job.call.sample
        slime_adapter.watch_aborts(args, sample)
        job.args = snapshot = self._pack_args(args)
        job.key, job.sent_aborts = next(self._numbers), job.read_aborts()
        spans = slime_adapter.current_spans(sample)
        params = dict(job.call.sampling_params)
        try:
            return remote.pack(RemoteCall(snapshot.number, sample, params, job.call.evaluation, spans))
        except Exception as e:  # a sample's values may raise anything when they are pickled
            got = remote.unpicklable_value(vars(sample), pickle.dumps)
            raise errors.ConfigError(
                f"the sample can't be sent to an episode worker: {got}; expected values that can be pickled, or "
                "episode_workers: 0"
            ) from e

    async def play(self, job: _EpisodeJob) -> Result | None:
        """Play the job on a worker and return its result.

        The result is None if the job was aborted while waiting for a worker, without journal records.

        Raises:
            RolloutError: The workers could not be started, keep dying, or could not play the episode.
        """
        if self._error is not None:
            raise copy.copy(self._error)
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await shared_result(self._starting)
        job.done, job.waits_or_plays_since = self.loop.create_future(), time.monotonic()
        args, sample = job.call.args, job.call.sample
        abort_key = slime_adapter.abort_key(args, sample, job.should_abort)
        self._jobs[abort_key][job.key] = job
        self._queue.append(job)
        self._assign()
        try:
            return await job.done
        finally:
            del self._jobs[abort_key][job.key]
            if not self._jobs[abort_key]:
                del self._jobs[abort_key]
            if job.worker is not None and job.key in job.worker.jobs:  # still being played: the caller was cancelled
                del job.worker.jobs[job.key]
                job.worker.cancelled.append(job.key)
                self._schedule_send(job.worker)
                self._assign()

    async def close(self) -> None:
        """End all workers; their running episodes are lost."""
        for task in self._tasks:
            task.cancel()
        try:
            closing = [asyncio.ensure_future(each.actor.close.remote()) for each in self._workers if each.is_ready]
            if closing:
                await asyncio.wait(closing, timeout=_CLOSE_TIMEOUT_S)
        except Exception:  # Ray may raise anything; all workers are killed below, closed or not
            logger.debug("episode workers can't be closed", exc_info=True)
        for worker in self._workers:
            self._kill(worker)

    def metrics(self) -> dict[str, float]:
        """Return each worker's episodes and restarts so far, and the CPU cores that it used lately."""
        names = ("episodes", "restarts", "busy")
        return {f"workers/{each.number}/{name}": float(getattr(each, name)) for each in self._workers for name in names}

    def announce_abort(self) -> None:
        """Send an abort to all workers; return when they have it, at the latest after `_SEND_ABORT_TIMEOUT_S`.

        Blocks slime's event loop meanwhile, so that slime aborts the engines' requests only after the workers know.
        """
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._send_aborts_and_wait(), self.loop).result(_SEND_ABORT_TIMEOUT_S)

    def stop(self) -> None:
        """End all workers and the pool's thread."""
        slime_adapter.ABORT_LISTENERS.discard(self.announce_abort)
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(self.close(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        if not self._thread.is_alive():
            self.loop.close()

    def _pack_args(self, args: SlimeArgs) -> ArgsSnapshot:
        with self._args_lock:
            snapshot = self._args.get(id(args))
            if snapshot is None or not snapshot.belongs_to(args):
                snapshot = self._args[id(args)] = ArgsSnapshot(args, next(self._numbers))
                while len(self._args) > _MAX_ARGS:
                    self._args.popitem(last=False)
            self._args.move_to_end(id(args))
            return snapshot

    async def _start(self) -> None:
        try:
            nodes = await asyncio.to_thread(remote.choose_nodes, self._ray, self._setting)
            self._workers = [_Worker(number, node) for number, node in enumerate(nodes)]
            await asyncio.gather(*(self._start_worker(worker) for worker in self._workers))
        except RolloutError as e:
            self._error, self.failed_at = e, time.monotonic()
            logger.error("event=episode_workers_not_started error=%s", e)  # noqa: TRY400 - no traceback is needed
            await self.close()
            raise
        for worker in self._workers:
            self._spawn(self._run_worker(worker))
        self._spawn(self._poll_aborts())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_worker(self, worker: _Worker) -> None:
        with self._args_lock:
            snapshot = next(reversed(self._args.values()))
        level = logging.getLogger().getEffectiveLevel()
        # restart on the node where the dead worker's records are
        node = worker.node or (worker.info.node if worker.info else None)
        worker.args_numbers, worker.info = {snapshot.number: None}, None
        try:
            options = remote.actor_options(self._setting, node)
            worker.actor = (
                self._ray.remote(EpisodeWorker)
                .options(**options)
                .remote(worker.number, self._name, level, KNOWN_VERSIONS.numbering)
            )
            async with asyncio.timeout(_START_TIMEOUT_S):
                info: WorkerInfo = await worker.actor.start.remote(snapshot.number, snapshot.data)
        except TimeoutError:
            raise RolloutError(
                f"episode worker {worker.number} did not start within {_START_TIMEOUT_S:.0f} s; run `ray list actors` "
                "to see whether it waits for resources or for its runtime environment, and read Ray's logs for the "
                "reason"
            ) from None
        except Exception as e:  # Ray may raise anything while it starts an actor
            raise RolloutError(f"episode worker {worker.number} can't start: {describe_error(e)}") from e
        remote.check_worker(info, self._ray)
        worker.info, worker.is_ready = info, True
        self._assign()

    async def _run_worker(self, worker: _Worker) -> None:
        """Process the batches of a worker while it lives, and restart it whenever it dies."""
        cause: object = None
        while self._error is None:
            try:
                while worker.is_ready:
                    self._process_batch(worker, await worker.actor.collect.remote(is_clear=not self._is_aborting()))
            except Exception as e:  # whatever Ray raises here, the actor can't be reached
                cause = e
            try:
                await self._restart(worker, shorten(describe_error(cause), _MAX_CAUSE_CHARS))
                cause = None
            except Exception as e:  # a worker that can't be restarted has died once more
                cause = e

    def _process_batch(self, worker: _Worker, batch: Batch) -> None:
        worker.busy, results = batch.busy, batch.results
        # note the version before the results are delivered: their staleness is measured against the newest version
        KNOWN_VERSIONS.note(batch.newest_version)
        for key, record in batch.records:
            if key in worker.jobs:
                worker.jobs[key].add_record(record)
        for result in results:
            job = worker.jobs.pop(result.key, None)
            if job is None:
                continue
            worker.add_episode(time.monotonic() - job.waits_or_plays_since)
            job.end(
                result if result.error is None else RolloutError(f"{worker} could not play the episode: {result.error}")
            )
        if results:
            self._assign()

    async def _restart(self, worker: _Worker, cause: str) -> None:
        """Start a new actor for a worker that died, and queue its episodes again, ahead of others.

        If the worker has died too often, fail all episodes instead, which ends the run.
        """
        worker.is_ready = False
        self._kill(worker)  # an actor that Ray can't reach may still run
        now, dead, interrupted = time.monotonic(), worker.info, worker.jobs
        worker.jobs, worker.assignments, worker.notices, worker.cancelled = {}, [], [], []
        worker.deaths.append(now)
        worker.restarts += 1
        logger.warning("event=episode_worker_died worker=%s episodes=%d cause=%s", worker, len(interrupted), cause)
        if len(worker.deaths) == _MAX_DEATHS and now - worker.deaths[0] < _DEATH_WINDOW_S:
            message = f"{worker} died {_MAX_DEATHS} times within {_DEATH_WINDOW_S:.0f} s, the last time with: {cause}"
            self._fail_all(WorkersLostError(f"{message}. The end of its log:\n{remote.log_tail(dead)}"))
            return
        leftover: dict[int, Sequence[bytes]] | None = None
        starting = self.loop.create_task(self._start_worker(worker))
        try:
            # wait for a worker on the dead worker's node, to read the records there. Without the records, a finished
            # tool would count as a tool that may be running, and its episode would be lost
            while self._worker_on_node_of(dead) is None and not starting.done() and await self._is_node_alive(dead):
                await asyncio.wait({starting}, timeout=_NODE_POLL_S)
            if dead is not None and (reader := self._worker_on_node_of(dead)) is not None:
                leftover = await self._take_leftover_records(reader, dead)
        finally:
            for key, job in interrupted.items():
                job.on_worker_death(None if leftover is None else leftover.get(key, ()))
            self._queue.extendleft(reversed(interrupted.values()))
            self._assign()
        await starting

    async def _is_node_alive(self, dead: WorkerInfo | None) -> bool:
        nodes = await asyncio.to_thread(self._ray.nodes)
        return any(node["Alive"] and dead is not None and node["NodeID"] == dead.node for node in nodes)

    def _worker_on_node_of(self, dead: WorkerInfo | None) -> _Worker | None:
        ready = [(worker, worker.info) for worker in self._workers if worker.is_ready and worker.info is not None]
        return next((worker for worker, info in ready if dead is not None and info.node == dead.node), None)

    async def _take_leftover_records(self, worker: _Worker, dead: WorkerInfo) -> dict[int, Sequence[bytes]] | None:
        """Let `worker` read the journal records of a dead worker on its node; the driver may lack the last records."""
        try:
            async with asyncio.timeout(_READ_RECORDS_TIMEOUT_S):
                leftover: dict[int, Sequence[bytes]] = await worker.actor.take_leftover_records.remote(dead.folder)
                return leftover
        except Exception:  # Ray may raise anything; the driver has most of the records
            logger.debug("the records of a dead episode worker can't be read", exc_info=True)
            return None

    def _fail_all(self, error: RolloutError) -> None:
        self._error = error
        logger.error("event=episode_workers_lost error=%s", error)
        for jobs in self._jobs.values():
            for job in jobs.values():
                job.end(error)
        self._queue.clear()
        for worker in self._workers:
            worker.is_ready = False
            self._kill(worker)

    def _kill(self, worker: _Worker) -> None:
        with suppress(Exception):  # an actor that Ray can't find is dead already
            self._ray.kill(worker.actor, no_restart=True)

    def _assign(self) -> None:
        while self._queue:
            job = self._queue[0]
            worker = None if job.is_over else self._choose_worker(job)
            if worker is None and not job.is_over:
                return
            self._queue.popleft()
            if worker is not None:
                self._send_args(worker, job.args)
                worker.assignments.append(job.begin_attempt(worker))
                self._schedule_send(worker)

    def _choose_worker(self, job: _EpisodeJob) -> _Worker | None:
        """Return the free worker with the lowest load, or the group's last worker if its load is hardly higher."""
        limit = self._setting.max_episodes
        free = [worker for worker in self._workers if worker.is_ready and (limit is None or len(worker.jobs) < limit)]
        if not free:
            return None
        chosen = min(free, key=_Worker.expected_load_s)
        group = getattr(job.call.sample, "group_index", None)
        if group is not None:  # the samples of a group have one prompt, which a worker encodes once
            group_worker = self._groups.get(group)
            load_limit_s = _MAX_GROUP_LOAD_RATIO * chosen.expected_load_s()
            if group_worker in free and group_worker.expected_load_s() <= load_limit_s:
                chosen = group_worker
            self._groups[group] = chosen
            if len(self._groups) > _MAX_GROUPS:
                self._groups.popitem(last=False)
        return chosen

    def _schedule_send(self, worker: _Worker) -> None:
        # only the first message schedules the call, which also sends the later messages
        if len(worker.assignments) + len(worker.notices) + len(worker.cancelled) == 1:
            self.loop.call_later(_SEND_DELAY_S, self._send, worker, worker.actor)

    def _send(self, worker: _Worker, actor: Ray) -> Ray | None:
        """Send a worker's pending messages, and return Ray's reference to the call; None if nothing was sent."""
        if actor is not worker.actor or not worker.is_ready:  # the actor died meanwhile
            return None
        if not (worker.assignments or worker.notices or worker.cancelled):  # `_send_abort` sent them already
            return None
        assignments, notices, cancelled = worker.assignments, worker.notices, worker.cancelled
        worker.assignments, worker.notices, worker.cancelled = [], [], []
        try:
            return actor.assign.remote(assignments, notices, cancelled)
        except Exception:  # whatever Ray raises, a failed send means a dead actor; `collect` reports it
            return None

    def _send_args(self, worker: _Worker, args: ArgsSnapshot | None) -> None:
        if args is not None and args.number not in worker.args_numbers:
            worker.args_numbers[args.number] = None
            remote.drop_oldest_args(worker.args_numbers)
            with suppress(Exception):  # a failed send means a dead actor
                worker.actor.set_args.remote(args.number, args.data)

    async def _poll_aborts(self) -> None:
        """Regularly send the workers new aborts that no listener reports, such as an abort by `should_abort`."""
        while True:
            await asyncio.sleep(_ABORT_POLL_S)
            self._send_aborts()

    async def _send_aborts_and_wait(self) -> None:
        with suppress(Exception):  # a failed send means a dead actor
            await asyncio.gather(*self._send_aborts(), return_exceptions=True)

    def _send_aborts(self) -> list[Ray]:
        """Send new aborts to the workers, and end the aborted jobs that wait for a worker and have no journal record.

        Returns:
            Ray's references to the calls.
        """
        calls: list[Ray] = []
        for jobs in [*self._jobs.values()]:
            aborts = _read_aborts(jobs)
            if any(aborts):
                calls += self._send_abort([job for job in jobs.values() if job.sent_aborts != aborts], aborts)
        return calls

    def _is_aborting(self) -> bool:
        return any(any(_read_aborts(jobs)) for jobs in self._jobs.values())

    def _send_abort(self, jobs: Sequence[_EpisodeJob], aborts: AbortSignals) -> list[Ray]:
        by_worker: defaultdict[_Worker, list[int]] = defaultdict(list)
        for job in jobs:
            job.sent_aborts = aborts
            if job.worker is None:
                if not job.records:
                    job.end(None)
            elif job.key in job.worker.jobs:  # else the worker died, and the job's next assignment carries the signals
                by_worker[job.worker].append(job.key)
        for worker, keys in by_worker.items():
            worker.notices.append(AbortNotice(keys, aborts))
        calls = [self._send(worker, worker.actor) for worker in by_worker]
        return [call for call in calls if call is not None]


def _read_aborts(jobs: Mapping[int, _EpisodeJob]) -> AbortSignals:
    """Return the abort signals of jobs with the same abort key, which share them."""
    try:
        return next(iter(jobs.values())).read_aborts()
    except Exception:  # a user's should_abort may raise anything
        return _NO_ABORT


_POOLS: Final[dict[tuple[int, str], WorkerPool]] = {}
_POOLS_LOCK: Final = threading.Lock()


def _get_pool(setting: EpisodeWorkers) -> WorkerPool:
    key = os.getpid(), json.dumps(setting.model_dump(mode="json"), sort_keys=True)
    with _POOLS_LOCK:
        pool = _POOLS.get(key)
        if pool is not None and pool.failed_at is not None and time.monotonic() - pool.failed_at > _RETRY_START_S:
            pool.stop()
            pool = None
        if pool is None:
            pool = _POOLS[key] = WorkerPool(setting)
        return pool


def pool_metrics() -> dict[str, float]:
    """Return the metrics of all workers of this process; see `WorkerPool.metrics`.

    If workers of different pools have the same number, their metrics are added up.
    """
    total: defaultdict[str, float] = defaultdict(float)
    for pool in list(_POOLS.values()):
        for name, value in pool.metrics().items():
            total[name] += value
    return dict(total)


def close_pools() -> None:
    """End all workers of this process."""
    with _POOLS_LOCK:
        for pool in _POOLS.values():
            pool.stop()
        _POOLS.clear()


@contextmanager
def local_workers(count: int) -> Iterator[None]:
    """Within the block, run Ray on this machine alone, with CPUs for `count` workers; if `count` is 0, do nothing.

    At the end of the block, end all workers of this process.

    Raises:
        ConfigError: Ray is not installed, or can't be started.
    """
    if not count:
        yield
        return
    if importlib.util.find_spec("ray") is None:
        raise errors.ConfigError("--workers needs Ray, which is not installed; run: pip install 'strands-rollout[ray]'")
    import ray

    try:
        ray.init(address="local", num_cpus=count, include_dashboard=False, logging_level=logging.WARNING)
    except Exception as e:  # Ray may fail to start in many ways
        raise errors.ConfigError(f"Ray can't be started here for --workers: {describe_error(e)}") from e
    try:
        yield
    finally:
        close_pools()
        ray.shutdown()


def describe_error(error: object) -> str:
    """Return an error, or its `cause` if it has one, in one line of at most 500 characters.

    The line has the type of an exception, and the first and the last line of the text, which may be a traceback.
    """
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in _ANSI_COLOR.sub("", str(cause)).splitlines() if line.strip(" ^~")]
    text = " ... ".join([*lines[:1], *lines[1:][-1:]])
    return shorten(f"{type(cause).__name__}: {text}" if isinstance(cause, BaseException) else text, 500)
