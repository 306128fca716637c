"""Two encodings of a text: the tokenizer's own, and one token per byte, as a policy may sample it."""

import functools
from typing import Any

from strands_rollout.template.tokens import token_bytes


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


@functools.cache
def one_byte_tokens(tokenizer: Any) -> dict[bytes, int]:
    bytes_of = token_bytes(tokenizer)
    return {bytes_of(token): token for token in range(tokenizer.vocab_size) if len(bytes_of(token)) == 1}


def byte_ids(tokenizer: Any, text: str) -> list[int]:
    """Return one token for each byte of the text; encoding the text again usually gives other tokens."""
    return [one_byte_tokens(tokenizer)[bytes([value])] for value in text.encode()]
