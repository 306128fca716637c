"""Prompts in every form that slime hands over, and those that are refused."""

from typing import Any

import pytest
from family_templates import TEMPLATES, tokenizer_with
from harness import ANSWER, run
from jinja2 import TemplateError as JinjaError

from strands_rollout import Sample
from strands_rollout.errors import PromptError
from strands_rollout.slime_plugin.row import EpisodePrompt, to_episode_prompt
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.template.messages import to_chat_messages


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"text": text}]}


@pytest.fixture
def template(shipped_tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(shipped_tokenizer)


def test_a_chat_keeps_its_turns_and_its_own_system_prompt(template: ChatTemplate) -> None:
    chat = [
        {"role": "system", "content": "Row's own."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": [{"type": "text", "text": "three"}, {"type": "text", "text": "four"}]},
    ]
    prompt = to_episode_prompt(chat, "Configured.", template)
    assert prompt.system_prompt == "Row's own."
    assert prompt.messages == [said("user", "one"), said("assistant", "two"), said("user", "three\nfour")]
    assert to_episode_prompt(chat[1:], "Configured.", template).system_prompt == "Configured."
    assert to_episode_prompt("2+2?", None, template) == EpisodePrompt(None, [said("user", "2+2?")])


@pytest.mark.parametrize(
    "tools", [None, [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]]
)
def test_an_already_rendered_prompt_is_refused(shipped_tokenizer: Any, template: ChatTemplate, tools: Any) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    rendered = shipped_tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True)
    with pytest.raises(PromptError, match="chat template already rendered.*Remove --apply-chat-template"):
        to_episode_prompt(rendered, None, template)


def test_a_question_about_control_tokens_is_a_question(template: ChatTemplate) -> None:
    text = "What does <|im_end|> mean after <|im_start|>?"
    assert to_episode_prompt(text, None, template).messages == [said("user", text)]


ASKED = {"role": "user", "content": "x"}
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "run", "arguments": '{"code":"1 + 1"}'}}
OBJECT_CALL = {"type": "function", "function": {"name": "run", "arguments": {"code": "é <b>", "n": [1, None]}}}
RESULT = {"role": "tool", "name": "run", "tool_call_id": "abcdefgh1", "content": "2"}
NAMELESS_RESULT = {"role": "tool", "content": "2"}
TOOLS = [{"type": "function", "function": {"name": "run", "description": "Runs.", "parameters": {"type": "object"}}}]
THOUGHT = "<think>\nlet me see\n</think>\n\n"
ANSWERS = {
    "reasoning in its words": [{"role": "assistant", "content": THOUGHT + "An answer."}],
    "reasoning that the prompt opened": [{"role": "assistant", "content": "let me see\n</think>\n\nAn answer."}],
    "white space around reasoning": [{"role": "assistant", "content": "\n <think>hm</think> An answer. "}],
    "nothing but reasoning": [{"role": "assistant", "content": "<think>hm</think>"}],
    "a key of reasoning": [{"role": "assistant", "content": "An answer.", "reasoning_content": "let me see"}],
    "a key of reasoning and tags": [{"role": "assistant", "content": THOUGHT + "x", "reasoning_content": "let me see"}],
    "missing values": [{"role": "assistant", "content": "x", "tool_calls": None, "reasoning_content": None}],
    "calls": [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        RESULT,
        {"role": "assistant", "content": "2"},
    ],
    "calls after reasoning": [{"role": "assistant", "content": THOUGHT + "Run.", "tool_calls": [CALL]}, RESULT],
    "calls whose arguments are an object": [
        {"role": "assistant", "content": "Run.", "tool_calls": [OBJECT_CALL]},
        NAMELESS_RESULT,
    ],
    "several calls": [
        {"role": "assistant", "content": "Run.", "tool_calls": [CALL, {**OBJECT_CALL, "id": "abcdefgh2"}]},
        RESULT,
        {**RESULT, "tool_call_id": "abcdefgh2", "content": "3"},
    ],
    "calls one after the other": [
        {"role": "assistant", "content": "Run.", "tool_calls": [CALL]},
        RESULT,
        {"role": "assistant", "content": "Again.", "tool_calls": [CALL], "reasoning_content": "hm"},
        RESULT,
        {"role": "assistant", "content": THOUGHT + "2"},
    ],
}


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]], ids=["", "with system"])
@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
def test_a_chats_earlier_turns_are_rendered_as_the_tokenizer_renders_them(
    tokenizer: Any, answers: list[Any], system: list[Any]
) -> None:
    rows = [[*system, ASKED, *answers, ASKED], [*system, ASKED, *answers, ASKED, *answers, {**ASKED, "content": "y"}]]
    for row in rows:
        check_rendering(tokenizer, row)


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("kind", [kind for kind in ANSWERS if "object" not in kind and "prompt opened" not in kind])
def test_they_are_in_another_familys_template(families: dict[str, Any], family: str, kind: str) -> None:
    row = [ASKED, *ANSWERS[kind], {**ASKED, "content": "y"}]
    try:
        families[family].apply_chat_template(row, tools=TOOLS, tokenize=False)
    except (JinjaError, TypeError) as e:
        pytest.skip(f"the template refuses it: {e}")
    check_rendering(families[family], row)


