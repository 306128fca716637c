"""The client of an SGLang engine or router: token ids in, one checked `Generation` out.

The client also aborts requests of cancelled calls, and fetches an engine's model and limits. `shared_client` returns
one client per event loop for each URL, vocabulary size and patience.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self, cast

import httpx
import orjson

from strands_rollout import errors
from strands_rollout.aio import LoopCache, shared_result
from strands_rollout.client import transport
from strands_rollout.client.generate_api import (
    EncodedIds,
    FinishReason,
    GenerateRequest,
    Generation,
    NotJsonError,
    load_json,
    read_generation,
)
from strands_rollout.client.retry import (
    DEFAULT_BACKOFF_BASE_S,
    DEFAULT_BACKOFF_CAP_S,
    DEFAULT_PATIENCE_S,
    Fault,
    FaultKind,
    Outage,
    RetriesExhaustedError,
    RetryPolicy,
    with_retries,
)
from strands_rollout.client.transport import create_client
from strands_rollout.control import Control, never

__all__ = ["EncodedIds", "FinishReason", "Flight", "Generation", "SGLangClient", "ServerInfo", "create_client"]

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S: Final = 5.0
_BEFORE_RETRY: Final = "before the request was sent again"
# a client with httpx's default of 5 s per read was not configured for generations, which take longer
_HTTPX_DEFAULT_TIMEOUT: Final = httpx.Timeout(5.0)
_GENERATION_TIMEOUT: Final = httpx.Timeout(connect=10.0, read=None, write=transport.WRITE_TIMEOUT_S, pool=None)


@dataclass(slots=True)
class Flight:
    """The state of one `generate` call's current attempt; the client updates it while the call runs."""

    rid: str | None = None
    """Id of the attempt's request while the attempt runs; None before and after, and between two attempts."""
    sent_at: float = 0.0
    """Time of the last attempt's start, by `time.monotonic`."""
    fault: Fault | None = None
    """Failure of the last attempt; None unless the call is retrying or its retries were cancelled."""


