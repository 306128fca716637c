"""One episode worker: a Ray actor that plays episodes as `generate` does in the driver; its place and its messages.

Samples travel pickled, their large arrays beside them, so that Ray shares those without a copy. The lists of a filled
sample travel as arrays. Records of an episode's steps go to the driver in batches; a turn's tools run when the driver
has them.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib
import importlib.util
import logging
import os
import pickle
import platform
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from strands_rollout import __version__
from strands_rollout.aio import own_pass
from strands_rollout.errors import ConfigError
from strands_rollout.record.store import EpisodeRecords, RecordStore, left_in
from strands_rollout.record.weight_versions import KNOWN_VERSIONS
from strands_rollout.samples import SampleLike, SlimeArgs
from strands_rollout.settings import EpisodeWorkers, settings_from_args
from strands_rollout.slime_plugin.episode import play_sample
from strands_rollout.slime_plugin.inputs import find_load_errors
from strands_rollout.slime_plugin.reward import grade_ahead
from strands_rollout.slime_plugin.slime_adapter import DRIVER_STATE_ATTR, GenerateCall, within_spans
from strands_rollout.user_code import add_config_folder

Ray: TypeAlias = Any
"""The module, or a handle of an actor: Ray's own types are of little use."""
Packed = tuple[bytes, list[Any]]
"""A pickled value, and the buffers of its large arrays."""
_DRIVERS: Final = ("episode_workers", "journal_dir", "should_abort")  # settings that are the driver's
_LOG_LINES: Final = 20
_IN_BAND_BYTES: Final = 64_000
_LATE_S: Final = 5.0  # by which Ray may hear late that resources are free
_LONGEST_WAIT_S: Final = 0.05  # for which one waits for others while there are many
_WAIT_FOR_EACH_S: Final = 0.002
_BATCH_BYTES: Final = 1_000_000
_HEARTBEAT_S: Final = 1.0
MAX_ARGS: Final = 64  # that a worker keeps
_ARRAYS: Final = {"tokens": np.int32, "loss_mask": np.int8, "rollout_log_probs": np.float64}
_INPUTS: Final = ("prompt", "multimodal_inputs")  # large, and not sent back as they came


def pack(value: object, dumps: Callable[..., bytes] = pickle.dumps) -> Packed:
    """A value as it crosses the border."""
    buffers: list[Any] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        with buffer.raw() as raw:
            if raw.nbytes < _IN_BAND_BYTES:
                return True
        buffers.append(np.frombuffer(buffer.raw(), dtype=np.uint8))
        return False

    return dumps(value, protocol=5, buffer_callback=keep), buffers


def unpack(data: bytes, buffers: Sequence[Any]) -> Any:  # noqa: ANN401 - whatever was packed
    """The value; its large arrays are read-only, since Ray shares their memory."""
    return pickle.loads(data, buffers=buffers)  # noqa: S301 - the job's own


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """A `GenerateCall` as it is sent to a worker.

    Attributes:
        args_number: Of slime's args, which were sent before.
        spans: slime's open spans in the driver.
    """

    args_number: int
    sample: SampleLike
    sampling_params: Mapping[str, Any]
    evaluation: bool
    spans: object


class LeftRecords(NamedTuple):
    """The records of an attempt whose process died; see `journal.RecordSink`."""

    records: Sequence[bytes]
    may_have_acted: bool
    is_certain: bool


class AbortSignals(NamedTuple):
    """Whether slime is aborting, and whether the setting's `should_abort` says so; None without that setting."""

    own: bool
    asked: bool | None


class Assignment(NamedTuple):
    """An episode on its way to a worker.

    Attributes:
        key: Of the episode, in one driver.
        data: A `RemoteCall`, pickled.
        buffers: Its large arrays.
        left: The records of an earlier attempt.
        aborts: The signals so far.
    """

    key: int
    data: bytes
    buffers: Sequence[Any]
    left: LeftRecords
    aborts: AbortSignals


class AbortNotice(NamedTuple):
    """Signals for the episodes with these keys."""

    keys: Sequence[int]
    aborts: AbortSignals


