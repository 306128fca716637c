"""A `/generate` request as bytes, with every token id checked before it can leave.

Knows the fields of SGLang's native API; nothing of HTTP. One id outside the vocabulary kills an SGLang 0.5 server, all
its processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import orjson

from strands_rollout.errors import ConfigError, TrajectoryError

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
        """Where it ends now, for `rewind`."""
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
    """The prompts of a trajectory's requests: what it holds, and the context that is to follow; each id encoded once.

    Args:
        token_ids: The trajectory's own list, not a copy. It may grow; what it holds must stay.
        vocab_size: Ids must be below it; see `EncodedIds`.
    """

    __slots__ = ("_after", "_encoded", "_known", "_mark", "_token_ids")

    def __init__(self, token_ids: list[int], *, vocab_size: int | None) -> None:
        self._token_ids = token_ids
        self._encoded = EncodedIds(vocab_size=vocab_size)
        self._known = 0  # ids of the list that are encoded up to the mark
        self._mark = self._encoded.mark()
        self._after: list[int] = []  # ids that are encoded after the mark

    def is_of(self, token_ids: list[int], *, vocab_size: int | None) -> bool:
        """Whether it goes on from these ids."""
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

    Raises:
        TrajectoryError: There are no input ids.
        ConfigError: `extra` names a field that this client sets or must not send, or something is not JSON.
    """

    __slots__ = ("_body", "_rid", "_rid_at")

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
        self._rid = rid
        self._body = input_ids.to_json(b'{"input_ids":', b",%b%b" % (rest[1:-1], end))
        self._rid_at = len(self._body) - len(end)

    def body(self, rid: str) -> bytes:
        """The request's JSON under this rid."""
        if rid != self._rid:
            self._body, self._rid = self._body[: self._rid_at] + _end(rid), rid
        return self._body


def _end(rid: str) -> bytes:
    return b',"rid":%b}' % orjson.dumps(rid)