class SGLangClient:
    """A client of one engine, for any number of concurrent generations on one event loop; an async context manager.

    Args:
        http: The engine's URL, or an httpx client with a `base_url` (see `create_client`). For a URL, this client makes
            an httpx client, and closes it. The caller closes an httpx client of its own. If that client has httpx's
            default timeouts of 5 s, generations get no read timeout.
        vocab_size: Number of rows of the model's embedding: input and output ids must be below this number. None
            disables the check.
        patience_s: How long to retry while the engine is unreachable, busy or failing, in seconds; see `RetryPolicy`.
        max_attempts: Maximum number of requests for one generation; None for no limit.
        backoff_base_s: Upper limit of the first wait between attempts, in seconds; see `RetryPolicy`.
        backoff_cap_s: Upper limit of each wait between attempts, in seconds.
        rng: Source of the jitter in waits.
        sleep: Replaces `asyncio.sleep` between attempts.
        clock: Returns seconds, for `patience_s` and `Generation.latency_s`.

    Attributes:
        retry_policy: The limits and waits of retries, from the arguments.

    Raises:
        ConfigError: The URL is invalid, the httpx client has no `base_url` with a host, or an argument of
            `RetryPolicy` is out of range.
    """

    def __init__(
        self,
        http: httpx.AsyncClient | str,
        *,
        vocab_size: int | None = None,
        patience_s: float = DEFAULT_PATIENCE_S,
        max_attempts: int | None = None,
        backoff_base_s: float = DEFAULT_BACKOFF_BASE_S,
        backoff_cap_s: float = DEFAULT_BACKOFF_CAP_S,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._owns_http = isinstance(http, str)
        self._http = create_client(http) if isinstance(http, str) else http
        if not self._http.base_url.host:
            raise errors.ConfigError(
                "the httpx client's base_url has no host; create the client with create_client('http://host:port')"
            )
        self.url: Final = transport.redacted(self._http.base_url)
        self.vocab_size: Final = vocab_size
        self.retry_policy: Final = RetryPolicy(patience_s, backoff_base_s, backoff_cap_s, max_attempts)
        self._rng, self._sleep, self._clock = rng or random.Random(), sleep, clock  # noqa: S311 - jitter, no secret
        self._timeout = _GENERATION_TIMEOUT if self._http.timeout == _HTTPX_DEFAULT_TIMEOUT else self._http.timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._aborts = _AbortSender(self._http, url=self.url)
        self._info: asyncio.Task[ServerInfo] | None = None
        self._known_info: ServerInfo | None = None
        self._info_fault: Fault | None = None
        self._info_epoch = 0
        self._is_healthy = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    @property
    def is_closed(self) -> bool:
        """True if the httpx client is closed, by this client or by its owner."""
        return self._http.is_closed

    @property
    def info_fault(self) -> Fault | None:
        """The failure of the last attempt to fetch the server's info, while the fetch is retried; None otherwise."""
        return self._info_fault

    async def aclose(self) -> None:
        """Wait up to 5 s for aborts in flight, and close the httpx client if this client made it."""
        if self._info is not None:
            self._info.cancel()
        await asyncio.gather(*self._aborts.in_flight, return_exceptions=True)
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
        should_abort: Callable[[], bool] = never,
        control: Control | None = None,
    ) -> Generation:
        """Sample tokens after a prompt; the answer is checked token by token.

        A cancelled call ends immediately, and the client asks the engine to abort the request. Once a router has
        answered that it lacks the endpoint for aborts, the client does not ask. SGLang refuses an rid that is still in
        flight. Therefore, each attempt has its own rid: the second attempt's rid is `<rid>-2`.

        Args:
            input_ids: The prompt, at least one id. A list is checked and encoded on each call; `EncodedIds` are already
                checked and encoded.
            sampling_params: SGLang's sampling parameters. Set `max_new_tokens`: the engine's default is 128.
            rid: Request id; None for a random id. It must be unique among in-flight requests, and not the prefix of
                another id, since SGLang aborts by prefix.
            return_logprob: Request the logprob of each sampled token; an answer without logprobs is then an error.
            headers: Headers of this request only, such as a routing key.
            extra: Further top-level fields of the request.
            flight: Updated with the state of the current attempt.
            should_abort: Polled during the wait for a retry, and called before each retry; a true result ends the call.
            control: The episode's control; its `should_abort` is used instead of the argument.

        Raises:
            TrajectoryError: An input id is outside the vocabulary, or there is no input id. Nothing was sent.
            EngineOverlongError: The request does not fit the engine's context.
            EngineRejectedError: The engine refuses the request.
            EngineResponseError: The answer is not a valid generation of this request. After an answer that is not JSON,
                the request is retried once; after other invalid answers, it is not.
            EngineUnavailableError: No attempt succeeded within `patience_s` and `max_attempts`; or an attempt reached
                the read timeout, and the engine did not confirm its abort.
            EngineAbortedError: An attempt failed, and `should_abort` returned True.
            ConfigError: `sampling_params`, `extra` or `headers` can't be sent, `input_ids` were checked for another
                `vocab_size`, or the client belongs to another event loop.
        """
        ids, rid = self._encode(input_ids), rid or secrets.token_hex(16)
        request = GenerateRequest(ids, sampling_params, rid=rid, return_logprob=return_logprob, extra=extra)
        return await self._generate(request, headers, flight or Flight(), control or Control(should_abort))

    async def _generate(
        self,
        request: GenerateRequest,
        headers: Mapping[str, str] | None,
        flight: Flight,
        control: Control,
    ) -> Generation:
        first_rid, started, attempts = request.rid, self._clock(), 0

        async def attempt() -> object:
            nonlocal attempts
            attempts += 1
            rid = flight.rid = f"{first_rid}-{attempts}" if attempts > 1 else first_rid
            flight.sent_at = time.monotonic()
            try:
                answer = await self._attempt(request.body(rid), rid, headers)
            finally:
                flight.rid = None
            flight.fault = answer if isinstance(answer, Fault) else None
            return answer

        try:
            answer = await self._send_with_retries(attempt, f"no generation from {self.url}/generate", control)
        finally:
            # after a cancellation the fault stays, so that the caller can report why the call was waiting
            if not isinstance(sys.exception(), asyncio.CancelledError):
                flight.fault = None
        latency_s = self._clock() - started
        return read_generation(answer, request, vocab_size=self.vocab_size, latency_s=latency_s, attempts=attempts)

    async def _send_with_retries(
        self, attempt: Callable[[], Awaitable[object]], missing: str, control: Control
    ) -> object:
        """Repeat an attempt until it returns an answer other than a `Fault`.

        `missing` is the start of the error message, such as "no generation from http://...".

        Raises:
            EngineError: The retries are exhausted, or the rollout is aborted during a wait.
        """

        def log(outage: Outage, wait_s: float) -> None:
            # until a request succeeds again, only the first failure is logged as a warning
            level, self._is_healthy = (logging.WARNING if self._is_healthy else logging.DEBUG), False
            message = "event=engine_fault url=%s attempt=%d patience_s=%g wait_s=%.2f kind=%s answer=%s"
            fault, attempts = outage.faults[-1], len(outage.faults)
            logger.log(
                level, message, self.url, attempts, self.retry_policy.patience_s, wait_s, fault.kind, fault.message
            )

        sleep = functools.partial(self._sleep_unless_aborted, control=control)
        try:
            answer = await with_retries(
                attempt, self.retry_policy, on_wait=log, rng=self._rng, sleep=sleep, clock=self._clock
            )
        except RetriesExhaustedError as e:
            raise _outage_error(e.outage, missing, self.url) from None
        if not self._is_healthy:
            self._is_healthy = True
            logger.warning("event=engine_recovered url=%s", self.url)
        return answer

    async def _sleep_unless_aborted(self, seconds: float, control: Control) -> None:
        async with control.deadline(during=_BEFORE_RETRY):
            await self._sleep(seconds)
        control.check(_BEFORE_RETRY)

    async def wait_to_retry(self, outage: Outage, control: Control) -> None:
        """Wait as long as this client would before a retry; for callers that repeat a request themselves.

        Args:
            outage: The failed requests, collected in an `Outage(client.retry_policy)`.
            control: The episode's control.

        Raises:
            EngineAbortedError: The rollout is aborted.
        """
        await self._sleep_unless_aborted(outage.next_wait_s(self._rng), control)

    async def abort(
        self, rid: str | None = None, *, abort_all: bool = False, headers: Mapping[str, str] | None = None
    ) -> bool:
        """Abort a request, or all requests, at the engine.

        Returns:
            True if the engine confirmed within 5 s; else False, for example behind a router without the endpoint (404).

        Raises:
            ConfigError: Neither an rid nor `abort_all` was given.
        """
        if not rid and not abort_all:
            raise errors.ConfigError("abort() needs an rid, or abort_all=True")
        return await self._aborts.send({"rid": "", "abort_all": True} if abort_all else {"rid": rid}, headers)

    async def stop(self, rid: str, *, headers: Mapping[str, str] | None = None) -> bool:
        """Abort one request as `abort` does, but send nothing once a router has answered that it lacks the endpoint."""
        return await self._aborts.stop({"rid": rid}, headers)

    async def health(self) -> bool:
        """Return whether `/readiness` reports success, or `/health` if the server (an engine) lacks `/readiness`.

        Raises:
            ConfigError: The client belongs to another event loop.
        """
        self._claim_loop()
        try:
            response = await self._http.get("/readiness", timeout=_PROBE_TIMEOUT_S)
            if response.status_code == 404:
                response = await self._http.get("/health", timeout=_PROBE_TIMEOUT_S)
        except transport.CONNECTION_ERRORS:
            return False
        return response.is_success

    @property
    def connection_epoch(self) -> int:
        """A number that changes once all connections have been closed: another server may answer from then on.

        It is always 0 if the httpx client was not made by `create_client`.
        """
        return self._http.connection_epoch if isinstance(self._http, transport.EngineClient) else 0

    async def server_info(self) -> ServerInfo:
        """Return the engine's model and limits, fetched once per `connection_epoch`.

        A value is None if a router in front of the engine does not report it. If the engine is busy or failing, the
        last known info is returned, and the next call fetches again.

        Raises:
            ConfigError: The client belongs to another event loop.
            EngineUnavailableError: The engine could not be reached within `patience_s`.
            EngineResponseError: The engine is busy or failing, or gives no answer within 10 s, and no info is known
                yet.
        """
        self._claim_loop()
        if self._info is None or (self._info.done() and self._info_epoch != self.connection_epoch):
            self._info = asyncio.get_running_loop().create_task(self._fetch_info())
        task = self._info
        try:
            self._known_info = await shared_result(task)
        except errors.EngineError as e:
            if self._info is task:
                self._info = None
            if self._known_info is None or not isinstance(e, errors.EngineResponseError):
                raise
        return self._known_info

    async def _fetch_info(self) -> ServerInfo:
        async def attempt() -> ServerInfo | Fault:
            try:
                return await fetch_server_info(self._http, url=self.url)
            except errors.EngineUnavailableError as e:
                self._info_fault = Fault(FaultKind.UNREACHABLE, str(e))
                return self._info_fault

        try:
            return cast(
                "ServerInfo", await self._send_with_retries(attempt, f"no server info from {self.url}", Control())
            )
        finally:
            self._info_fault, self._info_epoch = None, self.connection_epoch

    def _encode(self, input_ids: Sequence[int] | EncodedIds) -> EncodedIds:
        self._claim_loop()
        if not isinstance(input_ids, EncodedIds):
            return EncodedIds(input_ids, vocab_size=self.vocab_size)
        if input_ids.vocab_size != self.vocab_size:
            checked, expected = input_ids.vocab_size, self.vocab_size
            raise errors.ConfigError(
                f"got EncodedIds with vocab_size={checked}; expected this client's vocab_size={expected}. Create the "
                "ids with EncodedIds(ids, vocab_size=client.vocab_size)"
            )
        return input_ids

    async def _attempt(self, body: bytes, rid: str, headers: Mapping[str, str] | None) -> object:
        """Send the request once; return the JSON of an answer with status 200, or a `Fault`."""
        try:
            answer = await transport.post_generate(
                self._http, body, headers=headers, timeouts=self._timeout, url=self.url
            )
            slow = isinstance(answer, Fault) and answer.kind is FaultKind.SLOW
            if slow and not await self.abort(rid, headers=headers):
                raise errors.EngineUnavailableError(
                    f"{self.url}/generate gave no answer within the read timeout of {self._timeout.read} s, and did "
                    "not confirm the abort, so the request is not retried; use create_client(timeout=None) for long "
                    "generations"
                )
        except asyncio.CancelledError:
            if self._aborts.has_endpoint is not False:
                self._aborts.send_in_background({"rid": rid}, headers)
            raise
        return answer

    def _claim_loop(self) -> None:
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise errors.ConfigError(
                f"this client of {self.url} belongs to the event loop of its first request, but another loop runs now; "
                "use shared_client(base_url), which keeps one client per loop"
            )


