"""Drift: how many sampled tokens would be others, had the text of each turn been decoded and encoded again.

A turn is measured alone, control tokens included: a sampled control token encodes to itself, and ordinary tokens that
spell one count as drift, since they would come back as that token.

A sampled token differs unless the encoding of the turn's text has the same token at the same place of the text, or both
end with the same tokens from there on. Places are counted in characters (and bytes of an unfinished one), U+FFFD for
broken UTF-8 included. Where encoding changes the text itself (Unicode normalisation), a new token's place is where the
text lies that it was made of. Time is linear in the tokens.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from strands_rollout.template.tokens import bytes_of_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-F]{2})>")


BytesOf = Callable[[int], bytes]
"""The bytes of a token by its id; see `token_bytes`."""
Placed = tuple[int, int, int, int]
"""Characters before a token, bytes of an unfinished one, empty tokens right before it, and its id."""


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


def unlike_tokens(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, bytes_of: BytesOf, again: Sequence[int] | None = None
) -> tuple[list[Placed], list[Placed]]:
    """Sampled tokens and those that their text is encoded to, `again` where that is known, as `placed_tokens`.

    Both end where from there on they are alike: both are empty where nothing would differ.
    """
    again = encoded_again(ids, tokenizer) if again is None else again
    if list(again) == list(ids):
        return [], []
    shorter = min(len(ids), len(again))
    alike = next((n for n in range(shorter) if ids[-1 - n] != again[-1 - n]), shorter)
    sampled = list(placed_tokens(ids[: len(ids) - alike], bytes_of))
    return sampled, placed_again(ids, again, tokenizer, bytes_of)[: len(again) - alike]


def placed_again(
    ids: Sequence[int], again: Sequence[int], tokenizer: PreTrainedTokenizerBase, bytes_of: BytesOf
) -> list[Placed]:
    """The tokens that the text of ids is encoded to again, each with its place in the text as it was."""
    text = decoded(ids, tokenizer)
    if decoded(again, tokenizer) == text:
        return list(placed_tokens(again, bytes_of))
    # encoding changes the text itself (Unicode normalisation): only the tokenizer knows the places in what it was given
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [(start, 0, 0, token) for (start, _), token in zip(encoding["offset_mapping"], again, strict=True)]


def encoded_again(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokenizer's own ids for the text of these, control tokens included."""
    return list(tokenizer.encode(decoded(ids, tokenizer), add_special_tokens=False, verbose=False))


def decoded(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of ids, control tokens included."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> BytesOf:
    """The bytes that a token stands for, enough to find its place in the text; nothing for an unknown id."""
    has_bytes = is_byte_level(tokenizer)

    @functools.cache
    def bytes_of(token_id: int) -> bytes:
        token = tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if has_bytes:
            return bytes_of_token(token)
        # SentencePiece writes a space as U+2581, one character too, and a byte without a piece of its own as `<0xE2>`
        byte = _BYTE_PIECE.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.encode()

    return bytes_of


def is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether its vocabulary writes each byte as one character, as GPT-2's does."""
    decoder = tokenizer.backend_tokenizer.decoder
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


def placed_tokens(ids: Sequence[int], bytes_of: BytesOf) -> Iterator[Placed]:
    """Each id with where it begins in the text, in ascending order."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    characters = pending = empty = 0
    for token_id in ids:
        surface = bytes_of(token_id)
        if not pending and (count := _whole_characters(surface)) is not None:
            yield characters, 0, empty, token_id
            characters += count
            empty = 0 if surface else empty + 1
            continue
        first = decoder.decode(surface[:1])
        # a byte that does not continue the unfinished character breaks it: that one is U+FFFD, and another begins
        breaks = pending and (len(first) == 2 or (first and decoder.getstate()[0]))
        yield (characters + 1, 0, 0, token_id) if breaks else (characters, pending, empty, token_id)
        characters += len(first) + len(decoder.decode(surface[1:]))
        pending = len(decoder.getstate()[0])
        empty = 0 if surface else empty + 1


@functools.lru_cache(maxsize=2**18)
def _whole_characters(surface: bytes) -> int | None:
    """How many characters these bytes are; None where they are not whole ones."""
    try:
        return len(surface.decode())
    except UnicodeDecodeError:
        return None
