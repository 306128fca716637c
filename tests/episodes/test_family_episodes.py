"""Episodes in each family's format: what the policy reads is what its template makes of the whole history."""

import json
from functools import cache
from typing import Any

import pytest
from family_episodes import ENDINGS, MARK, Ending, expected_context, play
from family_templates import MISTRAL_NEMO, TEMPLATES, tokenizer_with
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strands_rollout.errors import TemplateError
from strands_rollout.model.conversation import HistorySegment
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.tool_parsers import get_parser

TOOLS = [{"type": "function", "function": {"name": "f", "description": "Does it.", "parameters": {}}}]


def results(*contents: str) -> list[dict[str, Any]]:
    named = enumerate(contents)
    return [{"role": "tool", "name": f"f{at}", "tool_call_id": f"c0000{at}000", "content": text} for at, text in named]


@pytest.mark.parametrize("known", TEMPLATES)
async def test_every_context_of_an_episode_is_what_the_template_makes_of_its_history(
    known: str, shipped_tokenizer: Any
) -> None:
    tokenizer = tokenizer_with(TEMPLATES[known][1] + f"{{#{ENDINGS[known].sampled}#}}", shipped_tokenizer)
    episode = await play(known, tokenizer, ENDINGS[known])
    assert [tokenizer.decode(ids) for ids in episode.contexts] == [tokenizer.decode(ids) for ids in episode.expected]
    assert episode.contexts == episode.expected
    assert episode.model.parse_failures == []


texts = st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from(
    ["<|im_end|>", "<|observation|>", "</tool_response>", "</s>[INST]", "<|call|>", "strands-rollout-answer", ' "x"\n']
)


@pytest.mark.parametrize("known", TEMPLATES)
@given(plan=st.lists(st.lists(texts, min_size=1, max_size=3) | texts, min_size=1, max_size=4))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=12)
def test_new_messages_are_rendered_as_in_the_whole_history(
    known: str, shipped_tokenizer: Any, plan: list[list[str] | str]
) -> None:
    """Each turn of the plan is the results of so many calls, or a user's words."""
    ending, tokenizer = ENDINGS[known], _tokenizers(known, shipped_tokenizer)
    template, history = ChatTemplate(tokenizer), [{"role": "user", "content": "hi"}]
    for number, turn in enumerate(plan, start=1):
        if isinstance(turn, str) and ending.users == 1:
            continue
        new = [{"role": "user", "content": turn}] if isinstance(turn, str) else results(*turn)
        new = new if ending.is_parallel else new[:1]
        history += [_answer_to(new, MARK.format(number), ending), *new]
        expected = expected_context(tokenizer, history, ending, number + 1, TOOLS)
        assert template.turn_ids(new, TOOLS, last_id=None) == expected
        assert template.turn_ids(new, TOOLS, last_id=expected[0]) == expected[1:]


@cache
def _tokenizers(known: str, tokenizer: Any) -> Any:
    return tokenizer_with(TEMPLATES[known][1], tokenizer)


def _answer_to(new: list[dict[str, Any]], mark: str, ending: Ending) -> dict[str, Any]:
    calls = [
        {"type": "function", "id": message["tool_call_id"], "function": {"name": message["name"], "arguments": given}}
        for message in new
        if message["role"] == "tool"
        for given in [json.dumps({"x": mark}) if ending.arguments_as_text else {"x": mark}]
    ]
    return {"role": "assistant", "content": mark, **({"tool_calls": calls} if calls else {})}


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
def test_a_stop_token_that_is_not_the_templates_own_stays_and_the_templates_follows(
    known: str, sampled: str, read: str, shipped_tokenizer: Any
) -> None:
    tokenizer = tokenizer_with(TEMPLATES[known][1] + "{#<|endoftext|><|return|>#}", shipped_tokenizer)
    template = ChatTemplate(tokenizer)
    ids = template.turn_ids(results("1"), TOOLS, last_id=tokenizer.convert_tokens_to_ids(sampled))
    assert tokenizer.decode(ids).startswith(read)


@pytest.mark.parametrize("known", ["llama3_json", "gpt_oss"])
def test_results_of_calls_that_a_template_does_not_write_together_are_shown_as_after_a_call_each(
    known: str, shipped_tokenizer: Any
) -> None:
    template = ChatTemplate(tokenizer_with(TEMPLATES[known][1], shipped_tokenizer))
    one, other = results("one", "two")
    first, second = (template.render_turn([result], TOOLS) for result in (one, other))
    end = template.encoder.decode([template.end_of_calls_id])
    prompts = {"llama3_json": "<|start_header_id|>assistant<|end_header_id|>\n\n", "gpt_oss": "<|start|>assistant"}
    prompt = prompts[known]
    assert first.endswith(prompt)
    assert template.render_turn([one, other], TOOLS) == first.removesuffix(prompt) + second.removeprefix(end)


