"""Spell a text with other tokens than the tokenizer does, as a policy that samples token by token may."""

from collections.abc import Sequence
from random import Random
from typing import Any

from strands_rollout.template.tokens import token_bytes


class Respeller:
    """Function that replaces some tokens by two tokens that spell the same bytes.

    Args:
        tokenizer: A Hugging Face fast tokenizer.
        share: Probability that a token which can be split is split.
        rng: Chooses the tokens, and how they are split.
    """

    def __init__(self, tokenizer: Any, share: float, rng: Random) -> None:
        self._share = share
        self._rng = rng
        bytes_of, special = token_bytes(tokenizer), set(tokenizer.get_added_vocab().values())
        spelled = {token: bytes_of(token) for token in sorted(tokenizer.get_vocab().values()) if token not in special}
        token_of = {piece: token for token, piece in spelled.items() if piece}
        self._halves = {
            token: [
                (token_of[piece[:at]], token_of[piece[at:]])
                for at in range(1, len(piece))
                if piece[:at] in token_of and piece[at:] in token_of
            ]
            for token, piece in spelled.items()
        }

    def __call__(self, ids: Sequence[int]) -> list[int]:
        """Return ids of the same text; control tokens are not split."""
        return [new for token in ids for new in self._respelled(token)]

    def _respelled(self, token: int) -> Sequence[int]:
        halves = self._halves.get(token)
        if not halves or self._rng.random() >= self._share:
            return (token,)
        return self._rng.choice(halves)
