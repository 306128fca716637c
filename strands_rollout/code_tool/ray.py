"""The backend for clusters: code runs on all nodes of a Ray cluster, on each in a local executor behind an actor.

Ray kills the processes that it starts when the thread that started them ends: what connects, starts actors and blocks
runs on one control thread, which lives as long as the executor.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from strands_rollout.code_tool import executors
from strands_rollout.code_tool.executors import CodeExecutor, ExecutionResult
from strands_rollout.code_tool.sandbox.code_runner import shorten
from strands_rollout.errors import ConfigError, SandboxError, foreign_code

ObjectRef: TypeAlias = Any
"""Ray's reference to a result."""
_CONNECT_LIMIT_S: Final = 10.0
_START_LIMIT_S: Final = 120.0  # of the first actor; a runtime environment may have to be built first
_GATHER_S: Final = 10.0  # how long the first call waits for slower nodes, so that not all goes to the first
_REFRESH_S: Final = 5.0
_RETRY_S: Final = 10.0  # until an actor that could not be made is tried again
_PAUSE_S: Final = 0.05
_SHUN_S: Final = 30.0  # a node that fails at once would otherwise always be the least loaded
_SLACK_S: Final = 60.0  # for everything that is neither waiting for a place nor running
_CLOSE_LIMIT_S: Final = 30.0
_IDLE_LOOK_S: Final = 0.02
_MAX_CONCURRENCY: Final = 10_000  # the executor on the node has the real limit, and a queue
_OURS: Final = {"num_cpus", "max_restarts", "max_task_retries", "lifetime", "name", "scheduling_strategy"}
_SHUT_DOWN: Final = "Ray was shut down while a RayExecutor used it; close the executor first"
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Call:
    """What to run, and where its session lives."""

    code: str
    timeout_s: float
    session: str | None = None
    incarnation: str | None = None


class RayWorker:
    """One node's executor. All methods run on one event loop, any number of calls at a time."""

    def __init__(self, setting: Mapping[str, Any]) -> None:
        self._setting = setting
        self._incarnation = uuid.uuid4().hex
        self._starting = asyncio.Lock()
        self._executor: CodeExecutor | None = None

    async def hello(self) -> str:
        """Make and start the executor; returns this process's incarnation, which a restarted actor does not share."""
        await self._started()
        return self._incarnation

    async def run(self, call: Call) -> ExecutionResult | None:
        """Run the code; None, without running it, where the session is one of another incarnation."""
        if call.incarnation not in (None, self._incarnation):
            return None
        executor = await self._started()
        return await executor.run(call.code, timeout_s=call.timeout_s, session=call.session)

    async def close_session(self, session: str) -> None:
        """As `CodeExecutor.close_session`."""
        if self._executor is not None:
            await self._executor.close_session(session)

    async def aclose(self) -> None:
        """As `CodeExecutor.aclose`."""
        if self._executor is not None:
            await self._executor.aclose()

    async def _started(self) -> CodeExecutor:
        # Not in the constructor, whose errors Ray buries; a restarted actor may be given a call before it is greeted.
        async with self._starting:
            if self._executor is None:
                self._executor = await executors.make_executor(self._setting).__aenter__()
            return self._executor


@dataclass(eq=False, slots=True)
class _Node:
    """A node and its actor."""

    node_id: str
    address: str
    places: float  # calls that it runs at once, about
    actor: Any  # Ray's handle of a `RayWorker`
    greeting: Future[str]  # becomes the incarnation of the actor's process, or why there is none
    outstanding: int = 0  # calls that were given to it and have not ended
    sessions: int = 0
    turn: int = 0  # when it was last chosen, in calls
    shunned_until: float = 0.0  # on the monotonic clock: others are preferred until then, since it failed

    def __str__(self) -> str:
        return f"node {self.address} ({self.node_id[:8]})"

    @property
    def is_ready(self) -> bool:
        """Whether it can be given calls."""
        greeting = self.greeting  # another thread may put a new one there, for which this one would wait
        return greeting.done() and greeting.exception() is None

    def rank(self, now: float, *, of_sessions: bool) -> tuple[float, ...]:
        """The lowest gets the next call: the least loaded, but one that failed lately last."""
        of_all_sessions = (self.sessions + 1) / self.places if of_sessions else 0.0
        return max(now, self.shunned_until), of_all_sessions, (self.outstanding + 1) / self.places, self.turn


