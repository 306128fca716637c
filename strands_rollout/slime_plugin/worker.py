"""One episode worker: a Ray actor that plays episodes as `generate` does, and what its driver needs to use it.

Samples are pickled, with their large arrays in separate buffers that Ray shares without a copy. The tokens, mask and
logprobs of a filled sample are sent as arrays. Journal records of an episode's steps are sent to the driver in batches.
If an episode has a journal, the tools of a turn run only once the driver has the turn's journal record.
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
from strands_rollout.aio import admit_to_loop
from strands_rollout.errors import ConfigError
from strands_rollout.record.store import EpisodeRecords, RecordStore, take_leftover_records
from strands_rollout.record.weight_versions import KNOWN_VERSIONS
from strands_rollout.samples import SampleLike, SlimeArgs
from strands_rollout.settings import EpisodeWorkers, settings_from_args
from strands_rollout.slime_plugin.episode import play_sample
from strands_rollout.slime_plugin.inputs import find_load_errors
from strands_rollout.slime_plugin.reward import grade_ahead
from strands_rollout.slime_plugin.slime_adapter import DRIVER_STATE_ATTR, GenerateCall, within_spans
from strands_rollout.user_code import add_config_folder

Ray: TypeAlias = Any
"""The module `ray`, an actor's handle, or the `ObjectRef` of a call; Any, since Ray's own types are of little use."""
Packed = tuple[bytes, list[Any]]
"""A pickled value, and the buffers of its large arrays."""
_DRIVER_SETTINGS: Final = ("episode_workers", "journal_dir", "should_abort")  # settings that are not sent to workers
_LOG_LINES: Final = 20
_MIN_BUFFER_BYTES: Final = 64_000  # smaller arrays are pickled with the value
_RAY_DELAY_S: Final = 5.0  # assumed longest time until Ray reports freed resources
_MAX_BATCH_WAIT_S: Final = 0.05  # longest wait of a batch for more messages, while many arrive
_BATCH_WAIT_PER_MESSAGE_S: Final = 0.002
_BATCH_BYTES: Final = 1_000_000
_HEARTBEAT_S: Final = 1.0  # an empty batch is sent after this time without messages
MAX_ARGS: Final = 64  # versions of slime's args that a worker keeps
_ARRAY_TYPES: Final = {"tokens": np.int32, "loss_mask": np.int8, "rollout_log_probs": np.float64}
_INPUT_FIELDS: Final = ("prompt", "multimodal_inputs")  # large; sent back only if they have changed


def pack(value: object, dumps: Callable[..., bytes] = pickle.dumps) -> Packed:
    """Pickle a value for Ray, with its large arrays in separate buffers."""
    buffers: list[Any] = []

    def is_in_band(buffer: pickle.PickleBuffer) -> bool:
        with buffer.raw() as raw:
            if raw.nbytes < _MIN_BUFFER_BYTES:
                return True
        buffers.append(np.frombuffer(buffer.raw(), dtype=np.uint8))
        return False

    return dumps(value, protocol=5, buffer_callback=is_in_band), buffers


def unpack(data: bytes, buffers: Sequence[Any]) -> Any:  # noqa: ANN401 - whatever was packed
    """Return the packed value; its large arrays are read-only, since Ray shares their memory."""
    return pickle.loads(data, buffers=buffers)  # noqa: S301 - the job's own


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """A `GenerateCall` as it is sent to a worker.

    Attributes:
        args_number: Identifies slime's args, which are sent separately (`ArgsSnapshot.number`).
        spans: The spans of slime's trace that are open in the driver.
    """

    args_number: int
    sample: SampleLike
    sampling_params: Mapping[str, Any]
    evaluation: bool
    spans: object


class LeftoverRecords(NamedTuple):
    """Journal records of an earlier attempt whose process died, if any; fields as in `journal.RecordSink`."""

    records: Sequence[bytes]
    may_have_acted: bool
    is_latest: bool


class AbortSignals(NamedTuple):
    """Signals that the rollout is being aborted.

    Attributes:
        slime: slime's abort flag.
        user: True if slime's flag is set or the setting `should_abort` returned True; None without that setting.
    """

    slime: bool
    user: bool | None


class Assignment(NamedTuple):
    """An episode on its way to a worker.

    Attributes:
        key: Identifies the episode in one driver.
        data: A pickled `RemoteCall`.
        buffers: The buffers of the call's large arrays.
        leftover: The journal records of an earlier attempt, if any.
        aborts: The abort signals that the driver had read before the assignment.
    """

    key: int
    data: bytes
    buffers: Sequence[Any]
    leftover: LeftoverRecords
    aborts: AbortSignals


class AbortNotice(NamedTuple):
    """New abort signals for the episodes with these keys."""

    keys: Sequence[int]
    aborts: AbortSignals


class Batch(NamedTuple):
    """Message from a worker to the driver.

    Attributes:
        records: Pairs of an episode's key and a journal record.
        results: The results of finished episodes.
        busy: The average number of CPU cores that the worker's process has used since the previous batch.
        newest_version: The newest weight version that the worker knows; None if it knows none.
    """

    records: Sequence[tuple[int, bytes]]
    results: Sequence[Result]
    busy: float
    newest_version: int | None


class Result(NamedTuple):
    """The outcome of an episode: the packed fields of its filled samples or, if there are none to send, the error."""

    key: int
    error: str | None
    data: bytes
    buffers: Sequence[Any]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The process of a started worker.

    Attributes:
        pid: The process id.
        host: The IP address of its node.
        node: Ray's id of its node.
        log: The path of its log, on that node; empty if unknown.
        folder: The folder with the journal records of its episodes, on that node.
        versions: The versions of Python, Ray and this package on that node.
        load_errors: An entry for each unusable setting: its code can't be loaded on that node, or its value can't be
            used.
    """

    pid: int
    host: str
    node: str
    log: str
    folder: str
    versions: Mapping[str, str]
    load_errors: Sequence[str] = ()


