"""Cuts text to a number of tokens, keeping head and tail around a marker that says how much is missing."""

from __future__ import annotations

from strands_rollout.token_encoder import TokenEncoder

_MAX_CHARS_PER_TOKEN = 16


def is_far_over(length: int, max_tokens: int) -> bool:
    """Whether a text of `length` characters has so certainly more tokens that it need not be encoded to know it."""
    return length > 2 * max_tokens * _MAX_CHARS_PER_TOKEN


def head_and_tail(text: str, max_tokens: int, encoder: TokenEncoder) -> str:
    """`text` if it has at most `max_tokens` tokens, else its head and tail and a marker between them.

    The result may exceed `max_tokens` by a few tokens where the pieces meet: who needs it exact measures again. Half
    of the kept tokens are head. With `max_tokens` below the marker's own length the result is empty.
    """
    if is_far_over(len(text), max_tokens):
        # far over: drop the middle unseen, so that a megabyte is never encoded
        kept = max_tokens * _MAX_CHARS_PER_TOKEN
        head_text, tail_text = text[: kept // 2], text[len(text) - kept // 2 :]
        return _joined(text, encoder.encode_plain(head_text), encoder.encode_plain(tail_text), max_tokens, encoder)
    ids = encoder.encode_plain(text)
    return text if len(ids) <= max_tokens else _joined(text, ids, ids, max_tokens, encoder)


def _joined(text: str, head_ids: list[int], tail_ids: list[int], max_tokens: int, encoder: TokenEncoder) -> str:
    room = max_tokens - len(encoder.encode_plain(_marker(len(text))))
    if room < 0:
        return ""
    head = encoder.decode(head_ids[: room - room // 2]).rstrip("\ufffd")
    tail = encoder.decode(tail_ids[len(tail_ids) - room // 2 :]).lstrip("\ufffd")
    return head + _marker(len(text) - len(head) - len(tail)) + tail


def _marker(dropped: int) -> str:
    return f"\n[... {dropped} characters cut ...]\n"
