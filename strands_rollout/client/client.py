"""The client of an SGLang engine or router: token ids in, one checked `Generation` out.

Retries, aborts, and keeps one client per event loop. It knows SGLang 0.5's native API; nothing of messages, templates
or trajectories.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import httpx

from strands_rollout.errors import ConfigError, EngineAbortedError, EngineUnavailableError
from strands_rollout.generation import FinishReason, Generation, read_generation
from strands_rollout.server_info import ServerInfo, fetch_server_info
from strands_rollout.sglang_abort import Aborts
from strands_rollout.sglang_connection import WRITE_TIMEOUT_S, create_client, redacted
from strands_rollout.sglang_exchange import CONNECTION_ERRORS, exchange
from strands_rollout.sglang_request import EncodedIds, GenerateRequest
from strands_rollout.sglang_retry import (
    BACKOFF_BASE_S,
    BACKOFF_CAP_S,
    MAX_ATTEMPTS,
    Fault,
    FaultKind,
    RetryPolicy,
    exhausted,
)

__all__ = [
    "EncodedIds",
    "FinishReason",
    "Flight",
    "Generation",
    "SGLangClient",
    "ServerInfo",
    "create_client",
]

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S: Final = 5.0
# httpx's own default of 5 s per read is nobody's choice for a generation.
_HTTPX_DEFAULT: Final = httpx.Timeout(5.0)
_GENERATION_TIMEOUT: Final = httpx.Timeout(connect=10.0, read=None, write=WRITE_TIMEOUT_S, pool=None)


@dataclass(slots=True)
class Flight:
    """Where the request of one `generate` call is.

    Attributes:
        rid: The request's id while the engine has it; None before, after, and between two attempts.
    """

    rid: str | None = None


class SGLangClient:
    """One engine, for any number of concurrent generations on one event loop; an async context manager.

    Args:
        http: The engine's URL: the client makes its own connection and closes it. Or a connection of the caller's,
            with a `base_url` (see `create_client`), which stays the caller's to close; where that has httpx's default
            time limits of 5 s, generations are given no read limit.
        vocab_size: Rows of the model's embedding: ids must be below it, both ways. None: not checked.
        owns_http: Close the caller's connection with this client.
        max_attempts: Requests in all for one generation; this and the waits: see `RetryPolicy`.
        backoff_base_s: First wait between attempts.
        backoff_cap_s: Longest wait between attempts.
        rng: Source of the waits' jitter.
        sleep: Waits between attempts.
        clock: Seconds, for `Generation.latency_s`.
    """

    def __init__(
        self,
        http: httpx.AsyncClient | str,
        *,
        vocab_size: int | None = None,
        owns_http: bool = False,
        max_attempts: int = MAX_ATTEMPTS,
        backoff_base_s: float = BACKOFF_BASE_S,
        backoff_cap_s: float = BACKOFF_CAP_S,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._owns_http = owns_http or isinstance(http, str)
        self._http = create_client(http) if isinstance(http, str) else http
        if not self._http.base_url.host:
            raise ConfigError("the httpx client has no base_url; make it with create_client('http://host:port')")
        self.url: Final = redacted(self._http.base_url)
        self.vocab_size: Final = vocab_size
        self._retry = RetryPolicy(max_attempts, backoff_base_s, backoff_cap_s)
        self._rng, self._sleep, self._clock = rng or random.Random(), sleep, clock  # noqa: S311 - jitter, no secret
        self._timeout = _GENERATION_TIMEOUT if self._http.timeout == _HTTPX_DEFAULT else self._http.timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._aborts = Aborts(self._http, url=self.url)
        self._info: asyncio.Task[ServerInfo] | None = None
        self._is_well = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    @property
    def is_closed(self) -> bool:
        """Whether the connection was closed, by this client or by its owner."""
        return self._http.is_closed

    async def aclose(self) -> None:
        """Wait for the aborts that are under way, 5 s at most, and close the connection if it is this client's own."""
        await self._aborts.wait()
        if self._owns_http:
            await self._http.aclose()

    async def generate(
        self,
        input_ids: Sequence[int] | EncodedIds,
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        return_logprob: bool = True,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        flight: Flight | None = None,
        should_abort: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """Sample from these token ids; return only what was checked token by token.

        A cancelled call ends at once; its request is aborted at the engine. No attempt is sent under the rid of
        another, since SGLang refuses a rid that it still holds: the second attempt is `<rid>-2`.

        Args:
            input_ids: The prompt, at least one id. A list is checked and encoded whole; `EncodedIds` only once.
            sampling_params: As SGLang reads them. Name `max_new_tokens`: the engine's default is 128.
            rid: The request's id, unique among those in flight; none a prefix of another, since SGLang aborts by
                prefix. Default: a random one.
            return_logprob: Ask for the logprob of each sampled token, and refuse an answer without.
            headers: For this request only, such as a routing key.
            extra: More top-level fields of the request.
            flight: Told where the request is.
            should_abort: Asked before the request is sent again.

        Raises:
            TrajectoryError: An input id is not one of the vocabulary, or there is none. Nothing was sent.
            EngineOverlongError: The request does not fit the engine's context.
            EngineRejectedError: The engine refuses the request.
            EngineResponseError: The answer is not a valid generation. One that isn't JSON is asked for once more.
            EngineUnavailableError: Every attempt failed.
            EngineAbortedError: An attempt failed, and `should_abort` holds.
            ConfigError: `sampling_params` or `extra` can't be sent, or the client belongs to another event loop.
        """
        self._claim_loop()
        first_rid, flight = rid or uuid.uuid4().hex, flight or Flight()
        request = GenerateRequest(
            self._encoded(input_ids), sampling_params, rid=first_rid, return_logprob=return_logprob, extra=extra
        )
        started = self._clock()
        faults: list[Fault] = []
        while True:
            attempt_rid = f"{first_rid}-{len(faults) + 1}" if faults else first_rid
            flight.rid = attempt_rid
            try:
                answer = await self._attempt(request.body(attempt_rid), attempt_rid, headers)
            finally:
                flight.rid = None
            if not isinstance(answer, Fault):
                break
            faults.append(answer)
            if self._retry.gives_up(faults):
                raise exhausted(self.url, faults)
            delay_s = self._retry.delay_s(faults, self._rng)
            self._note_fault(answer, attempt=len(faults), delay_s=delay_s)
            await self._sleep(delay_s)
            if should_abort():
                raise EngineAbortedError("the rollout was aborted before the request was sent again")
        self._note_recovery()
        return read_generation(
            answer,
            return_logprob=return_logprob,
            vocab_size=self.vocab_size,
            rid=attempt_rid,
            latency_s=self._clock() - started,
            attempts=len(faults) + 1,
        )

    async def abort(
        self, rid: str | None = None, *, abort_all: bool = False, headers: Mapping[str, str] | None = None
    ) -> bool:
        """Ask the engine to stop a request, or all; return whether it confirmed within 5 s. A router can't (404).

        Raises:
            ConfigError: Neither a rid nor `abort_all` was given.
        """
        if not rid and not abort_all:
            raise ConfigError("abort() needs a rid, or abort_all=True")
        return await self._aborts.send({"rid": "", "abort_all": True} if abort_all else {"rid": rid}, headers)

    async def stop(self, rid: str, *, headers: Mapping[str, str] | None = None) -> bool:
        """As `abort` of one request, but a router, which has said once that it can't, is not asked again."""
        return await self._aborts.stop(rid, headers)

    async def health(self) -> bool:
        """Whether `/readiness` (a router's truth) or, where there is none, `/health` is answered with a 200."""
        self._claim_loop()
        try:
            response = await self._http.get("/readiness", timeout=PROBE_TIMEOUT_S)
            if response.status_code == 404:
                response = await self._http.get("/health", timeout=PROBE_TIMEOUT_S)
        except CONNECTION_ERRORS:
            return False
        return response.is_success

    async def server_info(self) -> ServerInfo:
        """Return the engine's facts, asked for once per client; all None behind a router that has none.

        Raises:
            EngineUnavailableError: Nothing answers; asked once, without retries.
        """
        self._claim_loop()
        if self._info is None:
            self._info = asyncio.get_running_loop().create_task(fetch_server_info(self._http, url=self.url))
        try:
            # one request for all who ask at once; who is cancelled does not cancel it for the others
            return await asyncio.shield(self._info)
        except EngineUnavailableError:
            self._info = None
            raise

    def _encoded(self, input_ids: Sequence[int] | EncodedIds) -> EncodedIds:
        if not isinstance(input_ids, EncodedIds):
            return EncodedIds(input_ids, vocab_size=self.vocab_size)
        if input_ids.vocab_size != self.vocab_size:
            checked, expected = input_ids.vocab_size, self.vocab_size
            raise ConfigError(f"the ids were checked for vocab_size={checked}; this client has vocab_size={expected}")
        return input_ids

    async def _attempt(self, body: bytes, rid: str, headers: Mapping[str, str] | None) -> object:
        """Return the decoded JSON of a 200 or the fault of this attempt; nothing is left running at the engine."""
        try:
            answer = await exchange(self._http, body, headers=headers, limits=self._timeout, url=self.url)
            slow = isinstance(answer, Fault) and answer.kind is FaultKind.SLOW
            if slow and not await self.abort(rid, headers=headers):
                raise EngineUnavailableError(
                    f"{self.url}/generate gave no answer within the read limit of {self._timeout.read} s and did not "
                    "confirm that it stopped the request, which is therefore not sent again; generations that take "
                    "long need create_client(timeout=None)"
                )
        except asyncio.CancelledError:
            self._aborts.start(rid, headers)
            raise
        return answer

    def _claim_loop(self) -> None:
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise ConfigError(
                f"this client of {self.url} belongs to the event loop of its first request, and another loop runs now; "
                "use shared_client(base_url), which keeps one client per loop"
            )

    def _note_fault(self, fault: Fault, *, attempt: int, delay_s: float) -> None:
        """Log one warning per outage, however many requests it hits."""
        level, self._is_well = (logging.WARNING if self._is_well else logging.DEBUG), False
        message = "event=engine_fault url=%s attempt=%d of=%d delay_s=%.2f kind=%s answer=%s"
        logger.log(level, message, self.url, attempt, self._retry.max_attempts, delay_s, fault.kind, fault.words)

    def _note_recovery(self) -> None:
        if not self._is_well:
            self._is_well = True
            logger.warning("event=engine_recovered url=%s", self.url)