@dataclass(slots=True)
class DriverState:
    """A worker's copy of slime's state in the driver; see `slime_adapter.slime_state`.

    Attributes:
        aborted: slime's abort flag.
        user_abort: As `AbortSignals.user`.
        last_clear_at: The latest `time.monotonic()` at which neither flag was set, as far as the worker knows.
    """

    aborted: bool
    user_abort: bool | None
    last_clear_at: float


@dataclass(slots=True)
class _RunningEpisode:
    task: asyncio.Task[None]
    state: DriverState


class _Outbox:
    """Journal records and results for the driver, in batches because each message to the driver has a fixed cost."""

    def __init__(self) -> None:
        self._records: list[tuple[int, bytes]] = []
        self._results: deque[Result] = deque()
        self._filled = asyncio.Event()
        self._commits: list[asyncio.Future[None]] = []  # of `commit` calls that wait for the next batch
        self._sent_commits: list[asyncio.Future[None]] = []  # of `commit` calls that wait for the previous batch
        self._wait_s = 0.0

    def add_record(self, key: int, record: bytes) -> None:
        self._records.append((key, record))
        self._filled.set()

    def add_result(self, result: Result) -> None:
        self._results.append(result)
        self._filled.set()

    def send_soon(self) -> None:
        """Send the next batch soon, even if it is empty."""
        self._filled.set()

    async def commit(self) -> None:
        """Return when the driver has all records that were added so far."""
        commit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._commits.append(commit)
        await commit

    async def next_batch(self) -> tuple[list[tuple[int, bytes]], list[Result]]:
        """Wait for records and results; return all records, and results until their buffers reach `_BATCH_BYTES`.

        If none arrive within `_HEARTBEAT_S` seconds, return empty lists. After `send_soon`, return empty lists too if
        none are waiting.

        The driver asks for a batch only once it has the previous batch. Therefore, calling this method ends the calls
        of `commit` that wait for the previous batch.
        """
        for commit in self._sent_commits:
            if not commit.done():
                commit.set_result(None)
        self._sent_commits = []
        try:
            async with asyncio.timeout(_HEARTBEAT_S):
                await self._filled.wait()
        except TimeoutError:
            return [], []
        await asyncio.sleep(self._wait_s)
        messages = len(self._records) + len(self._results)
        self._wait_s = min(_MAX_BATCH_WAIT_S, messages * _BATCH_WAIT_PER_MESSAGE_S)
        records, self._records, self._sent_commits, self._commits = self._records, [], self._commits, []
        results, size = [], 0
        # Bound the batch: it stays in memory as long as one of its arrays is in use
        while self._results and size < _BATCH_BYTES:
            results.append(self._results.popleft())
            size += sum(len(buffer) for buffer in results[-1].buffers)
        if not self._results:
            self._filled.clear()
        return records, results


