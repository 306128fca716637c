"""Text -> token ids, with control tokens only where trusted text asks for them.

Knows a Hugging Face fast tokenizer; knows nothing of messages or templates. Untrusted text is escaped before a template
sees it, and what was escaped is encoded by a twin of the tokenizer that has no added tokens at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from strands_rollout.byte_decoder import ByteDecoder
from strands_rollout.errors import TemplateError

_ESCAPE = "\U000f0000"
_FIRST_CODE = 0xF0001


class TokenEncoder:
    """Encodes rendered templates; cut at control tokens, each piece between them encoded whole.

    Build one per tokenizer: its decoder learns each token once. Several threads may use it.

    Attributes:
        cuts_are_plain: Whether no control token swallows the white space beside it.
    """

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - any Hugging Face fast tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TemplateError(
                f"got a {type(tokenizer).__name__}; expected a fast tokenizer (tokenizers-backed, with a "
                "tokenizer.json): control tokens in untrusted text can't be told apart without one."
            )
        added = tokenizer.added_tokens_decoder
        self._control_ids = {str(token): token_id for token_id, token in added.items()}
        self._control_id_set = frozenset(added)
        self._plain = _without_added_tokens(backend)
        self._cut = _control_pattern(added.values())
        self.cuts_are_plain = not any(token.lstrip or token.rstrip for token in added.values())
        # longest first: a control token that begins with another one must win
        self._escapable = [_ESCAPE, *sorted(self._control_ids, key=len, reverse=True)]
        self._codes = {text: chr(_FIRST_CODE + index) for index, text in enumerate(self._escapable)}
        self._escape_pattern = re.compile("|".join(map(re.escape, self._escapable)))
        self._unescape_pattern = re.compile(_ESCAPE + "(.)", re.DOTALL)
        self._backend = backend
        self._decoder = ByteDecoder(backend)
        self._check_plain_twin()

    @cached_property
    def vocab_size(self) -> int:
        """Ids are below this; the largest id + 1, added tokens included."""
        return int(max(max(self._control_id_set, default=-1), max(self._backend.get_vocab().values()))) + 1

    def escape(self, text: str) -> str:
        """Untrusted text with every control-token text hidden; ordinary text is returned as it is."""
        return self._escape_pattern.sub(lambda match: _ESCAPE + self._codes[match.group()], text)

    def unescape(self, text: str) -> str:
        """The inverse of `escape`, for any text that it occurs in."""
        return self._unescape_pattern.sub(lambda match: self._escapable[ord(match.group(1)) - _FIRST_CODE], text)

    def encode_rendered(self, rendered: str) -> list[int]:
        """Ids of a rendered template whose untrusted parts were escaped."""
        ids: list[int] = []
        for piece in self.pieces(rendered):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self.encode_plain(self.unescape(piece))
        return ids

    def pieces(self, rendered: str) -> Iterator[str | int]:
        """A rendered template cut into its control tokens, as ids, and the (escaped) text between them."""
        position = 0
        for match in self._cut.finditer(rendered):
            if match.start() > position:
                yield rendered[position : match.start()]
            yield self._control_ids[match[match.lastindex or 0]]
            position = match.end()
        if position < len(rendered):
            yield rendered[position:]

    def encode_trusted(self, text: str) -> list[int]:
        """Ids as the tokenizer itself encodes the text, control tokens included, nothing escaped."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text as ordinary tokens, whatever control-token text it contains."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids if text else []
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, control tokens included; broken UTF-8 at the ends becomes U+FFFD."""
        return self._decoder.decode(ids)

    def first_control(self, rendered: str) -> str | None:
        """Text of the first control token in trusted text."""
        match = self._cut.search(rendered)
        return match[match.lastindex or 0] if match else None

    def is_control(self, token_id: int) -> bool:
        """Whether the id is one of the tokenizer's added tokens."""
        return token_id in self._control_id_set

    def _check_plain_twin(self) -> None:
        for text in self._control_ids:
            leaked = self._control_id_set.intersection(self.encode_plain(text))
            if leaked:
                raise TemplateError(
                    f"the tokenizer's own vocabulary encodes the ordinary text {text!r} to the control token "
                    f"{min(leaked)}; expected it to be split, since tool output could forge control tokens. Use a "
                    "tokenizer whose control tokens are added tokens only."
                )


def _without_added_tokens(backend: Tokenizer) -> Tokenizer:
    """Shares the vocabulary with the tokenizer, and so is made at once."""
    twin = Tokenizer(backend.model)
    twin.normalizer, twin.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    return twin


def _control_pattern(added_tokens: Iterable[Any]) -> re.Pattern[str]:
    """Matches a control token and the white space that its flags swallow; the last group is the token."""
    by_flags: dict[tuple[bool, bool], list[str]] = {}
    for token in added_tokens:
        by_flags.setdefault((token.lstrip, token.rstrip), []).append(token.content)
    classes = []
    for (lstrip, rstrip), texts in by_flags.items():
        alternatives = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
        before, after = r"\s*" if lstrip else "", r"\s*" if rstrip else ""
        classes.append(f"{before}({alternatives}){after}")
    # (?!) never matches: a tokenizer without added tokens
    return re.compile("|".join(classes) or "(?!)")
