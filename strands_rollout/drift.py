"""Drift: how many sampled tokens would be others, had the text of each turn been decoded and encoded again.

Knows a Hugging Face fast tokenizer and token ids. A turn is measured alone, control tokens included: a sampled control
token encodes to itself, and ordinary tokens that spell one count as drift, since they would come back as that token.

A sampled token differs unless the encoding of the turn's text has the same token at the same place of the text, or both
end with the same tokens from there on. Places are counted in characters (and bytes of an unfinished one), U+FFFD for
broken UTF-8 included. Where encoding changes the text itself (Unicode normalisation), places no longer agree: then all
tokens between the first change and the common end count. Time is linear in the tokens.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers.pre_tokenizers import ByteLevel

from strands_rollout.finished_sample import kept

MAX_SAMPLES: Final = 64
"""Samples of a step whose drift is measured."""
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class Drift:
    """The drift of one sample.

    Attributes:
        sampled_tokens: Tokens that were compared; at least 1.
        drift_tokens: Of these, how many would differ.
    """

    sampled_tokens: int
    drift_tokens: int

    @property
    def share(self) -> float:
        """Differing tokens by sampled tokens, 0 to 1."""
        return self.drift_tokens / self.sampled_tokens


def measure_drift(samples: Sequence[Sequence[Sequence[int]]], tokenizer: Any) -> list[Drift]:  # noqa: ANN401 - any fast tokenizer
    """The drift of at most `MAX_SAMPLES` of the samples, evenly spread; always of the same ones.

    A sample with ids that the tokenizer does not take, such as negative ones, is left out.

    Args:
        samples: Each the sampled ids of its turns; those without any token are not measured.
        tokenizer: The policy's, a Hugging Face fast tokenizer.
    """
    measurable = [turns for turns in samples if any(turns)]
    count = min(len(measurable), MAX_SAMPLES)
    spread = [measurable[position * len(measurable) // count] for position in range(count)]
    bytes_of = token_bytes(tokenizer)
    drifts = [
        kept("drift", functools.partial(_drift_of, turns, tokenizer, bytes_of), of_sample=True) for turns in spread
    ]
    return [drift for drift in drifts if drift is not None]


def _drift_of(turns: Sequence[Sequence[int]], tokenizer: Any, bytes_of: Callable[[int], bytes]) -> Drift:  # noqa: ANN401
    return Drift(sum(map(len, turns)), sum(drift_of_turn(ids, tokenizer, bytes_of) for ids in turns))


def drift_of_turn(ids: Sequence[int], tokenizer: Any, bytes_of: Callable[[int], bytes]) -> int:  # noqa: ANN401
    """How many of one turn's sampled ids would differ.

    Args:
        ids: As they were sampled.
        tokenizer: The policy's.
        bytes_of: `token_bytes` of it.
    """
    sampled = list(ids)
    text = tokenizer.decode(sampled, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    encoded = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    if encoded == sampled:
        return 0
    while sampled and encoded and sampled[-1] == encoded[-1]:
        sampled.pop()
        encoded.pop()
    return len(set(placed_tokens(sampled, bytes_of)) - set(placed_tokens(encoded, bytes_of)))


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:  # noqa: ANN401
    """The bytes that a token stands for, enough to find its place in the text; nothing for an unknown id."""
    decoder = tokenizer.backend_tokenizer.decoder
    byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
    to_bytes = _of_byte_level if byte_level else _of_piece

    @functools.cache
    def bytes_of(token_id: int) -> bytes:
        token = tokenizer.convert_ids_to_tokens(token_id)
        return b"" if token is None else to_bytes(token)

    return bytes_of


def placed_tokens(ids: Sequence[int], bytes_of: Callable[[int], bytes]) -> Iterator[tuple[int, int, int, int]]:
    """Each id with where it begins in the text.

    Args:
        ids: Any.
        bytes_of: `token_bytes` of their tokenizer.

    Yields:
        Characters before the token, bytes of an unfinished one, empty tokens right before it, and its id; in ascending
        order.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    characters = pending = empty = 0
    for token_id in ids:
        surface = bytes_of(token_id)
        first = decoder.decode(surface[:1])
        # a byte that does not continue the unfinished character breaks it: that one is U+FFFD, and another begins
        breaks = pending and (len(first) == 2 or (first and decoder.getstate()[0]))
        yield (characters + 1, 0, 0, token_id) if breaks else (characters, pending, empty, token_id)
        characters += len(first) + len(decoder.decode(surface[1:]))
        pending = len(decoder.getstate()[0])
        empty = 0 if surface else empty + 1


def _of_byte_level(token: str) -> bytes:
    """A byte-level vocabulary writes each byte as one character; added tokens are written as they are."""
    alphabet = _byte_alphabet()
    return bytes(alphabet[char] for char in token) if all(char in alphabet for char in token) else token.encode()


def _of_piece(token: str) -> bytes:
    """SentencePiece writes a space as U+2581, one character too, and a byte without a piece of its own as `<0xE2>`."""
    byte = _BYTE_PIECE.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Bytes that print stand for themselves, the others in order for the characters from U+0100 on."""
    alphabet = sorted(ByteLevel.alphabet())
    table = {char: ord(char) for char in alphabet if ord(char) < 256}
    others = (value for value in range(256) if chr(value) not in table)
    return table | dict(zip(alphabet[len(table) :], others, strict=True))
