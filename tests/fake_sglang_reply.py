"""What the fake SGLang answers: generations, statuses, broken bodies, cut connections, silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import orjson


@dataclass(frozen=True, slots=True)
class Reply:
    """What one `/generate` request gets. Build it with the class methods."""

    kind: Literal["tokens", "raw", "cut", "reset", "hang", "stall"]
    ids: tuple[int, ...] = ()
    finish: dict[str, Any] = field(default_factory=dict)
    logprobs: tuple[float | None, ...] | None = None
    logprob_ids: tuple[int, ...] | None = None
    text: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    code: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0

    @classmethod
    def tokens(
        cls,
        ids: Sequence[int],
        finish: str = "stop",
        *,
        matched: int | str | None = None,
        logprobs: Sequence[float | None] | None = None,
        logprob_ids: Sequence[int] | None = None,
        text: str | None = None,
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
    def stall(cls) -> Self:
        """A 200 that stops after half of its body, with the connection open."""
        return cls("stall")

    @classmethod
    def reset(cls) -> Self:
        """The connection closes before a response."""
        return cls("reset")

    @classmethod
    def hang(cls, partial: Sequence[int] = ()) -> Self:
        """No answer until the request is aborted by its rid; then an abort with the `partial` ids."""
        return cls("hang", ids=tuple(partial))

    def after(self, delay_s: float) -> Self:
        """The same answer, that many seconds later."""
        return replace(self, delay_s=delay_s)
