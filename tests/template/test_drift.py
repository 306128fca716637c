"""Drift counts exactly the sampled tokens that re-encoding the text of their turn would change."""

from typing import Any

import pytest
from byte_tokens import byte_ids, encode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from strands_rollout.template.tokens import differing_tokens, token_bytes

TEXT = "The number 17 times 2 is thirty four, so the answer is the number 34."


def drift(tokenizer: Any, ids: list[int]) -> int:
    sampled, encoded = differing_tokens(ids, tokenizer, token_bytes(tokenizer))
    return len(set(sampled) - set(encoded))


TURN = "<think>\nHm.\n</think>\n\n<tool_call>\n{}\n</tool_call><|im_end|>"


@pytest.mark.parametrize("text", [TEXT, "Größe 東京 🙂 👩‍👩‍👧", TURN, " \n\n\t  x", "<|im_end|>"])
def test_tokenizers_own_tokens_do_not_drift(tokenizer: Any, text: str) -> None:
    assert drift(tokenizer, encode(tokenizer, text)) == 0


@pytest.mark.parametrize("word", [" number", "<|im_end|>"], ids=["word", "control token"])
def test_only_differently_split_tokens_drift(tokenizer: Any, word: str) -> None:
    before, after = encode(tokenizer, "The answer"), encode(tokenizer, " is four.")
    assert len(encode(tokenizer, word)) == 1
    assert drift(tokenizer, [*before, *byte_ids(tokenizer, word), *after]) == len(word)


@pytest.mark.parametrize("tail", ["", " and the answer"])
def test_only_bytes_of_broken_utf8_drift(tokenizer: Any, tail: str) -> None:
    first_byte, between = byte_ids(tokenizer, "🙂")[:1], encode(tokenizer, " is the answer")
    assert drift(tokenizer, [*first_byte, *between, *first_byte, *encode(tokenizer, tail)]) == 2


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pieces=st.lists(st.text("aehnrtu 17.\n", min_size=1, max_size=6), max_size=12))
def test_differing_tokens_match_the_definition(shipped_tokenizer: Any, pieces: list[str]) -> None:
    sampled = [token for piece in pieces for token in encode(shipped_tokenizer, piece)]

    def placed(ids: list[int]) -> set[tuple[int, int]]:
        return {(len(shipped_tokenizer.decode(ids[:position])), token) for position, token in enumerate(ids)}

    expected = len(placed(sampled) - placed(encode(shipped_tokenizer, "".join(pieces))))
    assert drift(shipped_tokenizer, sampled) == expected


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_turn_is_encoded_without_prepended_space(scheme: str) -> None:
    pieces = ["\u2581", "\u2581a", "\u2581b", "a", "b", "ab", "\n"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [("\u2581", "a"), ("\u2581", "b"), ("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    backend.add_special_tokens(["<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    begin, end = encode(tokenizer, "<s></s>")
    a, b, space_a, both, newline = (pieces.index(piece) for piece in ("a", "b", "\u2581a", "ab", "\n"))
    for before in (begin, newline):
        turns = [([both, end], 0), ([space_a, newline, end], 0), ([a, b, end], 2)]
        if scheme == "always" and before == begin:  # the tokenizer adds a space there
            turns = [([space_a, newline, end], 0), ([both, end], 1)]
        for turn, count in turns:
            sampled, encoded = differing_tokens(turn, tokenizer, token_bytes(tokenizer), before=before)
            assert len(set(sampled) - set(encoded)) == count, (before, turn)


def test_token_bytes_of_sentencepiece() -> None:
    pieces = ["\u2581", "\u2581a", "a", "b", "\u2581ab", *(f"<0x{value:02X}>" for value in range(256))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [("\u2581", "a"), ("\u2581a", "b")], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    space_a, b, whole, broken = (pieces.index(piece) for piece in ("\u2581a", "b", "\u2581ab", "<0xE2>"))
    accented = encode(tokenizer, "é")
    assert (len(accented), encode(tokenizer, " ab")) == (2, [whole])
    assert drift(tokenizer, [whole, *accented, space_a, b, *accented, whole]) == 2
    assert drift(tokenizer, [broken, whole, *accented, whole, broken, whole]) == 2