class RayCluster:
    """Keeps one `RayWorker` on each alive node. Methods that block say so; call them on the control thread."""

    def __init__(
        self,
        address: str | None,
        setting: Mapping[str, Any],
        nodes: Collection[str] | None,
        actor_options: Mapping[str, Any],
    ) -> None:
        self._address = address
        self._setting = dict(setting)
        self._wanted = nodes
        self._actor_options = dict(actor_options)
        self._lock = threading.Lock()
        self._nodes: dict[str, _Node] = {}
        self._faults: dict[str, tuple[str, float]] = {}  # of nodes, and when they are tried again
        self._turns = 0
        self._looked_at = -_REFRESH_S
        self._ray: Any = None
        self._connection: str | None = None
        self._made_here = False

    def take(self, *, for_session: bool = False) -> _Node | None:
        """Choose the node with least to do for its CPUs and count a call there; None where a look is due first."""
        now = time.monotonic()
        with self._lock:
            ready = [node for node in self._nodes.values() if node.is_ready]
            if not ready or now - self._looked_at > _REFRESH_S:
                return None
            node = min(ready, key=lambda node: node.rank(now, of_sessions=for_session))
            self._turns += 1
            node.turn = self._turns
            node.outstanding += 1
            return node

    def count(self, node: _Node, *, calls: int = 0, sessions: int = 0) -> None:
        """Calls or sessions have begun (1) or ended (-1) there."""
        with self._lock:
            node.outstanding += calls
            node.sessions += sessions

    def suspect(self, node: _Node) -> None:
        """A call there failed: prefer others for a while, and this one not before it has answered again."""
        with self._lock:
            node.shunned_until = time.monotonic() + _SHUN_S
            if node.is_ready:
                with foreign_code("whatever Ray raises here, it can't reach the actor any more") as outcome:
                    node.greeting = self.submit(node, "hello").future()
                if outcome.error is not None:
                    self._nodes.pop(node.node_id, None)

    def submit(self, node: _Node, method: str, *arguments: object) -> ObjectRef:
        """Start a method of the node's actor; returns Ray's reference to its result."""
        if not self._ray.is_initialized():  # Ray itself would start a cluster
            raise SandboxError(_SHUT_DOWN)
        return getattr(node.actor, method).remote(*arguments)

    def cancel(self, reference: ObjectRef) -> None:
        """End what `submit` started. Blocks for about 2 ms."""
        with contextlib.suppress(Exception):  # there is nothing left to cancel where Ray refuses
            if self._is_up():
                self._ray.cancel(reference)

    def ensure_ready(self) -> None:
        """Connect, and look for nodes until one is ready or none can be. Blocks, for two minutes at most.

        Raises:
            SandboxError: No node is ready; says why.
        """
        if self._any_ready() and time.monotonic() - self._looked_at <= _REFRESH_S:
            return  # `take` gives a node
        is_first = self._connection is None
        give_up_at = time.monotonic() + _START_LIMIT_S
        with foreign_code("Ray may raise anything while it connects or starts an actor") as outcome:
            self._look()
            if is_first:
                wait([node.greeting for node in self._nodes.values()], timeout=_GATHER_S)
                self._look()
            while self._nodes and not self._any_ready() and time.monotonic() < give_up_at:
                wait([node.greeting for node in self._nodes.values()], timeout=1.0, return_when=FIRST_COMPLETED)
                time.sleep(_PAUSE_S)
                self._look()
        if outcome.error is not None:
            raise SandboxError(f"no node of the Ray cluster can run code: {describe(outcome.error)}")
        if not self._any_ready():
            waiting = [f"{node}: has not answered yet" for node in self._nodes.values()]
            faults = [*waiting, *sorted(fault for fault, _ in self._faults.values())]
            where = "offers CPUs" if self._wanted is None else f"is one of {sorted(self._wanted)}"
            found = "; ".join(faults or [f"no alive node {where}"])
            raise SandboxError(f"no node of the Ray cluster can run code: {found}")

    def close(self) -> None:
        """Close and kill this object's actors, and disconnect if it connected. Blocks."""
        if not self._is_up():
            return
        nodes = list(self._nodes.values())
        closing = []
        for node in nodes:
            with contextlib.suppress(Exception):  # an actor that Ray doesn't know needs no closing
                if node.is_ready:
                    closing.append(node.actor.aclose.remote().future())
        wait(closing, timeout=_CLOSE_LIMIT_S)
        for node in nodes:
            self._kill(node)
        if self._made_here:
            self._ray.shutdown()

    def _any_ready(self) -> bool:
        with self._lock:
            return any(node.is_ready for node in self._nodes.values())

    def _is_up(self) -> bool:
        return self._ray is not None and self._ray.is_initialized() and self._worker_id() == self._connection

    def _worker_id(self) -> str:
        return str(self._ray.get_runtime_context().get_worker_id())

    def _connect(self) -> None:
        """Use the connection that is there, or else make one. Blocks for seconds then."""
        self._ray = importlib.import_module("ray")
        if not self._ray.is_initialized():
            if self._address is None:
                raise SandboxError(_SHUT_DOWN)
            _check_reachable(self._address)
            local = {"include_dashboard": False} if self._address == "local" else {}
            self._ray.init(address=self._address, log_to_driver=False, **local)
            self._made_here = True
        if self._connection != self._worker_id():  # what belongs to the last one is no more
            self._connection = self._worker_id()
            with self._lock:
                self._nodes.clear()

    def _look(self) -> None:
        """Look for nodes that came, left or died. Blocks for about a millisecond."""
        self._connect()
        alive = {entry["NodeID"]: entry for entry in self._ray.nodes() if self._is_wanted(entry)}
        now = time.monotonic()
        for node in list(self._nodes.values()):
            fault = node.greeting.exception() if node.greeting.done() else None
            if isinstance(fault, self._ray.exceptions.ActorUnavailableError):
                node.greeting = self.submit(node, "hello").future()
            elif fault is not None or node.node_id not in alive:
                with self._lock:
                    self._nodes.pop(node.node_id, None)
                reason = describe(fault or "it has left the cluster")
                self._faults[node.node_id] = (f"{node}: {reason}", now + (_RETRY_S if fault else 0.0))
                self._kill(node)
        for node_id, entry in alive.items():
            if node_id not in self._nodes and self._faults.get(node_id, ("", now))[1] <= now:
                self._start(entry)
        self._looked_at = now

    def _is_wanted(self, entry: Mapping[str, Any]) -> bool:
        if not entry["Alive"]:
            return False
        if self._wanted is None:
            return bool(entry["Resources"].get("CPU"))
        return entry["NodeID"] in self._wanted or entry["NodeManagerAddress"] in self._wanted

    def _start(self, entry: Mapping[str, Any]) -> None:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        options = {
            "num_cpus": 0,  # what slime's placement group has reserved must not matter
            "max_restarts": -1,
            "max_task_retries": 0,
            "max_concurrency": _MAX_CONCURRENCY,
            "scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(entry["NodeID"], soft=False),
        }
        actor = self._ray.remote(RayWorker).options(**options | self._actor_options).remote(self._setting)
        places = float(self._setting.get("max_concurrency") or entry["Resources"].get("CPU") or 1)
        node = _Node(entry["NodeID"], entry["NodeManagerAddress"], places, actor, actor.hello.remote().future())
        self._faults.pop(node.node_id, None)
        with self._lock:
            self._nodes[node.node_id] = node

    def _kill(self, node: _Node) -> None:
        with contextlib.suppress(Exception):  # it is gone already where Ray can't find it
            self._ray.kill(node.actor, no_restart=True)


