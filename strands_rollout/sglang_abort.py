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
        has_endpoint: Whether there is an `/abort_request`, which routers lack; None until it was asked.
    """

    def __init__(self, http: httpx.AsyncClient, *, url: str) -> None:
        self._http, self._url = http, url
        self._under_way: set[asyncio.Task[bool]] = set()
        self.has_endpoint: bool | None = None
        self._first: asyncio.Task[bool] | None = None

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

    async def stop(self, rid: str, headers: Mapping[str, str] | None) -> bool:
        """Abort this request where that can be heard; of many at once, one finds out whether it can."""
        body = {"rid": rid}
        if self.has_endpoint is None and self._first is None:
            self._first = asyncio.get_running_loop().create_task(self._send_quietly(body, headers))
            self._under_way.add(self._first)
            self._first.add_done_callback(self._asked)
            return await asyncio.shield(self._first)
        if self.has_endpoint is None and self._first is not None:
            await asyncio.wait({self._first})
        return self.has_endpoint is not False and await self._send_quietly(body, headers)

    def _asked(self, first: asyncio.Task[bool]) -> None:
        self._under_way.discard(first)
        self._first = None

    def start(self, rid: str, headers: Mapping[str, str] | None) -> None:
        """Begin to abort this request and return at once; nothing happens where there is no endpoint."""
        if self.has_endpoint is False:
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
