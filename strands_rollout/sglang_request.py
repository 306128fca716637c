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
        self._json = bytearray()
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
        if self._json:
            self._json += b","
        self._json += encoded
        self._count += len(new)
        return self

    def to_json(self) -> bytes:
        """The ids as a JSON array."""
        return b"[" + self._json + b"]"

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


class GenerateRequest:
    """One generation's request; only its rid changes from attempt to attempt.

    Raises:
        TrajectoryError: There are no input ids.
        ConfigError: `extra` names a field that this client sets or must not send, or something is not JSON.
    """

    __slots__ = ("_json",)

    def __init__(
        self,
        input_ids: EncodedIds,
        sampling_params: Mapping[str, Any],
        *,
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
        self._json = b'{"input_ids":' + input_ids.to_json() + b"," + rest[1:-1]

    def body(self, rid: str) -> bytes:
        """The request's JSON under this rid."""
        return self._json + b',"rid":' + orjson.dumps(rid) + b"}"
