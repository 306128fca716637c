"""Text -> token ids and back, with control tokens only where trusted text asks for them.

Untrusted text is escaped before a template sees it, and what was escaped is encoded by a twin of the tokenizer that has
no added tokens at all. Texts are cut to a number of tokens here, too.

Drift is how many sampled tokens would be others, had the text of each turn been decoded and encoded again. A turn is
measured alone, control tokens included: a sampled control token encodes to itself, and ordinary tokens that spell one
count as drift, since they would come back as that token.

A sampled token differs unless the encoding of the turn's text has the same token at the same place of the text, or both
end with the same tokens from there on. Places are counted in characters (and bytes of an unfinished one), U+FFFD for
broken UTF-8 included. Where encoding changes the text itself (Unicode normalisation), a new token's place is where the
text lies that it was made of. Time is linear in the tokens.
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
"""Texts of so many characters are encoded in a thread: they take 3 ms, 8 where they are digits."""
# An escaped text is a mark and a number. A mark's first character occurs nowhere else in either, so that no mark begins
# inside another one. Decimal digits outlast what templates do with texts (JSON, Python's repr, upper case, stripping);
# the private characters are for tokenizers with control tokens that begin or end with a digit.
_ALPHABETS: Final = ("012345678", "".join(map(chr, range(0xF0000, 0xF0009))))
_MARK: Final = "8314057264113702"
_SMALLEST_MARKED: Final = 10 ** len(_MARK)  # a number below it has no digit after a mark
_NOTHING: Final = ""
# what templates may put around a word, leave out of it, or replace in it
_SIGNS: Final = re.compile(r"[\W_]+")
_LONGEST_WORD: Final = 64
# byte-level BPE writes printable Latin-1 as itself, and the other bytes, in order, as the characters from 256
_PRINTABLE: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHER_BYTES: Final = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF: Final = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + at): byte for at, byte in enumerate(_OTHER_BYTES)
}
_CHARS_PER_TOKEN: Final = 16
# a text that is cut off may end in more tokens than it has in one piece
_SPARE_TOKENS: Final = 64


class TokenEncoder:
    """Encodes rendered templates; cut at control tokens, each piece between them encoded whole.

    Build one per tokenizer: its decoder learns each token once. Several threads may use it.

    Attributes:
        control_ids: The ids of control tokens, by their texts.
        decode: Ids -> text, control tokens included; see `ByteDecoder.decode`.
        cuts_are_plain: Whether no control token swallows the white space beside it.
        tag_pairs: Control tokens' texts that open and close something, such as ("<think>", "</think>").
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TemplateError(
                f"got a {type(tokenizer).__name__}; expected a fast tokenizer (tokenizers-backed, with a "
                "tokenizer.json): control tokens in untrusted text can't be told apart without one."
            )
        added = tokenizer.added_tokens_decoder
        self.control_ids = {str(token): token_id for token_id, token in added.items()}
        self._control_id_set = frozenset(added)
        self._plain = Tokenizer(backend.model)  # shares the vocabulary, and so is made at once
        self._plain.normalizer, self._plain.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
        if getattr(backend.pre_tokenizer, "prepend_scheme", None) == "first":  # no piece is the first of a prompt
            self._plain.pre_tokenizer = pre_tokenizers.Metaspace(
                backend.pre_tokenizer.replacement, prepend_scheme="never", split=backend.pre_tokenizer.split
            )
        self._cut = _control_pattern(added.values())
        self.cuts_are_plain = not any(token.lstrip or token.rstrip for token in added.values())
        self._set_escapes()
        self._backend = backend
        self.decode = ByteDecoder(backend).decode
        for text in self.control_ids:
            if leaked := self._control_id_set.intersection(self.encode_plain(text)):
                raise TemplateError(
                    f"the tokenizer's own vocabulary encodes the ordinary text {text!r} to the control token "
                    f"{min(leaked)}; expected it to be split, since tool output could forge control tokens. Use a "
                    "tokenizer whose control tokens are added tokens only."
                )

    @cached_property
    def vocab_size(self) -> int:
        """Ids are below this; the largest id + 1, added tokens included."""
        return int(max(max(self._control_id_set, default=-1), max(self._backend.get_vocab().values()))) + 1

    def escape(self, text: str, *, apart: bool = False) -> str:
        """Untrusted text with every control-token text hidden; ordinary text is returned as it is.

        No two texts are escaped alike. Nor do escaped texts make a control token together, or with a template's own
        text: beside one that could be the begin or the end of a control token stands an escape of nothing. With `apart`
        one stands before each text that is the word of a control token, too; see `tokens_of_word`.
        """
        if not apart and not any(part in text for part in self._parts_of_escapables):
            return text  # as most texts are
        escaped = self._escape_pattern.sub(lambda match: self._codes[match.group()], text)
        if self._could_end_token(text) or (apart and self.tokens_of_word(text)):
            at = len(escaped) - len(escaped.lstrip())
            escaped = escaped[:at] + self._codes[_NOTHING] + escaped[at:]
        if self._could_begin_token(text):
            at = len(escaped.rstrip())
            escaped = escaped[:at] + self._codes[_NOTHING] + escaped[at:]
        return escaped

    def escape_number(self, number: int) -> int:
        """A number that is unescaped to this one, also where its digits look like an escaped text."""
        if -_SMALLEST_MARKED < number < _SMALLEST_MARKED:
            return number
        try:
            return int(self.escape(str(number)))
        except ValueError:  # longer than Python writes, or marks are no digits
            return number

    def tokens_of_word(self, text: str) -> Collection[str]:
        """The control tokens' texts that this text would make with other signs: "<think>" and "</think>" of "think"."""
        if len(text) > _LONGEST_WORD or text in self._codes:  # a whole token is hidden anyway
            return ()
        word = (text if text.isalnum() else _SIGNS.sub("", text)).casefold()
        return self._by_word.get(word, ()) if word else ()

    def _could_end_token(self, text: str) -> bool:
        begin = text.lstrip()[: self._longest]
        is_plain = self._last_signs.isdisjoint(begin)  # as nearly all texts are
        return not is_plain and any(begin[:length] in self._token_ends for length in range(1, len(begin) + 1))

    def _could_begin_token(self, text: str) -> bool:
        end = text.rstrip()[-self._longest :]
        return not self._first_signs.isdisjoint(end) and any(end[at:] in self._token_begins for at in range(len(end)))

    def unescape(self, text: str) -> str:
        """The inverse of `escape`, for any text that it occurs in."""
        return self._unescape_pattern.sub(lambda match: self._escaped.get(match.group(), match.group()), text)

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
            yield self.control_ids[match[match.lastindex or 0]]
            position = match.end()
        if position < len(rendered):
            yield rendered[position:]

    def encode_trusted(self, text: str) -> list[int]:
        """Ids as the tokenizer itself encodes the text, control tokens included, nothing escaped."""
        return _encode(self._backend, text)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text as ordinary tokens, whatever control-token text it contains; "?" for each lone surrogate."""
        if not text:
            return []
        try:
            return _encode(self._plain, text)
        except (TypeError, UnicodeError):  # a lone surrogate, which a tool's schema or a call's JSON may hold
            return _encode(self._plain, text.encode("utf-8", "replace").decode())

    def first_control(self, rendered: str) -> str | None:
        """Text of the first control token in trusted text."""
        match = self._cut.search(rendered)
        return match[match.lastindex or 0] if match else None

    def is_control(self, token_id: int) -> bool:
        """Whether a token is one of the tokenizer's added tokens."""
        return token_id in self._control_id_set

    def _set_escapes(self) -> None:
        controls = sorted(filter(None, self.control_ids), key=len, reverse=True)
        edges = {text[0] for text in controls} | {text[-1] for text in controls}
        alphabet = next((digits for digits in _ALPHABETS if edges.isdisjoint(digits)), _ALPHABETS[-1])
        digits = str.maketrans(_ALPHABETS[0], alphabet)
        mark = _MARK.translate(digits)
        self._parts_of_escapables = (*sorted(edges), mark)
        self.tag_pairs = [(_opening(text), text) for text in controls]
        self.tag_pairs = [pair for pair in self.tag_pairs if pair[0] != pair[1] and pair[0] in self.control_ids]
        # longest first: a control token that begins with another one must win
        escapable = [mark, *controls]
        width = len(f"{len(escapable):o}")
        self._codes = {
            text: mark + f"{index:0{width}o}".translate(digits) for index, text in enumerate([_NOTHING, *escapable])
        }
        self._escaped = {code: text for text, code in self._codes.items()}
        self._escape_pattern = re.compile("|".join(map(re.escape, escapable)))
        self._unescape_pattern = re.compile(f"{mark}[{alphabet[:8]}]{{{width}}}")
        # texts begin and end as tokens do that begin or end as words: these are left out
        framed = [text for text in controls if not any(c.isalnum() or c.isspace() for c in (text[0], text[-1]))]
        self._first_signs, self._last_signs = {text[0] for text in framed}, {text[-1] for text in framed}
        self._token_begins = {text[:length] for text in framed for length in range(1, len(text))}
        self._token_ends = {text[-length:] for text in framed for length in range(1, len(text))}
        self._longest = max(map(len, framed), default=1)
        self._by_word: dict[str, list[str]] = {}
        for text in framed:
            self._by_word.setdefault(_SIGNS.sub("", text).casefold(), []).append(text)