@dataclass(slots=True)
class _WorkerRecordSink:
    """Implementation of `journal.RecordSink` in a worker.

    Records go to a file in case this process dies, and to the driver in case the node is lost. The driver keeps the
    previous attempt's records until this attempt has sent its first record. That record holds the whole episode so far.
    """

    outbox: _Outbox
    key: int
    records: Sequence[bytes]
    may_have_acted: bool
    is_latest: bool
    file: EpisodeRecords

    def begin(self) -> None:
        self.file.begin()

    def write(self, record: bytes) -> None:
        self.file.write(record)
        self.outbox.add_record(self.key, record)

    async def write_before_tools(self, record: bytes) -> None:
        """Send a record, and write it to the file once the driver has it.

        So if a dead worker's file lacks a turn's record, that turn's tools have not begun.
        """
        self.outbox.add_record(self.key, record)
        await self.outbox.commit()
        self.file.write(record)

    def close(self, *, keep: bool) -> None:  # noqa: ARG002 - the driver keeps records
        self.file.close(keep=False)


class EpisodeWorker:
    """Ray actor that plays episodes in a process of its own; its methods run concurrently on one event loop."""

    def __init__(self, number: int, pool: str, log_level: int, numbering: str) -> None:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no warning that torch is missing
        KNOWN_VERSIONS.use_numbering(numbering)
        self._number = number
        self._folder = _session_folder() / f"episodes-{pool}-{number}-{os.getpid()}"
        self._store = RecordStore(self._folder)
        self._log_level = log_level
        self._args: dict[int, Any] = {}
        self._args_arrived = asyncio.Condition()
        self._running: dict[int, _RunningEpisode] = {}
        self._outbox = _Outbox()
        self._cpu_s, self._measured_at = time.process_time(), time.monotonic()
        # see `DriverState`
        self._last_clear_at = self._measured_at

    async def start(self, number: int, args: bytes) -> WorkerInfo:
        """Prepare the process for slime's args, and return its `WorkerInfo` with the settings that can't be used here.

        The constructor does not do this, since Ray hides the errors of constructors.
        """
        logging.basicConfig(
            level=self._log_level, format=f"[episode worker {self._number}] %(levelname)s %(name)s: %(message)s"
        )
        await self.set_args(number, args)
        # the driver decides which samples are too old, so it must learn of new weight versions soon
        KNOWN_VERSIONS.on_newer = functools.partial(
            asyncio.get_running_loop().call_soon_threadsafe, self._outbox.send_soon
        )
        run_args = self._args[number]
        add_config_folder(getattr(run_args, "custom_config_path", None))
        ray = importlib.import_module("ray")
        versions = {"python": platform.python_version(), "ray": ray.__version__, "strands-rollout": __version__}
        errors = [f"{name}: {error}" for name, error in await find_load_errors(settings_from_args(run_args))]
        node = ray.get_runtime_context().get_node_id()
        host = ray.util.get_node_ip_address()
        return WorkerInfo(os.getpid(), host, node, _log_path(), str(self._folder), versions, errors)

    async def set_args(self, number: int, args: bytes) -> None:
        """Store pickled args of slime, to which calls refer by `number`."""
        async with self._args_arrived:
            self._args[number] = pickle.loads(args)  # noqa: S301 - the job's own
            drop_oldest_args(self._args)
            self._args_arrived.notify_all()

    async def assign(
        self,
        assignments: Sequence[Assignment],
        notices: Sequence[AbortNotice],
        cancelled: Sequence[int],
    ) -> None:
        """Take the driver's messages.

        Args:
            assignments: Episodes to begin.
            notices: New abort signals for running episodes.
            cancelled: The keys of episodes to cancel, since their callers were cancelled.
        """
        for assignment in assignments:
            state = DriverState(assignment.aborts.slime, assignment.aborts.user, self._last_clear_at)
            task = asyncio.create_task(self._run(assignment, state))
            self._running[assignment.key] = _RunningEpisode(task, state)
            task.add_done_callback(functools.partial(self._forget, assignment.key))
        for notice in notices:
            for state in (self._running[key].state for key in notice.keys if key in self._running):
                state.aborted = state.aborted or notice.aborts.slime
                state.user_abort = notice.aborts.user
                state.last_clear_at = self._last_clear_at
        for key in cancelled:
            if key in self._running:
                self._running[key].task.cancel()

    async def _run(self, assignment: Assignment, state: DriverState) -> None:
        """Play an episode and send its result; a cancelled episode sends no result."""
        key = assignment.key
        try:
            call: RemoteCall = unpack(assignment.data, assignment.buffers)
            result = Result(key, None, *await self._play(key, call, state, assignment.leftover))
        except Exception as e:  # a user's value may raise anything when it is pickled or unpickled
            result = Result(key, f"{type(e).__name__}: {e}", b"", [])
        self._outbox.add_result(result)

    def _forget(self, key: int, _task: asyncio.Task[None]) -> None:
        self._running.pop(key, None)

    async def _play(self, key: int, call: RemoteCall, state: DriverState, leftover: LeftoverRecords) -> Packed:
        async with self._args_arrived:
            await self._args_arrived.wait_for(lambda: call.args_number in self._args)
        args = copy.copy(self._args[call.args_number])
        setattr(args, DRIVER_STATE_ATTR, state)
        if state.user_abort is not None:
            args.strands_rollout = {**args.strands_rollout, "should_abort": lambda: state.user_abort}
        sample, sink = call.sample, _WorkerRecordSink(self._outbox, key, *leftover, self._store.open(str(key)))
        inputs = {name: getattr(sample, name, None) for name in _INPUT_FIELDS}
        with within_spans(call.spans):
            await admit_to_loop()
            local_call = GenerateCall(args, sample, call.sampling_params, call.evaluation)
            played = await play_sample(local_call, sink)
            samples = played if isinstance(played, list) else [played]
            await grade_ahead(args, samples[0])
        return pack((isinstance(played, list), [_changed_fields(each, inputs) for each in samples]))

    async def collect(self, *, is_clear: bool) -> Batch:
        """Return the next batch. The driver calls this only after it has received the previous batch.

        Args:
            is_clear: True if no rollout was being aborted when the driver received the previous batch.
        """
        if is_clear:
            self._last_clear_at = self._measured_at  # when the previous batch was built
        records, results = await self._outbox.next_batch()
        cpu_s, now = time.process_time(), time.monotonic()
        busy = (cpu_s - self._cpu_s) / max(now - self._measured_at, 1e-6)
        self._cpu_s, self._measured_at = cpu_s, now
        return Batch(records, results, busy, KNOWN_VERSIONS.newest)

    async def take_leftover_records(self, folder: str) -> dict[int, Sequence[bytes]]:
        """Return the journal records, by episode, that a dead process left in a local folder, and remove the folder."""
        leftover = await asyncio.to_thread(take_leftover_records, Path(folder))
        return {int(key): records for key, records in leftover.items()}

    async def close(self) -> None:
        """Remove the journal records of this worker's episodes."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _log_path() -> str:
    try:
        return os.readlink("/proc/self/fd/2")  # noqa: PTH115 - it may be no file
    except OSError:
        return ""


def _session_folder() -> Path:
    """Return the folder of the Ray session if this process logs to one, else the folder for temporary files."""
    logs = Path(_log_path()).parent
    return logs.parent if logs.name == "logs" else Path(tempfile.gettempdir())


def _changed_fields(sample: SampleLike, inputs: Mapping[str, object]) -> dict[str, Any]:
    """Return a filled sample's fields, without inputs that have not changed; tokens, mask and logprobs as arrays."""
    values = {name: value for name, value in vars(sample).items() if name not in inputs or value is not inputs[name]}
    for name, dtype in _ARRAY_TYPES.items():
        if isinstance(values.get(name), list):
            values[name] = np.array(values[name], dtype=dtype)
    return values


