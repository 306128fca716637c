"""The backend for clusters: code runs on all nodes of a Ray cluster, on each in a local executor behind an actor."""

import asyncio
import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Literal

from strands_rollout.code_tool import ray_cluster as cluster
from strands_rollout.code_tool.executors import (
    CodeExecutor,
    ExecutionResult,
    check_call,
    check_positive,
    facts_of,
    infra_failure,
    retried_once,
)
from strands_rollout.errors import ConfigError, SandboxError, foreign_code

_LOOK_S: Final = 2.0  # how often a waiting call looks whether its node is still there
_READY_LIMIT_S: Final = 300.0  # connecting, and waiting for the first node


class RayCaller:
    """Calls the actors of a cluster, from any number of event loops."""

    def __init__(self, nodes: cluster.RayCluster) -> None:
        self._cluster = nodes
        self._control = ThreadPoolExecutor(1, thread_name_prefix="ray-executor")
        self._refreshing = threading.Lock()

    async def take(self, *, for_session: bool = False) -> cluster.RayNode:
        """A node that is ready, waited for if need be."""
        node = self._cluster.take(for_session=for_session)
        if node is None:
            try:
                await asyncio.wait_for(self._on_control_thread(self._cluster.ensure_ready), _READY_LIMIT_S)
            except TimeoutError as e:
                raise SandboxError(f"Ray did not answer within {_READY_LIMIT_S:g} s") from e
            node = self._cluster.take(for_session=for_session)
        if node is None:
            raise SandboxError(self._cluster.describe_faults())
        self._refresh_if_stale()
        return node

    async def reply(
        self, node: cluster.RayNode, limit_s: float, method: Literal["run", "close_session"], argument: object
    ) -> ExecutionResult | None:
        """Call a method of the node's actor; after a fault, other nodes are preferred for a while."""
        with foreign_code("whatever Ray raises, the code is not to blame") as outcome:
            return await self._answer(node, self._cluster.submit(node, method, argument), limit_s)
        self._cluster.suspect(node)
        raise SandboxError(f"{node}: {cluster.describe(outcome.error)}") from outcome.error

    async def _answer(
        self, node: cluster.RayNode, reference: cluster.ObjectRef, limit_s: float
    ) -> ExecutionResult | None:
        """Wait for a result until the node is lost or the limit is reached; then, the call is cancelled."""
        now = asyncio.get_running_loop().time
        give_up_at = now() + limit_s
        future: asyncio.Future[ExecutionResult | None] = asyncio.wrap_future(reference.future())
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=max(0.0, min(_LOOK_S, give_up_at - now())))
                if future.done():
                    break
                if node.lost:
                    raise SandboxError("it was lost while code ran there")
                if now() >= give_up_at:
                    raise SandboxError(f"no result within {limit_s:.0f} s")
                self._refresh_if_stale()
            return future.result()
        finally:
            if not future.done():
                self._control.submit(self._cluster.cancel, reference)  # it blocks for milliseconds
                future.cancel()

    def _refresh_if_stale(self) -> None:
        """Start a refresh on the control thread, if one is due; errors are left to the next call that needs a node."""
        if self._cluster.is_stale and self._refreshing.acquire(blocking=False):
            refresh = self._control.submit(self._cluster.refresh)
            refresh.add_done_callback(lambda _: self._refreshing.release())

    async def aclose(self, within_s: float) -> None:
        """Close the cluster and end the thread; to be called once, when no call is left."""
        await self._on_control_thread(lambda: self._cluster.close(within_s))
        self._control.shutdown(wait=False)

    def _on_control_thread(self, work: Callable[[], None]) -> asyncio.Future[None]:
        return asyncio.wrap_future(self._control.submit(work))


_CLOSE_LIMIT_S: Final = 30.0
_IDLE_LOOK_S: Final = 0.02
_OURS: Final = {"num_cpus", "max_restarts", "max_task_retries", "lifetime", "name", "scheduling_strategy"}


