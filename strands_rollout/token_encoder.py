"""Text -> token ids, with control tokens only where trusted text asks for them.

Knows a Hugging Face fast tokenizer; knows nothing of messages or templates. Untrusted text is escaped before a template
sees it, and what was escaped is encoded by a twin of the tokenizer that has no added tokens at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from strands_rollout.errors import TemplateError

_ESCAPE = "\U000f0000"
_FIRST_CODE = 0xF0001


class TokenEncoder:
    """Encodes rendered templates; cut at control tokens, each piece between them encoded whole.

    Building it takes about a second for a vocabulary of 150,000 tokens; build one per tokenizer.

    Attributes:
        vocab_size: Ids are below this; the largest id + 1, added tokens included.
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
        # longest first: a control token that begins with another one must win
        self._escapable = [_ESCAPE, *sorted(self._control_ids, key=len, reverse=True)]
        self._codes = {text: chr(_FIRST_CODE + index) for index, text in enumerate(self._escapable)}
        self._escape_pattern = re.compile("|".join(map(re.escape, self._escapable)))
        self._unescape_pattern = re.compile(_ESCAPE + "(.)", re.DOTALL)
        self._backend = backend
        self.vocab_size = max(max(added, default=-1), max(backend.get_vocab().values())) + 1
        self._check_plain_twin()

    def escape(self, text: str) -> str:
        """Untrusted text with every control-token text hidden; ordinary text is returned as it is."""
        return self._escape_pattern.sub(lambda match: _ESCAPE + self._codes[match.group()], text)

    def unescape(self, text: str) -> str:
        """The inverse of `escape`, for any text that it occurs in."""
        return self._unescape_pattern.sub(lambda match: self._escapable[ord(match.group(1)) - _FIRST_CODE], text)

    def encode_rendered(self, rendered: str) -> list[int]:
        """Ids of a rendered template whose untrusted parts were escaped."""
        ids: list[int] = []
        position = 0
        for match in self._cut.finditer(rendered):
            ids += self.encode_plain(self.unescape(rendered[position : match.start()]))
            ids.append(self._control_ids[match[match.lastindex or 0]])
            position = match.end()
        ids += self.encode_plain(self.unescape(rendered[position:]))
        return ids

    def encode_trusted(self, text: str) -> list[int]:
        """Ids as the tokenizer itself encodes the text, control tokens included, nothing escaped."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text as ordinary tokens, whatever control-token text it contains."""
        return list(self._plain.encode(text, add_special_tokens=False).ids) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens included; broken UTF-8 at the ends becomes U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

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
    description = json.loads(backend.to_str())
    description |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    return Tokenizer.from_str(json.dumps(description))


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