def fill_sample(sample: SampleLike, values: dict[str, Any]) -> None:
    """Set the fields of a sample to values from `_changed_fields`; tokens, mask and logprobs become lists again."""
    for name in _ARRAY_TYPES:
        if isinstance(values.get(name), np.ndarray):
            values[name] = values[name].tolist()
    vars(sample).update(values)


def drop_oldest_args(sent: dict[int, Any]) -> None:
    """Drop all but the last `MAX_ARGS` args.

    Both the worker and the driver do this, so the driver knows which args a worker still has.
    """
    for number in list(sent)[:-MAX_ARGS]:
        del sent[number]


class ArgsSnapshot:
    """slime's args at one moment, pickled for workers.

    Attributes:
        number: Identifies the snapshot in the driver and its workers.
        data: The pickled args, with the settings that apply in a worker.

    Raises:
        ConfigError: A value can't be pickled.
    """

    def __init__(self, args: SlimeArgs, number: int) -> None:
        dumps = importlib.import_module("ray").cloudpickle.dumps
        self.number = number
        self._args = args  # kept alive, so that no other args get the same id
        self._values = dict(vars(args))
        settings = _worker_settings(args)
        try:
            sent = copy.copy(args)
            sent.strands_rollout = settings  # type: ignore[attr-defined]
            self.data: bytes = dumps(sent)
            self._settings = copy.deepcopy(settings)  # the original may be changed in place
        except Exception as e:  # a user's values may raise anything when they are pickled
            values = {**self._values, "strands_rollout": None}
            values |= {f"strands_rollout.{name}": value for name, value in settings.items()}
            raise ConfigError(
                f"slime's args can't be sent to episode workers: {unpicklable_value(values, dumps)}; expected values "
                "that can be pickled, such as a dotted path instead of an object, or episode_workers: 0"
            ) from e

    def belongs_to(self, args: SlimeArgs) -> bool:
        """Return whether this is a snapshot of these args, and they have not changed since."""
        try:
            return args is self._args and vars(args) == self._values and _worker_settings(args) == self._settings
        except Exception:  # a user's values may refuse to be compared, as arrays do
            return False