class Batch(NamedTuple):
    """Records and results of a worker since its last batch.

    Attributes:
        busy: The share of a CPU that its process has used since.
        newest_version: The newest weight version that engines have named to it.
    """

    records: Sequence[tuple[int, bytes]]
    results: Sequence[Result]
    busy: float
    newest_version: int | None


class Result(NamedTuple):
    """The outcome of an assignment: the filled samples' fields, packed, or the error in their place."""

    key: int
    error: str | None
    data: bytes
    buffers: Sequence[Any]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A started worker's process, place and versions; `faults` are the settings' names that can't be used there."""

    pid: int
    host: str
    node: str
    log: str
    folder: str
    versions: Mapping[str, str]
    faults: Sequence[str] = ()


@dataclass(slots=True)
class DriverState:
    """slime's state in the driver, as far as it is known in a worker; see `slime_adapter.slime_state`.

    Attributes:
        aborted: slime's flag.
        asked: The answer of the setting's `should_abort`; None without that setting.
        clear_until: The time of `time.monotonic` until which neither was set.
    """

    aborted: bool
    asked: bool | None
    clear_until: float


@dataclass(slots=True)
class _PlayedEpisode:
    """An episode that is being played."""

    task: asyncio.Task[None]
    state: DriverState


class _Outbox:
    """Records and results on their way to the driver, in batches: a message costs the same for one as for many."""

    def __init__(self) -> None:
        self._records: list[tuple[int, bytes]] = []
        self._results: deque[Result] = deque()
        self._filled = asyncio.Event()
        self._uncommitted: list[asyncio.Future[None]] = []
        self._sent: list[asyncio.Future[None]] = []
        self._wait_s = 0.0

    def add(self, key: int, record: bytes) -> None:
        """Have a record sent."""
        self._records.append((key, record))
        self._filled.set()

    def add_result(self, result: Result) -> None:
        """Have a result sent."""
        self._results.append(result)
        self._filled.set()

    def send_soon(self) -> None:
        """Have a batch sent, though it be empty."""
        self._filled.set()

    async def commit(self) -> None:
        """Return when the driver has all records so far."""
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._uncommitted.append(kept)
        await kept

    async def batch(self) -> tuple[list[tuple[int, bytes]], list[Result]]:
        """What is next, nothing after a while; when it is asked for again, the driver has the last batch."""
        for kept in self._sent:
            if not kept.done():
                kept.set_result(None)
        self._sent = []
        try:
            async with asyncio.timeout(_HEARTBEAT_S):
                await self._filled.wait()
        except TimeoutError:
            return [], []
        await asyncio.sleep(self._wait_s)
        self._wait_s = min(_LONGEST_WAIT_S, (len(self._records) + len(self._results)) * _WAIT_FOR_EACH_S)
        records, self._records, self._sent, self._uncommitted = self._records, [], self._uncommitted, []
        results, size = [], 0
        while self._results and size < _BATCH_BYTES:  # large arrays end a batch, whose memory they share
            results.append(self._results.popleft())
            size += sum(len(buffer) for buffer in results[-1].buffers)
        if not self._results:
            self._filled.clear()
        return records, results


@dataclass(slots=True)
class _Relay:
    """Keeps an episode's records in a file, for when this process dies, and in the driver, for when the node is lost.

    See `journal.RecordSink`. Until an attempt has a record, which is whole, the driver keeps those of the last one.
    """

    outbox: _Outbox
    key: int
    records: Sequence[bytes]
    may_have_acted: bool
    is_certain: bool
    file: EpisodeRecords

    def begin(self) -> None:
        """Begin an attempt."""
        self.file.begin()

    def write(self, record: bytes) -> None:
        """Write a record, and send it."""
        self.file.write(record)
        self.outbox.add(self.key, record)

    async def write_before_tools(self, record: bytes) -> None:
        """Send a record; write it when the driver has it, so that the file tells whether the tools may have begun."""
        self.outbox.add(self.key, record)
        await self.outbox.commit()
        self.file.write(record)

    def close(self, *, keep: bool) -> None:  # noqa: ARG002 - the driver has the sample next
        """Remove the file."""
        self.file.close(keep=False)


