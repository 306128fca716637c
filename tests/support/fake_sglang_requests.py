"""Running requests of the fake SGLang: their progress, and the effect of aborts, pauses and new weights on them.

Pauses work as in SGLang 0.5. Mode "abort" ends all running and queued requests; in the other modes they freeze, and
continue with the weights loaded by then. In every mode, new requests wait until the engine continues, and can't be
aborted meanwhile.
"""

import asyncio
import contextlib
import math
import time
from dataclasses import dataclass

from fake_sglang_reply import Reply


@dataclass(frozen=True, slots=True)
class Sampled:
    """A finished or aborted generation."""

    reply: Reply  # with the tokens that were sampled
    versions: tuple[str, ...]  # the weights that sampled each of these tokens
    prefilled_by: str  # the weights that read the prompt


@dataclass(eq=False, slots=True)
class _Request:
    rid: str
    is_queued: bool = True
    is_aborted: bool = False


class Requests:
    """The requests of one engine, its weight version, and whether it is paused."""

    def __init__(self, weight_version: str) -> None:
        self.weight_version = weight_version
        self.is_paused = False
        self._is_frozen = False
        self._running: set[_Request] = set()
        self._change = asyncio.Event()

    async def run(self, rid: str, reply: Reply) -> Sampled:
        """Queue a request and sample its reply; when the request ends or is aborted, return what was sampled."""
        while self.is_paused:
            await self._wait_for_change(math.inf)
        request, prefilled_by, versions = _Request(rid), self.weight_version, list[str]()
        self._running.add(request)
        try:
            await self._wait_engine_time(request, reply.queued_s)
            request.is_queued = False
            for _ in reply.ids:
                await self._wait_engine_time(request, reply.token_s)
                if request.is_aborted:
                    break
                versions.append(self.weight_version)
            if reply.kind == "hang":
                await self._wait_engine_time(request, math.inf)
        finally:
            self._running.discard(request)
            self._notify()
        if request.is_aborted:
            if reply.kind != "hang":  # the last token would have ended the request
                versions = versions[: max(0, len(reply.ids) - 1)]
            reply = reply.aborted_after(len(versions))
        return Sampled(reply, tuple(versions), prefilled_by)

    async def _wait_engine_time(self, request: _Request, seconds: float) -> None:
        """Wait for `seconds` of engine time, which stops during a pause; return early if the request is aborted."""
        while seconds > 0 and not request.is_aborted:
            began_s, was_frozen = time.monotonic(), self._is_frozen
            await self._wait_for_change(math.inf if was_frozen else seconds)
            seconds -= 0.0 if was_frozen else time.monotonic() - began_s

    def abort(self, rid: str) -> None:
        """Abort all running and queued requests whose rids begin with `rid`."""
        for request in self._running:
            request.is_aborted = request.is_aborted or request.rid.startswith(rid)
        self._notify()

    async def pause(self, mode: str) -> None:
        """Pause the engine; in mode "abort", also abort all requests, and return when none runs or is queued."""
        self.is_paused = True
        if mode == "abort":
            self.abort("")
            while self._running:
                await self._wait_for_change(math.inf)
        else:
            self._is_frozen = True
        self._notify()

    def resume(self) -> None:
        self.is_paused = self._is_frozen = False
        self._notify()

    def update_weights(self, version: str) -> None:
        """Use this weight version for all tokens sampled from now on."""
        self.weight_version = version

    def load(self) -> tuple[int, int]:
        """Return the numbers of running and queued requests; new requests that wait out a pause are neither."""
        queued = sum(request.is_queued for request in self._running)
        return len(self._running) - queued, queued

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _wait_for_change(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if timeout_s == math.inf else timeout_s):
                await self._change.wait()