def _worker_settings(args: SlimeArgs) -> dict[str, Any]:
    settings = getattr(args, "strands_rollout", None) or {}
    return {**{name: value for name, value in settings.items() if name not in _DRIVER_SETTINGS}, "episode_workers": 0}


def unpicklable_value(values: Mapping[str, Any], dumps: Callable[[Any], object]) -> str:
    """Describe the first value that can't be pickled: its name, its type and the reason.

    If all values can be pickled, return a general text.
    """
    for name, value in values.items():
        try:
            dumps(value)
        except Exception as e:  # a user's value may raise anything when it is pickled
            return f"got {name} of type {type(value).__name__} ({e})"
    return "got a value that can't be pickled"


def require_ray() -> Ray:
    """Return the module `ray`.

    Raises:
        ConfigError: Ray is not installed, or this process is not connected to a Ray cluster.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "episode_workers needs Ray, which is not installed here; run: pip install 'strands-rollout[ray]', or set "
            "episode_workers: 0"
        )
    import ray

    if not ray.is_initialized():
        raise ConfigError(
            "episode_workers needs a Ray cluster, and this process is connected to none. slime's jobs are connected; "
            "elsewhere call ray.init() first, run `strands-rollout eval` or `train` with --workers, or set "
            "episode_workers: 0"
        )
    return ray


def choose_nodes(ray: Ray, setting: EpisodeWorkers) -> list[str | None]:
    """Return a list with the node of each worker: Ray's id of the node, or None to let Ray choose.

    Ray reports freed resources late. So if resources are short, this function blocks for some seconds.

    Raises:
        ConfigError: The cluster has too few free resources, or no live node with CPUs.
    """
    give_up_at = time.monotonic() + _RAY_DELAY_S
    while True:
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        count = setting.count if setting.count is not None else max(len(nodes), 1) * (setting.per_node or 1)
        free = ray.available_resources()
        wanted = {"CPU": setting.cpus, **setting.resources}
        fit = [int(free.get(name, 0.0) / each + 1e-6) for name, each in wanted.items() if each > 0]
        capacity = min(fit, default=count)
        capacity = capacity if setting.per_node is None else min(capacity, setting.per_node * len(nodes))
        if capacity >= count or time.monotonic() > give_up_at:
            break
        time.sleep(_RAY_DELAY_S / 20)
    if capacity < count:
        total = ray.cluster_resources()
        amounts = ", ".join(f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name}" for name in wanted)
        node_limit = "" if setting.per_node is None else f", at most {setting.per_node} on a node"
        fewer = f"Set a count of {capacity} or less" if capacity else "Set episode_workers: 0"
        raise ConfigError(
            f"episode_workers asks for {count} workers with {wanted} each{node_limit}. The Ray cluster has "
            f"{len(nodes)} nodes, and {amounts} are free (engines, the trainer or others hold the rest). That is "
            f"enough for {capacity} workers. {fewer}, set fewer `cpus` and `resources` for each worker, or give Ray "
            "more of what is short (ray start --num-cpus, --resources)"
        )
    if setting.per_node is None:
        return [None] * count
    ids = [node["NodeID"] for _ in range(setting.per_node) for node in nodes]
    return list(ids[:count])


def actor_options(setting: EpisodeWorkers, node: str | None) -> dict[str, Any]:
    """Return Ray's options for a worker's actor."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # soft: if a node is lost, its workers may start on another node
    strategy = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=True)
    return {
        "num_cpus": setting.cpus,
        "resources": setting.resources or None,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": 100_000,
        "scheduling_strategy": strategy,
        **({"runtime_env": {"env_vars": dict(setting.env)}} if setting.env else {}),
    }


