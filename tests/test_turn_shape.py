"""Turns of tool results are what the template renders, though it is rendered only to find that out."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from strands_rollout.chat_template import ChatTemplate
from strands_rollout.turn_shape import telling_texts

TOOLS = [{"type": "function", "function": {"name": "run", "description": "Runs it.", "parameters": {}}}]
PLAIN = (
    "{%- set word = 'error' %}{%- if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TELLING = ["", " padded \n", "<|im_end|>", "error", '"quoted" <b>', "begin of the end", "x" * 300, "0"]
texts = st.text(max_size=30) | st.sampled_from(["<|im_end|>\n<|im_start|>user\n", "</tool_response>", "\U000f0001"])


def results(*contents: str, call: str = "call_1_0", name: str = "run") -> list[dict[str, Any]]:
    return [{"role": "tool", "name": name, "tool_call_id": call, "content": content} for content in contents]


def rendered_ids(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any = TOOLS) -> list[int]:
    return template.encoder.encode_rendered(template.render_turn(messages, tools))


def with_template(tokenizer: Any, source: str) -> Any:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = source
    return changed


def renderings(work: Callable[[], object]) -> int:
    """How often a chat template is rendered in this thread meanwhile."""
    names = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        work()
    finally:
        sys.setprofile(None)
    return names.count("apply_chat_template")


@given(contents=st.lists(texts, min_size=1, max_size=4), name=st.text(max_size=10))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
def test_a_turn_of_tool_results_is_what_the_template_renders(tokenizer: Any, contents: list[str], name: str) -> None:
    template = ChatTemplate(tokenizer)
    messages = results(*contents, name=name)
    assert template.turn_ids(messages, TOOLS, last_id=None) == rendered_ids(template, messages)


def test_a_known_turn_is_not_rendered(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer)
    template.turn_ids(results("one"), TOOLS, last_id=None)
    assert renderings(lambda: template.turn_ids(results("two", call="call_9_3"), TOOLS, last_id=None)) == 0
    user = [{"role": "user", "content": "go on"}]
    assert renderings(lambda: template.turn_ids(user, TOOLS, last_id=None)) == 1


def test_other_tools_are_not_tried_out_at_length_again(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer)
    template.turn_ids(results("one"), TOOLS, last_id=None)
    others = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "name": "other"}}]
    assert renderings(lambda: template.turn_ids(results("two"), others, last_id=None)) < 10


@pytest.mark.parametrize(
    "shown",
    [
        "m.content | trim",
        "m.content | tojson",
        "m.content | upper",
        "(m.content or 'nothing')",
        "m.content.replace('</', '< /')",
        "('failed' if m.content == 'error' else m.content)",
        "('failed' if 'error' in m.content else m.content)",
        "('failed' if word in m.content else m.content)",
        "('failed' if m.content in ['ok', 'error'] else m.content)",
        "(m.content[5:] if m.content.startswith('begin') and m.content.endswith('end') else m.content)",
        "m.content[:200]",
        "(m.content ~ m.name)",
        "(m.tool_call_id + m.content)",
        "(m.content + m.content)",
        "(m.content + strftime_now('%S'))",
    ],
)
def test_a_template_that_does_more_than_show_a_result_is_rendered_each_time(shipped_tokenizer: Any, shown: str) -> None:
    how = f"({shown} if m.role == 'tool' else m.content)"
    template = ChatTemplate(with_template(shipped_tokenizer, PLAIN.replace("m.content", how)))
    for content in TELLING:
        messages = results(content, call=f"call_{len(content)}", name=f"tool{len(content)}")
        if "strftime_now" not in shown:
            assert template.turn_ids(messages, (), last_id=None) == rendered_ids(template, messages, ())
        assert renderings(lambda turn=messages: template.turn_ids(turn, (), last_id=None)) == 1


def test_a_template_that_shows_results_as_they_are_need_not_be_a_known_one(shipped_tokenizer: Any) -> None:
    template = ChatTemplate(with_template(shipped_tokenizer, PLAIN))
    for content in TELLING:
        messages = results(content, "between", content)
        assert template.turn_ids(messages, TOOLS, last_id=None) == rendered_ids(template, messages)
    assert renderings(lambda: template.turn_ids(results("a", "b", "c"), TOOLS, last_id=None)) == 0


def test_what_a_template_compares_with_is_tried_out_from_both_sides() -> None:
    found = telling_texts(
        "{% if m.role == 'tool' and m.content.startswith('<a>') and '</a>' in m.content %}{% endif %}"
    )
    assert found is not None
    assert {"<a>", "<a>x", "x</a>", "<a>x</a>"} <= set(found)


def test_a_template_with_very_many_conditions_is_not_tried_out() -> None:
    assert telling_texts("".join(f"{{% if x == 'word {n}' %}}{{% endif %}}" for n in range(40))) is None


def test_space_that_a_control_token_swallows_is_swallowed_from_a_result_too(shipped_tokenizer: Any) -> None:
    greedy = with_template(shipped_tokenizer, PLAIN.replace("'<|im_end|>\n'", "'<|greedy|><|im_end|>\n'"))
    greedy.add_tokens([AddedToken("<|greedy|>", lstrip=True, special=True, normalized=False)])
    template = ChatTemplate(greedy)
    messages = results("ends with space \n ")
    assert template.turn_ids(messages, TOOLS, last_id=None) == rendered_ids(template, messages)
