"""SGLang's native `/generate` API without HTTP: requests as bytes, answers as `Generation`, checked token by token.

A single id outside the vocabulary kills an SGLang 0.5 server with all its processes, so ids are checked before they are
sent. Answers are never padded or guessed: it is an error if an answer's ids, counts and logprobs disagree.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import orjson

from strands_rollout.errors import ConfigError, EngineResponseError, TrajectoryError
from strands_rollout.files.json_codec import Json

_OWN_FIELDS: Final = frozenset({"input_ids", "sampling_params", "return_logprob", "rid"})
_FORBIDDEN_FIELDS: Final = {
    "logprob_start_len": "the engine can't use its prefix cache for input logprobs",
    "stream": "this client reads no streams",
    "text": "the prompt is sent as token ids",
}


class EncodedIds:
    """A growing prompt: token ids that are checked once and stored as the JSON of the request.

    The time to append ids depends on their number only, not on the length of the prompt.

    Args:
        ids: The first ids.
        vocab_size: Ids must be below this number; if None, they are only checked to be integers >= 0.

    Raises:
        TrajectoryError: From the constructor and `extend`: a value is not an int in the vocabulary. No id is appended
            then.
    """

    __slots__ = ("_count", "_json", "vocab_size")

    def __init__(self, ids: Sequence[int] = (), *, vocab_size: int | None = None) -> None:
        self.vocab_size = vocab_size
        self._json = bytearray(b"[")
        self._count = 0
        self.extend(ids)

    def __len__(self) -> int:
        return self._count

    def extend(self, ids: Sequence[int]) -> Self:
        """Check and append ids; positions in error messages count from the start of the prompt."""
        new = list(ids)
        if not new:
            return self
        encoded = _encode_ids(new)
        if encoded is None or (self.vocab_size is not None and max(new) >= self.vocab_size):
            raise TrajectoryError(self._describe_invalid(new))
        if self._count:
            self._json += b","
        self._json += encoded
        self._count += len(new)
        return self

    def mark(self) -> tuple[int, int]:
        """Return the current end, for `rewind`."""
        return self._count, len(self._json)

    def rewind(self, mark: tuple[int, int]) -> None:
        """Remove the ids that were appended after a mark."""
        self._count, size = mark
        del self._json[size:]

    def to_json(self, before: bytes = b"", after: bytes = b"") -> bytes:
        """Return the ids as a JSON array between `before` and `after`; the ids are copied only once."""
        return b"".join((before, self._json, b"]", after))

    def _describe_invalid(self, new: list[Any]) -> str:
        below = "" if self.vocab_size is None else f" below the vocabulary's size {self.vocab_size}"
        for position, token_id in enumerate(new, start=self._count):
            is_int = type(token_id) is int and token_id >= 0
            if not is_int or (self.vocab_size is not None and token_id >= self.vocab_size):
                return (
                    f"input id {token_id!r} ({type(token_id).__name__}) at position {position}: expected an int >= 0"
                    f"{below}. The request was not sent, since such an id can kill the server; check that the "
                    "tokenizer is the model's"
                )
        return "the input ids can't be written as JSON: expected a list of ints"


def _encode_ids(ids: Sequence[Any]) -> bytes | None:
    """Return ids as JSON without the brackets; None if a value is not an int of at least 0.

    For hundreds of ids, this check takes a fifth of the time of a loop in Python.
    """
    try:
        encoded = orjson.dumps(ids)[1:-1]
    except TypeError:
        return None
    # anything besides digits and commas belongs to a sign, a float, a bool, a null, a string or a list
    return None if encoded.translate(None, b"0123456789,") else encoded


class EncodedPrompt:
    """Encoding of a trajectory's prompts: the trajectory's ids, then new context. Each id is encoded only once.

    Args:
        token_ids: The trajectory's own list, not a copy. It may grow, but its ids must not change.
        vocab_size: See `EncodedIds`.
    """

    __slots__ = ("_after", "_encoded", "_known", "_mark", "_token_ids")

    def __init__(self, token_ids: list[int], *, vocab_size: int | None) -> None:
        self._token_ids = token_ids
        self._encoded = EncodedIds(vocab_size=vocab_size)
        self._known = 0  # number of the list's ids that are encoded before the mark
        self._mark = self._encoded.mark()
        self._after: list[int] = []  # ids encoded after the mark: context that may enter the trajectory

    def encodes(self, token_ids: list[int], *, vocab_size: int | None) -> bool:
        """Return whether this object encodes this very list for `vocab_size`, and the list was not shortened since."""
        is_same = token_ids is self._token_ids and vocab_size == self._encoded.vocab_size
        return is_same and len(token_ids) >= self._known

    def with_context(self, context_ids: Sequence[int]) -> EncodedIds:
        """Return the trajectory's ids followed by context; the result is valid until the next call.

        Raises:
            TrajectoryError: An id is outside the vocabulary.
        """
        encoded, new = self._encoded, self._token_ids[self._known :]
        after = [*new, *context_ids]
        if after[: len(self._after)] != self._after:  # the previous call's context was not appended to the trajectory
            encoded.rewind(self._mark)
            self._after = []
        encoded_already = len(self._after)
        if new and encoded_already <= len(new):
            encoded.extend(new[encoded_already:])
            self._known, self._mark, self._after = len(self._token_ids), encoded.mark(), []
            encoded_already, after = 0, list(context_ids)
        encoded.extend(after[encoded_already:])
        self._after = after
        return encoded


class GenerateRequest:
    """The request of one generation; a retry changes only the rid. If `input_ids` changes later, the request does not.

    Attributes:
        rid: Request id of the last `body`.
        return_logprob: Require one logprob per output id.
        prompt_length: Number of tokens that the engine must report as read; None disables the check. An answer without
            this report is accepted.
        max_new_tokens: Maximum number of sampled tokens; None disables the check.

    Raises:
        TrajectoryError: There are no input ids.
        ConfigError: `extra` has a field that this client sets or must not send, or a value can't be written as JSON.
    """

    __slots__ = ("_body", "_rid_at", "max_new_tokens", "prompt_length", "return_logprob", "rid")

    def __init__(
        self,
        input_ids: EncodedIds,
        sampling_params: Mapping[str, Any],
        *,
        rid: str,
        return_logprob: bool,
        extra: Mapping[str, Any] | None,
    ) -> None:
        if not len(input_ids):
            raise TrajectoryError("the prompt has no input ids: expected at least one")
        for name in extra or ():
            if name in _OWN_FIELDS:
                raise ConfigError(f"extra[{name!r}] can't be sent: use the argument {name} of generate() instead")
            if name in _FORBIDDEN_FIELDS:
                raise ConfigError(f"extra[{name!r}] can't be sent: {_FORBIDDEN_FIELDS[name]}; leave it out")
        fields = {"sampling_params": dict(sampling_params), "return_logprob": return_logprob, **(extra or {})}
        try:
            rest = orjson.dumps(fields)
        except TypeError as e:
            raise ConfigError(f"sampling_params or extra can't be written as JSON: {e}") from e
        end = _rid_suffix(rid)
        self.rid, self.return_logprob = rid, return_logprob
        # the engine expands an image to more tokens than the request has, so the count can't be checked here
        self.prompt_length = None if (extra or {}).get("image_data") else len(input_ids)
        self.max_new_tokens = sampling_params.get("max_new_tokens")
        self._body = input_ids.to_json(b'{"input_ids":', b",%b%b" % (rest[1:-1], end))
        self._rid_at = len(self._body) - len(end)

    def body(self, rid: str) -> bytes:
        """Return the request's JSON with this rid."""
        if rid != self.rid:
            self._body, self.rid = self._body[: self._rid_at] + _rid_suffix(rid), rid
        return self._body


