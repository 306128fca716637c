"""Prompts in every form that slime hands over, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from strands_rollout.chat_template import ChatTemplate
from strands_rollout.errors import PromptError
from strands_rollout.prompt_messages import EpisodePrompt, to_episode_prompt


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"text": text}]}


@pytest.fixture
def template(shipped_tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(shipped_tokenizer)


def test_a_string_is_the_users_message(template: ChatTemplate) -> None:
    assert to_episode_prompt("2+2?", "Be brief.", template) == EpisodePrompt("Be brief.", [said("user", "2+2?")])


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


def test_a_chat_without_system_gets_the_configured_one(template: ChatTemplate) -> None:
    assert to_episode_prompt([{"role": "user", "content": "x"}], "Configured.", template).system_prompt == "Configured."
    assert to_episode_prompt([{"role": "user", "content": "x"}], None, template).system_prompt is None


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
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [1]}],
            "got tool calls at position 1",
        ),
    ],
)
def test_an_unusable_prompt_says_what_was_got_and_expected(template: ChatTemplate, prompt: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        to_episode_prompt(prompt, None, template)
