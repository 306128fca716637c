"""Text, ids and chat prompts come out as transformers makes them."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from strands_rollout.engine.generation import read_text_codec
from strands_rollout.engine.requests import RequestRefusedError

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


@pytest.fixture(scope="module", params=["tiny", "qwen3"])
def theirs(request, tiny_dir):
    if request.param == "qwen3":
        return request.getfixturevalue("qwen3_tokenizer")
    return AutoTokenizer.from_pretrained(tiny_dir)


@pytest.fixture(scope="module")
def ours(theirs):
    return read_text_codec(Path(theirs.name_or_path))


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
    assert (ids, ours.decode(ids)) == (theirs(text)["input_ids"], theirs.decode(ids))
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_token_id == theirs.eos_token_id


def test_a_template_that_refuses_is_a_refusal(tiny_dir, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((tiny_dir / "tokenizer.json").read_bytes())
    with pytest.raises(RequestRefusedError, match="no chat template"):
        read_text_codec(tmp_path).render_chat(CHATS[0], [], {})
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestRefusedError, match="roles must alternate"):
        read_text_codec(tmp_path).render_chat(CHATS[0], [], {})


def test_templates_see_the_environment_that_transformers_gives_them(theirs, tmp_path):
    template = """\
    {% for message in messages %}
        {% if loop.index > 1 %}
            {% break %}
        {% endif %}
        {{ message | tojson(indent=2) }}
    {% endfor %}
    {{ eos_token }} {{ strftime_now("%Y")[:2] }} {{ add_generation_prompt }}
    """
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(theirs.name_or_path) / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    expected = theirs.apply_chat_template(CHATS[1], chat_template=template, tokenize=False, add_generation_prompt=True)
    assert read_text_codec(tmp_path).render_chat(CHATS[1], [], {}) == expected
