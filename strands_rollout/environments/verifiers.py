"""Environments of the library `verifiers` (v1), played unchanged: set `agent_program` to the path of `play`.

The setting `environment_config` names the environment's TOML file. A row names a task of a taskset. verifiers runs the
episode. One of its harnesses plays the task in a runtime, with the environment's tools and simulated user. The
environment's rewards score the trace. A seat is an agent of the environment. If the policy is the model of a seat, the
model calls of this seat go to the episode's endpoint, which records the exact tokens.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import os
import shutil
import subprocess
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.client import resolve_api_key
from verifiers.v1.utils.compile import validate_pairing
from verifiers.v1.utils.loaders import load_environment, load_harness, resolve_env_config
from verifiers.v1.utils.prime import ensure_prime_auth

from strands_rollout import errors
from strands_rollout.agent.environment import Task
from strands_rollout.exits import exits_as_errors, original_exception
from strands_rollout.gateway.server import KEY_HEADER
from strands_rollout.secret_mask import mask_text

if TYPE_CHECKING:
    from strands_rollout.gateway.program import Endpoint

TASK_KEY: Final = "verifiers_task"
"""Key of a row's metadata that names its task: a mapping with `key`, `idx` and optionally `split`."""
_NO_KEY_VARIABLE: Final = "STRANDS_ROLLOUT_API_KEY"  # any name except PRIME_API_KEY; the key is sent in a header
_CONTAINER_ENGINES: Final = ("docker", "podman", "apptainer")
_ENGINE_TIMEOUT_S: Final = 20.0
_RUNTIME_FAULTS: Final = ("SandboxError", "TunnelError", "InterceptionError")
_STAGE_TIMEOUTS: Final = ("setup_timeout", "finalize_timeout", "scoring_timeout")
_LOCAL_HOSTS: Final = ("127.0.0.1", "localhost", "::1")
_LOAD_LOCK: Final = threading.Lock()


async def play(task: Task, endpoint: Endpoint) -> dict[str, Any]:
    """Play one episode of the environment in `task.environment_config`; return its score, rewards and metrics by name.

    Raises:
        ConfigError: The configuration or the row can't be used, or the policy's seats can't be trained.
        SandboxError: The runtime failed.
        EnvironmentFaultError: A task's code, a tool server, a judge or a harness failed, or a stage timed out.
        RuntimeError: A harness failed after a limit had cut an answer. This is the policy's fault.
    """
    row = _row_of(task)
    source = _load(_config_path(task), row.get("split"))
    source.check_machine()
    chosen = source.find(row)
    # verifiers' client overwrites its API's usual key header; the episode's key is sent in another header
    client = EvalClientConfig(
        base_url=endpoint.base_url, api_key_var=_NO_KEY_VARIABLE, headers={KEY_HEADER: endpoint.api_key}
    )
    with exits_as_errors("the verifiers environment", errors.EnvironmentFaultError):
        environment = load_environment(source.config)
        slot = environment.slots(chosen)[0]
        seats = _Seats(slot, endpoint.base_url)
        playing = _play_slot(environment, slot, ModelContext(endpoint.model, client), seats)
        # a cancellation of this await also cancels the slot, which cleans up on its own loop
        episode = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(playing, _shared_loop()))
    if seats.error is not None:
        raise seats.error
    if not environment.complete(episode):
        raise _error_of(episode)
    stops = [trace.stop_condition for trace in episode.traces]
    if timeout := next((stop for stop in stops if stop in _STAGE_TIMEOUTS), None):
        raise errors.EnvironmentFaultError(
            f"the verifiers environment stopped at the timeout {timeout}; raise the timeout of this stage in the "
            "environment's configuration"
        )
    return seats.score(episode)


async def _play_slot(environment: Any, slot: Any, context: Any, seats: _Seats) -> Any:  # noqa: ANN401
    with exits_as_errors("the verifiers environment", errors.EnvironmentFaultError):
        async with environment.serving():
            return await environment.run_slot(slot, context, on_trace=seats.check)


def _shared_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of all episodes of this process: verifiers' runtimes share locks, which belong to one loop."""
    with _LOAD_LOCK:
        return _start_loop(os.getpid())


@functools.cache
def _start_loop(_pid: int) -> asyncio.AbstractEventLoop:
    """Start a loop in a new thread; cached by process id, since a forked process does not inherit the thread."""
    loop = asyncio.new_event_loop()

    def serve() -> None:
        asyncio.set_event_loop(loop)
        while True:
            with suppress(SystemExit, KeyboardInterrupt):  # one episode raised it; other episodes need the loop
                loop.run_forever()

    threading.Thread(target=serve, name="verifiers", daemon=True).start()
    return loop


def check_config(path: str | Path) -> None:
    """Check that an environment can be played on this machine.

    Raises:
        ConfigError: The environment can't be played; the message has the reason and the remedy.
    """
    _load(Path(path), None).check_machine()


