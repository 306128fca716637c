"""This process's connection to Ray: imported late, made only where it was asked for, and left as it was found.

Blocks where it says so. Must not know nodes or actors.
"""

from __future__ import annotations

import importlib
import socket
from typing import Any, Final

from strands_rollout.errors import SandboxError

_CONNECT_LIMIT_S: Final = 10.0
_SHUT_DOWN: Final = "Ray was shut down while a RayExecutor used it; close the executor first"


class RayConnection:
    """The connection that is there, or else one of this object's own.

    Args:
        address: Where to connect if this process is not connected: "auto", "local" or "host:port"; None to rely on its
            being so.

    Attributes:
        ray: The module; None before `open`.
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

        Raises:
            SandboxError: There is no connection to be had.
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
        """Refuse to go on without a connection; Ray itself would start a cluster of its own accord.

        Raises:
            SandboxError: This process is not connected any more.
        """
        if not self.ray.is_initialized():
            raise SandboxError(_SHUT_DOWN)

    def close(self) -> None:
        """Disconnect, if it was this object that connected. Blocks for about a second then."""
        if self._made_here and self.is_up:
            self.ray.shutdown()

    def _worker_id(self) -> str:
        return str(self.ray.get_runtime_context().get_worker_id())


def _check_reachable(address: str) -> None:
    """Find out what Ray would not report: it ends this process if nobody answers at an address for a minute.

    Raises:
        SandboxError: It is "host:port", and nobody listens there.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_LIMIT_S).close()
    except OSError as e:
        raise SandboxError(
            f"no Ray cluster answers at {address}: {e}; is it running, and is that its GCS address?"
        ) from e