class EpisodeWorker:
    """All methods run on one event loop, any number of them at a time."""

    def __init__(self, number: int, pool: str, log_level: int, numbering: str) -> None:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it speaks of torch
        KNOWN_VERSIONS.share(numbering)
        self._number = number
        self._folder = _session_folder() / f"episodes-{pool}-{number}-{os.getpid()}"
        self._log = RecordStore(self._folder)
        self._log_level = log_level
        self._args: dict[int, Any] = {}
        self._has_args = asyncio.Condition()
        self._running: dict[int, _PlayedEpisode] = {}
        self._outbox = _Outbox()
        self._cpu_s, self._measured_at = time.process_time(), time.monotonic()
        self._clear_until = self._measured_at  # when the driver knew of no abort, at the least

    async def hello(self, number: int, args: bytes) -> WorkerInfo:
        """Get ready for these args; not in the constructor, whose errors Ray buries."""
        logging.basicConfig(
            level=self._log_level, format=f"[episode worker {self._number}] %(levelname)s %(name)s: %(message)s"
        )
        await self.set_args(number, args)
        # the driver decides which samples are too old
        KNOWN_VERSIONS.on_newer = functools.partial(
            asyncio.get_running_loop().call_soon_threadsafe, self._outbox.send_soon
        )
        given = self._args[number]
        add_config_folder(getattr(given, "custom_config_path", None))
        ray = importlib.import_module("ray")
        versions = {"python": platform.python_version(), "ray": ray.__version__, "strands-rollout": __version__}
        faults = [f"{name}: {error}" for name, error in await find_load_errors(settings_from_args(given))]
        node = ray.get_runtime_context().get_node_id()
        host = ray.util.get_node_ip_address()
        return WorkerInfo(os.getpid(), host, node, _log_path(), str(self._folder), versions, faults)

    async def set_args(self, number: int, args: bytes) -> None:
        """Take slime's args; those of the episodes that follow."""
        async with self._has_args:
            self._args[number] = pickle.loads(args)  # noqa: S301 - the job's own
            drop_oldest_args(self._args)
            self._has_args.notify_all()

    async def assign(
        self,
        assignments: Sequence[Assignment],
        notices: Sequence[AbortNotice],
        cancelled: Sequence[int],
    ) -> None:
        """Begin episodes; tell others of aborts; end those whose callers were cancelled, by their keys."""
        for one in assignments:
            state = DriverState(one.aborts.own, one.aborts.asked, self._clear_until)
            task = asyncio.create_task(self._run(one, state))
            self._running[one.key] = _PlayedEpisode(task, state)
            task.add_done_callback(functools.partial(self._forget, one.key))
        for notice in notices:
            for state in (self._running[key].state for key in notice.keys if key in self._running):
                state.aborted = state.aborted or notice.aborts.own
                state.asked = notice.aborts.asked
                state.clear_until = self._clear_until
        for key in cancelled:
            if key in self._running:
                self._running[key].task.cancel()

    async def _run(self, assignment: Assignment, state: DriverState) -> None:
        """Play an episode, and have its result sent; none of one that was cancelled."""
        key = assignment.key
        try:
            call: RemoteCall = unpack(assignment.data, assignment.buffers)
            result = Result(key, None, *await self._play(key, call, state, assignment.left))
        except Exception as e:  # a value of a user's may raise anything when it is unpickled, or pickled again
            result = Result(key, f"{type(e).__name__}: {e}", b"", [])
        self._outbox.add_result(result)

    def _forget(self, key: int, _task: asyncio.Task[None]) -> None:
        self._running.pop(key, None)

    async def _play(self, key: int, call: RemoteCall, state: DriverState, left: LeftRecords) -> Packed:
        async with self._has_args:
            await self._has_args.wait_for(lambda: call.args_number in self._args)
        args = copy.copy(self._args[call.args_number])
        setattr(args, DRIVER_STATE_ATTR, state)
        if state.asked is not None:
            args.strands_rollout = {**args.strands_rollout, "should_abort": lambda: state.asked}
        sample, relay = call.sample, _Relay(self._outbox, key, *left, self._log.open(str(key)))
        inputs = {name: getattr(sample, name, None) for name in _INPUTS}
        with within_spans(call.spans):
            await own_pass()
            own_call = GenerateCall(args, sample, call.sampling_params, call.evaluation)
            given = await play_sample(own_call, relay)
            samples = given if isinstance(given, list) else [given]
            await grade_ahead(args, samples[0])
        return pack((isinstance(given, list), [_fields(one, inputs) for one in samples]))

    async def collect(self, *, is_clear: bool) -> Batch:
        """The next batch; the last one has arrived when this is called.

        Args:
            is_clear: Whether no rollout was being aborted when the driver had the last batch.
        """
        if is_clear:
            self._clear_until = self._measured_at
        records, results = await self._outbox.batch()
        cpu_s, now = time.process_time(), time.monotonic()
        busy = (cpu_s - self._cpu_s) / max(now - self._measured_at, 1e-6)
        self._cpu_s, self._measured_at = cpu_s, now
        return Batch(records, results, busy, KNOWN_VERSIONS.newest)

    async def left(self, folder: str) -> dict[int, Sequence[bytes]]:
        """What episodes of a process that died on this node have left in its folder, which is removed."""
        found = await asyncio.to_thread(left_in, Path(folder))
        return {int(key): records for key, records in found.items()}

    async def close(self) -> None:
        """Remove the records: nothing is played any more."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _log_path() -> str:
    try:
        return os.readlink("/proc/self/fd/2")  # noqa: PTH115 - it may be no file
    except OSError:
        return ""


def _session_folder() -> Path:
    """Ray's folder of this session, in which its logs are too."""
    logs = Path(_log_path()).parent
    return logs.parent if logs.name == "logs" else Path(tempfile.gettempdir())