def _check_reachable(address: str) -> None:
    """Raise if no server listens at an address: Ray would end this process after trying for a minute."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_LIMIT_S).close()
    except OSError as e:
        raise SandboxError(
            f"no Ray cluster answers at {address}: {e}; is it running, and is that its GCS address?"
        ) from e


def describe(fault: object) -> str:
    """A fault in one line: what it is, and the last line of the traceback that Ray puts into the text."""
    cause = getattr(fault, "cause", None) or fault
    lines = [line.strip() for line in _COLOUR.sub("", str(cause)).splitlines() if line.strip(" ^~")]
    text = " ... ".join([*lines[:1], *lines[1:][-1:]])
    foreign = isinstance(cause, BaseException) and not isinstance(cause, SandboxError)
    return shorten(f"{type(cause).__name__}: {text}" if foreign else text, 500)


@dataclass(eq=False, slots=True)
class _Session:
    """Where a session lives: a node, and the process there."""

    node: _Node
    incarnation: str
    is_new: bool = True


class RayExecutor(CodeExecutor):
    """Runs code on the CPUs of all nodes of the Ray cluster that this process is, or will be, connected to.

    Each node gets one actor, which takes no Ray resources and holds one local executor. A call goes to the node with
    the fewest unfinished calls for its CPUs; a session stays on one node. Nodes that come are used within seconds, and
    nodes that fail are avoided: a call without a session is retried once, elsewhere if there is an elsewhere; a session
    whose process is gone ends with `session_lost` and `infra_error`. A call also has a deadline of its own.

    It isolates the code as well as `executor` does. This package must be installed on every node. Where it is not, the
    job can bring it, `ray.init(runtime_env={"py_modules": [strands_rollout]})`, or the actors' environment can name its
    folder, `actor_options={"runtime_env": {"env_vars": {"PYTHONPATH": "/shared/folder"}}}`.

    Ray is never started implicitly. If this process is not connected, `address` says where to connect: "auto" or
    "host:port" for a cluster that runs, "local" for one of this machine alone that ends with this object.

    Args:
        address: As above; None for RAY_ADDRESS. Of no effect where Ray is initialized already.
        timeout_s: Default limit in wall-clock seconds; a call may name its own.
        max_output_chars: Characters kept of stdout and of stderr.
        executor: The `CodeExecutor` that each node makes, by name or dotted path.
        options: Its keyword arguments; `timeout_s` and `max_output_chars` are passed on where it takes them. One is
            made here too, to check them and for its `facts`, and never run.
        nodes: Ids or IP addresses of the nodes to use; None or "all" for every node that offers CPUs to Ray.
        actor_options: Ray's options for the actors: runtime_env, resources, num_gpus ...

    Raises:
        ConfigError: Ray is not installed, there is nothing to connect to, or a setting can't be used.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        timeout_s: float = 60.0,
        max_output_chars: int = 20_000,
        executor: str = "strands_rollout.code_tool.LocalExecutor",
        options: Mapping[str, Any] | None = None,
        nodes: Collection[str] | None = None,
        actor_options: Mapping[str, Any] | None = None,
    ) -> None:
        defaults = {"timeout_s": timeout_s, "max_output_chars": max_output_chars}
        executors.check_positive(**defaults)
        if taken := sorted(_OURS & (actor_options or {}).keys()):
            raise ConfigError(f"actor_options names {', '.join(taken)}, which RayExecutor decides; leave them out")
        parameters = inspect.signature(executors.executor_factory(executor)).parameters
        known = {name: value for name, value in defaults.items() if name in parameters}
        setting = {"name": executor, **known, **(options or {})}
        self._pattern = executors.make_executor(setting)
        self.facts = executors.facts_of(self._pattern)
        self._timeout_s = timeout_s
        self._cluster = RayCluster(_checked_address(address), setting, _checked_nodes(nodes), actor_options or {})
        self._control = ThreadPoolExecutor(1, thread_name_prefix="ray-executor")
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._running = 0
        self._closed = False
        self._released = False

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        """Run code on some node, or on the session's; see `CodeExecutor.run`."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        executors.check_call("RayExecutor", code, limit_s, session, keeps_sessions=self.facts.keeps_sessions)
        with self._lock:
            if self._closed:
                raise SandboxError("RayExecutor.run was called after aclose(); make a new executor")
            self._running += 1
        try:
            if session is not None:
                return await self._run_in_session(session, code, limit_s)
            return await executors.retried_once(lambda: self._run_somewhere(Call(code, limit_s)))
        finally:
            with self._lock:
                self._running -= 1

    async def close_session(self, session: str) -> None:
        """End a session's interpreter and forget its node; see `CodeExecutor.close_session`."""
        with self._lock:
            home = self._sessions.pop(session, None)
        if home is None:
            return
        self._cluster.count(home.node, sessions=-1)
        with contextlib.suppress(SandboxError):  # where the process is gone, so is the session
            await self._reply(home.node, _CLOSE_LIMIT_S, "close_session", session)

    async def aclose(self) -> None:
        """Refuse new calls, wait for running ones, end this object's actors; see `CodeExecutor.aclose`.

        Ray is left as it was found: this process is disconnected only if this object connected it.
        """
        with self._lock:
            self._closed = True
        while self._running:  # noqa: ASYNC110 - the calls may be those of other event loops
            await asyncio.sleep(_IDLE_LOOK_S)
        await self._pattern.aclose()
        if not self._released:
            self._released = True
            await asyncio.wrap_future(self._control.submit(self._cluster.close))
            self._control.shutdown(wait=False)

    async def _take(self, *, for_session: bool = False) -> _Node:
        """A node that is ready, waited for if need be, with a call counted there."""
        node = self._cluster.take(for_session=for_session)
        while node is None:
            await asyncio.wrap_future(self._control.submit(self._cluster.ensure_ready))
            node = self._cluster.take(for_session=for_session)
        return node

    async def _reply(self, node: _Node, limit_s: float, method: str, argument: object) -> ExecutionResult | None:
        """Call a method of the node's actor; after a fault, other nodes are preferred for a while."""
        with foreign_code("whatever Ray raises, the code is not to blame") as outcome:
            reference = self._cluster.submit(node, method, argument)
            future: asyncio.Future[ExecutionResult | None] = asyncio.wrap_future(reference.future())
            try:
                async with asyncio.timeout(limit_s):
                    return await future
            except TimeoutError:
                raise SandboxError(f"no result within {limit_s:.0f} s") from None
            finally:
                if future.cancelled() or not future.done():
                    self._control.submit(self._cluster.cancel, reference)
        self._cluster.suspect(node)
        raise SandboxError(f"{node}: {describe(outcome.error)}") from outcome.error

    async def _run_at(self, node: _Node, call: Call) -> ExecutionResult:
        """Run a call at the node that it is counted at; what fails there is an `infra_error`."""
        # what it takes if all calls before it use their whole time limits, twice: the executor may have fewer places
        limit_s = _SLACK_S + 2 * call.timeout_s * (1 + node.outstanding / node.places)
        try:
            result = await self._reply(node, limit_s, "run", call)
        except SandboxError as e:
            return executors.infra_failure(e, session_lost=call.session is not None)
        finally:
            self._cluster.count(node, calls=-1)
        if result is None:
            result = executors.infra_failure(
                f"{node}: the process that kept the session was replaced", session_lost=True
            )
        if result.infra_error is not None:
            self._cluster.suspect(node)
        return result

    async def _run_somewhere(self, call: Call) -> ExecutionResult:
        """One attempt of a stateless call; where it fails, the next one will go elsewhere if there is an elsewhere."""
        try:
            node = await self._take()
        except SandboxError as e:
            return executors.infra_failure(e)
        return await self._run_at(node, call)

    async def _run_in_session(self, name: str, code: str, timeout_s: float) -> ExecutionResult:
        """A call of a session. Only where the session never ran anything can it be retried without loss."""
        for _ in range(2):
            try:
                home = self._sessions.get(name) or await self._settle(name)
            except SandboxError as e:
                return executors.infra_failure(e)
            self._cluster.count(home.node, calls=1)
            try:
                result = await self._run_at(home.node, Call(code, timeout_s, name, home.incarnation))
            except asyncio.CancelledError:
                home.is_new = False
                raise
            if result.infra_error is None or not result.session_lost:
                home.is_new = home.is_new and result.infra_error is not None
                break
            self._forget(name, home)
            if not home.is_new:
                break
        return result

    async def _settle(self, name: str) -> _Session:
        """Give a session its node, unless another call of it has just done so."""
        node = await self._take(for_session=True)
        with self._lock:
            home = self._sessions.setdefault(name, _Session(node, node.greeting.result()))
        self._cluster.count(node, calls=-1, sessions=int(home.node is node))
        return home

    def _forget(self, name: str, home: _Session) -> None:
        """The next call of this session starts afresh; what may be left of this one is ended."""
        with self._lock:
            if self._sessions.get(name) is not home:
                return
            del self._sessions[name]
        self._cluster.count(home.node, sessions=-1)
        with contextlib.suppress(Exception):  # where the actor can't be reached, there is nothing to end
            self._cluster.submit(home.node, "close_session", name)


def _checked_address(address: str | None) -> str | None:
    """Where to connect, if that should be needed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("RayExecutor needs Ray, which is not installed here: pip install ray")
    wanted = address or os.environ.get("RAY_ADDRESS") or None
    ray = sys.modules.get("ray")
    if wanted is None and not (ray is not None and ray.is_initialized()):
        raise ConfigError(
            "RayExecutor found Ray not initialized, and got no address; call ray.init() first, or give an address "
            "(or RAY_ADDRESS): 'auto' for the cluster of this machine, 'host:port', or 'local' to start one here"
        )
    if wanted is not None and wanted.startswith("ray://"):
        raise ConfigError(
            f"got the address {wanted!r} of a Ray Client server; expected 'host:port' of the cluster itself"
        )
    return wanted


def _checked_nodes(nodes: Collection[str] | None) -> frozenset[str] | None:
    if nodes is None or nodes == "all":
        return None
    if isinstance(nodes, str) or not nodes:
        raise ConfigError(f"nodes is {nodes!r}; expected 'all', or a list of node ids or IP addresses")
    return frozenset(nodes)
