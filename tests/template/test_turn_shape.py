"""Turns of tool results equal the template's rendering, although the template is rendered only to learn their shape."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from strands_rollout.template.chat_template import ChatTemplate

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
    changed = copy.copy(tokenizer)
    changed.chat_template = source
    return changed


def renderings(work: Callable[[], object]) -> int:
    """Return how often `work` renders a chat template in this thread."""
    names = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        work()
    finally:
        sys.setprofile(None)
    return names.count("apply_chat_template")


@given(contents=st.lists(texts, min_size=1, max_size=4), name=st.text(max_size=10))
@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40
)
def test_turn_shape_equals_rendered_template(tokenizer: Any, contents: list[str], name: str) -> None:
    template = ChatTemplate(tokenizer)
    messages = results(*contents, name=name)
    assert template.turn_ids(messages, TOOLS, last_id=None) == rendered_ids(template, messages)


def test_turn_shape_is_cached(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer)

    def renderings_of(turn: list[dict[str, Any]], tools: Any = TOOLS) -> int:
        return renderings(lambda: template.turn_ids(turn, tools, last_id=None))

    renderings_of(results("one"))
    assert renderings_of(results("two", call="call_9_3")) == 0
    assert renderings_of([{"role": "user", "content": "go on"}]) == 1
    others = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "name": "other"}}]
    assert renderings_of(results("two"), others) < 10


@pytest.mark.parametrize(
    "shown",
    [
        "m.content | trim",
        "m.content | tojson",
        "m.content.replace('</', '< /')",
        "('failed' if m.content == 'error' else m.content)",
        "('failed' if word in m.content else m.content)",
        "('failed' if m.content in ['ok', 'error'] else m.content)",
        "(m.content[5:] if m.content.startswith('begin') and m.content.endswith('end') else m.content)",
        "(m.content ~ m.name)",
        "(m.tool_call_id + m.content)",
        "(m.content + strftime_now('%S'))",
    ],
)
def test_template_that_changes_results_has_no_turn_shape(shipped_tokenizer: Any, shown: str) -> None:
    how = f"({shown} if m.role == 'tool' else m.content)"
    template = ChatTemplate(with_template(shipped_tokenizer, PLAIN.replace("m.content", how)))
    for content in TELLING:
        messages = results(content, call=f"call_{len(content)}", name=f"tool{len(content)}")
        if "strftime_now" not in shown:
            assert template.turn_ids(messages, (), last_id=None) == rendered_ids(template, messages, ())
        assert renderings(lambda turn=messages: template.turn_ids(turn, (), last_id=None)) == 1


def test_turn_shape_with_space_swallowing_tokens(shipped_tokenizer: Any) -> None:
    greedy = with_template(
        copy.deepcopy(shipped_tokenizer), PLAIN.replace("'<|im_end|>\n'", "'<|greedy|><|im_end|>\n'")
    )
    greedy.add_tokens([AddedToken("<|greedy|>", lstrip=True, special=True, normalized=False)])
    template = ChatTemplate(greedy)
    messages = results("ends with space \n ")
    assert template.turn_ids(messages, TOOLS, last_id=None) == rendered_ids(template, messages)


# how a template shows a message m, and a special case: a result, a tool name and a call id that it shows differently
LOOKING = {
    "at a tool's name": ("('ipython' if m.name == 'python' else 'tool') ~ m.content", "1", "python", "c"),
    "at a call's id": (
        "('x' if (m.tool_call_id or '').startswith('chatcmpl-') else '') ~ m.content",
        "1",
        "r",
        "chatcmpl-1",
    ),
    "beyond 10,000 characters": ("m.content[:16384]", "ab " * 8000, "run", "c"),
    "with a test by name": ("('none' if m.content is eq '(empty)' else m.content)", "(empty)", "run", "c"),
    "at a number": ("('big' if m.content | int > 100 else m.content)", "101", "run", "c"),
    "at tools too": ("('bad' if tools and m.content == 'fatal' else m.content)", "fatal", "run", "c"),
}


@pytest.mark.parametrize(("shown", "result", "name", "call"), LOOKING.values(), ids=LOOKING)
def test_template_that_compares_results_has_no_turn_shape(tokenizer, shown, result, name, call) -> None:
    template = ChatTemplate(
        with_template(tokenizer, PLAIN.replace("+ m.content +", f"~ ({shown} if m.role == 'tool' else m.content) ~"))
    )
    template.turn_ids(results("1"), [], last_id=None)
    messages = results(result, name=name, call=call)
    assert template.turn_ids(messages, TOOLS, last_id=None) == rendered_ids(template, messages)


def test_turn_shape_of_template_given_as_argument(tokenizer: Any) -> None:
    own = PLAIN.replace("+ m.content +", "~ ('ERR' if m.content == 'fatal' else m.content) ~")
    template = ChatTemplate(with_template(tokenizer, PLAIN), chat_template=own)
    messages = results("fatal")
    assert template.turn_ids(messages, TOOLS, last_id=None) == rendered_ids(template, messages)
