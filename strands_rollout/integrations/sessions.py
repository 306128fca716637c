"""The gateway alone, for other trainers: sessions by HTTP, and their samples in the dump's format.

`POST /sessions` begins one and gives its key, `GET /sessions/{id}/samples` its samples so far, and
`DELETE /sessions/{id}` ends it; what the key is for is in `strands_rollout.gateway`.
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

from strands_rollout.agent.episode import Episode
from strands_rollout.agent.limits import EpisodeLimits, StopReason
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

_ARGS: Final = SimpleNamespace()
_Handler = Callable[[web.Request], Awaitable[web.Response]]


class SessionOptions(BaseModel):
    """What `POST /sessions` takes; all of it may be left out."""

    model_config = ConfigDict(extra="forbid", strict=True)
    sampling_params: dict[str, Any] = {}
    """SGLang's. They hold for all requests; what is not among them, a client may set. `max_new_tokens` is the budget of
    the whole response."""
    max_context_tokens: int | None = Field(default=None, ge=1)
    """Tokens of prompt and response together; default: the engine's own context."""
    index: int | None = None
    """Of the samples."""
    label: str | None = None
    """Of the samples."""
    metadata: dict[str, Any] = {}
    """Of the samples."""


@dataclass(slots=True)
class _Open:
    """A session that runs."""

    session: Session
    key: str
    options: SessionOptions
    started: float = field(default_factory=time.monotonic)


def _new_model(tokenizer: PreTrainedTokenizerBase, base_url: str, **more: Any) -> SGLangModel:  # noqa: ANN401 - its own
    return SGLangModel(tokenizer, base_url, conversations="many", on_rewritten_history="segment", **more)


class SessionServer:
    """The sessions of one gateway, which its owner may begin, read and end.

    Args:
        tokenizer: The policy's.
        base_url: The engine's, or the router's.
        owner_key: Bearer token that the owner's requests must carry; None accepts them from every local client.
        idle_s: Seconds after which a session that nobody uses is ended.
        **model: Further settings of `SGLangModel`.
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
        self._open: dict[str, _Open] = {}
        self._new_model()  # a template that can't be used is said before the first session

    @property
    def has_owner(self) -> bool:
        """Whether a key keeps others from beginning sessions."""
        return self._owner_key is not None

    def routes(self) -> list[web.RouteDef]:
        """Those of the owner."""
        return [
            web.post("/sessions", self._guarded(self._begin)),
            web.get("/sessions/{id}", self._guarded(self._show)),
            web.get("/sessions/{id}/samples", self._guarded(self._samples)),
            web.delete("/sessions/{id}", self._guarded(self._end)),
        ]

    def _guarded(self, answer: _Handler) -> _Handler:
        async def guarded(request: web.Request) -> web.Response:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if self._owner_key is not None and not hmac.compare_digest(given.encode(), self._owner_key.encode()):
                return _said(401, "got no key of the gateway's owner; expected it as Authorization: Bearer KEY")
            try:
                return await answer(request)
            except KeyError:
                return _said(404, f"there is no session {request.match_info['id']!r}; it has ended, or never was")
            except ValidationError as e:
                return _said(400, explain_errors(e, SessionOptions))
            except RolloutError as e:
                return _said(problem_of(e)[0], str(e))

        return guarded

    async def _begin(self, request: web.Request) -> web.Response:
        now = time.monotonic()
        for name in [name for name, one in self._open.items() if now - one.session.last_used_at > self._idle_s]:
            await self._ended(name)
        options = SessionOptions.model_validate(_given(await request.read()))
        params, name = dict(options.sampling_params), uuid.uuid4().hex
        limits = TokenLimits(params.pop("max_new_tokens", None), options.max_context_tokens)
        session = Session(self._new_model(sampling_params=params, limits=limits, headers={ROUTING_HEADER: name}))
        self._open[name] = _Open(session, self.gateway.add(session), options)
        url = f"{request.scheme}://{request.host}"
        return web.json_response({"id": name, "api_key": self._open[name].key, "base_url": f"{url}/v1"}, status=201)

    async def _show(self, request: web.Request) -> web.Response:
        return web.json_response(self._open[request.match_info["id"]].session.facts.as_json())

    async def _samples(self, request: web.Request) -> web.Response:
        one = self._open[request.match_info["id"]]
        one.session.last_used_at = time.monotonic()
        if one.session.is_busy:
            return _said(409, "a request of this session is being answered; ask for its samples when it is not")
        lines = [record_line(DumpRecord.from_sample(sample, self._texts)) for sample in samples_of(one)]
        return web.Response(body=b"".join(lines), content_type="application/jsonl")

    async def _end(self, request: web.Request) -> web.Response:
        await self._ended(request.match_info["id"])
        return web.Response(status=204)

    async def _ended(self, name: str) -> None:
        one = self._open.pop(name)
        await self.gateway.remove(one.key, SessionEndedError("the session was ended by its owner"))
        await one.session.model.finish(0.0)


def samples_of(one: _Open) -> list[SampleLike]:
    """What a session has sampled so far: the main conversation's sample first, then one for each other history."""
    session, model = one.session, one.session.model
    session.settle_main()
    sample = Sample(prompt="", index=one.options.index, label=one.options.label, metadata={**one.options.metadata})
    reason = StopReason.COMPLETED if model.conversation.branch.stop_reason != "max_tokens" else StopReason.TURN_LENGTH
    calls = sum(message["role"] == "assistant" for message in session.main_messages)
    episode = Episode(
        reason,
        session.error,
        calls,
        calls,
        ToolStats(),
        time.monotonic() - one.started,
        EpisodeLimits(),
        EpisodeProgress(session.main_messages, model.conversation.branch.covered),
    )
    segments = sibling_segments(model, (), {""})
    ended = EndedEpisode(model, episode, gateway=session.facts.as_json())
    return write_episode(_ARGS, sample, ended, WritingRules(fans_out=True), segments)


async def serve_sessions(sessions: SessionServer, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until this is cancelled; `on_ready` is called with the URL once requests are accepted.

    Raises:
        ConfigError: The port is taken, or is open to the network without an owner's key.
    """
    if not sessions.has_owner and host not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(f"got the host {host} and no key of the owner; expected one: others can reach the port")
    runner = await start(sessions.gateway, host, port, sessions.routes())
    try:
        on_ready(sessions.gateway.base_url)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def chat_endpoint(model_dir: Path) -> Gateway:
    """A gateway without sessions beside an engine on the same port: each request is a conversation of its own."""

    async def fresh(request: web.Request) -> Session:
        host, port = request.transport.get_extra_info("sockname")[:2] if request.transport else ("127.0.0.1", 80)
        tokenizer = await asyncio.to_thread(load_tokenizer, str(model_dir))
        return Session(_new_model(tokenizer, f"http://{host}:{port}", tool_parser="auto"))

    return Gateway(fresh)


def _given(body: bytes) -> Json:
    try:
        return decode_json(body or b"{}")
    except ValueError as e:
        raise PromptError(f"got a body that is no JSON: {e}") from e


def _said(status: int, words: str) -> web.Response:
    return web.json_response({"error": {"message": words}}, status=status)
