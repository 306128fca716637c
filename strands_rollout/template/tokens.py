"""Encode and decode text so that only trusted text yields control tokens; truncate texts; measure drift.

Untrusted text is escaped before a template sees it. After rendering, the text is unescaped, and encoded by a copy of
the tokenizer that has no added tokens.

To measure drift, each turn is decoded, and its text is encoded again. Drift is the number of sampled tokens that this
changes. Each turn is measured separately, with its control tokens. A sampled control token encodes to itself. Ordinary
tokens that spell a control token count as drift, since they would be encoded to that token.

A sampled token counts as equal if the new encoding has the same token at the same position in the text. A token also
counts as equal if both token sequences are the same from this token to their ends. Positions are counted in characters,
with U+FFFD for broken UTF-8, and in bytes within an incomplete character. If encoding changes the text (Unicode
normalization), a re-encoded token has the position of its source text. The time is linear in the number of tokens.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from tokenizers import Tokenizer, decoders, pre_tokenizers

from strands_rollout.errors import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LONG_TEXT_CHARS: Final = 10_000
"""Texts of at least this length are encoded in a thread; encoding this many characters takes 3 ms (8 ms for digits)."""
# An escaped text is a mark and a number. The mark's first character occurs nowhere else in the mark or the number, so
# that no mark begins inside another. Decimal digits survive what templates do with texts (JSON, Python's repr, upper
# case, stripping). If a control token begins or ends with a digit, private-use characters replace the digits.
_ALPHABETS: Final = ("012345678", "".join(map(chr, range(0xF0000, 0xF0009))))
_MARK: Final = "8314057264113702"
_SMALLEST_MARKED: Final = 10 ** len(_MARK)  # a smaller number is too short for a mark and a digit after it
_EMPTY: Final = ""
# characters that templates may add around a word, remove from it, or replace in it
_NON_WORD_CHARS: Final = re.compile(r"[\W_]+")
_LONGEST_WORD: Final = 64
# byte-level BPE writes a printable Latin-1 byte as itself; the other bytes become the characters from U+0100 on
_PRINTABLE: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHER_BYTES: Final = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF: Final = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + at): byte for at, byte in enumerate(_OTHER_BYTES)
}
_CHARS_PER_TOKEN: Final = 16
# a truncated text may have more tokens near the cut than the same passage of the whole text
_SPARE_TOKENS: Final = 64


class TokenEncoder:
    """Encoder of rendered templates, which encodes each text between control tokens as a whole.

    Make one encoder per tokenizer, since an encoder caches decoded tokens. An encoder is thread-safe.

    Attributes:
        control_ids: Text -> id of each control token.
        decode: Ids -> text, including control tokens; see `ByteDecoder.decode`.
        keeps_white_space: True if no control token swallows the white space next to it.
        tag_pairs: Texts of each pair of control tokens that open and close a part, such as ("<think>", "</think>").

    Raises:
        TemplateError: The tokenizer is not a fast tokenizer, or encodes a control token's text to a control token even
            without its added tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TemplateError(
                f"got a {type(tokenizer).__name__}; expected a fast tokenizer (tokenizers-backed, with a "
                "tokenizer.json): other tokenizers can't keep control tokens out of untrusted text"
            )
        added = tokenizer.added_tokens_decoder
        self.control_ids = {str(token): token_id for token_id, token in added.items()}
        self._control_id_set = frozenset(added)
        self._plain = Tokenizer(backend.model)  # shares the vocabulary, so this is fast
        self._plain.normalizer, self._plain.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
        # the tokenizer prepends no space to a text after a control token
        if getattr(backend.pre_tokenizer, "prepend_scheme", None) == "first":
            self._plain.pre_tokenizer = pre_tokenizers.Metaspace(
                backend.pre_tokenizer.replacement, prepend_scheme="never", split=backend.pre_tokenizer.split
            )
        self._cut = _control_pattern(added.values())
        self.keeps_white_space = not any(token.lstrip or token.rstrip for token in added.values())
        self._set_escapes()
        self._backend = backend
        self.decode = ByteDecoder(backend).decode
        for text in self.control_ids:
            if leaked := self._control_id_set.intersection(self.encode_plain(text)):
                raise TemplateError(
                    f"the tokenizer's own vocabulary encodes the ordinary text {text!r} to the control token "
                    f"{min(leaked)}; expected ordinary tokens, since tool output could otherwise forge control tokens. "
                    "Use a tokenizer whose control tokens are added tokens only"
                )

    @cached_property
    def vocab_size(self) -> int:
        """The largest id of all tokens, including added tokens, plus 1."""
        return int(max(max(self._control_id_set, default=-1), max(self._backend.get_vocab().values()))) + 1

    def escape(self, text: str, *, apart: bool = False) -> str:
        """Hide the texts of control tokens in untrusted text; ordinary text is returned unchanged.

        Different texts have different escaped forms. An empty escape is put next to a text that could begin or end a
        control token. Otherwise, the template's own text or another text could complete the token. This is not done for
        tokens that begin or end with a letter, a digit or a space, since many ordinary texts do, too.

        Args:
            text: Untrusted text.
            apart: Also put an empty escape before a text that is the word of a control token; see `tokens_of_word`.
        """
        if not apart and not any(part in text for part in self._parts_of_escapables):
            return text  # the usual case
        escaped = self._escape_pattern.sub(lambda match: self._codes[match.group()], text)
        if self._could_end_token(text) or (apart and self.tokens_of_word(text)):
            at = len(escaped) - len(escaped.lstrip())
            escaped = escaped[:at] + self._codes[_EMPTY] + escaped[at:]
        if self._could_begin_token(text):
            at = len(escaped.rstrip())
            escaped = escaped[:at] + self._codes[_EMPTY] + escaped[at:]
        return escaped

    def escape_number(self, number: int) -> int:
        """Escape a number, so that `unescape` restores its digits even if they look like an escaped text."""
        if -_SMALLEST_MARKED < number < _SMALLEST_MARKED:
            return number
        try:
            return int(self.escape(str(number)))
        except ValueError:  # the number is too long for `str`, or the marks are not digits
            return number

    def tokens_of_word(self, text: str) -> Collection[str]:
        """Return the control tokens that consist of the word `text` and signs, such as "</think>" for "think"."""
        if len(text) > _LONGEST_WORD or text in self._codes:  # too long for a word, or hidden by `escape` anyway
            return ()
        word = (text if text.isalnum() else _NON_WORD_CHARS.sub("", text)).casefold()
        return self._by_word.get(word, ()) if word else ()

    def _could_end_token(self, text: str) -> bool:
        begin = text.lstrip()[: self._longest]
        is_plain = self._last_signs.isdisjoint(begin)  # the usual case
        return not is_plain and any(begin[:length] in self._token_ends for length in range(1, len(begin) + 1))

    def _could_begin_token(self, text: str) -> bool:
        end = text.rstrip()[-self._longest :]
        return not self._first_signs.isdisjoint(end) and any(end[at:] in self._token_begins for at in range(len(end)))

    def unescape(self, text: str) -> str:
        """Undo `escape`: restore every escaped text that `text` contains."""
        return self._unescape_pattern.sub(lambda match: self._escaped.get(match.group(), match.group()), text)

    def encode_rendered(self, rendered: str) -> list[int]:
        """Encode a rendered template whose untrusted parts were escaped."""
        ids: list[int] = []
        for piece in self.pieces(rendered):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self.encode_plain(self.unescape(piece))
        return ids

    def pieces(self, rendered: str) -> Iterator[str | int]:
        """Split a rendered template; yield control tokens as ids, and the (escaped) texts between them."""
        position = 0
        for match in self._cut.finditer(rendered):
            if match.start() > position:
                yield rendered[position : match.start()]
            yield self.control_ids[match[match.lastindex or 0]]
            position = match.end()
        if position < len(rendered):
            yield rendered[position:]

    def encode_trusted(self, text: str) -> list[int]:
        """Encode trusted text, including control tokens, as the tokenizer itself does."""
        return _encode(self._backend, text)

    def encode_plain(self, text: str) -> list[int]:
        """Encode text to ordinary tokens, even the text of a control token; a lone surrogate becomes "?"."""
        if not text:
            return []
        try:
            return _encode(self._plain, text)
        except (TypeError, UnicodeError):  # a tool's schema or a call's JSON may contain lone surrogates
            return _encode(self._plain, text.encode("utf-8", "replace").decode())

    def first_control(self, rendered: str) -> str | None:
        """Return the text of the first control token in trusted text, or None."""
        match = self._cut.search(rendered)
        return match[match.lastindex or 0] if match else None

    def is_control(self, token_id: int) -> bool:
        """Return whether a token is one of the tokenizer's added tokens."""
        return token_id in self._control_id_set

    def _set_escapes(self) -> None:
        controls = sorted(filter(None, self.control_ids), key=len, reverse=True)
        edges = {text[0] for text in controls} | {text[-1] for text in controls}
        alphabet = next((digits for digits in _ALPHABETS if edges.isdisjoint(digits)), _ALPHABETS[-1])
        digits = str.maketrans(_ALPHABETS[0], alphabet)
        mark = _MARK.translate(digits)
        self._parts_of_escapables = (*sorted(edges), mark)
        self.tag_pairs = [(_opening_tag(text), text) for text in controls]
        self.tag_pairs = [pair for pair in self.tag_pairs if pair[0] != pair[1] and pair[0] in self.control_ids]
        # `controls` has long tokens first, so that a token is matched before a shorter one at its beginning
        escapable = [mark, *controls]
        width = len(f"{len(escapable):o}")
        self._codes = {
            text: mark + f"{index:0{width}o}".translate(digits) for index, text in enumerate([_EMPTY, *escapable])
        }
        self._escaped = {code: text for text, code in self._codes.items()}
        self._escape_pattern = re.compile("|".join(map(re.escape, escapable)))
        self._unescape_pattern = re.compile(f"{mark}[{alphabet[:8]}]{{{width}}}")
        # leave out tokens that begin or end with a letter, a digit or a space, as many ordinary texts do
        framed = [text for text in controls if not any(c.isalnum() or c.isspace() for c in (text[0], text[-1]))]
        self._first_signs, self._last_signs = {text[0] for text in framed}, {text[-1] for text in framed}
        self._token_begins = {text[:length] for text in framed for length in range(1, len(text))}
        self._token_ends = {text[-length:] for text in framed for length in range(1, len(text))}
        self._longest = max(map(len, framed), default=1)
        self._by_word: dict[str, list[str]] = {}
        for text in framed:
            self._by_word.setdefault(_NON_WORD_CHARS.sub("", text).casefold(), []).append(text)


