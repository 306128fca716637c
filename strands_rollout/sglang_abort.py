"""Stops requests at an engine, at once or behind the back of a caller who was cancelled.

Knows SGLang's `/abort_request`, which a router does not have: there the closed connection is all that stops a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

import httpx
import orjson

from strands_rollout.sglang_exchange import CONNECTION_ERRORS, JSON_HEADERS

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S: Final = 5.0


class Aborts:
    """The aborts of one client, and those of them that are under way.

    Args:
        http: The connection that the requests use.
        url: For logs.

    Attributes:
        has_endpoint: False once a router has said that it has none.
    """

    def __init__(self, http: httpx.AsyncClient, *, url: str) -> None:
        self._http, self._url = http, url
        self._under_way: set[asyncio.Task[bool]] = set()
        self.has_endpoint = True

    async def send(self, body: Mapping[str, Any], headers: Mapping[str, str] | None) -> bool:
        """POST `/abort_request`; return whether the engine confirmed within 5 s."""
        sent_headers = {**JSON_HEADERS, **(headers or {})}
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                response = await self._http.post("/abort_request", content=orjson.dumps(body), headers=sent_headers)
        except (*CONNECTION_ERRORS, TimeoutError) as e:
            logger.debug("event=abort_failed url=%s body=%s error=%r", self._url, body, e)
            return False
        self.has_endpoint = response.status_code != 404
        return response.is_success

    def start(self, rid: str, headers: Mapping[str, str] | None) -> None:
        """Begin to abort this request and return at once; nothing happens where there is no endpoint."""
        if not self.has_endpoint:
            return
        task = asyncio.get_running_loop().create_task(self._send_quietly({"rid": rid}, headers))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def wait(self) -> None:
        """Wait for the aborts that are under way."""
        if self._under_way:
            await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _send_quietly(self, body: Mapping[str, Any], headers: Mapping[str, str] | None) -> bool:
        try:
            return await self.send(body, headers)
        except Exception as e:  # nobody waits for this abort; the closed connection ends the request as well
            logger.debug("event=abort_failed url=%s body=%s error=%r", self._url, body, e)
            return False
