"""The nodes of a Ray cluster, with an actor on each: follow who comes and goes, choose the next one.

Methods that block say so; call them on one long-lived thread: Ray kills the processes that it starts when the thread
that started them ends. All others may be called from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from strands_rollout.code_tool.executors import CodeExecutor, ExecutionResult, executor_factory, make_executor
from strands_rollout.code_tool.local.sandbox.output import shorten
from strands_rollout.errors import SandboxError, foreign_code


class ObjectRef(Protocol):
    """Ray's reference to a result."""

    def future(self) -> Future[Any]:
        """The result, to be waited for on any thread."""
        ...


@dataclass(frozen=True, slots=True)
class ExecutorRecipe:
    """How to make the same executor on every node."""

    path: str
    options: dict[str, Any]

    def make(self) -> CodeExecutor:
        """Make one."""
        return make_executor({"name": self.path} | self.options)

    def with_defaults(self, defaults: Mapping[str, object]) -> ExecutorRecipe:
        """Add those defaults that the executor has a parameter for; the options win."""
        parameters = inspect.signature(executor_factory(self.path)).parameters
        known = {name: value for name, value in defaults.items() if name in parameters}
        return ExecutorRecipe(self.path, known | self.options)


@dataclass(frozen=True, slots=True)
class Call:
    """What to run, and where its session lives."""

    code: str
    timeout_s: float
    session: str | None = None
    incarnation: str | None = None


class RayWorker:
    """One node's executor. All methods run on one event loop, any number of calls at a time."""

    def __init__(self, recipe: ExecutorRecipe) -> None:
        self._recipe = recipe
        self._incarnation = uuid.uuid4().hex
        self._starting = asyncio.Lock()
        self._executor: CodeExecutor | None = None

    async def hello(self) -> str:
        """Make and start the executor; returns this process's incarnation, which a restarted actor does not share."""
        await self._started()
        return self._incarnation

    async def ping(self) -> None:
        """Answer."""

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
                self._executor = await self._recipe.make().__aenter__()
            return self._executor


_CONNECT_LIMIT_S: Final = 10.0
_SHUT_DOWN: Final = "Ray was shut down while a RayExecutor used it; close the executor first"


class RayConnection:
    """The connection that is there, or else one of this object's own, to `address`; without one it must be there.

    `ray` is the module; None before `open`.
    """

    def __init__(self, address: str | None) -> None:
        self.ray: Any = None
        self._address = address
        self._identity: str | None = None
        self._made_here = False

    @property
    def is_up(self) -> bool:
        """Whether this process is connected, as it was when `open` was last called."""
        return self.ray is not None and self.ray.is_initialized() and self._worker_id() == self._identity

    def open(self) -> bool:
        """Connect if need be. Blocks for seconds then. Must be called on a thread that outlives the connection.

        Returns:
            Whether it is another connection than before: what belongs to the last one is no more.
        """
        self.ray = importlib.import_module("ray")
        if not self.ray.is_initialized():
            if self._address is None:
                raise SandboxError(_SHUT_DOWN)
            _check_reachable(self._address)
            local = {"include_dashboard": False} if self._address == "local" else {}
            self.ray.init(address=self._address, log_to_driver=False, **local)
            self._made_here = True
        last, self._identity = self._identity, self._worker_id()
        return last != self._identity

    def require(self) -> None:
        """Raise if there is no connection, where Ray itself would start a cluster."""
        if not self.ray.is_initialized():
            raise SandboxError(_SHUT_DOWN)

    def close(self) -> None:
        """Disconnect, if it was this object that connected. Blocks for about a second then."""
        if self._made_here and self.is_up:
            self.ray.shutdown()

    def _worker_id(self) -> str:
        return str(self.ray.get_runtime_context().get_worker_id())


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


CONTROL_GROUP: Final = "control"  # pings must not wait behind calls
START_LIMIT_S: Final = 120.0  # of an actor; a runtime environment may have to be built first
_PING_LIMIT_S: Final = 30.0  # an actor that has not answered by then is frozen or cut off
_PING_LOOKS: Final = 3  # after a stall of this process, the answers may be here but not yet be noted
_SLACK_S: Final = 60.0  # for everything that is neither waiting for a place nor running


