"""Token ids -> text, as a tokenizer decodes them, without asking it for each token again.

Knows the alphabet in which byte-level BPE writes bytes; nothing of templates or turns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tokenizers import Tokenizer, decoders


class ByteDecoder:
    """Decodes ids exactly as `tokenizer.decode(ids, skip_special_tokens=False)` does.

    The bytes of a byte-level tokenizer's ids are looked up once per id, then joined; another tokenizer is asked itself.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._bytes_of = _TokenBytes(tokenizer).__getitem__ if is_byte_level else None

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, control tokens included; broken UTF-8 becomes U+FFFD, ids without a token nothing."""
        if self._bytes_of is None:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        return b"".join(map(self._bytes_of, ids)).decode("utf-8", "replace")


class _TokenBytes(dict[int, bytes]):
    """Each token's bytes by its id, read from the tokenizer when they are first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            value = bytes([_BYTE_OF[char] for char in token])
        except KeyError:  # an added token is its own text
            value = token.encode()
        self[token_id] = value
        return value


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 as itself, and the other bytes, in order, as the characters from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF: Final = _byte_of_char()