def _opening_tag(closing: str) -> str:
    """Return the opening tag for a closing tag: <think></think>, <|START_X|><|END_X|> or <|x><x|>."""
    return re.sub(r"\A<(\w+)\|>\Z", r"<|\1>", closing.replace("/", "", 1).replace("END_", "START_"))


def _encode(backend: Tokenizer, text: str) -> list[int]:
    if len(text) < LONG_TEXT_CHARS:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    else:  # tokenizers releases the GIL for batches only
        ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _control_pattern(added_tokens: Iterable[Any]) -> re.Pattern[str]:
    """Make a pattern for a control token and the white space that it swallows; the matching group is the token."""
    by_flags: dict[tuple[bool, bool], list[str]] = {}
    for token in added_tokens:
        by_flags.setdefault((token.lstrip, token.rstrip), []).append(token.content)
    classes = []
    for (lstrip, rstrip), texts in by_flags.items():
        alternatives = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
        before, after = r"\s*" if lstrip else "", r"\s*" if rstrip else ""
        classes.append(f"{before}({alternatives}){after}")
    # (?!) never matches, for a tokenizer without added tokens
    return re.compile("|".join(classes) or "(?!)")


class ByteDecoder:
    """Decoder of ids that returns exactly what `tokenizer.decode(ids, skip_special_tokens=False)` returns."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._bytes_of = _TokenBytes(tokenizer).__getitem__ if is_byte_level else None

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids, including control tokens; broken UTF-8 becomes U+FFFD, and unknown ids are skipped."""
        if self._bytes_of is None:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        return b"".join(map(self._bytes_of, ids)).decode("utf-8", "replace")