def _opening(closing: str) -> str:
    """The tag that one would close: as <think></think>, <|START_X|><|END_X|> and <|x><x|>."""
    return re.sub(r"\A<(\w+)\|>\Z", r"<|\1>", closing.replace("/", "", 1).replace("END_", "START_"))


def _encode(backend: Tokenizer, text: str) -> list[int]:
    if len(text) < LONG_TEXT_CHARS:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    else:  # tokenizers releases Python's lock for batches only: other threads go on meanwhile
        ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


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
        self[token_id] = value = bytes_of_token(self._tokenizer.id_to_token(token_id) or "")
        return value


def bytes_of_token(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for; an added token is its own text."""
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


def are_far_over(texts: Sequence[str], max_tokens: int, encoder: TokenEncoder) -> bool:
    """Whether texts certainly have more tokens together, judged by a part of them.

    A megabyte is not encoded to know that it is too long. Its length alone does not tell: a run of spaces or of one
    letter has tokens of more than a hundred characters.
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


def head_and_tail(text: str, max_tokens: int, encoder: TokenEncoder) -> str:
    """`text` if it has at most `max_tokens` tokens, else its head and tail and a marker between them.

    The result may exceed `max_tokens` by a few tokens where the pieces meet: who needs it exact measures again. Half
    of the kept tokens are head. With `max_tokens` below the marker's own length the result is empty.
    """
    head, is_whole = _ids_at_end(text, max_tokens, encoder)
    if is_whole:
        return text if len(head) <= max_tokens else _joined(text, head, head, max_tokens, encoder)
    # the middle is never encoded
    return _joined(text, head, _ids_at_end(text, max_tokens // 2, encoder, tail=True)[0], max_tokens, encoder)


def _ids_at_end(text: str, count: int, encoder: TokenEncoder, *, tail: bool = False) -> tuple[list[int], bool]:
    """Ids of as much of a text as certainly has more than `count` tokens, and whether that is all of it."""
    length = max(count, 0) * _CHARS_PER_TOKEN + _SPARE_TOKENS
    while length < len(text):
        ids = encoder.encode_plain(text[-length:] if tail else text[:length])
        if len(ids) > count + _SPARE_TOKENS:
            return ids, False
        length *= 4
    return encoder.encode_plain(text), True


def _joined(text: str, head_ids: list[int], tail_ids: list[int], max_tokens: int, encoder: TokenEncoder) -> str:
    room = max_tokens - len(encoder.encode_plain(_marker(len(text))))
    if room < 0:
        return ""
    head = encoder.decode(head_ids[: room - room // 2]).rstrip("\ufffd")
    tail = encoder.decode(tail_ids[len(tail_ids) - room // 2 :]).lstrip("\ufffd")
    return head + _marker(len(text) - len(head) - len(tail)) + tail


def _marker(dropped: int) -> str:
    return f"\n[... {dropped} characters cut ...]\n"


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
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    bytes_of: BytesOf,
    again: Sequence[int] | None = None,
    *,
    before: int | None = None,
) -> tuple[list[Placed], list[Placed]]:
    """Sampled tokens and those that their text is encoded to, `again` where that is known, as `placed_tokens`.

    Both end where from there on they are alike: both are empty where nothing would differ. `before` is the token that
    they follow, None at the beginning of a prompt.
    """
    if again is None:
        again = _turn_again(ids, before, tokenizer, bytes_of)
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


def _turn_again(
    ids: Sequence[int], before: int | None, tokenizer: PreTrainedTokenizerBase, bytes_of: BytesOf
) -> list[int]:
    """The tokenizer's own ids for the text of these alone, without the space that it would put before a first text."""
    alone = encoded_again(ids, tokenizer)
    if before is None or alone == list(ids) or not _prepends(tokenizer, bytes_of):
        return alone
    controls = tokenizer.added_tokens_decoder
    opening = [] if before in controls else list(controls)[:1]  # so that the token before is no first text either
    following = encoded_again([*opening, before, *ids], tokenizer)
    at = following.index(before) + 1 if before in following[: len(opening) + 2] else 0
    is_apart = at > 0 and decoded(following[at:], tokenizer) == decoded(ids, tokenizer)
    return following[at:] if is_apart else alone


def _prepends(tokenizer: PreTrainedTokenizerBase, bytes_of: BytesOf) -> bool:
    """Whether a text that stands alone is encoded with a space before it."""
    first = encoded_text("a", tokenizer)[:1]
    return bool(first) and bytes_of(first[0])[:1] != b"a"


def encoded_again(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokenizer's own ids for the text of these, control tokens included."""
    return encoded_text(decoded(ids, tokenizer), tokenizer)


def encoded_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokenizer's own ids for a text, control tokens included."""
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


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
