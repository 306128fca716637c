"""The event loops' way to the nodes of a Ray cluster: waits without blocking, and never for ever.

Knows event loops, and the one thread on which everything of Ray's that blocks is done. Must not know sessions or code.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from strands_rollout.errors import SandboxError
from strands_rollout.sandbox.ray_cluster import RayCluster, describe
from strands_rollout.sandbox.ray_node import RayNode

_LOOK_S: Final = 2.0  # how often a waiting call looks whether its node is still there
_READY_LIMIT_S: Final = 300.0  # connecting, and waiting for the first node


class RayCaller:
    """Calls the actors of a cluster, from any number of event loops.

    Args:
        cluster: Owned from now on.
    """

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster
        self._control = ThreadPoolExecutor(1, thread_name_prefix="ray-executor")
        self._refreshing = threading.Lock()

    async def take(self, *, for_session: bool = False) -> RayNode:
        """A node that is ready, waited for if need be.

        Raises:
            SandboxError: There is none.
        """
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

    async def reply(self, node: RayNode, limit_s: float, method: str, argument: object) -> Any:  # noqa: ANN401
        """What a method of the node's actor returns; after a fault the node is under suspicion.

        Raises:
            SandboxError: The actor, the node or the executor there failed, or did not answer in time.
        """
        try:
            return await self._answer(node, self._cluster.submit(node, method, argument), limit_s)
        except Exception as e:  # whatever it is, the code is not to blame
            self._cluster.suspect(node)
            raise SandboxError(f"{node}: {describe(e)}") from e

    async def _answer(self, node: RayNode, reference: Any, limit_s: float) -> Any:  # noqa: ANN401 - Ray's ObjectRef
        """Wait for a result, as long as there is hope; whatever ends the wait, ends the work too."""
        now = asyncio.get_running_loop().time
        give_up_at = now() + limit_s
        future = asyncio.wrap_future(reference.future())
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=max(0.0, min(_LOOK_S, give_up_at - now())))
                if not future.done():
                    self._check_hope(node, give_up_at - now(), limit_s)
            return future.result()
        finally:
            if not future.done():
                self._control.submit(self._cluster.cancel, reference)  # it blocks for milliseconds
                future.cancel()

    def _check_hope(self, node: RayNode, left_s: float, limit_s: float) -> None:
        if node.lost:
            raise SandboxError("it was lost while code ran there")
        if left_s <= 0:
            raise SandboxError(f"no result within {limit_s:.0f} s")
        self._refresh_if_stale()

    def _refresh_if_stale(self) -> None:
        """Look for changes in the cluster, on the control thread; nobody waits for it, and its failure is no news."""
        if self._cluster.is_stale and self._refreshing.acquire(blocking=False):
            refresh = self._control.submit(self._cluster.refresh)
            refresh.add_done_callback(lambda _: self._refreshing.release())

    async def aclose(self, within_s: float) -> None:
        """Close the cluster and end the thread; to be called once, when no call is left.

        Args:
            within_s: Seconds for the actors to end what runs there.
        """
        await self._on_control_thread(lambda: self._cluster.close(within_s))
        self._control.shutdown(wait=False)

    def _on_control_thread(self, work: Callable[[], None]) -> asyncio.Future[None]:
        return asyncio.wrap_future(self._control.submit(work))
