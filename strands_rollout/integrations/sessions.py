"""The gateway as a server for other trainers: sessions over HTTP, with samples in the format of a dump.

`POST /sessions` begins a session and returns its id, API key and base URL. `GET /sessions/{id}` returns the session's
facts, and `GET /sessions/{id}/samples` its samples so far. `DELETE /sessions/{id}` ends the session. At the base URL,
the API key gives access to the APIs of `strands_rollout.gateway`. The embedded engine serves these APIs without keys
(`chat_endpoint`).
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import PreTrainedTokenizerBase

from strands_rollout.agent.limits import EpisodeLimits, StopReason
from strands_rollout.agent.run import Episode
from strands_rollout.agent.tool_call import ToolStats
from strands_rollout.dump.record import DumpRecord, TokenTexts, record_line
from strands_rollout.errors import ConfigError, PromptError, RolloutError
from strands_rollout.files.json_codec import Json, decode_json
from strands_rollout.gateway.server import Gateway, problem_of, start
from strands_rollout.gateway.session import Session, SessionEndedError
from strands_rollout.model.sampling import TokenLimits
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.record.saved import EpisodeProgress
from strands_rollout.samples import Sample, SampleLike
from strands_rollout.slime_plugin.episode import ROUTING_HEADER
from strands_rollout.slime_plugin.sample_writer import EndedEpisode, WritingRules, sibling_segments, write_episode
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer
from strands_rollout.validation import explain_errors

_SET_KEY_COMMAND: Final = "export STRANDS_ROLLOUT_GATEWAY_KEY=$(python -c 'import secrets; print(secrets.token_hex())')"
_NO_SLIME_ARGS: Final = SimpleNamespace()
_Handler = Callable[[web.Request], Awaitable[web.Response]]


class SessionOptions(BaseModel):
    """The body of `POST /sessions`; all fields are optional."""

    model_config = ConfigDict(extra="forbid", strict=True)
    sampling_params: dict[str, Any] = {}
    """SGLang's sampling parameters, fixed for all requests of the session. A request may set other parameters, a token
    limit for its turn, and stop strings, which are added to the session's. `max_new_tokens` limits each conversation of
    the session, not one request: all tokens after the conversation's first prompt, tool results included."""
    max_context_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of prompt plus response. Default: the engine's context length."""
    index: int | None = None
    """slime's `Sample.index` of the session's samples."""
    label: str | None = None
    """slime's `Sample.label` of the session's samples."""
    metadata: dict[str, Any] = {}
    """slime's `Sample.metadata` of the session's samples; the facts are added to it."""


@dataclass(slots=True)
class _OpenSession:
    session: Session
    key: str
    options: SessionOptions
    started: float = field(default_factory=time.monotonic)


def _to_bytes(key: str) -> bytes:
    """Return a key's bytes as they were sent or typed; bytes that are not UTF-8 were decoded to surrogates."""
    return key.encode("utf-8", "surrogateescape")


def _new_model(tokenizer: PreTrainedTokenizerBase, base_url: str, **more: Any) -> SGLangModel:  # noqa: ANN401 - its own
    return SGLangModel(tokenizer, base_url, conversations="many", on_rewritten_history="segment", **more)