def _outage_error(outage: Outage, missing: str, url: str) -> errors.EngineError:
    last, count = outage.faults[-1], len(outage.faults)
    message = f"{missing} in {count} attempt{'s' * (count > 1)}; the last failed with: {last.message}"
    if last.kind is FaultKind.BAD_BODY:
        return errors.EngineResponseError(f"{message}. Check that the URL points to an SGLang server or its router")
    advice = f"Check that the server is up (GET {url}/health) and that the URL is right"
    return errors.EngineUnavailableError(
        f"{message}. The client waited {outage.waited_s:.0f} s (the limit is engine_patience_s). {advice}"
    )


_ABORT_TIMEOUT_S: Final = 5.0


class _AbortSender:
    """Sender of one client's abort requests, which remembers whether the server has the endpoint for them."""

    def __init__(self, http: httpx.AsyncClient, *, url: str) -> None:
        self._http, self._url = http, url
        self.in_flight: set[asyncio.Task[bool]] = set()
        self.has_endpoint: bool | None = None  # None until the first answer; False for most routers
        self._first: asyncio.Task[bool] | None = None

    async def send(self, body: Mapping[str, Any], headers: Mapping[str, str] | None) -> bool:
        sent_headers = {**transport.JSON_HEADERS, **(headers or {})}
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                response = await self._http.post("/abort_request", content=orjson.dumps(body), headers=sent_headers)
        except (*transport.CONNECTION_ERRORS, TimeoutError) as e:
            logger.debug("event=abort_failed url=%s body=%s error=%r", self._url, body, e)
            return False
        self.has_endpoint = response.status_code != 404
        return response.is_success

    async def stop(self, body: Mapping[str, Any], headers: Mapping[str, str] | None) -> bool:
        """Abort a request unless the server lacks the endpoint; return whether the engine confirmed.

        While the first call finds out whether the server has the endpoint, other calls wait.
        """
        if self.has_endpoint is None:
            if self._first is None or self._first.done():
                self._first = self.send_in_background(body, headers)
                return await asyncio.shield(self._first)
            await asyncio.wait({self._first})
        return self.has_endpoint is not False and await self._send_quietly(body, headers)

    def send_in_background(self, body: Mapping[str, Any], headers: Mapping[str, str] | None) -> asyncio.Task[bool]:
        task = asyncio.get_running_loop().create_task(self._send_quietly(body, headers))
        self.in_flight.add(task)
        task.add_done_callback(self.in_flight.discard)
        return task

    async def _send_quietly(self, body: Mapping[str, Any], headers: Mapping[str, str] | None) -> bool:
        try:
            return await self.send(body, headers)
        except Exception as e:  # a caller's httpx client may raise anything; a disconnect aborts the request, too
            logger.debug("event=abort_failed url=%s body=%s error=%r", self._url, body, e)
            return False


