"""The requests at the fake engine: how far each one is, and what aborts, pauses and new weights do to them.

As SGLang 0.5 does: a pause in mode "abort" ends what runs and is queued, and lets whatever comes wait, out of reach of
aborts, until the engine goes on; in the other modes generations stand still and go on with the new weights. Knows time
and replies; nothing of HTTP.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from fake_sglang_reply import Reply


@dataclass(frozen=True, slots=True)
class Sampled:
    """A generation as it came about.

    Attributes:
        reply: With the tokens that were sampled.
        versions: The weights that sampled each of them.
        prefilled_by: The weights that read the prompt.
    """

    reply: Reply
    versions: tuple[str, ...]
    prefilled_by: str


@dataclass(eq=False, slots=True)
class _Request:
    rid: str
    reply: Reply
    prefilled_by: str
    seen_at_s: float
    worked_s: float = 0.0
    is_aborted: bool = False
    versions: list[str] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        """Until it ends by itself."""
        if self.reply.kind == "hang":
            return math.inf
        return self.reply.queued_s + self.reply.token_s * len(self.reply.ids) - self.worked_s

    @property
    def is_queued(self) -> bool:
        return self.worked_s < self.reply.queued_s

    def settle(self, now_s: float, version: str, *, stands_still: bool) -> None:
        """Count what has been sampled since the last look, all by these weights."""
        if not stands_still:
            self.worked_s += now_s - self.seen_at_s
        self.seen_at_s = now_s
        count = self._sampled_by_now()
        self.versions += [version] * (count - len(self.versions))

    def _sampled_by_now(self) -> int:
        if self.is_queued:
            return 0
        if not self.reply.token_s:
            return len(self.reply.ids)
        return min(len(self.reply.ids), int((self.worked_s - self.reply.queued_s) / self.reply.token_s))

    def outcome(self, version: str) -> Sampled:
        reply, count = self.reply, len(self.reply.ids)
        if self.is_aborted:
            # the last token would have ended it, but for one that was never to end
            count = min(len(self.versions), count if reply.kind == "hang" else max(0, count - 1))
            reply = reply.aborted_after(count)
        return Sampled(reply, tuple([*self.versions, *[version] * count][:count]), self.prefilled_by)


class Requests:
    """All of them."""

    def __init__(self, weight_version: str) -> None:
        self.weight_version = weight_version
        self.is_paused = False
        self._stands_still = False
        self._running: set[_Request] = set()
        self._change = asyncio.Event()

    async def run(self, rid: str, reply: Reply) -> Sampled:
        """Let a request be queued, sample, and end, by itself or by an abort."""
        while self.is_paused:
            await self._changed(math.inf)
        request = _Request(rid, reply, self.weight_version, time.monotonic())
        self._running.add(request)
        try:
            request.settle(request.seen_at_s, self.weight_version, stands_still=False)
            while not request.is_aborted and request.left_s > 0:
                await self._changed(math.inf if self._stands_still else request.left_s)
                self._settle([request])
        finally:
            self._running.discard(request)
            self._tell()
        return request.outcome(self.weight_version)

    def abort(self, rid: str) -> None:
        """End those whose ids begin so."""
        self._settle(self._running)
        for request in self._running:
            request.is_aborted = request.is_aborted or request.rid.startswith(rid)
        self._tell()

    async def pause(self, mode: str) -> None:
        """Return when the engine has paused: in mode "abort", when nothing runs any more."""
        self.is_paused = True
        if mode == "abort":
            self.abort("")
            while self._running:
                await self._changed(math.inf)
        else:
            self._settle(self._running)
            self._stands_still = True
        self._tell()

    def resume(self) -> None:
        """Go on."""
        self._settle(self._running)
        self.is_paused = self._stands_still = False
        self._tell()

    def update_weights(self, version: str) -> None:
        """Whatever is sampled from now on is sampled by these."""
        self._settle(self._running)
        self.weight_version = version

    def load(self) -> tuple[int, int]:
        """Requests that run, and requests that are queued; those that a pause lets wait are neither."""
        self._settle(self._running)
        queued = sum(request.is_queued for request in self._running)
        return len(self._running) - queued, queued

    def _settle(self, requests: Iterable[_Request]) -> None:
        now_s = time.monotonic()
        for request in requests:
            request.settle(now_s, self.weight_version, stands_still=self._stands_still)

    def _tell(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _changed(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if timeout_s == math.inf else timeout_s):
                await self._change.wait()