class SessionServer:
    """The sessions of one gateway, and the HTTP routes that let their owner begin, read and end them.

    Args:
        tokenizer: The policy's tokenizer.
        base_url: The URL of the engine or router.
        owner_key: The bearer token of the owner's requests; None accepts requests without a token, which
            `serve_sessions` allows on a local host only.
        idle_s: A session is idle if no request is in flight and, for this many seconds, no turn was requested and no
            samples were read. Each `POST /sessions` ends the idle sessions.
        **model: More arguments of `SGLangModel`.

    Raises:
        ConfigError: Arguments of `SGLangModel` contradict each other, or one is unknown.
        TemplateError: The tokenizer or its chat template can't be used.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        base_url: str,
        *,
        owner_key: str | None = None,
        idle_s: float = 3600.0,
        **model: Any,  # noqa: ANN401 - as SGLangModel takes it
    ) -> None:
        self.gateway = Gateway()
        self._new_model = functools.partial(_new_model, tokenizer, base_url, **model)
        self._texts = TokenTexts(tokenizer)
        self._owner_key = owner_key
        self._idle_s = idle_s
        self._open: dict[str, _OpenSession] = {}
        self._new_model()  # if the chat template is unusable, fail here, not in the first session

    @property
    def has_owner_key(self) -> bool:
        """Return whether the owner's requests need a key."""
        return self._owner_key is not None

    def routes(self) -> list[web.RouteDef]:
        """Return the owner's routes."""
        return [
            web.post("/sessions", self._require_owner_key(self._create)),
            web.get("/sessions/{id}", self._require_owner_key(self._read_facts)),
            web.get("/sessions/{id}/samples", self._require_owner_key(self._read_samples)),
            web.delete("/sessions/{id}", self._require_owner_key(self._delete)),
        ]

    def _require_owner_key(self, handler: _Handler) -> _Handler:
        async def handle(request: web.Request) -> web.Response:
            key = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if self._owner_key is not None and not hmac.compare_digest(_to_bytes(key), _to_bytes(self._owner_key)):
                return _error_response(401, "the owner's key is missing or wrong; send it as Authorization: Bearer KEY")
            try:
                return await handler(request)
            except KeyError:
                return _error_response(404, f"no session {request.match_info['id']!r}; it has ended or never existed")
            except ValidationError as e:
                return _error_response(400, explain_errors(e, SessionOptions))
            except RolloutError as e:
                return _error_response(problem_of(e)[0], str(e))

        return handle

    async def _create(self, request: web.Request) -> web.Response:
        now = time.monotonic()
        sessions = {name: opened.session for name, opened in self._open.items()}
        for name, session in sessions.items():
            if now - session.last_used_at > self._idle_s and not session.is_busy:
                await self._close_session(name)
        options = SessionOptions.model_validate(_decode_body(await request.read()))
        params, name = dict(options.sampling_params), uuid.uuid4().hex
        limits = TokenLimits(params.pop("max_new_tokens", None), options.max_context_tokens)
        session = Session(self._new_model(sampling_params=params, limits=limits, headers={ROUTING_HEADER: name}))
        self._open[name] = _OpenSession(session, self.gateway.add(session), options)
        url = f"{request.scheme}://{request.host}"
        return web.json_response({"id": name, "api_key": self._open[name].key, "base_url": f"{url}/v1"}, status=201)

    async def _read_facts(self, request: web.Request) -> web.Response:
        return web.json_response(self._open[request.match_info["id"]].session.facts.as_json())

    async def _read_samples(self, request: web.Request) -> web.Response:
        opened = self._open[request.match_info["id"]]
        opened.session.last_used_at = time.monotonic()
        if opened.session.is_busy:
            return _error_response(409, "a request of this session is in flight; ask for the samples after its answer")
        lines = [record_line(DumpRecord.from_sample(sample, self._texts)) for sample in samples_of(opened)]
        return web.Response(body=b"".join(lines), content_type="application/jsonl")

    async def _delete(self, request: web.Request) -> web.Response:
        await self._close_session(request.match_info["id"])
        return web.Response(status=204)

    async def _close_session(self, name: str) -> None:
        opened = self._open.pop(name)
        await self.gateway.remove(
            opened.key,
            SessionEndedError("its owner ended the session, or the session had no request for too long"),
        )
        await opened.session.model.finish(0.0)


def samples_of(opened: _OpenSession) -> list[SampleLike]:
    """Return a session's samples so far, beginning with the sample of the main conversation's newest branch.

    Every other branch that has a turn has a sample, too.

    As a side effect, the session's main conversation becomes the main conversation of the record.
    """
    session, model, options = opened.session, opened.session.model, opened.options
    session.settle_main()
    sample = Sample(prompt="", index=options.index, label=options.label, metadata={**options.metadata})
    reason = StopReason.COMPLETED if model.conversation.branch.stop_reason != "max_tokens" else StopReason.TURN_LENGTH
    calls = sum(message["role"] == "assistant" for message in session.main_messages)
    episode = Episode(
        reason,
        session.error,
        calls,
        calls,
        ToolStats(),
        time.monotonic() - opened.started,
        EpisodeLimits(),
        EpisodeProgress(session.main_messages, model.conversation.branch.covered),
    )
    segments = sibling_segments(model, (), {""})
    ended = EndedEpisode(model, episode, gateway=session.facts.as_json())
    return write_episode(_NO_SLIME_ARGS, sample, ended, WritingRules(fans_out=True), segments)


async def serve_sessions(sessions: SessionServer, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until cancelled; call `on_ready` with the URL as soon as requests are accepted.

    Raises:
        ConfigError: The host and port can't be used, or the host is not a local one and there is no owner's key.
    """
    if not sessions.has_owner_key and host not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(
            f"got the host {host} without an owner's key; other machines can connect to it: pass --key KEY, or set a "
            f"random key with: {_SET_KEY_COMMAND}"
        )
    runner = await start(sessions.gateway, host, port, sessions.routes())
    try:
        on_ready(sessions.gateway.base_url)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def chat_endpoint(model_dir: Path) -> Gateway:
    """Return a gateway without keys, which the embedded engine serves on its own port; each request gets a session."""

    async def new_session(request: web.Request) -> Session:
        host, port = request.transport.get_extra_info("sockname")[:2] if request.transport else ("127.0.0.1", 80)
        tokenizer = await asyncio.to_thread(load_tokenizer, str(model_dir))
        return Session(_new_model(tokenizer, f"http://{host}:{port}", tool_parser="auto"))

    return Gateway(new_session)


def _decode_body(body: bytes) -> Json:
    try:
        return decode_json(body or b"{}")
    except ValueError as e:
        raise PromptError(f"the body is not valid JSON: {e}") from e


def _error_response(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
