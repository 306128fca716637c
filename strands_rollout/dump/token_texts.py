"""What each token id stands for, read from a tokenizer when it is first asked for.

Knows a Hugging Face fast tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from strands_rollout.drift import is_byte_level, token_bytes

_MARKED_SPACE: Final = "\u2581".encode()  # as SentencePiece writes a space


class TokenTexts(Mapping[int, bytes]):
    """The bytes of all ids of a tokenizer; an id without a token is not in it.

    Args:
        tokenizer: Any Hugging Face fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401
        self._size = len(tokenizer)
        self._bytes_of = token_bytes(tokenizer)
        self._spaces_are_marked = not is_byte_level(tokenizer)
        self._token_of = tokenizer.convert_ids_to_tokens

    def __getitem__(self, token_id: int) -> bytes:
        if token_id not in range(self._size) or self._token_of(token_id) is None:
            raise KeyError(token_id)
        text = self._bytes_of(token_id)
        return text.replace(_MARKED_SPACE, b" ") if self._spaces_are_marked else text

    def __iter__(self) -> Iterator[int]:
        return (token_id for token_id in range(self._size) if self._token_of(token_id) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)
