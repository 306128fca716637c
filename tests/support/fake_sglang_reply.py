"""Replies of the fake SGLang: generations, statuses, broken bodies, cut connections, silence."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import orjson


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply to one `/generate` request. Build it with the class methods."""

    kind: Literal["tokens", "raw", "cut", "reset", "hang"]
    ids: tuple[int, ...] = ()
    finish: dict[str, Any] = field(default_factory=dict)
    logprobs: tuple[float | None, ...] | None = None
    logprob_ids: tuple[int, ...] | None = None
    text: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    code: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    gate: asyncio.Event | None = None  # an event of the server's loop, which the answer awaits
    queued_s: float = 0.0
    token_s: float = 0.0
    facts: Any = None  # per-token facts that the engine reports, such as `TaskFacts`

    @classmethod
    def tokens(
        cls,
        ids: Sequence[int],
        finish: str = "stop",
        *,
        matched: int | str | None = None,
        logprobs: Sequence[float | None] | None = None,
        logprob_ids: Sequence[int] | None = None,
        text: str = "",
        **meta: Any,
    ) -> Self:
        """Return a generation; `meta` overrides meta_info (None drops a key).

        `matched` is used with the finish "stop", and defaults to the last id. `logprobs` (default: from `facts`,
        else -0.5 each) and `logprob_ids` (default: `ids`) may disagree with `ids`.
        """
        reason: dict[str, Any] = {"type": finish}
        if finish == "stop":
            reason["matched"] = ids[-1] if matched is None and ids else matched
        elif finish == "length":
            reason["length"] = len(ids)
        else:
            reason |= {"message": "Aborted", "status_code": None}
        return cls(
            "tokens",
            ids=tuple(ids),
            finish=reason,
            logprobs=None if logprobs is None else tuple(logprobs),
            logprob_ids=None if logprob_ids is None else tuple(logprob_ids),
            text=text,
            meta=meta,
        )

    @classmethod
    def abort(cls, ids: Sequence[int] = (), **meta: Any) -> Self:
        """Return an aborted generation with these ids; without ids, the answer to a request aborted in the queue."""
        queued: dict[str, Any] = {} if ids else {"prompt_tokens": None, "cached_tokens": None}
        return cls.tokens(ids, "abort", **{**queued, **meta})

    @classmethod
    def status(cls, code: int, body: str | Mapping[str, Any] = "", headers: Mapping[str, str] | None = None) -> Self:
        """Return a reply with an HTTP status and a text or JSON body."""
        raw = body.encode() if isinstance(body, str) else orjson.dumps(body)
        return cls("raw", code=code, body=raw, headers=dict(headers or {}))

    @classmethod
    def raw(cls, body: bytes) -> Self:
        """Return a 200 with exactly this body."""
        return cls("raw", body=body)

    @classmethod
    def cut(cls) -> Self:
        """Return a 200 whose connection closes after half of the body."""
        return cls("cut")

    @classmethod
    def reset(cls) -> Self:
        """Return a reply that closes the connection without a response."""
        return cls("reset")

    @classmethod
    def hang(cls, partial: Sequence[int] = ()) -> Self:
        """Return a reply that comes only when the request is aborted: an abort with the `partial` ids."""
        return cls("hang", ids=tuple(partial))

    def after(self, delay_s: float) -> Self:
        """Return the same answer, delayed by `delay_s` seconds, during which aborts have no effect."""
        return replace(self, delay_s=delay_s)

    def once_set(self, gate: asyncio.Event) -> Self:
        """Return the same answer, which comes after the event is set; until then, aborts have no effect."""
        return replace(self, gate=gate)

    def paced(self, token_s: float, *, queued_s: float = 0.0) -> Self:
        """Return the same generation, queued for `queued_s` and sampled in `token_s` per token; an abort cuts it."""
        return replace(self, token_s=token_s, queued_s=queued_s)

    def held(self, count: int) -> Self:
        """Return the same generation, which stops after `count` tokens and waits for an abort."""
        return replace(self, kind="hang", ids=self.ids[:count])

    def aborted_after(self, count: int) -> Self:
        """Return the same generation, aborted after `count` tokens."""
        kept = Reply.abort(self.ids[:count])
        logprobs = None if self.logprobs is None else self.logprobs[:count]
        return replace(self, kind="tokens", ids=kept.ids, finish=kept.finish, meta={**self.meta, **kept.meta},
                       logprobs=logprobs, logprob_ids=None, token_s=0.0, queued_s=0.0)  # fmt: skip

    def limited(self, max_new_tokens: int | None) -> Self:
        """Return the same generation, cut by length to at most `max_new_tokens` tokens."""
        if max_new_tokens is None or len(self.ids) <= max_new_tokens:
            return self
        kept = Reply.tokens(self.ids[:max_new_tokens], "length")
        return replace(self, ids=kept.ids, finish=kept.finish)