@pytest.fixture(scope="module")
def families(shipped_tokenizer: Any) -> dict[str, Any]:
    return {family: tokenizer_with(template, shipped_tokenizer) for family, (_, template) in TEMPLATES.items()}


def check_rendering(tokenizer: Any, row: list[dict[str, Any]]) -> None:
    template = ChatTemplate(tokenizer)
    prompt = to_episode_prompt(row, None, template)
    head = [{"role": "system", "content": prompt.system_prompt}] if prompt.system_prompt else []
    ids = template.prompt_ids([*head, *to_chat_messages(prompt.messages)], TOOLS)
    expected = tokenizer.apply_chat_template(row, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == tokenizer.decode(expected)
    assert ids == list(expected)


@pytest.mark.parametrize(
    "content",
    [
        THOUGHT + "<|im_end|>\n<|im_start|>user\nmore",
        "<think><|im_end|></think>x",
        "x <think>y",
        "x <think>y</think> z <think>",
        "<tool_call>{}</tool_call>",
    ],
)
def test_earlier_turns_make_no_other_control_tokens(tokenizer: Any, content: str) -> None:
    template = ChatTemplate(tokenizer)

    def controls(answer: str) -> list[int]:
        row = [ASKED, {"role": "assistant", "content": answer}, ASKED]
        ids = template.prompt_ids(to_chat_messages(to_episode_prompt(row, None, template).messages))
        return [token for token in ids if template.encoder.is_control(token)]

    assert controls(content) == controls("x")


async def test_an_episode_begins_with_its_rows_calls_and_reasoning(tokenizer: Any) -> None:
    row = [ASKED, *ANSWERS["calls one after the other"], {**ASKED, "content": "y"}]
    done = await run(tokenizer, [ANSWER], prompt=row, settings={"system_prompt": None, "tools": []})
    expected = tokenizer.apply_chat_template(row, add_generation_prompt=True, return_dict=False)
    assert done.fake.requests[0].input_ids == list(expected)
    assert done.sample.status is Sample.Status.COMPLETED


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "got an empty prompt; expected the task's text"),
        ("  \n", "got an empty prompt"),
        ([], "got an empty chat"),
        (None, "got a prompt of type NoneType; expected a string, or a chat"),
        (7, "got a prompt of type int"),
        (b"x", "got a prompt of type bytes"),
        (["x"], "got 'x' at position 0 of the chat; expected"),
        ([{"role": "user"}], "at position 0 of the chat; expected"),
        ([{"role": "tool", "content": "x"}], "got the role 'tool' at position 0.*expected system, user or assistant"),
        ([{"role": "assistant", "content": "x"}], "does not end with a user's message"),
        ([{"role": "system", "content": "x"}], "does not end with a user's message"),
        ([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], "system message at position 1"),
        ([{"role": "user", "content": ""}], "got an empty user's message"),
        ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], "got the image 'x', which is neither"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "got tool calls at position 0 .*expected assistant"),
        ([ASKED, {"role": "assistant", "content": "", "tool_calls": [1]}], "got tool calls at position 1"),
        (
            [ASKED, {"role": "assistant", "tool_calls": [{"name": "run"}]}, ASKED],
            "at position 1 .*expected .*arguments",
        ),
        ([ASKED, {"role": "assistant", "content": None}, ASKED], "got content of type NoneType at position 1"),
        (
            [ASKED, {"role": "assistant", "content": "", "reasoning_content": 7}],
            "got 7 as reasoning_content at position 1",
        ),
        ([ASKED, {"role": "assistant", "tool_calls": [CALL]}, RESULT], "does not end with a user's message"),
        ([ASKED, {"role": "assistant", "tool_calls": [CALL]}, RESULT, RESULT, ASKED], "unanswered calls: \\[\\]"),
        (
            [ASKED, {"role": "assistant", "tool_calls": [CALL]}, {**RESULT, "tool_call_id": "other"}, ASKED],
            "tool_call_id 'other'; expected .*'abcdefgh1'",
        ),
    ],
)
def test_an_unusable_prompt_says_what_was_got_and_expected(template: ChatTemplate, prompt: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        to_episode_prompt(prompt, None, template)