class _TokenBytes(dict[int, bytes]):
    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = value = bytes_of_token(self._tokenizer.id_to_token(token_id) or "")
        return value


def bytes_of_token(token: str) -> bytes:
    """Return the bytes of a byte-level token; if a character of `token` stands for no byte, return `token` as UTF-8."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def shared_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    if one == other[: len(one)]:  # compared in C
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


def clearly_exceed(texts: Sequence[str], max_tokens: int, encoder: TokenEncoder) -> bool:
    """Return True if texts certainly have more than `max_tokens` tokens in total; encode no more of them than needed.

    The length in characters is not enough: in a run of spaces or of one letter, a token can have over 100 characters.
    """
    if sum(map(len, texts)) <= 2 * max_tokens * _CHARS_PER_TOKEN:
        return False
    left = max_tokens
    for text in texts:
        ids, is_whole = _ids_at_end(text, left, encoder)
        left -= len(ids)
        if not is_whole or left < -_SPARE_TOKENS * len(texts):
            return True
    return False


def truncate_middle(text: str, max_tokens: int, encoder: TokenEncoder) -> str:
    """Truncate a text to about `max_tokens` tokens: keep as much of its head as of its tail, with a marker between.

    A text with at most `max_tokens` tokens is returned unchanged. The result may exceed `max_tokens` by a few tokens,
    since the text next to the marker is tokenized differently. If the marker alone has more than `max_tokens` tokens,
    the result is empty.
    """
    head, is_whole = _ids_at_end(text, max_tokens, encoder)
    if is_whole:
        return text if len(head) <= max_tokens else _join_ends(text, head, head, max_tokens, encoder)
    # the middle is never encoded
    return _join_ends(text, head, _ids_at_end(text, max_tokens // 2, encoder, tail=True)[0], max_tokens, encoder)


def _ids_at_end(text: str, count: int, encoder: TokenEncoder, *, tail: bool = False) -> tuple[list[int], bool]:
    """Encode enough of a text's head (or tail) for more than `count` ids, or else the whole text.

    Return the ids, and True if they encode the whole text.
    """
    length = max(count, 0) * _CHARS_PER_TOKEN + _SPARE_TOKENS
    while length < len(text):
        ids = encoder.encode_plain(text[-length:] if tail else text[:length])
        if len(ids) > count + _SPARE_TOKENS:
            return ids, False
        length *= 4
    return encoder.encode_plain(text), True


def _join_ends(text: str, head_ids: list[int], tail_ids: list[int], max_tokens: int, encoder: TokenEncoder) -> str:
    budget = max_tokens - len(encoder.encode_plain(_cut_marker(len(text))))
    if budget < 0:
        return ""
    head = encoder.decode(head_ids[: budget - budget // 2]).rstrip("\ufffd")
    tail = encoder.decode(tail_ids[len(tail_ids) - budget // 2 :]).lstrip("\ufffd")
    return head + _cut_marker(len(text) - len(head) - len(tail)) + tail


def _cut_marker(dropped: int) -> str:
    return f"\n[... {dropped} characters cut ...]\n"


_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-F]{2})>")


BytesOf = Callable[[int], bytes]
"""Token id -> bytes; see `token_bytes`."""
PlacedToken = tuple[int, int, int, int]
"""A token with its position: number of characters before it, number of bytes before it in an incomplete character,
number of empty tokens directly before it, and its id."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The drift of one sample.

    Attributes:
        sampled_tokens: Number of tokens that were compared, at least 1.
        drift_tokens: Number of these tokens that would change if their text were encoded again.
    """

    sampled_tokens: int
    drift_tokens: int

    @property
    def share(self) -> float:
        """Fraction of sampled tokens that would change, 0 to 1."""
        return self.drift_tokens / self.sampled_tokens


def differing_tokens(
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    bytes_of: BytesOf,
    reencoded: Sequence[int] | None = None,
    *,
    before: int | None = None,
) -> tuple[list[PlacedToken], list[PlacedToken]]:
    """Compare the tokens of a turn, or of a whole sample, with the encoding of their text.

    Args:
        ids: The tokens.
        tokenizer: The tokenizer of the ids.
        bytes_of: The `token_bytes` of that tokenizer.
        reencoded: The encoding of the ids' text, if known.
        before: The token before the ids; None at the beginning of a prompt.

    Returns:
        The tokens and the re-encoded tokens with their positions, both without their common end; two empty lists if
        nothing differs.
    """
    if reencoded is None:
        reencoded = _reencode_turn(ids, before, tokenizer, bytes_of)
    if list(reencoded) == list(ids):
        return [], []
    shorter = min(len(ids), len(reencoded))
    common_end = next((n for n in range(shorter) if ids[-1 - n] != reencoded[-1 - n]), shorter)
    sampled = list(place_tokens(ids[: len(ids) - common_end], bytes_of))
    return sampled, place_reencoded(ids, reencoded, tokenizer, bytes_of)[: len(reencoded) - common_end]


def place_reencoded(
    ids: Sequence[int], reencoded: Sequence[int], tokenizer: PreTrainedTokenizerBase, bytes_of: BytesOf
) -> list[PlacedToken]:
    """Return the re-encoded tokens of the ids' text with their positions in the original text."""
    text = decode_ids(ids, tokenizer)
    if decode_ids(reencoded, tokenizer) == text:
        return list(place_tokens(reencoded, bytes_of))
    # encoding changes the text itself (Unicode normalization): only the tokenizer knows positions in its input
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [(start, 0, 0, token) for (start, _), token in zip(encoding["offset_mapping"], reencoded, strict=True)]


