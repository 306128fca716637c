"""Episode workers in the driver, which is the process that calls `generate`: it assigns episodes to actors on Ray.

Each episode goes to the worker that has least to do. The driver keeps the records of its steps, so that another worker
continues it where one dies. All that Ray is asked happens in one thread with an event loop of its own; callers wait in
theirs.
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
from strands_rollout.aio import own_pass
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
    Assignment,
    Batch,
    EpisodeWorker,
    LeftRecords,
    Packed,
    Ray,
    RemoteCall,
    Result,
    SentArgs,
    WorkerInfo,
)

logger = logging.getLogger(__name__)
_START_LIMIT_S: Final = 120.0
_RETRY_START_S: Final = 30.0  # after which a start that failed is tried again
_ABORT_POLL_S: Final = 0.02
_MOST_DEATHS: Final = 5
_DEATHS_WITHIN_S: Final = 60.0
_MOST_ATTEMPTS: Final = 3  # of an episode that makes no progress between deaths of its workers
_CAUSE_CHARS: Final = 200
_LEFT_LIMIT_S: Final = 60.0
_NODE_POLL_S: Final = 5.0
_CLOSE_LIMIT_S: Final = 3.0
_SEND_AFTER_S: Final = 0.005
_TELL_LIMIT_S: Final = 0.5
_MOST_GROUPS: Final = 4096
_MOST_ARGS: Final = 8
_GROUP_SLACK: Final = 1.25  # how much busier a worker may be that has a sibling
_SMOOTHING: Final = 0.1
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_NO_ABORT: Final = AbortSignals(own=False, asked=None)


async def play_on_worker(call: GenerateCall, settings: RolloutSettings) -> SampleLike | list[SampleLike]:
    """Play the episode of a call of `generate` in an episode worker; the settings are the run's.

    Raises:
        RolloutError: No worker can play it.
        WorkersLostError: A worker dies again and again, which is to end the run.
    """
    if settings.freeze_gc:
        freeze_long_lived()  # full collections would look through what finished samples hold
    pool, sample = _pool_of(settings.episode_workers), call.sample
    job = _EpisodeJob(call, settings.should_abort)

    def conditions() -> dict[str, str]:
        return episode_conditions(call, with_row_settings(settings, sample.metadata))

    job.file = await open_journal(sample, settings, conditions, evaluation=call.evaluation)
    job.records = [] if job.file is None else [*job.file.records]  # of a driver that died
    try:
        job.packed_call = pool.packed_call(job)
        result = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(pool.play(job), pool.loop))
        await own_pass()  # results come in batches
        return _filled(job, result)
    except WorkersLostError as e:
        failed_groups_of(call.args).error = e  # for slime's fully-async rollout, which loses what is raised here
        raise
    finally:
        if job.file is not None:
            job.file.close(keep=is_unfinished(sample))


def _filled(job: _EpisodeJob, result: Result | None) -> SampleLike | list[SampleLike]:
    """The caller's sample with what the worker gave, and its siblings; aborted where no worker had begun."""
    sample = job.call.sample
    if result is None:
        if not slime_adapter.may_return_aborted(job.call.args, sample):
            raise errors.EngineAbortedError("the rollout was aborted before an episode worker had a place")
        sample.status = statuses_of(sample).ABORTED
        return sample
    is_list, (own, *others) = remote.unpack(result.data, result.buffers)
    remote.fill_sample(sample, own)
    add_facts(sample, EpisodeFacts(queue_s=job.queue_s))
    siblings = []
    for values in others:
        siblings.append(copy.copy(sample))
        vars(siblings[-1]).pop("trace", None)
        remote.fill_sample(siblings[-1], values)
    return [sample, *siblings] if is_list else sample


