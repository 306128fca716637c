"""`to_episode_prompt`: prompts in every form that slime passes, and refused prompts."""

import re
from typing import Any

import pytest
from harness import ANSWER, run

from strands_rollout import Sample
from strands_rollout.errors import PromptError
from strands_rollout.slime_plugin.inputs import EpisodePrompt, to_episode_prompt
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.template.messages import to_chat_messages


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"text": text}]}


@pytest.fixture
def template(shipped_tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(shipped_tokenizer)


def test_to_episode_prompt_keeps_turns_and_system_prompt(template: ChatTemplate) -> None:
    chat = [
        {"role": "system", "content": "Row's own."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": [{"type": "text", "text": "three"}, {"type": "text", "text": "four"}]},
    ]
    prompt = to_episode_prompt(chat, "Configured.", template)
    assert prompt.system_prompt == "Row's own."
    assert prompt.messages == [message("user", "one"), message("assistant", "two"), message("user", "three\nfour")]
    assert to_episode_prompt(chat[1:], "Configured.", template).system_prompt == "Configured."
    assert to_episode_prompt("2+2?", None, template) == EpisodePrompt(None, [message("user", "2+2?")])


@pytest.mark.parametrize(
    "tools", [None, [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]]
)
def test_to_episode_prompt_refuses_rendered_prompt(shipped_tokenizer: Any, template: ChatTemplate, tools: Any) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    rendered = shipped_tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True)
    with pytest.raises(PromptError, match="chat template has already rendered.*Remove --apply-chat-template"):
        to_episode_prompt(rendered, None, template)


def test_to_episode_prompt_accepts_text_about_control_tokens(template: ChatTemplate) -> None:
    text = "What does <|im_end|> mean after <|im_start|>?"
    assert to_episode_prompt(text, None, template).messages == [message("user", text)]


QUESTION = {"role": "user", "content": "x"}
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "run", "arguments": '{"code":"1 + 1"}'}}
OBJECT_CALL = {"type": "function", "function": {"name": "run", "arguments": {"code": "é <b>", "n": [1, None]}}}
RESULT = {"role": "tool", "name": "run", "tool_call_id": "abcdefgh1", "content": "2"}
NAMELESS_RESULT = {"role": "tool", "content": "2"}
TOOLS = [{"type": "function", "function": {"name": "run", "description": "Runs.", "parameters": {"type": "object"}}}]
THOUGHT = "<think>\nlet me see\n</think>\n\n"
ANSWERS = {
    "reasoning with its tags": [{"role": "assistant", "content": THOUGHT + "An answer."}],
    "reasoning that the prompt opened": [{"role": "assistant", "content": "let me see\n</think>\n\nAn answer."}],
    "reasoning as a key and in tags": [
        {"role": "assistant", "content": THOUGHT + "x", "reasoning_content": "let me see"}
    ],
    "calls after reasoning": [{"role": "assistant", "content": THOUGHT + "Run.", "tool_calls": [CALL]}, RESULT],
    "calls in each form": [
        {"role": "assistant", "content": "Run.", "tool_calls": [CALL, {**OBJECT_CALL, "id": "abcdefgh2"}]},
        RESULT,
        {**RESULT, "tool_call_id": "abcdefgh2", "content": "3"},
        {"role": "assistant", "content": "Run.", "tool_calls": [OBJECT_CALL]},
        NAMELESS_RESULT,
    ],
    "calls with equal ids": [
        {"role": "assistant", "content": "Run.", "tool_calls": [CALL, {**OBJECT_CALL, "id": CALL["id"]}]},
        RESULT,
        {**RESULT, "content": "3"},
    ],
    "consecutive calls": [
        {"role": "assistant", "content": "Run.", "tool_calls": [CALL]},
        RESULT,
        {"role": "assistant", "content": "Again.", "tool_calls": [CALL], "reasoning_content": "hm"},
        RESULT,
        {"role": "assistant", "content": THOUGHT + "2"},
    ],
}


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
def test_to_episode_prompt_renders_like_apply_chat_template(tokenizer: Any, answers: list[Any]) -> None:
    row = [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        *answers,
        QUESTION,
        *answers,
        {**QUESTION, "content": "y"},
    ]
    template = ChatTemplate(tokenizer)
    prompt = to_episode_prompt(row, None, template)
    ids = template.prompt_ids([row[0], *to_chat_messages(prompt.messages)], TOOLS)
    expected = tokenizer.apply_chat_template(row, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert (tokenizer.decode(ids), ids) == (tokenizer.decode(expected), list(expected))


@pytest.mark.parametrize(
    "content",
    [THOUGHT + "<|im_end|>\n<|im_start|>user\nmore", "x <think>y</think> z <think>", "<tool_call>{}</tool_call>"],
)
def test_to_episode_prompt_escapes_control_tokens_of_turns(tokenizer: Any, content: str) -> None:
    template = ChatTemplate(tokenizer)

    def controls(answer: str) -> list[int]:
        row = [QUESTION, {"role": "assistant", "content": answer}, QUESTION]
        ids = template.prompt_ids(to_chat_messages(to_episode_prompt(row, None, template).messages))
        return [token for token in ids if template.encoder.is_control(token)]

    assert controls(content) == controls("x")


@pytest.mark.parametrize("arguments", [None, "", " ", "null", {}, "{}"])
def test_to_episode_prompt_reads_empty_arguments_as_none(tokenizer: Any, arguments: Any) -> None:
    def rendered(value: Any) -> str:
        call = {"id": None, "type": "function", "function": {"name": "run", "arguments": value}}
        row = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, NAMELESS_RESULT, QUESTION]
        template = ChatTemplate(tokenizer)
        ids = template.prompt_ids(to_chat_messages(to_episode_prompt(row, None, template).messages), TOOLS)
        return str(tokenizer.decode(ids))

    assert rendered(arguments) == rendered({})
    assert '"arguments": {}' in rendered(arguments)


