"""Episodes of environments of the library `verifiers` (v1), played unchanged: `agent_program` is `play`.

A row names a task of a taskset. verifiers owns the episode: its harness plays the task in its runtime, with its tools
and its simulated user, and its rewards score the trace. Each model call of a seat that is the policy goes to the
episode's endpoint, which records the exact tokens.
"""

from __future__ import annotations

import functools
import itertools
import math
import shutil
import subprocess
import threading
import tomllib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from strands_rollout import errors
from strands_rollout.agent.environment import Task
from strands_rollout.exits import exits_as_errors
from strands_rollout.gateway.server import KEY_HEADER

if TYPE_CHECKING:
    from strands_rollout.gateway.program import Endpoint

TASK_KEY: Final = "verifiers_task"
"""Key of a row's metadata that names its task: a mapping with `key`, `idx` and optionally `split`."""
_NO_KEY_VARIABLE: Final = "STRANDS_ROLLOUT_API_KEY"  # any name but PRIME_API_KEY; the key goes in by a header
_CONTAINER_ENGINES: Final = ("docker", "podman", "apptainer")
_ENGINE_TIMEOUT_S: Final = 20.0
_RUNTIME_FAULTS: Final = ("SandboxError", "TunnelError", "InterceptionError")
_LATE_STAGES: Final = ("setup_timeout", "finalize_timeout", "scoring_timeout")
_LOCAL_HOSTS: Final = ("127.0.0.1", "localhost", "::1")
_LOADING: Final = threading.Lock()


async def play(task: Task, endpoint: Endpoint) -> dict[str, Any]:
    """Play one episode of the environment in `task.environment_config`; return its reward, rewards and metrics.

    Raises:
        ConfigError: The configuration, the row or a seat can't be played.
        SandboxError: The runtime failed.
        EnvironmentFaultError: A task's code, a tool server, a judge or a harness failed.
        RuntimeError: A harness failed after an answer that a limit cut, which is the policy's fault.
    """
    with exits_as_errors("the verifiers environment", errors.EnvironmentFaultError):
        row = _row_of(task)
        source = _load(_config_path(task), row.get("split"))
        chosen = source.find(row)

        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.utils.loaders import load_environment

        # verifiers' client sends its own key in its API's header, last; the episode's key needs another header
        client = EvalClientConfig(
            base_url=endpoint.base_url, api_key_var=_NO_KEY_VARIABLE, headers={KEY_HEADER: endpoint.api_key}
        )
        environment = load_environment(source.config)
        slot = environment.slots(chosen)[0]
        seats = _Seats(slot, endpoint.base_url)
        async with environment.serving():
            episode = await environment.run_slot(slot, ModelContext(endpoint.model, client), on_trace=seats.check)
    if seats.error is not None:
        raise seats.error
    if not environment.complete(episode):
        raise _error_of(episode)
    stops = [trace.stop_condition for trace in episode.traces]
    if late := next((stop for stop in stops if stop in _LATE_STAGES), None):
        raise errors.EnvironmentFaultError(f"the verifiers environment ended with {late}; raise this stage's timeout")
    return seats.score(episode)


def check_config(path: str | Path) -> None:
    """Check that an environment's configuration can be played on this machine.

    Raises:
        ConfigError: It can't; the message has the reason and the remedy.
    """
    with exits_as_errors(f"the verifiers environment of {path}", errors.ConfigError):
        _load(Path(path), None)