def check_worker(info: WorkerInfo, ray: Ray) -> None:
    """Check that a worker's node has the driver's versions of Ray and this package, and can use the settings.

    Raises:
        ConfigError: A version differs, or code can't be loaded or a value can't be used there.
    """
    expected = {"ray": ray.__version__, "strands-rollout": __version__}
    found = {name: info.versions[name] for name in expected}
    if different := [f"{name} {version}" for name, version in found.items() if version != expected[name]]:
        wanted = ", ".join(f"{name} {version}" for name, version in expected.items())
        raise ConfigError(f"the node {info.host} has {' and '.join(different)}; expected {wanted}, as in the driver")
    if info.load_errors:
        lines = "\n  ".join(info.load_errors)
        raise ConfigError(
            f"settings can't be used on the node {info.host}; install the code that is missing there, or let Ray ship "
            f"it (runtime_env: py_modules, or env_vars with PYTHONPATH):\n  {lines}"
        )


def log_tail(info: WorkerInfo | None) -> str:
    """Return the end of a worker's log, or a text that says where the log is or why there is none."""
    if info is None:
        return "the worker has not started yet"
    try:
        lines = Path(info.log).read_text(errors="replace").splitlines()
    except OSError:
        return f"the log is on the node {info.host}, in {info.log or 'the logs of the Ray session'}"
    return "\n".join(lines[-_LOG_LINES:]) or "the log is empty"
