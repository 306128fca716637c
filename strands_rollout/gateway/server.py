"""The gateway's HTTP server: finds a request's session by the API key, and answers in the format of the API it used."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any, Final

from aiohttp import web
from strands.types.exceptions import ContextWindowOverflowException

from strands_rollout import errors
from strands_rollout.aio import LoopCache, shared_result
from strands_rollout.files.json_codec import encode_json
from strands_rollout.gateway.openai import ChatCompletions, Responses
from strands_rollout.gateway.protocols import ApiProtocol, Messages, TurnRequest, decode_body
from strands_rollout.gateway.session import BusySessionError, HistoryLimitError, Session, SessionEndedError
from strands_rollout.model.context import token_count
from strands_rollout.record.agent_request import AgentRequest

logger = logging.getLogger(__name__)

KEY_HEADER: Final = "X-Strands-Rollout-Key"
"""Header of an episode's key, for clients that send another key in the header of their API."""
MAX_BODY_BYTES: Final = 64 * 2**20
_LONG_BODY_BYTES: Final = 4 * 2**20
_PING_INTERVAL_S: Final = 10.0
_SHUTDOWN_TIMEOUT_S: Final = 1.0
_PROTOCOLS: Final[dict[str, type[ApiProtocol]]] = {
    "/v1/chat/completions": ChatCompletions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
    "/v1/messages/count_tokens": Messages,
}

Problem = tuple[int, str, str]
"""HTTP status, code and message of an error."""