def task_rows(
    path: str | Path, *, split: str | None = None, limit: int | None = None, seed: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each task of a taskset, for slime's `--prompt-data`.

    Args:
        path: The environment's configuration.
        split: Value for the field `split` of the taskset's configuration; None leaves the field as it is.
        limit: Maximum number of rows.
        seed: Seed of a shuffle before the limit is applied; None keeps the taskset's order. The tasks of an endless
            taskset are shuffled after it is cut to `limit`.

    Raises:
        ConfigError: The configuration can't be played, or an endless taskset has no limit.
    """
    with exits_as_errors(f"the taskset of {path}", errors.ConfigError):
        tasks = _load(Path(path), split).taskset
        if limit is not None and not tasks.bounded:
            tasks = tasks.take(limit)
        if not tasks.bounded:
            raise errors.ConfigError(f"{path}: the taskset is endless; name the number of rows with --limit")
        tasks = tasks if seed is None else tasks.shuffle(seed)
        tasks = tasks if limit is None else tasks.take(limit)
        for chosen in tasks:
            row = {"key": chosen.key, "idx": chosen.data.idx} | ({} if split is None else {"split": split})
            prompt = chosen.data.prompt_text or chosen.data.name or chosen.key
            yield {"prompt": prompt, "label": "", "metadata": {TASK_KEY: row}}


class _Source:
    """The tasks of one configuration, which all episodes of this process share; read as far as they are asked for."""

    def __init__(self, path: Path, config: Any, taskset: Any) -> None:  # noqa: ANN401 - of a library that may be missing
        self.path, self.config, self.taskset = path, config, taskset
        self._lock = threading.Lock()  # each episode has a thread of its own
        self._read: list[Any] = []
        self._rest = iter(taskset)

    def find(self, row: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Return the task of a row: the one at its index if it has the row's key, else the one with the key."""
        key, index = row["key"], row["idx"]
        with self._lock:
            self._read.extend(itertools.islice(self._rest, max(0, index + 1 - len(self._read))))
            if index < len(self._read) and self._read[index].key == key:
                return self._read[index]
            if self.taskset.bounded:
                self._read.extend(self._rest)
            found = next((task for task in self._read if task.key == key), None)
        if found is None:
            raise errors.ConfigError(
                f"{self.path}: the taskset {self.config.taskset.id!r} has no task with the key {key!r}, which the row "
                f"names (index {index}). Write the rows again: strands-rollout tasks {self.path} --out ROWS.jsonl"
            )
        return found


class _Seats:
    """The runs of one episode whose model is the policy."""

    def __init__(self, slot: Any, base_url: str) -> None:  # noqa: ANN401
        self.error: errors.ConfigError | None = None
        self._slot, self._base_url = slot, base_url

    def check(self, trace: Any) -> None:  # noqa: ANN401
        """Refuse a run that can't be trained exactly, before its first request."""
        if not self._is_policy(trace):
            return
        name, playing = trace.agent.name or "agent", [one for one in self._slot.traces if self._is_policy(one)]
        start = _start_of(trace)
        if not trace.agent.trainable:
            self.error = errors.ConfigError(
                f"the seat {name!r} is not trained, and has no model of its own; set its `model` and `client` in the "
                "environment's configuration, so that its tokens don't count as the policy's"
            )
        elif sum(_start_of(one) == start for one in playing) > 1:
            self.error = errors.ConfigError(
                f"the seat {name!r} plays one task several times in an episode, and equal requests get equal answers; "
                "use slime's --n-samples-per-prompt for several attempts"
            )
        if self.error is not None:
            raise self.error

    def score(self, episode: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return the episode's reward as `score`, with the rewards and metrics of its seats as further numbers."""
        traces = [trace for trace in episode.traces if self._is_policy(trace)]
        if not traces:
            raise errors.ConfigError("no seat of the environment is the policy: each has a `client` of its own")
        rewards = {trace.agent.name: float(trace.reward) for trace in traces}
        if len(set(rewards.values())) > 1:
            raise errors.ConfigError(
                f"the seats got different rewards {rewards}, and all samples of an episode get one; give each seat but "
                "one a `model` and `client` of its own in the environment's configuration"
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
    """Return what decides a run's first request: its task and its harness."""
    return trace.task.hash, trace.agent.config.harness.model_dump_json()


def _error_of(episode: Any) -> Exception:  # noqa: ANN401
    """Return the error of a failed episode."""
    failed = [trace for trace in episode.traces if not trace.ok]
    error = next((trace.last_error for trace in failed if trace.last_error is not None), episode.last_error)
    if error is None:
        return errors.EnvironmentFaultError("the verifiers environment failed without an error")
    message = f"the verifiers environment failed with {error.type}: {error.message}"
    if error.type == "HarnessError" and any(trace.is_truncated for trace in failed):
        return RuntimeError(message)
    return (errors.SandboxError if error.type in _RUNTIME_FAULTS else errors.EnvironmentFaultError)(message)


def _row_of(task: Task) -> Mapping[str, Any]:
    row = task.metadata.get(TASK_KEY)
    if not isinstance(row, Mapping) or not isinstance(row.get("key"), str) or not isinstance(row.get("idx"), int):
        raise errors.ConfigError(
            f"got a row with metadata[{TASK_KEY!r}]={row!r:.200}; expected a mapping with `key` and `idx`, as `strands-"
            "rollout tasks` writes it. Does the run name the metadata with --metadata-key metadata?"
        )
    return row


def _config_path(task: Task) -> Path:
    if task.environment_config is None:
        raise errors.ConfigError("expected the setting environment_config: the TOML of a verifiers environment")
    return Path(task.environment_config)


def _load(path: Path, split: str | None) -> _Source:
    """Return the tasks and the checked configuration of a file, which is read once per process."""
    with _LOADING:  # a taskset may take long to load; the other episodes wait for it
        return _load_once(path, split)


@functools.lru_cache(maxsize=16)
def _load_once(path: Path, split: str | None) -> _Source:
    if find_spec("verifiers") is None:
        raise errors.ConfigError(
            "the package verifiers is missing; pip install 'strands-rollout[verifiers]' (it needs anthropic>=1, so "
            "not beside strands-agents[anthropic])"
        )
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise errors.ConfigError(f"environment_config {path} can't be read: {e}; expected TOML") from e
    given = given.get("env", given)  # the files of vf-eval have it in a table
    if split is not None:
        given = given | {"taskset": {**given.get("taskset", {}), "split": split}}

    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.compile import validate_pairing
    from verifiers.v1.utils.loaders import load_environment, load_harness, resolve_env_config

    try:
        config = resolve_env_config(given)
        taskset = load_environment(config).taskset
        task_class, harnesses = type(taskset).task_type(), config.agent_harnesses()
        tools = [*taskset.toolsets(config.taskset), *task_class.toolsets(config.taskset.task)]
        for name, seat in agent_config_fields(config).items():
            harness = load_harness(harnesses[name])
            validate_pairing(harness, task_class, seat.runtime, tools=tools)
            _check_runtime(f"{name}.runtime", seat.runtime.type)
        for judge in config.taskset.task.judges:
            _check_judge(judge)
    except Exception as e:  # a taskset's own code may raise anything
        if isinstance(e, errors.ConfigError):
            raise errors.ConfigError(f"environment_config {path}: {e}") from e
        raise errors.ConfigError(f"environment_config {path} can't be used: {type(e).__name__}: {e}") from e
    return _Source(path, config, taskset)


def _check_runtime(name: str, kind: str) -> None:
    """Check that a runtime can start on this machine."""
    remedy = f'; set `{name}.type = "subprocess"` to run the harness as your user on this machine'
    if kind == "subprocess" and shutil.which("uv") is None:
        raise errors.ConfigError(f"{name} is {kind!r}, which needs `uv` on the PATH: pip install uv, and put it there")
    if kind == "prime":
        from verifiers.v1.utils.prime import ensure_prime_auth

        try:
            ensure_prime_auth()
        except SystemExit as e:
            raise errors.ConfigError(f"{name} is {kind!r}, verifiers' default, a hosted one: {e}{remedy}") from e
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
    """Check that a judge's key is set, as far as its server needs one."""
    from verifiers.v1.configs.client import resolve_api_key

    host = urlsplit(judge.base_url).hostname
    if resolve_api_key(judge) == "EMPTY" and host not in _LOCAL_HOSTS:
        raise errors.ConfigError(
            f"the judge {judge.name or judge.id!r} at {judge.base_url} has no key; set the environment variable "
            f"{judge.api_key_var}, or name another one in `api_key_var`"
        )
