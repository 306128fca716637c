"""The nodes of a Ray cluster, with an actor on each: follow who comes and goes, choose the next one.

What blocks says so, and belongs on one thread that outlives it: Ray kills the processes that it starts when the thread
that started them ends. Everything else may be called from any thread. Must not know event loops.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import wait
from typing import Any, Final

from strands_rollout.errors import SandboxError
from strands_rollout.sandbox.capped_output import shorten
from strands_rollout.sandbox.ray_connection import RayConnection
from strands_rollout.sandbox.ray_node import CONTROL_GROUP, START_LIMIT_S, RayNode
from strands_rollout.sandbox.ray_worker import ExecutorRecipe, RayWorker

_REFRESH_S: Final = 5.0
_GATHER_S: Final = 10.0  # how long the first call waits for slower nodes, so that not all goes to the first
_PAUSE_S: Final = 0.05
_SHUN_S: Final = 30.0  # a node that fails at once would otherwise always be the least loaded
_HOPELESS_S: Final = 5.0  # callers that queued behind a vain wait share its outcome
_RETRY_S: Final = 10.0  # until an actor that could not be made is tried again
_MAX_CONCURRENCY: Final = 10_000  # the executor on the node has the real limit, and a queue
_NO_NODE: Final = ""  # the place of faults that are no node's
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


class RayCluster:
    """Keeps one `RayWorker` per alive node.

    Args:
        connection: Owned from now on.
        recipe: What each actor makes.
        nodes: Ids or IP addresses of the nodes to use; None for all that offer CPUs.
        actor_options: Ray's options, over the defaults.
        clock: Monotonic seconds.
    """

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
        self._hopeless_until = 0.0
        self._actor_class: Any = None

    @property
    def is_stale(self) -> bool:
        """Whether `refresh` is due."""
        return self._refreshed_at is None or self._clock() - self._refreshed_at > _REFRESH_S

    def take(self, *, for_session: bool = False) -> RayNode | None:
        """Choose the node with least to do for its CPUs and count a call there; None where no node is ready.

        One that failed lately is chosen only if there is no other, and the one that failed last is chosen last.

        Args:
            for_session: Spread sessions, which stay where they are, before calls.
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

    def take_this(self, node: RayNode) -> None:
        """Count a call on a node that needs no choosing."""
        with self._lock:
            node.outstanding += 1

    def give_back(self, node: RayNode) -> None:
        """A call there has ended."""
        with self._lock:
            node.outstanding -= 1

    def count_session(self, node: RayNode, change: int) -> None:
        """A session has begun (1) or ended (-1) there."""
        with self._lock:
            node.sessions += change

    def suspect(self, node: RayNode) -> None:
        """A call there failed: prefer others for a while, and this one not before it has answered again."""
        with self._lock:
            node.shunned_until = self._clock() + _SHUN_S
            if not node.is_ready:
                return
            try:
                self._connection.require()
                node.greet()
            except Exception:  # whatever Ray raises here, it can't reach the actor any more
                node.lost = True

    def submit(self, node: RayNode, method: str, *arguments: object) -> Any:  # noqa: ANN401 - Ray's ObjectRef
        """Start a method of the node's actor; returns Ray's reference to its result.

        Raises:
            SandboxError: This process is no longer connected.
            Exception: What Ray raises where it does not know the actor.
        """
        self._connection.require()
        return getattr(node.actor, method).remote(*arguments)

    def cancel(self, reference: Any) -> None:  # noqa: ANN401 - Ray's ObjectRef
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

        Where it was in vain, `describe_faults` says why.
        """
        if self._clock() < self._hopeless_until or self._has_ready():
            return
        try:
            self._wait_until_ready()
        except Exception as e:  # whatever Ray raises while it connects or starts an actor
            self._note_fault(_NO_NODE, describe(e))
        if not self._has_ready():
            self._hopeless_until = self._clock() + _HOPELESS_S

    def _wait_until_ready(self) -> None:
        give_up_at = self._clock() + START_LIMIT_S
        gather_s = _GATHER_S if self._refreshed_at is None else 0.0
        self.refresh()
        wait([node.greeting for node in self._nodes.values()], timeout=gather_s)
        while self._nodes and not self._has_ready() and self._clock() < give_up_at:
            time.sleep(_PAUSE_S)
            self.refresh()

    def refresh(self) -> None:
        """Look for nodes that came, left, died or froze. Blocks for about a millisecond.

        Raises:
            SandboxError: There is no connection to be had.
        """
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
        """Close and kill this object's actors, and disconnect if it connected. Blocks.

        Args:
            within_s: Seconds for the actors to end what runs there.
        """
        if not self._connection.is_up:
            return
        with self._lock:
            nodes = list(self._nodes.values())
            self._nodes.clear()
        farewells = []
        for node in nodes:
            with contextlib.suppress(Exception):  # an actor that Ray doesn't know needs no farewell
                if node.is_ready:
                    farewells.append(node.actor.aclose.remote().future())
        wait(farewells, timeout=within_s)
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