@dataclass(eq=False, slots=True)
class RayNode:
    """A node and its actor."""

    node_id: str
    address: str
    places: float  # calls that it runs at once, about
    actor: Any  # Ray's handle of a `RayWorker`
    greeting: Future[str] = field(init=False)  # becomes the incarnation of the actor's process, or why there is none
    incarnation: str | None = None  # the last known one
    outstanding: int = 0  # calls that were given to it and have not ended
    sessions: int = 0
    turn: int = 0  # when it was last chosen, in calls
    shunned_until: float = 0.0  # on the monotonic clock: others are preferred until then, since it failed
    lost: bool = False  # given up: calls stop waiting for its answers
    _pong: Future[None] | None = None
    _pinged_at: float = 0.0
    _looks: int = 0

    def __post_init__(self) -> None:
        self.greet()

    def __str__(self) -> str:
        return f"node {self.address} ({self.node_id[:8]})"

    @property
    def is_ready(self) -> bool:
        """Whether it can be given calls."""
        greeting = self.greeting  # another thread may put a new one there, for which this one would wait
        return not self.lost and greeting.done() and greeting.exception() is None

    @property
    def fault(self) -> BaseException | None:
        """Why it can't be given calls; None also where it has not answered yet."""
        greeting = self.greeting
        return greeting.exception() if greeting.done() else None

    def greet(self) -> None:
        """Ask whether it is there; it is not ready until it has answered."""
        self.greeting = self.actor.hello.remote().future()

    def is_silent(self, now: float) -> bool:
        """Whether a ping has gone unanswered for too long; sends the next one where the last was answered."""
        if self._pong is not None and not self._pong.done():
            self._looks += 1
            limit_s = START_LIMIT_S if self.incarnation is None else _PING_LIMIT_S
            return now - self._pinged_at > limit_s and self._looks >= _PING_LOOKS
        self._pong = self.actor.ping.options(concurrency_group=CONTROL_GROUP).remote().future()
        self._pinged_at = now
        self._looks = 0
        return False

    def deadline_s(self, timeout_s: float) -> float:
        """Seconds until a new call counts as lost: what it takes if all calls before it use their whole time limits.

        Twice that, since its executor may run fewer calls at once than the node has places.
        """
        return _SLACK_S + 2 * timeout_s * (1 + self.outstanding / self.places)

    def load(self, *, of_sessions: bool = False) -> float:
        """What it would have to do with one more, relative to what it can do."""
        return ((self.sessions if of_sessions else self.outstanding) + 1) / self.places


_REFRESH_S: Final = 5.0
_GATHER_S: Final = 10.0  # how long the first call waits for slower nodes, so that not all goes to the first
_PAUSE_S: Final = 0.05
_SHUN_S: Final = 30.0  # a node that fails at once would otherwise always be the least loaded
_FAILED_WAIT_S: Final = 5.0  # callers that queued behind a wait that failed share its outcome
_RETRY_S: Final = 10.0  # until an actor that could not be made is tried again
_MAX_CONCURRENCY: Final = 10_000  # the executor on the node has the real limit, and a queue
_NO_NODE: Final = ""  # the place of faults that are no node's
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