_SHARED: Final[LoopCache[SGLangClient]] = LoopCache()


def shared_client(
    base_url: str, *, vocab_size: int | None = None, patience_s: float = DEFAULT_PATIENCE_S
) -> SGLangClient:
    """Return the running event loop's client for these arguments of `SGLangClient`.

    The client is closed when its loop shuts down; see `LoopCache`.

    Raises:
        RuntimeError: No event loop is running.
        ConfigError: The URL is invalid; see `create_client`.
    """
    return _SHARED.get(
        (base_url, vocab_size, patience_s),
        lambda: SGLangClient(base_url, vocab_size=vocab_size, patience_s=patience_s),
    )


_INFO_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """An engine's model and limits; a value is None if the engine does not report it.

    Attributes:
        context_length: Maximum tokens of prompt plus answer.
        model_path: Folder or name of the served model.
        weight_version: Version of the loaded weights.
        raw: The engine's answers to `/server_info` and `/model_info` (or their older names), merged.
    """

    context_length: int | None = None
    model_path: str | None = None
    weight_version: str | None = None
    raw: dict[str, Any] = field(default_factory=dict)


async def fetch_server_info(http: httpx.AsyncClient, *, url: str) -> ServerInfo:
    """Fetch an engine's model and limits.

    Raises:
        EngineUnavailableError: The connection was refused or lost.
        EngineResponseError: The engine or its router is busy or failing, or gives no answer within 10 s.
    """
    raw: dict[str, Any] = {}
    for paths in (("/server_info", "/get_server_info"), ("/model_info", "/get_model_info")):
        for path in paths:
            part = await _get(http, path, url=url)
            if part:
                raw |= part
                break
    context_length = _positive_int_or_none(raw.get("context_length"))
    if context_length is None:  # the engine does not set or report it; `/v1/models` has it
        cards = (await _get(http, "/v1/models", url=url)).get("data")
        card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
        context_length = _positive_int_or_none(card.get("max_model_len"))
    texts = raw.get("model_path"), raw.get("weight_version")
    model_path, version = (text if isinstance(text, str) else None for text in texts)
    return ServerInfo(context_length, model_path, version, raw)


async def _get(http: httpx.AsyncClient, path: str, *, url: str) -> dict[str, Any]:
    """Return the JSON object at a path; {} if there is none."""
    try:
        response = await http.get(path, timeout=_INFO_TIMEOUT_S)
    except transport.READ_TIMEOUTS as e:
        raise errors.EngineResponseError(f"no answer from {url}{path} within {_INFO_TIMEOUT_S:g} s") from e
    except transport.CONNECTION_ERRORS as e:
        raise errors.EngineUnavailableError(f"no answer from {url}{path}: {e or type(e).__name__}") from e
    status = response.status_code
    if transport.is_busy(status, response.content) or (status >= 500 and status != httpx.codes.NOT_IMPLEMENTED):
        raise errors.EngineResponseError(f"got HTTP {status} from {url}{path}: the engine is busy or failing")
    try:
        answer = load_json(response.content) if status == 200 else {}
    except NotJsonError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _positive_int_or_none(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