@dataclass(eq=False, slots=True)
class _Session:
    """Where a session lives: a node, and the process there."""

    node: cluster.RayNode
    incarnation: str | None
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
        check_positive(**defaults)
        if taken := sorted(_OURS & (actor_options or {}).keys()):
            raise ConfigError(f"actor_options names {', '.join(taken)}, which RayExecutor decides; leave them out")
        recipe = cluster.ExecutorRecipe(executor, dict(options or {})).with_defaults(defaults)
        self._pattern = recipe.make()
        self.facts = facts_of(self._pattern)
        self._timeout_s = timeout_s
        self._cluster = cluster.RayCluster(
            connection=cluster.RayConnection(_checked_address(address)),
            recipe=recipe,
            nodes=_checked_nodes(nodes),
            actor_options=actor_options or {},
        )
        self._caller = RayCaller(self._cluster)
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._running = 0
        self._closed = False
        self._released = False

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        """Run code on some node, or on the session's; see `CodeExecutor.run`."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        check_call("RayExecutor", code, limit_s, session, keeps_sessions=self.facts.keeps_sessions)
        with self._lock:
            if self._closed:
                raise SandboxError("RayExecutor.run was called after aclose(); make a new executor")
            self._running += 1
        try:
            if session is not None:
                return await self._run_in_session(session, code, limit_s)
            return await retried_once(lambda: self._run_somewhere(cluster.Call(code, limit_s)))
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
            await self._caller.reply(home.node, _CLOSE_LIMIT_S, "close_session", session)

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
            await self._caller.aclose(_CLOSE_LIMIT_S)

    async def _run_somewhere(self, call: cluster.Call) -> ExecutionResult:
        """One attempt of a stateless call; where it fails, the next one will go elsewhere if there is an elsewhere."""
        try:
            node = await self._caller.take()
        except SandboxError as e:
            return infra_failure(e)
        try:
            result = await self._caller.reply(node, node.deadline_s(call.timeout_s), "run", call)
        except SandboxError as e:
            return infra_failure(e)
        finally:
            self._cluster.count(node, calls=-1)
        assert result is not None  # noqa: S101 - only a call of a session can be refused
        if result.infra_error is not None:
            self._cluster.suspect(node)
        return result

    async def _run_in_session(self, name: str, code: str, timeout_s: float) -> ExecutionResult:
        """A call of a session. Only where the session never ran anything can it be retried without loss."""
        for _ in range(2):
            try:
                home = self._sessions.get(name) or await self._settle(name)
            except SandboxError as e:
                return infra_failure(e)
            result = await self._run_at(home, cluster.Call(code, timeout_s, name, home.incarnation))
            if result.infra_error is None:
                home.is_new = False
            if result.infra_error is None or not result.session_lost:
                break
            self._forget(name, home)
            if not home.is_new:
                break
        return result

    async def _settle(self, name: str) -> _Session:
        """Give a session its node, unless another call of it has just done so."""
        node = await self._caller.take(for_session=True)
        try:
            with self._lock:
                home = self._sessions.setdefault(name, _Session(node, node.incarnation))
            if home.node is node:
                self._cluster.count(node, sessions=1)
            return home
        finally:
            self._cluster.count(node, calls=-1)

    def _forget(self, name: str, home: _Session) -> None:
        """The next call of this session starts afresh; what may be left of this one is ended."""
        with self._lock:
            if self._sessions.get(name) is not home:
                return
            del self._sessions[name]
        self._cluster.count(home.node, sessions=-1)
        with contextlib.suppress(Exception):  # where the actor can't be reached, there is nothing to end
            self._cluster.submit(home.node, "close_session", name)

    async def _run_at(self, home: _Session, call: cluster.Call) -> ExecutionResult:
        node = home.node
        self._cluster.count(node, calls=1)
        try:
            result = await self._caller.reply(node, node.deadline_s(call.timeout_s), "run", call)
        except SandboxError as e:
            return infra_failure(e, session_lost=True)
        except asyncio.CancelledError:
            home.is_new = False
            raise
        finally:
            self._cluster.count(node, calls=-1)
        if result is None:
            self._cluster.suspect(node)
            return infra_failure(f"{node}: the process that kept the session was replaced", session_lost=True)
        return result


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
