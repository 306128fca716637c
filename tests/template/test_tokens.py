"""Decoding of ids as the tokenizer decodes them, and truncation of texts by tokens instead of characters."""

from typing import Any

import pytest
from byte_tokens import one_byte_tokens
from harness import ANSWER, call_text, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strands import tool
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from strands_rollout.template.tokens import ByteDecoder, TokenEncoder, clearly_exceed, truncate_middle

many = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=150
)


def decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False))


@given(data=st.data())
@many
def test_byte_decoder_equals_tokenizer(tokenizer: Any, data: st.DataObject) -> None:
    beyond = tokenizer.backend_tokenizer.get_vocab_size() + 300  # a policy may also sample ids without a token
    ids = data.draw(st.lists(st.integers(0, beyond), max_size=30))
    assert ByteDecoder(tokenizer.backend_tokenizer).decode(ids) == decoded(tokenizer, ids)


@given(content=st.binary(max_size=12) | st.text(max_size=6).map(str.encode), cut=st.integers(0, 12))
@many
def test_byte_decoder_joins_split_characters(tokenizer, content, cut) -> None:
    decoder = ByteDecoder(tokenizer.backend_tokenizer)
    ids = [one_byte_tokens(tokenizer)[bytes([byte])] for byte in content]
    assert (decoder.decode(ids), decoder.decode(ids[:cut])) == (decoded(tokenizer, ids), decoded(tokenizer, ids[:cut]))
    assert decoder.decode(ids[cut:]) == decoded(tokenizer, ids[cut:])


def test_byte_decoder_delegates_to_other_tokenizers() -> None:
    backend = Tokenizer(models.BPE({"▁a": 0, "▁b": 1, "<0xE4>": 2, "<0xBE>": 3, "<0x8B>": 4}, []))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    decoder = ByteDecoder(backend)
    assert (decoder.decode([0, 1, 2, 3, 4]), backend.decode([0, 1, 2, 3, 4])) == ("a b例", "a b例")


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_encode_text_after_control_token(scheme: str) -> None:
    pieces = ["▁", "▁a", "▁b", "a", "b", "\n"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("▁", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.add_special_tokens(["<s>", "</s>"])
    encoder = TokenEncoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    for rendered in ("<s>a b</s>b", "<s> a</s>\n b", "<s></s> a"):
        assert encoder.encode_rendered(rendered) == encoder.encode_trusted(rendered)
    at_the_begin = encoder.encode_rendered("a<s>") == encoder.encode_trusted("a<s>")
    assert at_the_begin == (scheme != "first")  # such a template is refused


class WideEncoder:
    """An encoder with a token for each 100 characters."""

    def __init__(self) -> None:
        self.encoded_chars = 0

    def encode_plain(self, text: str) -> list[int]:
        self.encoded_chars += len(text)
        return [100] * (len(text) // 100) + ([len(text) % 100] if len(text) % 100 else [])

    def decode(self, ids: list[int]) -> str:
        return "".join("x" * length for length in ids)


def test_truncate_middle_keeps_max_tokens() -> None:
    encoder: Any = WideEncoder()
    text = "x" * 200_000
    cut = truncate_middle(text, 1000, encoder)
    assert 99_800 <= len(cut) <= 100_100
    assert "characters cut" in cut


def test_truncate_middle_does_not_encode_the_middle() -> None:
    encoder: Any = WideEncoder()
    text = "x" * 10**8
    assert clearly_exceed(["", text], 50, encoder)
    assert len(truncate_middle(text, 50, encoder)) < 5100
    assert encoder.encoded_chars < 200_000


@tool
async def spaces(code: str) -> str:
    """Return 40,000 spaces between two words.

    Args:
        code: Not read.
    """
    return "begin" + " " * 40_000 + "end"


async def test_tool_result_of_long_tokens_is_kept_whole(qwen3_tokenizer: Any) -> None:
    own_tools = {"tools": [f"{__name__}.spaces"]}
    turns, params = [call_text(name="spaces"), ANSWER], {"max_new_tokens": 700}
    done = await run(qwen3_tokenizer, turns, settings=own_tools, params=params)
    assert "begin" + " " * 40_000 + "end" in done.context_after(0)
    assert len(done.context_ids_after(0)) < 600
