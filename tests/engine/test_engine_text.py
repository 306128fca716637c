"""Text, ids and chat prompts come out as transformers makes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strands_rollout.engine.request_errors import RequestRefusedError
from strands_rollout.engine.text import read_text_codec

_REPOSITORY = Path(__file__).parents[2]
_QWEN3 = Path(os.environ.get("QWEN3_TOKENIZER", _REPOSITORY.parent / "shared" / "qwen3-8b-tokenizer"))

TOOL = {"type": "function", "function": {"name": "add", "description": "<b> & ü", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "text": "日本"}}}
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?\n"}],
    [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "<think>\nadd\n</think>\n\n", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "5"},
    ],
]


@pytest.fixture(scope="module", params=["tiny", "qwen3-8b"])
def folder(request, tiny_dir):
    if request.param == "tiny":
        return tiny_dir
    if not _QWEN3.is_dir():
        pytest.skip(f"no Qwen3 tokenizer at {_QWEN3}")
    return _QWEN3


@pytest.fixture(scope="module")
def theirs(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def ours(folder):
    return read_text_codec(folder)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [[], [TOOL]])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_chat_prompts_equal_transformers(ours, theirs, chat, tools, options):
    expected = theirs.apply_chat_template(
        chat, tools=tools or None, tokenize=False, add_generation_prompt=True, **options
    )
    assert ours.render_chat(chat, tools, options) == expected
    assert ours.encode(expected, add_special_tokens=False) == theirs.encode(expected, add_special_tokens=False)


@pytest.mark.parametrize("text", ["", "a  b\n\n c", "naïve 数学 🎉", "<|im_end|><tool_call>x</tool_call>"])
def test_encoding_and_decoding_equal_transformers(ours, theirs, text):
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_token_id == theirs.eos_token_id


def test_incomplete_characters_decode_to_the_replacement_character(ours, theirs):
    ids = theirs.encode("\U00013000")[:-1]
    assert "\ufffd" in ours.decode(ids)


def test_a_template_that_refuses_is_a_refusal(tiny_dir, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((tiny_dir / "tokenizer.json").read_bytes())
    with pytest.raises(RequestRefusedError, match="no chat template"):
        read_text_codec(tmp_path).render_chat(CHATS[0], [], {})
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestRefusedError, match="roles must alternate"):
        read_text_codec(tmp_path).render_chat(CHATS[0], [], {})