def task_rows(
    path: str | Path, *, split: str | None = None, limit: int | None = None, seed: int | None = None
) -> list[dict[str, Any]]:
    """Return a row for each task of a taskset, for slime's `--prompt-data`.

    Args:
        path: The environment's configuration.
        split: Value for the field `split` of the taskset's configuration; None leaves the field as it is.
        limit: Maximum number of rows; None for a row of each task. An endless taskset needs a limit.
        seed: Seed of a shuffle before the limit is applied; None keeps the taskset's order. An endless taskset is cut
            to `limit` before it is shuffled.

    Raises:
        ConfigError: The configuration can't be used, the taskset has no tasks, or it is endless and has no limit.
    """
    source = _load(Path(path), split)
    tasks = source.taskset
    if not tasks.bounded:
        if limit is None:
            raise errors.ConfigError(f"{path}: the taskset {source.name!r} is endless; set --limit")
        tasks = tasks.take(limit)
    tasks = tasks if seed is None else tasks.shuffle(seed)
    tasks = tasks if limit is None else tasks.take(limit)
    rows = []
    with _as_config_errors(f"{path}: the taskset {source.name!r}"):
        for task in tasks:
            name = {"key": task.key, "idx": task.data.idx} | ({} if split is None else {"split": split})
            prompt = task.data.prompt_text or task.data.name or task.key
            rows.append({"prompt": prompt, "label": "", "metadata": {TASK_KEY: name}})
    if not rows:
        raise errors.ConfigError(f"{path}: the taskset {source.name!r} has no tasks")
    return rows


@contextmanager
def _as_config_errors(what: str) -> Iterator[None]:
    try:
        with exits_as_errors(what):
            yield
    except errors.ConfigError as e:
        raise errors.ConfigError(f"{what}: {e}") from e
    except Exception as e:  # a taskset's code may raise anything
        cause = original_exception(e)
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
        raise errors.ConfigError(f"{what} can't be used: {type(cause).__name__}: {cause}") from e


class _Source:
    """The tasks of one configuration, shared by all episodes of a process; tasks are read when a row needs them."""

    def __init__(self, path: Path, config: Any, taskset: Any) -> None:  # noqa: ANN401 - of a library that may be missing
        self.path, self.config, self.taskset = path, config, taskset
        self._lock = threading.Lock()  # each episode has a thread of its own
        self._read: list[Any] = []
        self._rest = iter(taskset)
        self._is_checked = False

    @property
    def name(self) -> str:
        return str(self.config.taskset.id)

    def check_machine(self) -> None:
        with self._lock, _as_config_errors(f"environment_config {self.path}"):
            if self._is_checked:
                return
            for name, seat in agent_config_fields(self.config).items():
                _check_runtime(f"{name}.runtime", seat.runtime.type)
            for judge in self.config.taskset.task.judges:
                _check_judge(judge)
            self._is_checked = True

    def find(self, row: Mapping[str, Any]) -> Any:  # noqa: ANN401
        key, index = row["key"], row["idx"]
        with self._lock, _as_config_errors(f"{self.path}: the taskset {self.name!r}"):
            self._read.extend(itertools.islice(self._rest, max(0, index + 1 - len(self._read))))
            if index < len(self._read) and self._read[index].key == key:
                return self._read[index]
            if self.taskset.bounded:
                self._read.extend(self._rest)
            found = next((task for task in self._read if task.key == key), None)
            if found is None:
                raise errors.ConfigError(
                    f"got a row for the task {key!r} (index {index}), which the taskset does not have; write the rows "
                    f"again: strands-rollout tasks {self.path} --out ROWS.jsonl"
                )
            return found