def _rid_suffix(rid: str) -> bytes:
    return b',"rid":%b}' % orjson.dumps(rid)


# a logprob is at most 0, but float32 rounding of log_softmax can raise it by about 1e-6
MAX_LOGPROB: Final = 1e-4
# a smaller number becomes minus infinity in the trainer's float32 tensors, but no sampled token has probability 0
MIN_LOGPROB: Final = -3.4028234663852886e38
_FINISH_TYPES: Final = ("stop", "length", "abort")
_NUMBERS: Final = frozenset({float, int})


@dataclass(slots=True)
class FinishReason:
    """The reason why sampling ended.

    Attributes:
        type: "stop", "length" or "abort".
        matched: For "stop": the token id (the last of the output) or the string that ended the output; None if the
            engine does not report it.
        length: For "length": the limit that was reached, if the engine reports it.
        message: For "abort": the engine's message.
        status_code: For "abort": an HTTP status if an error made the engine abort; None for a plain abort.
    """

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None


@dataclass(slots=True)
class Generation:
    """A checked answer of the engine.

    Attributes:
        output_ids: The sampled tokens, including a stop token; may be empty, for example after an abort in the queue.
        logprobs: Natural log of each output id's probability at the sampling temperature; empty if not requested.
        finish_reason: The reason why sampling ended. An abort is an answer, not an error: its tokens are valid.
        text: The engine's decoding, for display; never encode it again.
        meta_info: The engine's `meta_info` without nulls. Counts summed by slime are left out if they are not ints.
        rid: Request id of the successful attempt.
        latency_s: Seconds from the call to the answer, including retries.
        attempts: Number of requests that were sent, at least 1.
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
        """Number of sampled tokens."""
        return len(self.output_ids)

    @property
    def prompt_tokens(self) -> int | None:
        """Number of input tokens by the engine's count; None if it reports none, as after an abort in the queue."""
        return _int_or_none(self.meta_info.get("prompt_tokens"))

    @property
    def cached_tokens(self) -> int | None:
        """Number of input tokens from the prefix cache; None if not reported, as after an abort in the queue."""
        return _int_or_none(self.meta_info.get("cached_tokens"))

    @property
    def weight_version(self) -> str | None:
        """Version of the weights; None if the engine does not report it."""
        version = self.meta_info.get("weight_version")
        return None if version is None else str(version)

    @property
    def weight_versions(self) -> list[tuple[str | None, int, int]]:
        """Spans (version, start, end) of the output; several if the weights were updated during sampling.

        SGLang 0.5.2x reports the spans as `meta_info.weight_versions`. If the spans are missing or don't cover the
        output, `weight_version` applies to the whole output.
        """
        count, spans = len(self.output_ids), self.meta_info.get("weight_versions")
        found: list[tuple[str | None, int, int]] = []
        reached = 0
        for span in spans if isinstance(spans, list) else ():
            end = _int_or_none(span.get("end")) if isinstance(span, dict) else None
            if end is None or end <= reached or span.get("start") != reached:
                found.clear()
                break
            found.append((str(span.get("version")), reached, end))
            reached = end
        return found if found and reached == count else [(self.weight_version, 0, count)]


