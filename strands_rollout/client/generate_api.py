"""What an engine sampled for one request, checked token by token before anyone may use it.

Knows the shape of SGLang 0.5's `/generate` answers; nothing of HTTP or of conversations. Nothing is padded or guessed:
an answer whose ids, counts and logprobs disagree is refused.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Final

import orjson

from strands_rollout.errors import EngineResponseError

# A logprob is at most 0; float32 rounding of log_softmax can lift it by about 1e-6.
MAX_LOGPROB: Final = 1e-4
FINISH_TYPES: Final = ("stop", "length", "abort")
_NUMBERS: Final = frozenset({float, int})


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why sampling ended.

    Attributes:
        type: "stop", "length" or "abort".
        matched: For "stop": the token id (the last of the output) or the string that ended it, where the engine says.
        length: For "length": the limit that was reached, where the engine says.
        message: For "abort": the engine's words.
        status_code: For "abort": an HTTP status where the engine aborted because of an error; None for a plain abort.
    """

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One accepted answer.

    Attributes:
        output_ids: The sampled tokens, the stop token included; empty if the request was aborted while it was queued.
        logprobs: One per output id, natural log at the sampling temperature; empty if none were asked for.
        finish_reason: Why it ended. An abort is an answer, not an error: its tokens are real.
        text: The engine's own decoding, for people; never encode it again.
        meta_info: As received.
        rid: The request id of the attempt that succeeded.
        latency_s: From the call to the accepted answer, retries included.
        attempts: Requests that were sent for it, 1 or more.
    """

    output_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    text: str
    meta_info: dict[str, Any]
    rid: str
    latency_s: float
    attempts: int

    @property
    def completion_tokens(self) -> int:
        """How many tokens were sampled."""
        return len(self.output_ids)

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the input by the engine's count; None if it was aborted before it ran."""
        return _int_or_none(self.meta_info.get("prompt_tokens"))

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the input that came from the prefix cache; None if it was aborted before it ran."""
        return _int_or_none(self.meta_info.get("cached_tokens"))

    @property
    def weight_version(self) -> str | None:
        """The version of the weights that the engine names, if it does."""
        version = self.meta_info.get("weight_version")
        return None if version is None else str(version)

    @property
    def weight_versions(self) -> list[tuple[str | None, int, int]]:
        """(version, start, end) in output tokens: several where the weights were updated while it was sampled.

        SGLang 0.5.2x reports the spans as `meta_info.weight_versions`; where they are absent or don't cover the output,
        the one version that is named counts for all of it.
        """
        count = len(self.output_ids)
        return _read_weight_versions(self.meta_info.get("weight_versions"), count) or [(self.weight_version, 0, count)]


class NotJsonError(ValueError):
    """A body that isn't JSON, such as half of one: the one bad answer that may be an accident of the connection."""


