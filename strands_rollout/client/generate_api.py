"""SGLang's native `/generate`: a request as bytes, and its answer as a `Generation`, both checked token by token.

One id outside the vocabulary kills an SGLang 0.5 server, all its processes: none can leave. Nothing of an answer is
padded or guessed: one whose ids, counts and logprobs disagree is refused. Nothing here knows HTTP.
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
    "logprob_start_len": "input logprobs forbid the prefix cache",
    "stream": "answers are read whole",
    "text": "the prompt is token ids",
}


class EncodedIds:
    """A growing prompt: token ids that were checked once and are kept as the JSON that the request needs.

    Appending what is new costs its own length only, however long the prompt is.

    Args:
        ids: The first ids.
        vocab_size: Ids must be below it; None checks only that they are integers >= 0.

    Raises:
        TrajectoryError: By the constructor and `extend`, for anything but an int of the vocabulary. Nothing is
            appended then.
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
        """Append ids after checking them; positions in the error count from the start of the prompt."""
        new = list(ids)
        if not new:
            return self
        try:
            encoded = orjson.dumps(new)[1:-1]
        except TypeError:
            encoded = b"?"
        # What is left without digits and commas is a sign, a float, a bool, a null, a string or a list.
        if encoded.translate(None, b"0123456789,") or (self.vocab_size is not None and max(new) >= self.vocab_size):
            raise TrajectoryError(self._complaint(new))
        if self._count:
            self._json += b","
        self._json += encoded
        self._count += len(new)
        return self

    def mark(self) -> tuple[int, int]:
        """The present end, for `rewind`."""
        return self._count, len(self._json)

    def rewind(self, mark: tuple[int, int]) -> None:
        """Forget what was appended since this mark."""
        self._count, size = mark
        del self._json[size:]

    def to_json(self, before: bytes = b"", after: bytes = b"") -> bytes:
        """The ids as a JSON array, between two texts: all of it is copied once."""
        return b"".join((before, self._json, b"]", after))

    def _complaint(self, new: list[Any]) -> str:
        below = "" if self.vocab_size is None else f" below the vocabulary's size {self.vocab_size}"
        for position, token_id in enumerate(new, start=self._count):
            is_int = type(token_id) is int and token_id >= 0
            if not is_int or (self.vocab_size is not None and token_id >= self.vocab_size):
                return (
                    f"input id {token_id!r} ({type(token_id).__name__}) at position {position}: expected an int >= 0"
                    f"{below}. It was not sent, since it can kill the server; check that the tokenizer is the model's"
                )
        return "the input ids can't be written as JSON: expected a list of ints"


class EncodedPrompt:
    """The prompts of a trajectory's requests: its ids, and the context that is to follow; each id encoded once.

    The list is the trajectory's own, not a copy. It may grow; what it holds must stay.
    """

    __slots__ = ("_after", "_encoded", "_known", "_mark", "_token_ids")

    def __init__(self, token_ids: list[int], *, vocab_size: int | None) -> None:
        self._token_ids = token_ids
        self._encoded = EncodedIds(vocab_size=vocab_size)
        self._known = 0  # ids of the list that are encoded up to the mark
        self._mark = self._encoded.mark()
        self._after: list[int] = []  # ids that are encoded after the mark

    def is_of(self, token_ids: list[int], *, vocab_size: int | None) -> bool:
        """Return True if it continues these ids."""
        is_same = token_ids is self._token_ids and vocab_size == self._encoded.vocab_size
        return is_same and len(token_ids) >= self._known

    def followed_by(self, context_ids: Sequence[int]) -> EncodedIds:
        """The trajectory's ids and these. What is returned changes with the next call.

        Raises:
            TrajectoryError: An id is not one of the vocabulary.
        """
        encoded, new = self._encoded, self._token_ids[self._known :]
        after = [*new, *context_ids]
        if after[: len(self._after)] != self._after:  # what was sent before has not entered the trajectory
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
    """One generation's request, as the ids are now; only its rid changes from attempt to attempt.

    Attributes:
        rid: Of the last body that was asked for.
        return_logprob: Whether one logprob per output id is required.
        prompt_length: Tokens that the engine must have read, if it says how many it read; None: not checked.
        max_new_tokens: The most tokens that may be sampled; None: not checked.

    Raises:
        TrajectoryError: There are no input ids.
        ConfigError: `extra` names a field that this client sets or must not send, or something is not JSON.
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
                raise ConfigError(f"extra[{name!r}] is set by the client itself; pass it as an argument of generate()")
            if name in _FORBIDDEN_FIELDS:
                raise ConfigError(f"extra[{name!r}] can't be sent: {_FORBIDDEN_FIELDS[name]}")
        fields = {"sampling_params": dict(sampling_params), "return_logprob": return_logprob, **(extra or {})}
        try:
            rest = orjson.dumps(fields)
        except TypeError as e:
            raise ConfigError(f"sampling_params or extra can't be written as JSON: {e}") from e
        end = _end(rid)
        self.rid, self.return_logprob = rid, return_logprob
        # the engine makes more tokens of images than it is sent; who sends them knows how many
        self.prompt_length = None if (extra or {}).get("image_data") else len(input_ids)
        self.max_new_tokens = sampling_params.get("max_new_tokens")
        self._body = input_ids.to_json(b'{"input_ids":', b",%b%b" % (rest[1:-1], end))
        self._rid_at = len(self._body) - len(end)

    def body(self, rid: str) -> bytes:
        """The request's JSON under this rid."""
        if rid != self.rid:
            self._body, self.rid = self._body[: self._rid_at] + _end(rid), rid
        return self._body