def _fields(sample: SampleLike, inputs: Mapping[str, object]) -> dict[str, Any]:
    """The fields of a filled sample, its lists as arrays."""
    values = {name: value for name, value in vars(sample).items() if name not in inputs or value is not inputs[name]}
    for name, kind in _ARRAYS.items():
        if isinstance(values.get(name), list):
            values[name] = np.array(values[name], dtype=kind)
    return values


def fill_sample(sample: SampleLike, values: dict[str, Any]) -> None:
    """Set a sample's fields to what `_fields` gave."""
    for name in _ARRAYS:
        if isinstance(values.get(name), np.ndarray):
            values[name] = values[name].tolist()
    vars(sample).update(values)


def drop_oldest_args(sent: dict[int, Any]) -> None:
    """Leave the args that came last; the driver knows by this which a worker has."""
    for old in list(sent)[:-MAX_ARGS]:
        del sent[old]


class SentArgs:
    """slime's args as they were sent to workers."""

    def __init__(self, args: SlimeArgs, number: int) -> None:
        dumps = importlib.import_module("ray").cloudpickle.dumps
        self.number = number
        self._args = args  # held so that no others get their id
        self._values = dict(vars(args))
        given = _workers_settings(args)
        try:
            sent = copy.copy(args)
            sent.strands_rollout = given  # type: ignore[attr-defined]
            self.data: bytes = dumps(sent)
            self._settings = copy.deepcopy(given)  # it may be changed in place
        except Exception as e:  # a user's values may raise anything when they are pickled
            values = {**self._values, "strands_rollout": None}
            values |= {f"strands_rollout.{name}": value for name, value in given.items()}
            raise ConfigError(
                f"slime's args can't be sent to episode workers: {unpicklable_value(values, dumps)}; expected values "
                "that pickle takes, such as a dotted path in place of an object, or episode_workers: 0"
            ) from e

    def belongs_to(self, args: SlimeArgs) -> bool:
        """Whether args are these, unchanged."""
        try:
            return args is self._args and vars(args) == self._values and _workers_settings(args) == self._settings
        except Exception:  # a user's values may refuse to be compared, as arrays do
            return False


def _workers_settings(args: SlimeArgs) -> dict[str, Any]:
    given = getattr(args, "strands_rollout", None) or {}
    return {**{name: value for name, value in given.items() if name not in _DRIVERS}, "episode_workers": 0}