class _Seats:
    """The seats with the policy as model in one episode, with methods that check and score their runs."""

    def __init__(self, slot: Any, base_url: str) -> None:  # noqa: ANN401
        self.error: errors.ConfigError | None = None
        self._slot, self._base_url = slot, base_url

    def check(self, trace: Any) -> None:  # noqa: ANN401
        """Check a run before its first request: if its tokens can't be trained, set `error` and raise it."""
        if not self._is_policy(trace):
            return
        name, playing = trace.agent.name or "agent", [other for other in self._slot.traces if self._is_policy(other)]
        start = _start_of(trace)
        if not trace.agent.trainable:
            self.error = errors.ConfigError(
                f"the seat {name!r} is not trained, and has no model of its own; set its `model` and `client` in the "
                "environment's configuration, so that its tokens don't count as the policy's"
            )
        elif sum(_start_of(other) == start for other in playing) > 1:
            self.error = errors.ConfigError(
                f"the seat {name!r} begins with the same request as another run of the episode, and equal requests get "
                "equal answers; use slime's --n-samples-per-prompt for several attempts at one task"
            )
        if self.error is not None:
            raise self.error

    def score(self, episode: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return the episode's reward as `score`, and the finite rewards and metrics of the policy's seats by name."""
        traces = [trace for trace in episode.traces if self._is_policy(trace)]
        if not traces:
            raise errors.ConfigError(
                "no seat of the environment is the policy: each has a `client` of its own; remove the `client` of the "
                "seat to train"
            )
        rewards = {trace.agent.name: float(trace.reward) for trace in traces}
        if len(set(rewards.values())) > 1:
            raise errors.ConfigError(
                f"the seats got different rewards {rewards}, but all samples of an episode get the same reward; give "
                "each seat but one a `model` and `client` of its own in the environment's configuration"
            )
        score: dict[str, Any] = {"score": traces[0].reward}
        for trace in traces:
            prefix = f"{trace.agent.name}/" if len(traces) > 1 else ""
            scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
            numbers = {name: value for name, value in trace.metrics.items() if value is not None} | scores
            score |= {f"{prefix}{name}": value for name, value in numbers.items() if math.isfinite(value)} | score
        return score

    def _is_policy(self, trace: Any) -> bool:  # noqa: ANN401
        client = trace.agent.config.client
        return client is not None and client.base_url == self._base_url


def _start_of(trace: Any) -> tuple[str, str]:  # noqa: ANN401
    """Return the task and the harness of a run, which determine its first request."""
    return trace.task.hash, trace.agent.config.harness.model_dump_json()


def _error_of(episode: Any) -> Exception:  # noqa: ANN401
    failed = [trace for trace in episode.traces if not trace.ok]
    error = next((trace.last_error for trace in failed if trace.last_error is not None), episode.last_error)
    if error is None:
        return errors.EnvironmentFaultError("the verifiers environment failed and reported no error")
    message = f"the verifiers environment failed with {error.type}: {error.message}"
    if error.type == "HarnessError" and any(trace.is_truncated for trace in failed):
        return RuntimeError(message)
    return (errors.SandboxError if error.type in _RUNTIME_FAULTS else errors.EnvironmentFaultError)(message)


def _row_of(task: Task) -> Mapping[str, Any]:
    row = task.metadata.get(TASK_KEY)
    if not isinstance(row, Mapping) or not isinstance(row.get("key"), str) or not isinstance(row.get("idx"), int):
        raise errors.ConfigError(
            f"got a row with metadata[{TASK_KEY!r}]={row!r:.200}; expected a mapping with `key` and `idx`, as `strands-"
            "rollout tasks` writes it. With slime, set --metadata-key metadata"
        )
    return row


def _config_path(task: Task) -> Path:
    if task.environment_config is None:
        raise errors.ConfigError(
            "the setting environment_config is missing; expected the path of a verifiers environment's TOML file"
        )
    return Path(task.environment_config)


def _load(path: Path, split: str | None) -> _Source:
    with _LOAD_LOCK:  # a taskset may take long to load; the other episodes wait for it
        return _load_once(path, split)


@functools.lru_cache(maxsize=16)
def _load_once(path: Path, split: str | None) -> _Source:
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise errors.ConfigError(f"can't read environment_config {path}: {e.strerror}") from e
    except ValueError as e:
        raise errors.ConfigError(f"environment_config {path} is not valid TOML: {e}") from e
    given = given.get("env", given)  # files of vf-eval have the environment in the table [env]
    if split is not None:
        given = given | {"taskset": {**given.get("taskset", {}), "split": split}}
    with _as_config_errors(f"environment_config {path}"):
        config = resolve_env_config(given)
        taskset = load_environment(config).taskset
        task_class, harnesses = type(taskset).task_type(), config.agent_harnesses()
        tools = [*taskset.toolsets(config.taskset), *task_class.toolsets(config.taskset.task)]
        for name, seat in agent_config_fields(config).items():
            validate_pairing(load_harness(harnesses[name]), task_class, seat.runtime, tools=tools)
        return _Source(path, config, taskset)


def _check_runtime(name: str, kind: str) -> None:
    remedy = f'; set `{name}.type = "subprocess"` to run the harness as your user on this machine'
    if kind == "subprocess" and shutil.which("uv") is None:
        raise errors.ConfigError(f"{name} is {kind!r}, which needs uv; run: pip install uv, and add its folder to PATH")
    if kind == "prime":
        try:
            ensure_prime_auth()
        except SystemExit as e:
            raise errors.ConfigError(
                f"{name} is {kind!r}, verifiers' default, which is hosted and can't be used: {e}{remedy}"
            ) from e
    if kind not in _CONTAINER_ENGINES:
        return
    command = ["apptainer", "--version"] if kind == "apptainer" else [kind, "info"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_ENGINE_TIMEOUT_S)  # noqa: S603 - a fixed command
    except FileNotFoundError as e:
        raise errors.ConfigError(f"{name} is {kind!r}, and there is no command {kind!r} on this machine{remedy}") from e
    except (OSError, subprocess.SubprocessError) as e:
        output = (getattr(e, "stderr", None) or b"").decode(errors="replace").strip()
        raise errors.ConfigError(f"{name} is {kind!r}, and `{' '.join(command)}` fails: {output or e}{remedy}") from e


def _check_judge(judge: Any) -> None:  # noqa: ANN401
    host = urlsplit(judge.base_url).hostname
    if resolve_api_key(judge) == "EMPTY" and host not in _LOCAL_HOSTS:
        raise errors.ConfigError(
            f"the judge {judge.name or judge.id!r} at {mask_text(judge.base_url)} has no key; set the environment "
            f"variable {judge.api_key_var}, or name another one in `api_key_var`"
        )