def _end(rid: str) -> bytes:
    return b',"rid":%b}' % orjson.dumps(rid)


# A logprob is at most 0; float32 rounding of log_softmax can lift it by about 1e-6.
MAX_LOGPROB: Final = 1e-4
# The trainer's tensors are float32: what is below is minus infinity there, which no sampled token has.
MIN_LOGPROB: Final = -3.4028234663852886e38
_FINISH_TYPES: Final = ("stop", "length", "abort")
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
        """The number of sampled tokens."""
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
    """A body that isn't JSON, such as half of one: the one bad answer that may be an accident of the connection."""


def load_json(body: bytes) -> Json:
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


_SUMMED: Final = frozenset(
    ("prompt_tokens", "cached_tokens", "spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct")
)
_MISPLACED: Final = "; check that the URL is that of an SGLang server, whose native endpoint is /generate"


def read_generation(
    answer: object, request: GenerateRequest, *, vocab_size: int | None, latency_s: float, attempts: int
) -> Generation:
    """Check the decoded JSON of a 200 and make it a value; output ids must be below `vocab_size`, where there is one.

    Raises:
        EngineResponseError: A field is missing, of the wrong kind, or disagrees with another or with the request.
    """
    if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
        raise EngineResponseError(f"expected a JSON object with meta_info, got {_shown(answer)}{_MISPLACED}")
    meta = answer["meta_info"]
    finish = _read_finish(meta.get("finish_reason"))
    # where versions of SGLang put logprobs: the second and third as torchrl reads them (torchrl 0.14,
    # torchrl/modules/llm/policies/sglang_wrapper.py)
    name = "output_token_logprobs"
    entries: Any = meta.get(name) or answer.get(name) or meta.get("logprobs") or []
    try:
        logprobs, beside = [entry[0] for entry in entries], [entry[1] for entry in entries]
    except (TypeError, IndexError, KeyError) as e:
        raise EngineResponseError(f"meta_info.{name}: expected a list of [logprob, token id, text]") from e
    ids = answer.get("output_ids")
    if ids is None:  # servers before 0.4.7 put them beside the logprobs only
        ids = beside
    _check_ids(ids, vocab_size=vocab_size, completion_tokens=meta.get("completion_tokens"))
    logprobs = _checked_logprobs(logprobs, beside, ids) if request.return_logprob else []
    _check_is_answer_to(request, meta, finish, len(ids))
    text = answer["text"] if isinstance(answer.get("text"), str) else ""
    # of what slime's samples sum over an episode's requests, only what can be added up
    facts = {
        key: value for key, value in meta.items() if value is not None and (key not in _SUMMED or type(value) is int)
    }
    return Generation(ids, logprobs, finish, text, facts, request.rid, latency_s, attempts)


def _read_finish(reason: object) -> FinishReason:
    if not isinstance(reason, dict) or reason.get("type") not in _FINISH_TYPES:
        raise EngineResponseError(f"meta_info.finish_reason is {_shown(reason)}; expected a type of {_FINISH_TYPES}")
    matched, message = reason.get("matched"), reason.get("message")
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


def _check_is_answer_to(request: GenerateRequest, meta: dict[str, Any], finish: FinishReason, count: int) -> None:
    """Refuse what was sampled for another request, after another prompt, or beyond what was asked for."""
    answered_rid, read = meta.get("id"), meta.get("prompt_tokens")
    if answered_rid is not None and answered_rid != request.rid:
        raise EngineResponseError(
            f"got the answer to the request {answered_rid!r}; expected that to {request.rid!r}. Something before the "
            "engine (a proxy, a cache) mixes answers up: connect to the engine or to SGLang's own router."
        )
    # SGLang gives no count where it aborts a request that is (again) in its queue, and that of a stand-in prompt where
    # it aborts one before its first token because of an error
    is_used = count > 0 or finish.type != "abort"
    prompt_length, max_new_tokens = request.prompt_length, request.max_new_tokens
    if prompt_length is not None and read is not None and is_used and _int_or_none(read) != prompt_length:
        raise EngineResponseError(
            f"the engine read {read!r} tokens of a prompt of {prompt_length}; expected all of them, since a sample "
            "must not be trained on a prompt that the policy did not read. Sending it again does not help. SGLang "
            "cuts long prompts if it runs with --allow-auto-truncate: start it without that, or keep prompts within "
            "what it reads (--rollout-max-context-len and --eval-max-context-len, or context_window_limit)."
        )
    if isinstance(max_new_tokens, int) and count > max_new_tokens:
        raise EngineResponseError(
            f"got {count} output ids for max_new_tokens={max_new_tokens}; expected at most as many as were asked for. "
            "Check that whatever stands before the engine passes sampling_params on unchanged."
        )


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
            "finite number of at most 0, in float32"
        )
    return list(map(float, logprobs)) if int in kinds else logprobs


def _are_logprobs(numbers: list[float]) -> bool:
    """Return True if all are finite in float32 and at most 0; never one by one, since an answer has hundreds."""
    try:
        is_finite = math.isfinite(sum(numbers))  # only if all that it sums is
    except OverflowError:  # an int beyond all floats
        return False
    return is_finite and min(numbers, default=0.0) >= MIN_LOGPROB and max(numbers, default=0.0) <= MAX_LOGPROB


def _int_or_none(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({type(value).__name__})"