@dataclass(eq=False, slots=True)
class _EpisodeJob:
    """An episode that is assigned to workers, one after the other where they die.

    Attributes:
        done: Becomes its result; None where it was aborted before it had begun.
        worker: Where it is played; None while it waits.
        since: When it began to wait, or to be played.
        records: Of its last attempt that has any.
        fresh: Of this attempt, from its beginning, as far as they have come.
        may_have_acted, is_certain: See `journal.RecordSink`.
        told: The signals that its worker knows.
    """

    call: GenerateCall
    should_abort: str | Callable[[], bool] | None
    key: int = 0
    sent: SentArgs | None = None
    packed_call: Packed = (b"", [])
    file: EpisodeRecords | None = None
    done: asyncio.Future[Result | None] | None = None
    worker: _Worker | None = None
    since: float = 0.0
    records: list[bytes] = field(default_factory=list)
    fresh: list[bytes] = field(default_factory=list)
    may_have_acted: bool = True
    is_certain: bool = False
    told: AbortSignals = _NO_ABORT
    attempts: int = 0
    queue_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.done is None or self.done.done()

    def aborts(self) -> AbortSignals:
        """The signals as they are now."""
        args, sample = self.call.args, self.call.sample
        own = slime_adapter.is_aborting(args, sample)
        if self.should_abort is None:
            return AbortSignals(own, None)
        return AbortSignals(own, own or slime_adapter.is_aborting(args, sample, self.should_abort))

    def end(self, outcome: Result | RolloutError | None) -> None:
        """Let its caller have what it came to."""
        if self.done is None or self.done.done():
            return
        if isinstance(outcome, RolloutError):
            self.done.set_exception(copy.copy(outcome))  # each raise adds to a traceback
        else:
            self.done.set_result(outcome)

    def begin_attempt(self, worker: _Worker) -> Assignment:
        """Give it to a worker."""
        now = time.monotonic()
        self.queue_s += now - self.since
        self.since, self.worker, worker.jobs[self.key] = now, worker, self
        if self.file is not None:
            self.file.begin()
        left = LeftRecords(self.records, self.may_have_acted, self.is_certain)
        return Assignment(self.key, *self.packed_call, left, self.told)

    def on_worker_death(self, left: Sequence[bytes] | None) -> None:
        """Count an attempt whose worker died; `left` are the records in its file, None where that can't be read."""
        # a turn is sent before its tools run, and written after that; a call's result the other way round
        ahead = 0 if left is None else len(self.fresh) - len(left)
        fresh = self.fresh if left is None or ahead > 0 else [*left]
        self.attempts = 0 if fresh else self.attempts + 1
        if fresh:
            self.records, self.may_have_acted, self.is_certain = fresh, ahead != 1, True
        self.fresh, self.since, self.worker = [], time.monotonic(), None
        if self.attempts >= _MOST_ATTEMPTS:
            self.end(
                errors.LostEpisodeError(f"{self.attempts} episode workers died one after the other as they played it")
            )

    def record(self, record: bytes) -> None:
        """Keep a record of its steps."""
        self.fresh.append(record)
        if self.file is not None:
            self.file.write(record)


@dataclass(eq=False, slots=True)
class _Worker:
    """A place of the pool, and the actor that has it now.

    Attributes:
        assignments, notices, cancelled: Arguments of the next call of `EpisodeWorker.assign`.
    """

    number: int
    node: str | None  # that it must be on
    actor: Ray = None
    info: WorkerInfo | None = None
    is_ready: bool = False
    jobs: dict[int, _EpisodeJob] = field(default_factory=dict)
    assignments: list[Assignment] = field(default_factory=list)
    notices: list[AbortNotice] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    has_args: dict[int, None] = field(default_factory=dict)  # in the order in which they were sent
    deaths: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_DEATHS))
    restarts: int = 0
    episodes: int = 0
    busy: float = 0.0
    episode_s: float = 0.0  # that one takes, smoothed

    def __str__(self) -> str:
        where = f" (process {self.info.pid} on {self.info.host})" if self.info else ""
        return f"episode worker {self.number}{where}"

    def add_episode(self, seconds: float) -> None:
        """Count an episode that it has played."""
        self.episodes += 1
        self.episode_s += (seconds - self.episode_s) * (_SMOOTHING if self.episode_s else 1.0)

    def rank(self) -> float:
        """The lowest gets the next episode: a slow node's is ranked as if it had more of them."""
        return (len(self.jobs) + 1) * (self.episode_s or 1.0)