def load_json(body: bytes) -> Any:  # noqa: ANN401 - foreign JSON; the reader below converts it
    """Decode a body; NaN and Infinity pass, so that the logprob check can name their token.

    Raises:
        NotJsonError: It is not JSON.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as e:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise NotJsonError(str(e)) from e


def read_generation(
    answer: object, *, return_logprob: bool, vocab_size: int | None, rid: str, latency_s: float, attempts: int
) -> Generation:
    """Check the decoded JSON of a 200 and make it a value.

    Raises:
        EngineResponseError: A field is missing, of the wrong kind, or disagrees with another.
    """
    if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
        raise EngineResponseError(f"expected a JSON object with meta_info, got {_shown(answer)}{_MISPLACED}")
    meta = answer["meta_info"]
    finish = _read_finish(meta.get("finish_reason"))
    logprobs, beside = _read_entries(_entries(answer, meta))
    ids = answer.get("output_ids")
    if ids is None:  # servers before 0.4.7 put them beside the logprobs only
        ids = beside
    _check_ids(ids, vocab_size=vocab_size, completion_tokens=meta.get("completion_tokens"))
    if return_logprob:
        logprobs = _checked_logprobs(logprobs, beside, ids)
    text = answer.get("text")
    return Generation(
        output_ids=ids,
        logprobs=logprobs if return_logprob else [],
        finish_reason=finish,
        text=text if isinstance(text, str) else "",
        meta_info=meta,
        rid=rid,
        latency_s=latency_s,
        attempts=attempts,
    )


_MISPLACED: Final = "; check that the URL is that of an SGLang server, whose native endpoint is /generate"


def _read_finish(reason: object) -> FinishReason:
    if not isinstance(reason, dict) or reason.get("type") not in FINISH_TYPES:
        raise EngineResponseError(f"meta_info.finish_reason is {_shown(reason)}; expected a type of {FINISH_TYPES}")
    matched = reason.get("matched")
    message = reason.get("message")
    return FinishReason(
        type=reason["type"],
        matched=matched if isinstance(matched, int | str) else None,
        length=_int_or_none(reason.get("length")),
        message=None if message is None else str(message),
        status_code=_int_or_none(reason.get("status_code")),
    )


def _check_ids(ids: object, *, vocab_size: int | None, completion_tokens: object) -> None:
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise EngineResponseError(f"output_ids is {_shown(ids)}; expected a list of ints")
    if ids and (min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size)):
        position = next(n for n, i in enumerate(ids) if i < 0 or (vocab_size is not None and i >= vocab_size))
        raise EngineResponseError(
            f"output id {ids[position]} at position {position} is outside the vocabulary of {vocab_size} tokens; "
            "the engine serves another model than the one this client was told of"
        )
    if completion_tokens is not None and completion_tokens != len(ids):
        raise EngineResponseError(f"got {len(ids)} output ids; meta_info.completion_tokens says {completion_tokens!r}")


def _entries(answer: dict[str, Any], meta: dict[str, Any]) -> object:
    """Of the three places where versions of SGLang put logprobs, the first that has any.

    The second and third as torchrl reads them (torchrl 0.14, torchrl/modules/llm/policies/sglang_wrapper.py).
    """
    places = meta.get("output_token_logprobs"), answer.get("output_token_logprobs"), meta.get("logprobs")
    return next((entries for entries in places if entries), [])


def _read_entries(entries: object) -> tuple[list[Any], list[Any]]:
    """Split [[logprob, token id, text], ...] into logprobs and token ids."""
    try:
        return [entry[0] for entry in entries], [entry[1] for entry in entries]  # type: ignore[attr-defined]
    except (TypeError, IndexError, KeyError) as e:
        raise EngineResponseError(
            "meta_info.output_token_logprobs: expected a list of [logprob, token id, text]"
        ) from e


def _checked_logprobs(logprobs: list[Any], beside: list[Any], ids: list[int]) -> list[float]:
    if len(logprobs) != len(ids):
        raise EngineResponseError(f"got {len(logprobs)} logprobs for {len(ids)} output ids; expected one for each")
    if beside != ids:
        position = next(n for n, pair in enumerate(zip(ids, beside, strict=True)) if pair[0] != pair[1])
        raise EngineResponseError(
            f"output id {ids[position]} at position {position} has the logprob of token {beside[position]!r} beside it"
        )
    kinds = set(map(type, logprobs))
    if not kinds <= _NUMBERS or not _are_logprobs(logprobs):
        position = next(n for n, p in enumerate(logprobs) if type(p) not in _NUMBERS or not _are_logprobs([p]))
        raise EngineResponseError(
            f"the logprob of output id {ids[position]} at position {position} is {logprobs[position]!r}; expected a "
            "finite number of at most 0"
        )
    return list(map(float, logprobs)) if int in kinds else logprobs


def _are_logprobs(numbers: list[float]) -> bool:
    """Whether all are finite and at most 0; never one by one, since an answer has hundreds."""
    try:
        # a sum is finite only if all that it sums is
        is_finite = math.isfinite(sum(numbers)) or all(map(math.isfinite, numbers))
    except OverflowError:  # an int beyond all floats
        return False
    return is_finite and max(numbers, default=0.0) <= MAX_LOGPROB


def _read_weight_versions(spans: object, count: int) -> list[tuple[str | None, int, int]]:
    """The spans where they cover `count` tokens without a gap, else nothing."""
    found: list[tuple[str | None, int, int]] = []
    reached = 0
    for span in spans if isinstance(spans, list) else ():
        end = _int_or_none(span.get("end")) if isinstance(span, dict) else None
        if end is None or end <= reached or span.get("start") != reached:
            return []
        found.append((str(span.get("version")), reached, end))
        reached = end
    return found if reached == count else []


def _int_or_none(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({type(value).__name__})"