class Gateway:
    """Sessions by API key, with the HTTP handlers that answer each request in the session of the request's key.

    Args:
        anonymous: Returns a session for a request without a known key; by default such requests are refused.
    """

    def __init__(self, anonymous: Callable[[web.Request], Awaitable[Session]] | None = None) -> None:
        self._anonymous = anonymous
        self._sessions: dict[str, Session] = {}
        self._handlers: dict[str, set[asyncio.Task[Any] | None]] = {}
        self.base_url = ""

    def add(self, session: Session) -> str:
        """Serve a session from now on, and return its key."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[key], self._handlers[key] = session, set()
        return key

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the running sessions."""
        return frozenset(self._sessions)

    async def remove(self, key: str, error: Exception) -> None:
        """End a session because of `error`: refuse its key from now on, and make its requests in flight fail."""
        session, handlers = self._sessions.pop(key), self._handlers.pop(key)
        session.end(error)
        await session.finish()
        running = [handler for handler in handlers if handler is not None]
        if running:  # the handlers send the error; this takes long only for a client that does not read
            await asyncio.wait(running, timeout=_SHUTDOWN_TIMEOUT_S)
        for handler in running:
            handler.cancel()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the APIs."""
        return [
            web.post(path, partial(self._serve, self._count_tokens if path.endswith("count_tokens") else self._answer))
            for path in _PROTOCOLS
        ]

    async def session_of(self, request: web.Request) -> tuple[str, Session] | None:
        """Return the key and session of a request; None if its key is unknown and `anonymous` is None.

        The key is "" for a session of `anonymous`.
        """
        headers = request.headers
        bearer = headers.get("Authorization", "").removeprefix("Bearer ")
        key = headers.get(KEY_HEADER) or headers.get("x-api-key") or bearer
        if key in self._sessions:
            return key, self._sessions[key]
        return ("", await self._anonymous(request)) if self._anonymous is not None else None

    async def models(self, request: web.Request) -> web.Response:
        """Answer a request for the list of models, or for one model, whose name is not checked."""
        found = await self.session_of(request)
        if found is None:
            return _error_response(ChatCompletions(), _NO_KEY)
        requested = request.match_info.get("name")
        name = requested or found[1].model.config["model_id"] or "policy"
        origin = {"created": 0, "created_at": "1970-01-01T00:00:00Z", "owned_by": "strands-rollout"}
        # the card has the fields of OpenAI's and Anthropic's APIs
        card = {"id": name, "object": "model", "type": "model", "display_name": name, **origin}
        models = {"object": "list", "data": [card], "has_more": False, "first_id": name, "last_id": name}
        return _json_response(card if requested else models)

    async def not_found(self, request: web.Request) -> web.Response:
        """Answer a request with an unknown path, or with a method that its path does not support."""
        paths = ", ".join(_PROTOCOLS)
        expected = f"POST to one of {paths}, or GET /v1/models"
        message = f"{request.method} {request.path} is not supported; expected {expected}"
        return _error_response(ChatCompletions(), (404, "not_found", message))

    async def _serve(
        self,
        answer: Callable[[web.Request, Session, ApiProtocol, TurnRequest], Awaitable[web.StreamResponse]],
        request: web.Request,
    ) -> web.StreamResponse:
        kind = _PROTOCOLS[request.path]
        found = await self.session_of(request)
        if found is None:  # check this first: without a known key, the body is not read
            return _error_response(kind(), _NO_KEY)
        key, session = found
        protocol = session.protocols.get(kind.__name__) or session.protocols.setdefault(kind.__name__, kind())
        handlers, task = self._handlers.get(key, set()), asyncio.current_task()
        handlers.add(task)
        try:
            return await answer(request, session, protocol, await _read(request, protocol))
        except Exception as e:  # whatever the cause (policy, engine, client), the client gets an answer
            return _error_response(protocol, _note_problem(session, e))
        finally:
            handlers.discard(task)

    async def _answer(
        self, request: web.Request, session: Session, protocol: ApiProtocol, turn_request: TurnRequest
    ) -> web.StreamResponse:
        def is_gone() -> bool:
            return request.transport is None or request.transport.is_closing()

        turn = asyncio.create_task(session.reply(turn_request, is_gone), context=session.context.copy())
        if not turn_request.streams:
            return _json_response(protocol.response_body(turn_request, await turn))
        done, _ = await asyncio.wait([turn], timeout=_PING_INTERVAL_S)
        if done:
            turn.result()  # an error is raised before the status is sent
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        # nobody awaits the turn of a client that disconnects: retrieve the turn's error, or asyncio would log it
        turn.add_done_callback(lambda done_turn: done_turn.cancelled() or done_turn.exception())
        with suppress(ConnectionError):
            while not done:
                await response.write(protocol.ping)
                done, _ = await asyncio.wait([turn], timeout=_PING_INTERVAL_S)
            try:
                written = b"".join(protocol.events(turn_request, turn.result()))
            except Exception as e:  # the status 200 has been sent, so the error is an event
                written = protocol.error_event(*_note_problem(session, e))
            await response.write(written)
        return response

    async def _count_tokens(
        self, _request: web.Request, session: Session, _protocol: ApiProtocol, turn_request: TurnRequest
    ) -> web.StreamResponse:
        call = AgentRequest(turn_request.messages, turn_request.tools, turn_request.system)
        return _json_response({"input_tokens": await token_count(session.model.template, call)})


_NO_KEY: Final[Problem] = (
    401,
    "invalid_api_key",
    "the request has no key of a running session; expected the episode's API key",
)


def problem_of(error: BaseException | None) -> Problem:
    """Return the status, code and message for an error; log the error if only a bug can have caused it.

    A client should send the request again only if the status is 429.
    """
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return 413, "request_too_large", f"got a body of more than {MAX_BODY_BYTES} bytes; expected a shorter one"
    if isinstance(error, RecursionError):  # only a client's JSON raises this: the policy's output is never so deep
        return 400, "invalid_request", "got JSON that is nested too deeply to be read; expected at most 100 levels"
    if isinstance(error, errors.BudgetExhaustedError | ContextWindowOverflowException):
        is_context = getattr(error, "budget", "context") == "context"
        return 400, "context_length_exceeded" if is_context else "budget_exhausted", str(error)
    kinds: list[tuple[type[Exception], int, str]] = [
        (errors.PromptError, 400, "invalid_request"),
        (errors.TemplateError, 400, "invalid_request"),
        (errors.ConfigError, 400, "invalid_request"),  # for example, an image for a text model
        (errors.UnsendableTextError, 400, "unsendable_text"),
        (HistoryLimitError, 400, "too_many_histories"),  # after a 429 or 409, SDKs would retry
        (BusySessionError, 429, "too_many_requests"),
        (SessionEndedError, 503, "episode_ended"),
        (errors.EngineError, 503, "engine_unavailable"),
        (errors.RolloutError, 500, "server_error"),
    ]
    for kind, status, code in kinds:
        if isinstance(error, kind):
            return status, code, str(error)
    logger.error("bug in the gateway", exc_info=error)
    return 500, "server_error", f"{type(error).__name__}: {error}"


async def _read(request: web.Request, protocol: ApiProtocol) -> TurnRequest:
    raw = await request.read()
    if len(raw) > _LONG_BODY_BYTES:  # too long to parse on the event loop, or to cache
        return protocol.read_body(await asyncio.to_thread(decode_body, raw))
    return protocol.read(raw)


def _note_problem(session: Session, error: BaseException | None) -> Problem:
    problem = problem_of(error)
    session.facts.refused[problem[1]] += 1
    return problem


def _json_response(body: object, status: int = 200) -> web.Response:
    return web.Response(body=encode_json(body), status=status, content_type="application/json")


def _error_response(protocol: ApiProtocol, problem: Problem) -> web.Response:
    response = _json_response(protocol.error(*problem), problem[0])
    if problem[0] >= web.HTTPInternalServerError.status_code:
        # keep SDKs from retrying, which can't help: requests to the engine were already sent again for
        # `engine_patience_s`, and all other errors with a status from 500 on would recur
        response.headers["x-should-retry"] = "false"
    return response


async def start(
    gateway: Gateway, host: str = "127.0.0.1", port: int = 0, routes: Sequence[web.RouteDef] = ()
) -> web.AppRunner:
    """Serve a gateway and the additional `routes` on this event loop; to stop, await the runner's `cleanup`.

    Raises:
        ConfigError: The host and port can't be used, for example because the port is taken.
    """
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    models = [web.get(path, gateway.models) for path in ("/v1/models", "/v1/models/{name:.+}")]
    app.add_routes([*gateway.routes(), *models, *routes])
    app.router.add_route("*", "/{path:.*}", gateway.not_found)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_TIMEOUT_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as e:
        await runner.cleanup()
        raise errors.ConfigError(
            f"can't listen on {host}:{port}: {e.strerror or e}. Choose another host or port"
        ) from e
    gateway.base_url = f"http://{host}:{runner.addresses[0][1]}"
    return runner


class SharedGateway:
    """The gateway of all episodes that programs play on an event loop. It runs from the first one to the loop's end."""

    _CACHE: Final[LoopCache[SharedGateway]] = LoopCache()

    def __init__(self) -> None:
        self.gateway = Gateway()
        self._starting: asyncio.Task[web.AppRunner] | None = None
        self.is_closed = False

    @classmethod
    async def running(cls) -> Gateway:
        """Return the gateway of this event loop; start it first if it is not running.

        Raises:
            ConfigError: The gateway can't listen on any port.
        """
        shared = cls._CACHE.get(None, cls)
        if shared._starting is None:
            # use an empty context, since the task outlives the first episode
            shared._starting = asyncio.create_task(start(shared.gateway), context=Context())
        await shared_result(shared._starting)
        return shared.gateway

    async def aclose(self) -> None:
        """Stop serving. The loop cache calls this when the loop ends."""
        self.is_closed = True
        if self._starting is not None:
            await (await self._starting).cleanup()