class NotJsonError(ValueError):
    """A body is not JSON, for example because it is incomplete. Other invalid answers are not retried."""


def load_json(body: bytes) -> Json:
    """Decode JSON; accept NaN and Infinity, since the later check of logprobs names the token of such a number.

    Raises:
        NotJsonError: The body is not JSON.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as e:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise NotJsonError(str(e)) from e


_SUMMED: Final = frozenset(
    ("prompt_tokens", "cached_tokens", "spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct")
)
_WRONG_URL_HINT: Final = "; check that the URL points to an SGLang server, whose native endpoint is /generate"


def read_generation(
    answer: object, request: GenerateRequest, *, vocab_size: int | None, latency_s: float, attempts: int
) -> Generation:
    """Check the decoded JSON of an answer with status 200, and convert it to a `Generation`.

    Args:
        answer: The decoded JSON.
        request: The request that was answered.
        vocab_size: Output ids must be below this number; None disables the check.
        latency_s: For `Generation.latency_s`.
        attempts: For `Generation.attempts`.

    Raises:
        EngineResponseError: A field is missing, has the wrong type, or contradicts another field or the request.
    """
    if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
        raise EngineResponseError(f"expected a JSON object with meta_info, got {_shown(answer)}{_WRONG_URL_HINT}")
    meta = answer["meta_info"]
    finish = _read_finish(meta.get("finish_reason"))
    # the field of the logprobs depends on SGLang's version; torchrl 0.14 tries the same three fields
    # (torchrl/modules/llm/policies/sglang_wrapper.py)
    name = "output_token_logprobs"
    entries: Any = meta.get(name) or answer.get(name) or meta.get("logprobs") or []
    try:
        logprobs, logprob_ids = [entry[0] for entry in entries], [entry[1] for entry in entries]
    except (TypeError, IndexError, KeyError) as e:
        raise EngineResponseError(
            f"meta_info.{name} is {_shown(entries)}; expected a list of [logprob, token id, text]"
        ) from e
    ids = answer.get("output_ids")
    if ids is None:  # SGLang before 0.4.7 reports the ids only with the logprobs
        ids = logprob_ids
    _check_ids(ids, vocab_size=vocab_size, completion_tokens=meta.get("completion_tokens"))
    logprobs = _check_logprobs(logprobs, logprob_ids, ids) if request.return_logprob else []
    _check_matches_request(request, meta, finish, len(ids))
    text = answer["text"] if isinstance(answer.get("text"), str) else ""
    # slime's samples sum these fields over requests, so a value that is not an int is dropped
    facts = {
        key: value for key, value in meta.items() if value is not None and (key not in _SUMMED or type(value) is int)
    }
    return Generation(ids, logprobs, finish, text, facts, request.rid, latency_s, attempts)


def _read_finish(reason: object) -> FinishReason:
    if not isinstance(reason, dict) or reason.get("type") not in _FINISH_TYPES:
        raise EngineResponseError(
            f"meta_info.finish_reason is {_shown(reason)}; expected an object whose type is one of {_FINISH_TYPES}"
        )
    matched, message = reason.get("matched"), reason.get("message")
    return FinishReason(
        type=reason["type"],
        matched=matched if isinstance(matched, int | str) else None,
        length=_int_or_none(reason.get("length")),
        message=None if message is None else str(message),
        status_code=_int_or_none(reason.get("status_code")),
    )


def _check_ids(ids: object, *, vocab_size: int | None, completion_tokens: object) -> None:
    are_ids = isinstance(ids, list) and _encode_ids(ids) is not None
    if not isinstance(ids, list) or not (are_ids or set(map(type, ids)) <= {int}):
        raise EngineResponseError(f"output_ids is {_shown(ids)}; expected a list of ints")
    if ids and ((not are_ids and min(ids) < 0) or (vocab_size is not None and max(ids) >= vocab_size)):
        position = next(n for n, i in enumerate(ids) if i < 0 or (vocab_size is not None and i >= vocab_size))
        reason = (
            "is negative; check that the URL points to an SGLang server"
            if ids[position] < 0
            else f"is outside the vocabulary of {vocab_size} tokens; the engine serves a model with another vocabulary "
            "than this client's vocab_size"
        )
        raise EngineResponseError(f"output id {ids[position]} at position {position} {reason}")
    if completion_tokens is not None and completion_tokens != len(ids):
        raise EngineResponseError(
            f"got {len(ids)} output ids; expected {completion_tokens!r}, the answer's meta_info.completion_tokens"
        )


def _check_matches_request(request: GenerateRequest, meta: dict[str, Any], finish: FinishReason, count: int) -> None:
    answered_rid, read = meta.get("id"), meta.get("prompt_tokens")
    if answered_rid is not None and answered_rid != request.rid:
        raise EngineResponseError(
            f"got the answer to request {answered_rid!r}; expected the answer to {request.rid!r}. A proxy or cache in "
            "front of the engine mixes up answers: connect to the engine or to SGLang's own router"
        )
    # for an abort in the queue, SGLang reports no count; for an error before the first token, it reports the count of a
    # placeholder prompt
    has_read_prompt = count > 0 or finish.type != "abort"
    prompt_length, max_new_tokens = request.prompt_length, request.max_new_tokens
    if prompt_length is not None and read is not None and has_read_prompt and _int_or_none(read) != prompt_length:
        raise EngineResponseError(
            f"the engine read {read!r} prompt tokens; expected {prompt_length}, since a sample must not be trained "
            "on a prompt that the policy did not read. A retry does not help. SGLang truncates long prompts if it runs "
            "with --allow-auto-truncate: start it without that flag, or limit the prompts "
            "(--rollout-max-context-len and --eval-max-context-len, or context_window_limit)"
        )
    if isinstance(max_new_tokens, int) and count > max_new_tokens:
        raise EngineResponseError(
            f"got {count} output ids; expected at most max_new_tokens={max_new_tokens}. Check that proxies in front of "
            "the engine pass sampling_params on unchanged"
        )


def _check_logprobs(logprobs: list[Any], logprob_ids: list[Any], ids: list[int]) -> list[float]:
    if len(logprobs) != len(ids):
        raise EngineResponseError(f"got {len(logprobs)} logprobs for {len(ids)} output ids; expected one for each")
    if logprob_ids != ids:
        position = next(n for n, pair in enumerate(zip(ids, logprob_ids, strict=True)) if pair[0] != pair[1])
        raise EngineResponseError(
            f"output id {ids[position]} at position {position} comes with the logprob of token "
            f"{logprob_ids[position]!r}; expected its own"
        )
    kinds = set(map(type, logprobs))
    if not kinds <= _NUMBERS or not _are_logprobs(logprobs):
        position = next(n for n, p in enumerate(logprobs) if type(p) not in _NUMBERS or not _are_logprobs([p]))
        raise EngineResponseError(
            f"the logprob of output id {ids[position]} at position {position} is {logprobs[position]!r}; expected a "
            "finite number of at most 0, in float32"
        )
    return list(map(float, logprobs)) if int in kinds else logprobs


def _are_logprobs(numbers: list[float]) -> bool:
    """Return whether all numbers are finite in float32 and at most `MAX_LOGPROB`.

    A loop in Python would be slow for hundreds of logprobs.
    """
    try:
        total = sum(numbers)
        # Numbers of at most 0 (checked below) are at least as large as their sum. If the sum is below the minimum but
        # finite, no number is NaN, so `min` can be trusted.
        are_above_min = total >= MIN_LOGPROB or (math.isfinite(total) and min(numbers) >= MIN_LOGPROB)
    except OverflowError:  # an int too large for a float
        return False
    return are_above_min and max(numbers, default=0.0) <= MAX_LOGPROB


def _int_or_none(value: object) -> int | None:
    return value if type(value) is int else None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({type(value).__name__})"
