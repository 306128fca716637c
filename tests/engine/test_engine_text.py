"""`read_text_codec` encodes and decodes as transformers does."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from strands_rollout.engine.generation import read_text_codec


@pytest.fixture(scope="module", params=["tiny", "qwen3"])
def theirs(request, tiny_dir):
    if request.param == "qwen3":
        return request.getfixturevalue("qwen3_tokenizer")
    return AutoTokenizer.from_pretrained(tiny_dir)


@pytest.fixture(scope="module")
def ours(theirs):
    return read_text_codec(Path(theirs.name_or_path))


@pytest.mark.parametrize("text", ["", "a  b\n\n c", "naïve 数学 🎉", "<|im_end|><tool_call>x</tool_call>"])
def test_text_codec_equals_transformers(ours, theirs, text):
    ids = ours.encode(text)
    assert (ids, ours.decode(ids)) == (theirs(text)["input_ids"], theirs.decode(ids))
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_token_id == theirs.eos_token_id