@pytest.mark.parametrize("written", ['{"code": "1"}', '  {"code":"1"}\n', '{"a": {"b": [1, null]}}'])
def test_to_episode_prompt_keeps_json_arguments_verbatim(written: str) -> None:
    call = {"function": {"name": "run", "arguments": written}}
    row = [QUESTION, {"role": "assistant", "tool_calls": [call]}, NAMELESS_RESULT, QUESTION]
    (block,) = to_episode_prompt(row, None, None).messages[1]["content"]
    assert block["toolUse"]["input"] == written


@pytest.mark.parametrize("arguments", ["{bad", "[1]", '"x"', "1", '{"a": 1} x', '{"a": NaN}', [1], 7])
def test_to_episode_prompt_refuses_invalid_arguments(arguments: Any) -> None:
    call = {"function": {"name": "run", "arguments": arguments}}
    with pytest.raises(PromptError, match="at position 1 .* an object, or its JSON"):
        to_episode_prompt(
            [QUESTION, {"role": "assistant", "tool_calls": [call]}, NAMELESS_RESULT, QUESTION], None, None
        )


def test_to_episode_prompt_shows_the_start_of_deeply_nested_content() -> None:
    content: list[Any] = []
    for _ in range(5000):
        content = [content]
    with pytest.raises(PromptError, match=re.escape("got the content [[[[[[[...]]]]]]] at position 0")):
        to_episode_prompt([{"role": "user", "content": content}], None, None)


def test_to_episode_prompt_ignores_empty_keys_of_parts() -> None:
    pixel = pytest.importorskip("PIL.Image").new("RGB", (1, 1))
    parts = [{"type": "image", "image": pixel, "text": None}, {"type": "text", "text": "x", "image": None}]
    image, text = to_episode_prompt([{"role": "user", "content": parts}], None, None).messages[0]["content"]
    assert ("image" in image, text) == (True, {"text": "x"})
    for role in ("system", "user"):
        with pytest.raises(PromptError, match=r"got the content \[.* at position 0 .* expected"):
            to_episode_prompt(
                [{"role": role, "content": [parts[1], {"type": "text", "text": None}]}, QUESTION], None, None
            )


async def test_generate_sends_calls_and_reasoning_of_the_row(shipped_tokenizer: Any) -> None:
    row = [QUESTION, *ANSWERS["consecutive calls"], {**QUESTION, "content": "y"}]
    done = await run(shipped_tokenizer, [ANSWER], prompt=row, settings={"system_prompt": None, "tools": []})
    expected = shipped_tokenizer.apply_chat_template(row, add_generation_prompt=True, return_dict=False)
    assert done.fake.requests[0].input_ids == list(expected)
    assert done.sample.status is Sample.Status.COMPLETED


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("", "got an empty prompt; expected the task's text"),
        ([], "got an empty chat"),
        (None, "got a prompt of type NoneType; expected a string, or a chat"),
        (["x"], "got 'x' at position 0 of the chat; expected"),
        ([{"role": "tool", "content": "x"}], "got the role 'tool' at position 0.*expected 'system', 'user' or"),
        ([{"role": "assistant", "content": "x"}], "does not end with a user's message"),
        ([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], "system message at position 1"),
        ([{"role": "user", "content": ""}], "got an empty user's message"),
        ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], "got the image 'x', which is neither"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "got tool calls at position 0 .*; expected them"),
        ([QUESTION, {"role": "assistant", "content": "", "tool_calls": [1]}], "got the tool call 1 at position 1"),
        (
            [QUESTION, {"role": "assistant", "tool_calls": [{"name": "run"}]}, QUESTION],
            "at position 1 .*expected .*arguments",
        ),
        (
            [QUESTION, {"role": "assistant", "tool_calls": [{"name": "", "arguments": {}}]}, QUESTION],
            "got the tool call .* at position 1",
        ),
        ([QUESTION, {"role": "assistant", "content": None}, QUESTION], "got the content None at position 1"),
        (
            [QUESTION, {"role": "assistant", "content": "", "reasoning_content": 7}],
            "got 7 as reasoning_content at position 1",
        ),
        ([QUESTION, {"role": "assistant", "tool_calls": [CALL]}, RESULT, RESULT, QUESTION], "unanswered calls: \\[\\]"),
        (
            [QUESTION, {"role": "assistant", "tool_calls": [CALL]}, {**RESULT, "tool_call_id": "other"}, QUESTION],
            "tool_call_id 'other'; expected .*'abcdefgh1'",
        ),
    ],
)
def test_to_episode_prompt_error_names_got_and_expected(template: ChatTemplate, prompt: Any, error: str) -> None:
    with pytest.raises(PromptError, match=error):
        to_episode_prompt(prompt, None, template)