def _reencode_turn(
    ids: Sequence[int], before: int | None, tokenizer: PreTrainedTokenizerBase, bytes_of: BytesOf
) -> list[int]:
    """Encode the text of a turn, without the space that some tokenizers put before the first text of a prompt."""
    alone = reencode(ids, tokenizer)
    if before is None or alone == list(ids) or not _prepends_space(tokenizer, bytes_of):
        return alone
    controls = tokenizer.added_tokens_decoder
    opening = [] if before in controls else list(controls)[:1]  # keeps `before` from being the first text
    following = reencode([*opening, before, *ids], tokenizer)
    at = following.index(before) + 1 if before in following[: len(opening) + 2] else 0
    is_separable = at > 0 and decode_ids(following[at:], tokenizer) == decode_ids(ids, tokenizer)
    return following[at:] if is_separable else alone


def _prepends_space(tokenizer: PreTrainedTokenizerBase, bytes_of: BytesOf) -> bool:
    first = encode_text("a", tokenizer)[:1]
    return bool(first) and bytes_of(first[0])[:1] != b"a"


def reencode(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Decode ids and encode their text again, including control tokens."""
    return encode_text(decode_ids(ids, tokenizer), tokenizer)


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Encode a text with the tokenizer itself, including control tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def decode_ids(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Decode ids with the tokenizer itself, including control tokens."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> BytesOf:
    """Return a function that maps a token id to bytes (b"" if unknown) from which positions can be counted."""
    has_bytes = is_byte_level(tokenizer)

    @functools.cache
    def bytes_of(token_id: int) -> bytes:
        token = tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if has_bytes:
            return bytes_of_token(token)
        # SentencePiece writes a space as U+2581, which is one character, too. It writes a byte that has no piece as,
        # for example, `<0xE2>`
        byte = _BYTE_PIECE.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.encode()

    return bytes_of


def is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer's vocabulary writes each byte as one character, like GPT-2's."""
    decoder = tokenizer.backend_tokenizer.decoder
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


def place_tokens(ids: Sequence[int], bytes_of: BytesOf) -> Iterator[PlacedToken]:
    """Yield each id with its position in the text, in ascending order."""
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
        # a byte that does not continue an incomplete character begins a new one; the incomplete one becomes U+FFFD
        breaks = pending and (len(first) == 2 or (first and decoder.getstate()[0]))
        yield (characters + 1, 0, 0, token_id) if breaks else (characters, pending, empty, token_id)
        characters += len(first) + len(decoder.decode(surface[1:]))
        pending = len(decoder.getstate()[0])
        empty = 0 if surface else empty + 1


@functools.lru_cache(maxsize=2**18)
def _whole_characters(surface: bytes) -> int | None:
    try:
        return len(surface.decode())
    except UnicodeDecodeError:  # a character may be incomplete
        return None
