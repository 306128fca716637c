"""What the fake SGLang answers: generations, statuses, broken bodies, cut connections, silence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import orjson


@dataclass(frozen=True, slots=True)
class Reply:
    """What one `/generate` request gets. Build it with the class methods."""

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
    queued_s: float = 0.0
    token_s: float = 0.0
    facts: Any = None  # what the engine reports of each token, such as `TaskFacts`

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
        """A generation. `matched` defaults to the last id; `meta` overrides meta_info (value None drops the key).

        `logprobs` (default -0.5 each) and `logprob_ids` (default `ids`) may disagree with `ids`, to be refused.
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
        """An aborted generation: partial if `ids`, else the shape of a request that was still queued."""
        queued: dict[str, Any] = {} if ids else {"prompt_tokens": None, "cached_tokens": None}
        return cls.tokens(ids, "abort", **{**queued, **meta})

    @classmethod
    def status(cls, code: int, body: str | Mapping[str, Any] = "", headers: Mapping[str, str] | None = None) -> Self:
        """An HTTP status with a text or JSON body."""
        raw = body.encode() if isinstance(body, str) else orjson.dumps(body)
        return cls("raw", code=code, body=raw, headers=dict(headers or {}))

    @classmethod
    def raw(cls, body: bytes) -> Self:
        """A 200 with exactly this body."""
        return cls("raw", body=body)

    @classmethod
    def cut(cls) -> Self:
        """A 200 whose connection closes after half of the body."""
        return cls("cut")

    @classmethod
    def reset(cls) -> Self:
        """The connection closes before a response."""
        return cls("reset")

    @classmethod
    def hang(cls, partial: Sequence[int] = ()) -> Self:
        """No answer until the request is aborted by its rid; then an abort with the `partial` ids."""
        return cls("hang", ids=tuple(partial))

    def after(self, delay_s: float) -> Self:
        """The same answer, that many seconds later; no abort is heard meanwhile."""
        return replace(self, delay_s=delay_s)

    def paced(self, token_s: float, *, queued_s: float = 0.0) -> Self:
        """The same generation, in time: queued that long, then one token after the other; an abort cuts it."""
        return replace(self, token_s=token_s, queued_s=queued_s)

    def held(self, count: int) -> Self:
        """The same generation, which gets no further than so many tokens, until it is aborted."""
        return replace(self, kind="hang", ids=self.ids[:count])

    def aborted_after(self, count: int) -> Self:
        """The same generation, aborted after so many tokens."""
        kept = Reply.abort(self.ids[:count])
        logprobs = None if self.logprobs is None else self.logprobs[:count]
        return replace(self, kind="tokens", ids=kept.ids, finish=kept.finish, meta={**self.meta, **kept.meta},
                       logprobs=logprobs, logprob_ids=None, token_s=0.0, queued_s=0.0)  # fmt: skip

    def limited(self, max_new_tokens: int | None) -> Self:
        """The same generation, cut by length where it has more tokens than were asked for."""
        if max_new_tokens is None or len(self.ids) <= max_new_tokens:
            return self
        kept = Reply.tokens(self.ids[:max_new_tokens], "length")
        return replace(self, ids=kept.ids, finish=kept.finish)
