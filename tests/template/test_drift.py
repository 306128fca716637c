"""Drift counts exactly the sampled tokens that would be others, had the text of their turn been encoded again."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spelled_tokens import bytewise, encode
from tokenizers import Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from strands_rollout.template.drift import token_bytes, unlike_tokens

TEXT = "The number 17 times 2 is thirty four, so the answer is the number 34."


def drift(tokenizer: Any, ids: list[int]) -> int:
    sampled, encoded = unlike_tokens(ids, tokenizer, token_bytes(tokenizer))
    return len(set(sampled) - set(encoded))


TURN = "<think>\nHm.\n</think>\n\n<tool_call>\n{}\n</tool_call><|im_end|>"


@pytest.mark.parametrize("text", [TEXT, "Größe 東京 🙂 👩‍👩‍👧", TURN, " \n\n\t  x", "<|im_end|>"])
def test_tokens_that_the_tokenizer_itself_would_choose_do_not_drift(tokenizer: Any, text: str) -> None:
    assert drift(tokenizer, encode(tokenizer, text)) == 0


@pytest.mark.parametrize("word", [" number", "<|im_end|>"], ids=["word", "control token"])
def test_a_token_sampled_in_other_pieces_drifts_by_those_pieces_alone(tokenizer: Any, word: str) -> None:
    before, after = encode(tokenizer, "The answer"), encode(tokenizer, " is four.")
    assert len(encode(tokenizer, word)) == 1
    assert drift(tokenizer, [*before, *bytewise(tokenizer, word), *after]) == len(word)


@pytest.mark.parametrize("tail", ["", " and the answer"])
def test_broken_utf8_drifts_by_its_bytes_alone(tokenizer: Any, tail: str) -> None:
    first_byte, between = bytewise(tokenizer, "🙂")[:1], encode(tokenizer, " is the answer")
    assert drift(tokenizer, [*first_byte, *between, *first_byte, *encode(tokenizer, tail)]) == 2


def test_an_id_that_the_tokenizer_does_not_know_drifts(tokenizer: Any) -> None:
    unknown = max(tokenizer.get_vocab().values()) + 100
    assert drift(tokenizer, [*encode(tokenizer, "It is"), unknown, unknown, *encode(tokenizer, " four.")]) == 2


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pieces=st.lists(st.text("aehnrtu 17.\n", min_size=1, max_size=6), max_size=12))
def test_the_count_is_that_of_the_definition(shipped_tokenizer: Any, pieces: list[str]) -> None:
    sampled = [token for piece in pieces for token in encode(shipped_tokenizer, piece)]

    def placed(ids: list[int]) -> set[tuple[int, int]]:
        return {(len(shipped_tokenizer.decode(ids[:position])), token) for position, token in enumerate(ids)}

    expected = len(placed(sampled) - placed(encode(shipped_tokenizer, "".join(pieces))))
    assert drift(shipped_tokenizer, sampled) == expected


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_ids_at_all_have_a_drift_between_none_and_all(shipped_tokenizer: Any, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(shipped_tokenizer) + 5), max_size=40))
    assert 0 <= drift(shipped_tokenizer, ids) <= len(ids)


def tokenizer_of(pieces: list[str], merges: list[tuple[str, str]], **parts: Any) -> Any:
    """A byte-pair tokenizer of these pieces; `parts` are its normalizer, pre-tokenizer and decoder."""
    model = models.BPE({piece: number for number, piece in enumerate(pieces)}, merges, byte_fallback=True)
    backend = Tokenizer(model)
    for name, part in parts.items():
        setattr(backend, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_pieces_of_a_sentencepiece_vocabulary_are_understood() -> None:
    pieces = ["\u2581", "\u2581a", "a", "b", "\u2581ab", *(f"<0x{value:02X}>" for value in range(256))]
    tokenizer = tokenizer_of(
        pieces,
        [("\u2581", "a"), ("\u2581a", "b")],
        normalizer=normalizers.Replace(" ", "\u2581"),
        decoder=decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]),
    )
    space_a, b, whole, broken = (pieces.index(piece) for piece in ("\u2581a", "b", "\u2581ab", "<0xE2>"))
    accented = encode(tokenizer, "é")
    assert (len(accented), encode(tokenizer, " ab")) == (2, [whole])
    assert drift(tokenizer, [whole, *accented, space_a, b, *accented, whole]) == 2
    assert drift(tokenizer, [broken, whole, *accented, whole, broken, whole]) == 2


def test_equal_bytes_of_one_character_are_told_apart() -> None:
    first, second = ByteLevel(add_prefix_space=False).pre_tokenize_str("\u0924")[0][0][:2]  # its bytes are E0 A4 A4
    tokenizer = tokenizer_of(
        [*ByteLevel.alphabet(), first + second, first + second + second],
        [(first, second), (first + second, second)],
        pre_tokenizer=ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
    )
    assert len(encode(tokenizer, "\u0924")) == 1
    assert drift(tokenizer, bytewise(tokenizer, "\u0924")) == 3


def test_of_a_text_that_encoding_changes_only_what_it_changes_drifts() -> None:
    tokenizer = tokenizer_of(
        ByteLevel.alphabet(),
        [],
        normalizer=normalizers.NFC(),
        pre_tokenizer=ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
    )
    decomposed, between = bytewise(tokenizer, "e\u0301"), encode(tokenizer, " is the answer" * 20)
    assert tokenizer.decode(encode(tokenizer, "e\u0301")) == "\u00e9"
    assert drift(tokenizer, [*decomposed, *between, *decomposed, *between]) == 2 * len(decomposed)