def test_a_template_that_moves_tools_and_system_text_is_refused_for_those_who_would_see_it(
    shipped_tokenizer: Any,
) -> None:
    template = ChatTemplate(tokenizer_with(MISTRAL_NEMO, shipped_tokenizer))
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "Be brief."}
    assert template.prompt_ids([user], TOOLS)
    assert template.turn_ids(results("1"), TOOLS, last_id=None)
    assert template.turn_ids([user], last_id=None)
    with pytest.raises(TemplateError, match="tools and more than one user's turn: .*not append-only for user turns in"):
        template.turn_ids([user], TOOLS, last_id=None)
    with pytest.raises(TemplateError, match="with a system message: .*not append-only for system messages"):
        template.prompt_ids([system, user], TOOLS)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("| tojson }}<|eot_id|>\n{%- elif", "| tojson }}{{ loop.index }}<|eot_id|>\n{%- elif", "turn 3"),
        ("{{ {'output': message.content} | tojson }}", "{{ message.content | length }}", "result 0 times"),
        ("{{ {'output': message.content} | tojson }}", "{{ message.content }} {{ message.content }}", "2 times"),
    ],
    ids=["results numbered", "not shown", "shown twice"],
)
def test_what_lies_outside_the_assistants_turns_must_still_be_the_same(
    old: str, new: str, words: str, shipped_tokenizer: Any
) -> None:
    source = TEMPLATES["llama3_json"][1]
    assert old in source
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(tokenizer_with(source.replace(old, new), shipped_tokenizer)).prompt_ids(
            [{"role": "user", "content": "hi"}], TOOLS
        )


def test_reasoning_tags_of_a_generation_prompt_may_change_and_nothing_else_may(shipped_tokenizer: Any) -> None:
    glm = TEMPLATES["glm4-7"][1]
    assert ChatTemplate(tokenizer_with(glm, shipped_tokenizer)).opens_reasoning
    opened = "<|assistant|><think>{% endif %}"
    assert opened in glm
    with pytest.raises(TemplateError, match="not append-only for user turns"):
        ChatTemplate(tokenizer_with(glm.replace(opened, "<|assistant|>Hm<think>{% endif %}"), shipped_tokenizer))


@pytest.mark.parametrize(
    ("known", "turn", "ids"),
    [
        ("kimi_k2", "functions.f:0", ["functions.f:0"]),
        ("kimi_k2-broken", "functions.f:3", ["functions.f:3"]),
        ("mistral-array", "Ab3456789", ["Ab3456789"]),
        ("mistral-array", "no id of 9", ["c00007000"]),
        ("hermes", "", ["c00007000"]),
    ],
)
def test_a_result_is_shown_under_the_id_that_the_policy_wrote_or_one_that_any_template_takes(
    known: str, turn: str, ids: list[str], shipped_tokenizer: Any
) -> None:
    arguments = "{broken" if known.endswith("broken") else "{}"
    text = {
        "kimi_k2": f"<|tool_calls_section_begin|><|tool_call_begin|>{turn}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "mistral-array": f'[TOOL_CALLS] [{{"name": "f", "arguments": {{}}, "id": "{turn}"}}]',
        "hermes": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    }[known.removesuffix("-broken")]
    parser, template = TEMPLATES[known.removesuffix("-broken")]
    tokenizer = tokenizer_with(template, shipped_tokenizer)
    segment = HistorySegment(ChatTemplate(tokenizer))
    turn = tokenizer.encode(text, add_special_tokens=False)
    segment.trajectory.append_turn([1], turn, [], finish_reason="stop", rid="r", latency_s=0.0)
    segment.read_turn(0, 7, get_parser(parser))
    assert list(segment.shown_ids.values()) == ids


def test_arguments_are_text_for_a_template_that_takes_no_objects(shipped_tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer_with(TEMPLATES["deepseek_v3"][1], shipped_tokenizer))
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": {"x": "é"}}}
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert 'f\n```json\n{"x": "é"}\n```' in template.encoder.decode(template.prompt_ids([*history, *results("1")]))
    assert isinstance(call["function"]["arguments"], dict)