def unpicklable_value(values: Mapping[str, Any], dumps: Callable[[Any], object]) -> str:
    """Name the first of these values that can't be pickled, with the reason."""
    for name, value in values.items():
        try:
            dumps(value)
        except Exception as e:  # a user's value may raise anything when it is pickled
            return f"got {name} of type {type(value).__name__} ({e})"
    return "got what can't be pickled"


def require_ray() -> Ray:
    """Ray, to whose cluster this process is connected.

    Raises:
        ConfigError: It is not.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "episode_workers needs Ray, which is not installed here: pip install 'strands-rollout[ray]'; or set "
            "episode_workers: 0"
        )
    import ray

    if not ray.is_initialized():
        raise ConfigError(
            "episode_workers needs a Ray cluster, and this process is connected to none: slime's jobs are; elsewhere "
            "call ray.init() first, or give `strands-rollout eval` and `train` the option --workers; or set "
            "episode_workers: 0"
        )
    return ray


def choose_nodes(ray: Ray, setting: EpisodeWorkers) -> list[str | None]:
    """For each worker the node that it must be on, or None where Ray may choose; blocks while Ray's count is late.

    Raises:
        ConfigError: There are fewer places than workers.
    """
    give_up_at = time.monotonic() + _LATE_S
    while True:
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        count = setting.count if setting.count is not None else len(nodes) * (setting.per_node or 1)
        free = ray.available_resources()
        wanted = {"CPU": setting.cpus, **setting.resources}
        fit = [int(free.get(name, 0.0) / each + 1e-6) for name, each in wanted.items() if each > 0]
        room = min(fit, default=count)
        room = room if setting.per_node is None else min(room, setting.per_node * len(nodes))
        if room >= count or time.monotonic() > give_up_at:
            break
        time.sleep(_LATE_S / 20)
    if room < count:
        total = ray.cluster_resources().get("CPU", 0.0)
        most = "" if setting.per_node is None else f", at most {setting.per_node} on a node"
        raise ConfigError(
            f"got episode_workers for {count} workers of {wanted}{most}; the Ray cluster has {len(nodes)} nodes with "
            f"{total:g} CPUs, of which {free.get('CPU', 0.0):g} are free (engines, trainer and others hold the rest), "
            f"which is room for {room}. Set a count of {room} or less, less cpus for each, or give Ray more CPUs "
            "(ray start --num-cpus)"
        )
    if setting.per_node is None:
        return [None] * count
    ids = [node["NodeID"] for _ in range(setting.per_node) for node in nodes]
    return list(ids[:count])


def actor_options(setting: EpisodeWorkers, node: str | None) -> dict[str, Any]:
    """Ray's options for a worker's actor."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # where a node is lost, its workers may start on another
    placing = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=True)
    return {
        "num_cpus": setting.cpus,
        "resources": setting.resources or None,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": 100_000,
        "scheduling_strategy": placing,
        **({"runtime_env": {"env_vars": dict(setting.env)}} if setting.env else {}),
    }


def check_worker(info: WorkerInfo, ray: Ray) -> None:
    """Raise ConfigError where a worker's node has other versions, or lacks what the settings name."""
    here = {"ray": ray.__version__, "strands-rollout": __version__}
    other = [f"{name} {info.versions[name]}" for name, own in here.items() if info.versions[name] != own]
    if other:
        wanted = ", ".join(f"{name} {version}" for name, version in here.items())
        raise ConfigError(f"the node {info.host} has {' and '.join(other)}; expected {wanted}, as here")
    if info.faults:
        names = "\n  ".join(info.faults)
        raise ConfigError(
            f"the settings name what can't be used on the node {info.host}; install it there, or have Ray bring it "
            f"(runtime_env: py_modules, or env_vars with PYTHONPATH):\n  {names}"
        )


def log_tail(info: WorkerInfo | None) -> str:
    """The end of a worker's log, or where it is."""
    if info is None:
        return "it has said nothing yet"
    try:
        lines = Path(info.log).read_text(errors="replace").splitlines()
    except OSError:
        return f"it is on the node {info.host}, in {info.log or 'Ray session logs'}"
    return "\n".join(lines[-_LOG_LINES:]) or "it is empty"