class WorkerPool:
    """The workers of one setting. Coroutines run in the pool's own thread."""

    def __init__(self, setting: EpisodeWorkers) -> None:
        self._setting = setting
        self._ray = remote.require_ray()
        self._name = uuid.uuid4().hex  # tells its episodes from those of other pools
        self._workers: list[_Worker] = []
        self._queue: deque[_EpisodeJob] = deque()
        self._jobs: defaultdict[Hashable, dict[int, _EpisodeJob]] = defaultdict(dict)  # by what decides on their abort
        self._groups: OrderedDict[Hashable, _Worker] = OrderedDict()
        self._numbers = itertools.count(1)
        self._args: OrderedDict[int, SentArgs] = OrderedDict()
        self._args_lock = threading.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting: asyncio.Task[None] | None = None
        self.failed_at: float | None = None  # when no worker could be started
        self._fault: RolloutError | None = None
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="episode-workers", daemon=True)
        self._thread.start()
        slime_adapter.ABORT_LISTENERS.add(self.tell_of_abort)

    def packed_call(self, job: _EpisodeJob) -> Packed:
        """The job's `worker.RemoteCall`, packed.

        Raises:
            ConfigError: Something of it can't be pickled.
        """
        args, sample = job.call.args, job.call.sample
        slime_adapter.watch_aborts(args, sample)
        job.sent = sent = self._as_sent(args)
        job.key, job.told = next(self._numbers), job.aborts()
        spans = slime_adapter.open_spans(sample)
        params = dict(job.call.sampling_params)
        try:
            return remote.pack(RemoteCall(sent.number, sample, params, job.call.evaluation, spans))
        except Exception as e:  # a sample's values may raise anything when they are pickled
            found = remote.unpicklable_value(vars(sample), pickle.dumps)
            words = f"the sample can't be sent to an episode worker: {found}; expected values that pickle takes"
            raise errors.ConfigError(f"{words}, or episode_workers: 0") from e

    async def play(self, job: _EpisodeJob) -> Result | None:
        """What a worker fills the job's sample with; None where it was aborted before a worker had begun."""
        if self._fault is not None:
            raise copy.copy(self._fault)
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)
        job.done, job.since = self.loop.create_future(), time.monotonic()
        args, sample = job.call.args, job.call.sample
        asked = slime_adapter.abort_key(args, sample, job.should_abort)
        self._jobs[asked][job.key] = job
        self._queue.append(job)
        self._assign()
        try:
            return await job.done
        finally:
            del self._jobs[asked][job.key]
            if not self._jobs[asked]:
                del self._jobs[asked]
            if job.worker is not None and job.key in job.worker.jobs:  # its caller was cancelled
                del job.worker.jobs[job.key]
                job.worker.cancelled.append(job.key)
                self._send_soon(job.worker)
                self._assign()

    async def close(self) -> None:
        """End all workers; what they play is lost."""
        for task in self._tasks:
            task.cancel()
        try:
            closing = [asyncio.ensure_future(one.actor.close.remote()) for one in self._workers if one.is_ready]
            if closing:
                await asyncio.wait(closing, timeout=_CLOSE_LIMIT_S)
        except Exception:  # Ray may raise anything; a worker that can't be closed is killed
            logger.debug("episode workers can't be closed", exc_info=True)
        for worker in self._workers:
            self._kill(worker)

    def metrics(self) -> dict[str, float]:
        """Of each worker: episodes and restarts so far, and the share of a CPU that it used lately."""
        names = ("episodes", "restarts", "busy")
        return {f"workers/{one.number}/{name}": float(getattr(one, name)) for one in self._workers for name in names}

    def tell_of_abort(self) -> None:
        """Tell all workers of an abort; return when they know, or after a moment: slime's loop stands still."""
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._tell_of_aborts(), self.loop).result(_TELL_LIMIT_S)

    def stop(self) -> None:
        """End all workers and the pool's thread."""
        slime_adapter.ABORT_LISTENERS.discard(self.tell_of_abort)
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(self.close(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        if not self._thread.is_alive():
            self.loop.close()

    def _as_sent(self, args: SlimeArgs) -> SentArgs:
        """These args as they are now, with the number under which workers know them."""
        with self._args_lock:
            held = self._args.get(id(args))
            if held is None or not held.belongs_to(args):
                held = self._args[id(args)] = SentArgs(args, next(self._numbers))
                while len(self._args) > _MOST_ARGS:
                    self._args.popitem(last=False)
            self._args.move_to_end(id(args))
            return held

    async def _start(self) -> None:
        """Start all workers.

        Raises:
            ConfigError: There are fewer places than workers, or the settings name what is not there.
            RolloutError: A worker does not start.
        """
        try:
            places = await asyncio.to_thread(remote.choose_nodes, self._ray, self._setting)
            self._workers = [_Worker(number, node) for number, node in enumerate(places)]
            await asyncio.gather(*(self._start_worker(worker) for worker in self._workers))
        except RolloutError as e:
            self._fault, self.failed_at = e, time.monotonic()
            logger.error("event=episode_workers_not_started error=%s", e)  # noqa: TRY400 - it speaks for itself
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
        """Make the worker's actor, and have it get ready.

        Raises:
            RolloutError: It does not start, or not with what the settings name.
        """
        with self._args_lock:
            sent = next(reversed(self._args.values()))
        level = logging.getLogger().getEffectiveLevel()
        # a worker that died has left its records on its node
        node = worker.node or (worker.info.node if worker.info else None)
        worker.has_args, worker.info = {sent.number: None}, None
        try:
            options = remote.actor_options(self._setting, node)
            worker.actor = (
                self._ray.remote(EpisodeWorker)
                .options(**options)
                .remote(worker.number, self._name, level, KNOWN_VERSIONS.numbering)
            )
            async with asyncio.timeout(_START_LIMIT_S):
                info: WorkerInfo = await worker.actor.hello.remote(sent.number, sent.data)
        except TimeoutError:
            raise RolloutError(
                f"episode worker {worker.number} did not start within {_START_LIMIT_S:.0f} s; `ray list actors` says "
                "whether it waits for resources or for its runtime environment, and Ray's logs why"
            ) from None
        except Exception as e:  # Ray may raise anything while it starts an actor
            raise RolloutError(f"episode worker {worker.number} can't start: {describe(e)}") from e
        remote.check_worker(info, self._ray)
        worker.info, worker.is_ready = info, True
        self._assign()

    async def _run_worker(self, worker: _Worker) -> None:
        """Take the batches of a worker while it lives, and start it again when it died."""
        fault: object = None
        while self._fault is None:
            try:
                while worker.is_ready:
                    self._take(worker, await worker.actor.collect.remote(is_clear=not self._is_aborting()))
            except Exception as e:  # whatever Ray raises here, the actor can't be reached any more
                fault = e
            try:
                await self._restart(worker, shorten(describe(fault), _CAUSE_CHARS))
                fault = None
            except Exception as e:  # a worker that can't be started again has died once more
                fault = e

    def _take(self, worker: _Worker, batch: Batch) -> None:
        worker.busy, results = batch.busy, batch.results
        KNOWN_VERSIONS.note(batch.newest_version)  # before any result that was sampled with it
        for key, record in batch.records:
            if key in worker.jobs:
                worker.jobs[key].record(record)
        for result in results:
            job = worker.jobs.pop(result.key, None)
            if job is None:
                continue
            worker.add_episode(time.monotonic() - job.since)
            job.end(
                result if result.error is None else RolloutError(f"{worker} could not play the episode: {result.error}")
            )
        if results:
            self._assign()

    async def _restart(self, worker: _Worker, cause: str) -> None:
        worker.is_ready = False
        self._kill(worker)  # an actor that Ray can't reach may still run
        now, died, lost = time.monotonic(), worker.info, worker.jobs
        worker.jobs, worker.assignments, worker.notices, worker.cancelled = {}, [], [], []
        worker.deaths.append(now)
        worker.restarts += 1
        logger.warning("event=episode_worker_died worker=%s episodes=%d cause=%s", worker, len(lost), cause)
        if len(worker.deaths) == _MOST_DEATHS and now - worker.deaths[0] < _DEATHS_WITHIN_S:
            words = f"{worker} died {_MOST_DEATHS} times within {_DEATHS_WITHIN_S:.0f} s, the last time by: {cause}."
            self._fail(WorkersLostError(f"{words} The end of its log:\n{remote.log_tail(died)}"))
            return
        left: dict[int, Sequence[bytes]] | None = None
        starting = self.loop.create_task(self._start_worker(worker))
        try:
            # without the records that it left, a tool that has finished counts as one that may be running
            while self._near(died) is None and not starting.done() and await self._node_lasts(died):
                await asyncio.wait({starting}, timeout=_NODE_POLL_S)
            if died is not None and (near := self._near(died)) is not None:
                left = await self._left(near, died)
        finally:
            for key, job in lost.items():
                job.on_worker_death(None if left is None else left.get(key, ()))
            self._queue.extendleft(reversed(lost.values()))
            self._assign()
        await starting

    async def _node_lasts(self, died: WorkerInfo | None) -> bool:
        """Whether a worker's node is still there."""
        nodes = await asyncio.to_thread(self._ray.nodes)
        return any(node["Alive"] and died is not None and node["NodeID"] == died.node for node in nodes)

    def _near(self, died: WorkerInfo | None) -> _Worker | None:
        """A worker on the node of one that died."""
        ready = [(one, one.info) for one in self._workers if one.is_ready and one.info is not None]
        return next((one for one, info in ready if died is not None and info.node == died.node), None)

    async def _left(self, worker: _Worker, died: WorkerInfo) -> dict[int, Sequence[bytes]] | None:
        """Records in the files of a dead process on the worker's node; the driver lacks the last of them."""
        try:
            async with asyncio.timeout(_LEFT_LIMIT_S):
                found: dict[int, Sequence[bytes]] = await worker.actor.left.remote(died.folder)
                return found
        except Exception:  # Ray may raise anything; the driver has most of them itself
            logger.debug("the records of a dead episode worker can't be read", exc_info=True)
            return None

    def _fail(self, error: RolloutError) -> None:
        self._fault = error
        logger.error("event=episode_workers_lost error=%s", error)
        for jobs in self._jobs.values():
            for job in jobs.values():
                job.end(error)
        self._queue.clear()
        for worker in self._workers:
            worker.is_ready = False
            self._kill(worker)

    def _kill(self, worker: _Worker) -> None:
        with suppress(Exception):  # it is gone already where Ray can't find it
            self._ray.kill(worker.actor, no_restart=True)

    def _assign(self) -> None:
        """Give waiting jobs the free places, in their order."""
        while self._queue:
            job = self._queue[0]
            worker = None if job.is_over else self._choose(job)
            if worker is None and not job.is_over:
                return
            self._queue.popleft()
            if worker is not None:
                self._send_args(worker, job.sent)
                worker.assignments.append(job.begin_attempt(worker))
                self._send_soon(worker)

    def _choose(self, job: _EpisodeJob) -> _Worker | None:
        most = self._setting.max_episodes
        free = [one for one in self._workers if one.is_ready and (most is None or len(one.jobs) < most)]
        if not free:
            return None
        chosen = min(free, key=_Worker.rank)
        group = getattr(job.call.sample, "group_index", None)
        if group is not None:  # siblings begin with the same prompt, which is encoded once
            siblings = self._groups.get(group)
            if siblings in free and siblings.rank() <= _GROUP_SLACK * chosen.rank():
                chosen = siblings
            self._groups[group] = chosen
            if len(self._groups) > _MOST_GROUPS:
                self._groups.popitem(last=False)
        return chosen

    def _send_soon(self, worker: _Worker) -> None:
        """Send the actor what has gathered, together with what comes in the next moment."""
        if len(worker.assignments) + len(worker.notices) + len(worker.cancelled) == 1:
            self.loop.call_later(_SEND_AFTER_S, self._send, worker, worker.actor)

    def _send(self, worker: _Worker, actor: Ray) -> Ray | None:
        """Send the actor what has gathered; Ray's reference of the call, if there is one."""
        if actor is not worker.actor or not worker.is_ready:  # it has died meanwhile
            return None
        if not (
            worker.assignments or worker.notices or worker.cancelled
        ):  # all was sent with an abort, which can't wait
            return None
        assignments, notices, cancelled = worker.assignments, worker.notices, worker.cancelled
        worker.assignments, worker.notices, worker.cancelled = [], [], []
        try:
            return actor.assign.remote(assignments, notices, cancelled)
        except Exception:  # whatever Ray raises, a failed send means a dead actor; `collect` reports it
            return None

    def _send_args(self, worker: _Worker, sent: SentArgs | None) -> None:
        if sent is not None and sent.number not in worker.has_args:
            worker.has_args[sent.number] = None
            remote.drop_oldest_args(worker.has_args)
            with suppress(Exception):  # as above
                worker.actor.set_args.remote(sent.number, sent.data)

    async def _poll_aborts(self) -> None:
        """Tell workers of aborts of which nothing else tells."""
        while True:
            await asyncio.sleep(_ABORT_POLL_S)
            self._begin_to_tell_of_aborts()

    async def _tell_of_aborts(self) -> None:
        """Return when the workers know."""
        with suppress(Exception):  # as above
            await asyncio.gather(*self._begin_to_tell_of_aborts(), return_exceptions=True)

    def _begin_to_tell_of_aborts(self) -> list[Ray]:
        """Tell workers of aborts, which the calls returned do; what waits and has not begun ends at once."""
        told: list[Ray] = []
        for jobs in [*self._jobs.values()]:
            now = _aborts_of(jobs)
            if any(now):
                told += self._tell_of_abort([job for job in jobs.values() if job.told != now], now)
        return told

    def _is_aborting(self) -> bool:
        return any(any(_aborts_of(jobs)) for jobs in self._jobs.values())

    def _tell_of_abort(self, jobs: Sequence[_EpisodeJob], told: AbortSignals) -> list[Ray]:
        by_worker: defaultdict[_Worker, list[int]] = defaultdict(list)
        for job in jobs:
            job.told = told
            if job.worker is None:
                if not job.records:
                    job.end(None)
            elif job.key in job.worker.jobs:  # else its worker has died, and the next one is told with the assignment
                by_worker[job.worker].append(job.key)
        for worker, keys in by_worker.items():
            worker.notices.append(AbortNotice(keys, told))
        calls = [self._send(worker, worker.actor) for worker in by_worker]
        return [call for call in calls if call is not None]


def _aborts_of(jobs: Mapping[int, _EpisodeJob]) -> AbortSignals:
    """`_EpisodeJob.aborts` of jobs that share what decides on it."""
    try:
        return next(iter(jobs.values())).aborts()
    except Exception:  # a user's should_abort may raise anything
        return _NO_ABORT


_POOLS: Final[dict[tuple[int, str], WorkerPool]] = {}
_POOLS_LOCK: Final = threading.Lock()


def _pool_of(setting: EpisodeWorkers) -> WorkerPool:
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
    """Of all workers of this process's pools; see `WorkerPool.metrics`."""
    return {name: value for pool in list(_POOLS.values()) for name, value in pool.metrics().items()}


def close_pools() -> None:
    """End all workers of this process."""
    with _POOLS_LOCK:
        for pool in _POOLS.values():
            pool.stop()
        _POOLS.clear()


@contextmanager
def local_workers(count: int) -> Iterator[None]:
    """Have a Ray of this machine alone, with room for so many workers, while the block lasts; nothing for none."""
    if not count:
        yield
        return
    if importlib.util.find_spec("ray") is None:
        raise errors.ConfigError("--workers needs Ray, which is not installed here: pip install 'strands-rollout[ray]'")
    import ray

    try:
        ray.init(address="local", num_cpus=count, include_dashboard=False, logging_level=logging.WARNING)
    except Exception as e:  # Ray may fail to start in many ways
        raise errors.ConfigError(f"Ray can't be started here, for --workers: {describe(e)}") from e
    try:
        yield
    finally:
        close_pools()
        ray.shutdown()


def describe(fault: object) -> str:
    """A fault in one line: its type, and the first and last line of the text, into which Ray puts a whole traceback."""
    cause = getattr(fault, "cause", None) or fault
    lines = [line.strip() for line in _COLOUR.sub("", str(cause)).splitlines() if line.strip(" ^~")]
    text = " ... ".join([*lines[:1], *lines[1:][-1:]])
    return shorten(f"{type(cause).__name__}: {text}" if isinstance(cause, BaseException) else text, 500)