class RayCluster:
    """Keeps one `RayWorker` per alive node."""

    def __init__(
        self,
        *,
        connection: RayConnection,
        recipe: ExecutorRecipe,
        nodes: Collection[str] | None,
        actor_options: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._recipe = recipe
        self._wanted = nodes
        self._actor_options = dict(actor_options)
        self._clock = clock
        self._lock = threading.Lock()
        self._nodes: dict[str, RayNode] = {}
        self._faults: dict[str, str] = {}
        self._retry_at: dict[str, float] = {}
        self._turns = 0
        self._refreshed_at: float | None = None
        self._wait_failed_until = 0.0
        self._actor_class: Any = None

    @property
    def is_stale(self) -> bool:
        """Whether `refresh` is due."""
        return self._refreshed_at is None or self._clock() - self._refreshed_at > _REFRESH_S

    def take(self, *, for_session: bool = False) -> RayNode | None:
        """Choose the node with least to do for its CPUs and count a call there; None where no node is ready.

        One that failed lately is chosen only if there is no other, and the one that failed last is chosen last.
        """
        now = self._clock()
        with self._lock:
            ready = [node for node in self._nodes.values() if node.is_ready]
            if not ready:
                return None
            node = min(
                ready,
                key=lambda node: (
                    max(now, node.shunned_until),
                    node.load(of_sessions=for_session),
                    node.load(),
                    node.turn,
                ),
            )
            self._turns += 1
            node.turn = self._turns
            node.outstanding += 1
            node.incarnation = node.greeting.result()
            return node

    def count(self, node: RayNode, *, calls: int = 0, sessions: int = 0) -> None:
        """Calls or sessions have begun (1) or ended (-1) there."""
        with self._lock:
            node.outstanding += calls
            node.sessions += sessions

    def suspect(self, node: RayNode) -> None:
        """A call there failed: prefer others for a while, and this one not before it has answered again."""
        with self._lock:
            node.shunned_until = self._clock() + _SHUN_S
            if not node.is_ready:
                return
            with foreign_code("whatever Ray raises here, it can't reach the actor any more") as outcome:
                self._connection.require()
                node.greet()
            node.lost = outcome.error is not None

    def submit(self, node: RayNode, method: str, *arguments: object) -> ObjectRef:
        """Start a method of the node's actor; returns Ray's reference to its result."""
        self._connection.require()
        reference: ObjectRef = getattr(node.actor, method).remote(*arguments)
        return reference

    def cancel(self, reference: ObjectRef) -> None:
        """End what `submit` started; about 2 ms."""
        with contextlib.suppress(Exception):  # there is nothing left to cancel where Ray refuses
            if self._connection.is_up:
                self._connection.ray.cancel(reference)

    def describe_faults(self) -> str:
        """Why no node is ready."""
        with self._lock:
            faults = [f"{node}: has not answered yet" for node in self._nodes.values() if not node.is_ready]
            faults += sorted(self._faults.values())
        where = "offers CPUs" if self._wanted is None else f"is one of {sorted(self._wanted)}"
        return "no node of the Ray cluster can run code: " + "; ".join(faults or [f"no alive node {where}"])

    def ensure_ready(self) -> None:
        """Connect, and wait until a node is ready or none can be. Blocks, for at most about two minutes.

        If none became ready, `describe_faults` says why.
        """
        if self._clock() < self._wait_failed_until or self._has_ready():
            return
        give_up_at = self._clock() + START_LIMIT_S
        gather_s = _GATHER_S if self._refreshed_at is None else 0.0
        with foreign_code("Ray may raise anything while it connects or starts an actor") as outcome:
            self.refresh()
            wait([node.greeting for node in self._nodes.values()], timeout=gather_s)
            while self._nodes and not self._has_ready() and self._clock() < give_up_at:
                time.sleep(_PAUSE_S)
                self.refresh()
        if outcome.error is not None:
            self._note_fault(_NO_NODE, describe(outcome.error))
        if not self._has_ready():
            self._wait_failed_until = self._clock() + _FAILED_WAIT_S

    def refresh(self) -> None:
        """Look for nodes that came, left, died or froze. Blocks for about a millisecond."""
        if self._connection.open():
            for node in self._nodes.values():
                node.lost = True
            with self._lock:
                self._nodes.clear()
            self._actor_class = self._connection.ray.remote(concurrency_groups={CONTROL_GROUP: 2})(RayWorker)
        alive = {entry["NodeID"]: entry for entry in self._connection.ray.nodes() if self._is_wanted(entry)}
        now = self._clock()
        for node in list(self._nodes.values()):
            if node.node_id not in alive:
                self._give_up(node, "it has left the cluster")
            elif isinstance(node.fault, self._connection.ray.exceptions.ActorUnavailableError):
                node.greet()
            elif node.lost or node.fault is not None:
                self._give_up(node, node.fault or "its actor was lost")
            elif node.is_silent(now):
                self._give_up(node, "its actor does not answer")
        for node_id, entry in alive.items():
            if node_id not in self._nodes and now >= self._retry_at.get(node_id, now):
                self._start(entry)
        self._note_fault(_NO_NODE, None)
        self._refreshed_at = now

    def close(self, within_s: float) -> None:
        """Close and kill this object's actors, and disconnect if it connected. Blocks."""
        if not self._connection.is_up:
            return
        with self._lock:
            nodes = list(self._nodes.values())
            self._nodes.clear()
        closing = []
        for node in nodes:
            with contextlib.suppress(Exception):  # an actor that Ray doesn't know needs no closing
                if node.is_ready:
                    closing.append(node.actor.aclose.remote().future())
        wait(closing, timeout=within_s)
        for node in nodes:
            self._kill(node)
        self._connection.close()

    def _has_ready(self) -> bool:
        with self._lock:
            return any(node.is_ready for node in self._nodes.values())

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
        actor = self._actor_class.options(**options | self._actor_options).remote(self._recipe)
        places = float(self._recipe.options.get("max_concurrency") or entry["Resources"].get("CPU") or 1)
        node = RayNode(entry["NodeID"], entry["NodeManagerAddress"], places, actor)
        self._note_fault(node.node_id, None)
        with self._lock:
            self._nodes[node.node_id] = node

    def _give_up(self, node: RayNode, reason: object) -> None:
        node.lost = True
        with self._lock:
            self._nodes.pop(node.node_id, None)
        self._note_fault(node.node_id, f"{node}: {describe(reason)}")
        if node.fault is not None:
            self._retry_at[node.node_id] = self._clock() + _RETRY_S
        self._kill(node)

    def _note_fault(self, node_id: str, fault: str | None) -> None:
        with self._lock:
            self._faults.pop(node_id, None)
            if fault is not None:
                self._faults[node_id] = fault

    def _kill(self, node: RayNode) -> None:
        with contextlib.suppress(Exception):  # it is gone already where Ray can't find it
            self._connection.ray.kill(node.actor, no_restart=True)


def describe(fault: object) -> str:
    """A fault in one line: what it is, and the last line of the traceback that Ray puts into the text."""
    cause = getattr(fault, "cause", None) or fault
    lines = [line.strip() for line in _COLOUR.sub("", str(cause)).splitlines() if line.strip(" ^~")]
    text = " ... ".join([*lines[:1], *lines[1:][-1:]])
    foreign = isinstance(cause, BaseException) and not isinstance(cause, SandboxError)
    return shorten(f"{type(cause).__name__}: {text}" if foreign else text, 500)
