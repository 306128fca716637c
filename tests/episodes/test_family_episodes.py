"""Chat templates of all model families: the context of each turn equals the rendering of the whole history."""

from contextlib import nullcontext
from typing import Any

import pytest
from family_episodes import ENDINGS, MARK, expected_context
from family_templates import CONTEXT_ONLY_TEMPLATES, MISTRAL_NEMO, TEMPLATES, tokenizer_with
from parser_families import family

from strands_rollout.diagnostics.template_check import check_template
from strands_rollout.errors import TemplateError
from strands_rollout.template.chat_template import ChatTemplate

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "Does it.", "parameters": {}}}]


def results(*contents: str) -> list[dict[str, Any]]:
    numbered = enumerate(contents)
    return [
        {"role": "tool", "name": f"f{at}", "tool_call_id": f"c0000{at}000", "content": text} for at, text in numbered
    ]


@pytest.mark.parametrize("episodes", [25, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("known", TEMPLATES)
def test_check_template_random_episodes_match_the_rendering(known: str, episodes: int, shipped_tokenizer: Any) -> None:
    parser, template = TEMPLATES[known]
    ending = ENDINGS[known]
    tokenizer = tokenizer_with(template + f"{{#{ending.sampled}#}}", shipped_tokenizer)
    found = {finding.name: finding for finding in check_template("nowhere", tokenizer, episodes=episodes)}
    faults = {name for name, one in found.items() if one.status in ("warning", "error")} - {"end of turn"}
    assert faults == (set() if ending.users > 1 else {"user turns with tools", "system message"}), found
    assert found["calls"].facts == {"tool_parser": parser}
    assert (found["several calls"].found == "append-only") == ending.is_parallel
    omitted = [] if ending.users > 1 else ["system messages", "more user turns with tools"]
    assert found["random episodes"].facts["random_episodes"]["without"] == omitted
    chat_template = ChatTemplate(tokenizer)
    ends = [
        chat_template.encoder.decode([token]) for token in (chat_template.end_of_turn_id, chat_template.end_of_calls_id)
    ]
    assert (*ends, chat_template.opens_reasoning) == (ending.answer, ending.calls, ending.opens_reasoning)
    call = {"type": "function", "id": "Ab3456780", "function": {"name": "add", "arguments": {"a": 1}}}
    with pytest.raises(TypeError) if ending.arguments_as_text else nullcontext():
        tokenizer.apply_chat_template(
            [USER, {"role": "assistant", "content": "", "tool_calls": [call]}], tokenize=False
        )
    read = family(known).make().parse(family(known).turn(calls=[("add", {}), ("add", {})]))
    assert [call.written_id for call in read] == list(ending.ids or (None, None))


@pytest.mark.parametrize("known", CONTEXT_ONLY_TEMPLATES)
def test_chat_template_turns_match_the_whole_rendering(known: str, shipped_tokenizer: Any) -> None:
    tokenizer, ending = tokenizer_with(CONTEXT_ONLY_TEMPLATES[known], shipped_tokenizer), ENDINGS[known]
    template = ChatTemplate(tokenizer)
    user = [{"role": "user", "content": "<|im_end|> Go on."}]
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate([user, results("one"), results("", '{"2": 3}'), user, results("<|im_end|>"), user]):
        mark, calls = MARK.format(number - 1), []
        for result in turn if turn is not user else []:
            function = {"name": result["name"], "arguments": {"note": mark}}
            calls.append({"type": "function", "id": result["tool_call_id"], "function": function})
        answer = {"role": "assistant", "content": "" if calls and ending.moves_text else mark}
        messages += [*([answer | ({"tool_calls": calls} if calls else {})] if number else []), *turn]
        found = template.turn_ids(turn, TOOLS, last_id=None) if number else template.prompt_ids(turn, TOOLS)
        expected = expected_context(tokenizer, messages, ending, number, TOOLS)
        assert (tokenizer.decode(found), found) == (tokenizer.decode(expected), expected)
    assert template.opens_reasoning == ending.opens_reasoning


@pytest.mark.parametrize(
    ("known", "sampled", "read"),
    [
        ("glm4", "<|user|>", "<|observation|><tool_response>\n1"),
        ("glm4", "<|endoftext|>", "<|observation|><tool_response>\n1"),
        ("glm4", "<|observation|>", "<tool_response>\n1"),
        ("gpt_oss", "<|return|>", "<|call|><|start|>functions.f0"),
        ("gpt_oss", "<|call|>", "<|start|>functions.f0"),
    ],
)
def test_turn_ids_close_a_turn_after_another_stop_token(
    known: str, sampled: str, read: str, shipped_tokenizer: Any
) -> None:
    tokenizer = tokenizer_with(TEMPLATES[known][1] + "{#<|endoftext|><|return|>#}", shipped_tokenizer)
    template = ChatTemplate(tokenizer)
    ids = template.turn_ids(results("1"), TOOLS, last_id=tokenizer.convert_tokens_to_ids(sampled))
    assert tokenizer.decode(ids).startswith(read)


@pytest.mark.parametrize("known", ["llama3_json", "gpt_oss"])
def test_render_turn_results_of_single_call_templates(known: str, shipped_tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer_with(TEMPLATES[known][1], shipped_tokenizer))
    one, other = results("one", "two")
    first, second = (template.render_turn([result], TOOLS) for result in (one, other))
    end = template.encoder.decode([template.end_of_calls_id])
    prompts = {"llama3_json": "<|start_header_id|>assistant<|end_header_id|>\n\n", "gpt_oss": "<|start|>assistant"}
    prompt = prompts[known]
    assert first.endswith(prompt)
    assert template.render_turn([one, other], TOOLS) == first.removesuffix(prompt) + second.removeprefix(end)


def test_chat_template_that_moves_tools_refuses_some_chats(shipped_tokenizer) -> None:
    template = ChatTemplate(tokenizer_with(MISTRAL_NEMO, shipped_tokenizer))
    user, system = USER, {"role": "system", "content": "Be brief."}
    assert template.prompt_ids([user], TOOLS)
    assert template.turn_ids(results("1"), TOOLS, last_id=None)
    assert template.turn_ids([user], last_id=None)
    with pytest.raises(TemplateError, match="tools and more than one user turn: .*not append-only for user turns in"):
        template.turn_ids([user], TOOLS, last_id=None)
    with pytest.raises(TemplateError, match="with a system message: .*not append-only for system messages"):
        template.prompt_ids([system, user], TOOLS)
