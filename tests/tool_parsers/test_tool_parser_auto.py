"""`tool_parser="auto"`: the format in which the tokenizer's chat template writes calls, and episodes in it."""

from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply
from family_templates import CHATML, TEMPLATES, tokenizer_with
from harness import ids_of
from parser_families import family
from strands import Agent, tool

from strands_rollout import SGLangModel
from strands_rollout.agent.episode import EpisodeSetup, run_episode
from strands_rollout.agent.limits import EpisodeLimits, StopReason
from strands_rollout.errors import ConfigError
from strands_rollout.record.saved import EpisodeProgress
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.tool_parsers import Text, ToolCall, detect_format, get_parser, register_parser
from strands_rollout.tool_parsers.json_object import HermesParser


def chosen(tokenizer: Any, **kwargs: Any) -> str:
    call = ChatTemplate(tokenizer, **kwargs).example_call
    return detect_format(*call)


def test_detect_format_of_real_templates_is_hermes(tokenizer: Any) -> None:
    assert chosen(tokenizer) == chosen(tokenizer, enable_thinking=False) == "hermes"


@pytest.mark.parametrize("known", TEMPLATES)
def test_detect_format_of_each_family(known: str, shipped_tokenizer: Any) -> None:
    name, template = TEMPLATES[known]
    assert chosen(tokenizer_with(template, shipped_tokenizer)) == name


@pytest.mark.parametrize(
    ("sign", "name"),
    [("{#<|tool_call|>#}", "granite"), ("{#<|tool_call_start|>#}", "lfm2"), ("<tool_call>\n{", "hermes")],
)
def test_detect_format_by_hints_without_calls(sign, name, shipped_tokenizer):
    shown = '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>' if name == "hermes" else sign
    template = CHATML.replace("CALL", "").replace("<tool_call>...</tool_call>", shown)
    assert chosen(tokenizer_with(template, shipped_tokenizer)) == name


@pytest.mark.parametrize("known", TEMPLATES)
def test_write_turn_is_parsed_back(known: str, shipped_tokenizer: Any) -> None:
    name, source = TEMPLATES[known]
    template = ChatTemplate(tokenizer_with(source, shipped_tokenizer))
    calls = [("add", {"item": "an apple"}), ("look_up", {"item": "a pear", "shop": "x"})]
    # in these formats, turns with calls have no text
    said = "" if name in ("llama3_json", "gpt_oss", "muse_glimmer") else "Let me see."
    for written in (calls[:1], calls[: 1 if name in ("llama3_json", "gpt_oss") else 2]):
        turn, end_id = template.write_turn(said, written)
        assert end_id == template.end_of_calls_id
        segments = get_parser(name).segments(turn, template.opens_reasoning)
        assert [(one.name, one.arguments) for one in segments if isinstance(one, ToolCall)] == written
        assert "".join(one.text for one in segments if isinstance(one, Text)).strip() == said


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            "[[{{ call.function.name }}({{ call.function.arguments | tojson }})]]",
            r"\[\[probe.*fits none of apertus, .*Set tool_parser to the format.*: apertus, deepseek_v3",
        ),
        ("", "can't write .*Set tool_parser to the format .* qwen3_coder"),
    ],
    ids=["no known format", "no calls"],
)
def test_detect_format_without_match_names_the_choices(shipped_tokenizer, call, words) -> None:
    tokenizer = tokenizer_with(CHATML.replace("CALL", call), shipped_tokenizer)
    with pytest.raises(ConfigError, match=words):
        SGLangModel(tokenizer, "http://127.0.0.1:1", tool_parser="auto")


def test_detect_format_with_several_matches_names_them(shipped_tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("strands_rollout.tool_parsers._factories", {"hermes": HermesParser})
    register_parser("mine", HermesParser)
    with pytest.raises(ConfigError, match="fits hermes and mine; expected exactly one.*: hermes, mine"):
        chosen(shipped_tokenizer)


@tool
def add(a: int, b: int, note: str = "") -> str:
    """Add."""
    return f"{a!r}+{b!r} is {a + b!r} ({note!r})"


async def test_value_against_its_schema_is_reported_and_counted(shipped_tokenizer: Any) -> None:
    tokenizer = tokenizer_with(TEMPLATES["qwen3_coder"][1], shipped_tokenizer)
    turn = family("qwen3_coder").turn(calls=[("add", {"a": "two", "b": 3})]) + "<|im_end|>"
    script = [Reply.tokens(ids_of(tokenizer, turn)), Reply.tokens(ids_of(tokenizer, "Hm.<|im_end|>"))]
    async with FakeSGLang(script) as fake:
        model = SGLangModel(tokenizer, fake.base_url, tool_parser="qwen3_coder")
        agent = Agent(model=model, callback_handler=None, retry_strategy=None, tools=[add])
        await agent.invoke_async("What is 2 + 3?")
    (failure,) = model.parse_failures
    assert (failure.name, failure.raw) == ("add", turn.removesuffix("<|im_end|>"))
    assert "the parameter 'a' of 'add' is 'two'; expected integer" in tokenizer.decode(fake.requests[1].input_ids)


async def test_resumed_episode_parses_by_tool_schemas(shipped_tokenizer: Any) -> None:
    tokenizer = tokenizer_with(TEMPLATES["qwen3_coder"][1], shipped_tokenizer)
    turn = family("qwen3_coder").turn(calls=[("add", {"a": "two", "b": 3})]) + "<|im_end|>"
    user = {"role": "user", "content": [{"text": "What is 2 + 3?"}]}
    async with FakeSGLang([Reply.tokens(ids_of(tokenizer, text)) for text in (turn, "Hm.<|im_end|>")]) as fake:
        first, second = (SGLangModel(tokenizer, fake.base_url, tool_parser="qwen3_coder") for _ in range(2))
        answer = await first.answer([user], [add.tool_spec])
        second.resume(first.trajectory, [user, answer.message], 1)
        progress = EpisodeProgress([user, answer.message], 1)
        episode = await run_episode(
            second,
            [user],
            EpisodeSetup(system_prompt=None, tools=[add], limits=EpisodeLimits(), progress=progress),
        )
    assert episode.stop_reason is StopReason.COMPLETED
    assert [failure.name for failure in second.parse_failures] == ["add"]
    assert "'a' of 'add' is 'two'; expected integer" in tokenizer.decode(fake.requests[1].input_ids)


async def test_turn_with_other_stop_token_is_parsed_without_it(shipped_tokenizer: Any) -> None:
    tokenizer = tokenizer_with(TEMPLATES["llama3_json"][1] + "{#<|eom_id|>#}", shipped_tokenizer)
    eom = tokenizer.convert_tokens_to_ids("<|eom_id|>")
    turn = [*ids_of(tokenizer, family("llama3_json").turn(calls=[("add", {"a": 2, "b": 3})])), eom]
    async with FakeSGLang([Reply.tokens(turn)]) as fake:
        model = SGLangModel(tokenizer, fake.base_url, tool_parser="auto")
        answer = await model.answer([{"role": "user", "content": [{"text": "hi"}]}])
    (block,) = answer.message["content"]
    assert (block["toolUse"]["name"], block["toolUse"]["input"]) == ("add", {"a": 2, "b": 3})
