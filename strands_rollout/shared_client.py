"""The client of the running event loop: one for all who ask the same engine on it.

Knows clients and loops; nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from strands_rollout.loop_cache import LoopCache
from strands_rollout.sglang_client import SGLangClient, create_client

_SHARED: Final[LoopCache[SGLangClient]] = LoopCache()


def shared_client(
    base_url: str,
    *,
    vocab_size: int | None = None,
    max_connections: int = 1024,
    timeout: float | None = None,
    connect_timeout: float = 10.0,
    headers: Mapping[str, str] | None = None,
) -> SGLangClient:
    """Return the running event loop's client for these arguments (see `create_client`); nobody needs to close it.

    It is closed when its loop shuts down; see `LoopCache`.

    Raises:
        RuntimeError: No event loop is running.
        ConfigError: As `create_client`.
    """
    key = (base_url, vocab_size, max_connections, timeout, connect_timeout, tuple(sorted((headers or {}).items())))

    def make() -> SGLangClient:
        http = create_client(
            base_url,
            max_connections=max_connections,
            timeout=timeout,
            connect_timeout=connect_timeout,
            headers=headers,
        )
        return SGLangClient(http, vocab_size=vocab_size, owns_http=True)

    return _SHARED.get(key, make)
