"""Chat completions: turns taken apart, answers in OpenAI's form, and Strands' own OpenAIModel running on them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_qwen3 import TinyQwen3

from strands_rollout.engine.chat import ChatCall, ChatParts, split_turn

CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
CALL = ChatCall("add", '{"a": 2, "b": 3}')
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two integers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
USER = [{"role": "user", "content": "What is 2 + 3?"}]


def _split(text: str, *, in_reasoning: bool = False, with_calls: bool = True, final: bool = True) -> ChatParts:
    return split_turn(text, in_reasoning=in_reasoning, with_calls=with_calls, final=final)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hello.", ChatParts("", "Hello.", ())),
        ("<think>\nhm\n</think>\n\nHello.", ChatParts("hm", "Hello.", ())),
        ("<think>\nnever closed", ChatParts("never closed", "", ())),
        (f"Sum: {CALL_TEXT}", ChatParts("", "Sum: ", (CALL,))),
        (f"{CALL_TEXT}\n{CALL_TEXT}", ChatParts("", "", (CALL, CALL))),
        (f"<think>{CALL_TEXT}</think>no", ChatParts(CALL_TEXT, "no", ())),
        (f"{CALL_TEXT[:-5]}", ChatParts("", CALL_TEXT[:-5], ())),
        ("<tool_call>{}</tool_call>", ChatParts("", "<tool_call>{}</tool_call>", ())),
        ("<tool_call>{nope</tool_call>", ChatParts("", "<tool_call>{nope</tool_call>", ())),
        (
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            ChatParts("", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', ()),
        ),
        ('<tool_call>{"name": "f"}</tool_call>', ChatParts("", "", (ChatCall("f", "{}"),))),
    ],
)
def test_a_turn_is_taken_apart_without_losing_anything(text, parts):
    assert _split(text) == parts


def test_what_is_looked_for_depends_on_the_prompt_and_the_tools():
    assert _split("hm\n</think>\n\nHello.", in_reasoning=True) == ChatParts("hm", "Hello.", ())
    assert _split(CALL_TEXT, with_calls=False) == ChatParts("", CALL_TEXT, ())


@given(
    st.lists(st.sampled_from(["<think>", "</think>", CALL_TEXT, "<tool_call>", "</tool_call>", "a", "\n", " <"])),
    st.booleans(),
)
def test_what_a_stream_has_shown_stays_a_prefix_of_the_whole(pieces, in_reasoning):
    text = "".join(pieces)
    whole = _split(text, in_reasoning=in_reasoning)
    for end in range(len(text) + 1):
        part = _split(text[:end], in_reasoning=in_reasoning, final=False)
        assert whole.reasoning.startswith(part.reasoning)
        assert whole.content.startswith(part.content)
        assert whole.calls[: len(part.calls)] == part.calls


async def _chat(api, **fields):
    body = {"model": "m", "messages": USER, "temperature": 0, **fields}
    return await api.post("/v1/chat/completions", body)


async def test_calls_are_looked_for_where_tools_are_and_a_turn_cut_by_length_says_so(start, scripted_dir):
    api = await start(scripted_dir)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = (await _chat(api, **fields)).body["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert "<tool_call>" in choice["message"]["content"]
    for name in ("max_tokens", "max_completion_tokens"):
        choice = (await _chat(api, tools=TOOLS, **{name: 7})).body["choices"][0]
        assert choice["finish_reason"] == "length"
        assert "tool_calls" not in choice["message"]


async def test_seeds_stops_and_template_options_reach_the_engine(embedded):
    fields = {"temperature": 1, "seed": 4, "max_tokens": 20, "ignore_eos": True}
    first, second = [(await _chat(embedded, **fields)).body["choices"][0]["message"] for _ in range(2)]
    assert first == second
    plain, closed = [
        (await _chat(embedded, max_tokens=1, chat_template_kwargs=options)).body["usage"]["prompt_tokens"]
        for options in ({}, {"enable_thinking": False})
    ]
    assert closed > plain


async def test_the_generation_config_gives_the_chats_defaults(start, tmp_path):
    folder = TinyQwen3().write(tmp_path / "m")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.6, "top_k": 1}))
    api = await start(folder)
    body = {"messages": USER, "max_tokens": 10}
    answers = [(await api.post("/v1/chat/completions", body)).body["choices"][0]["message"] for _ in range(2)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "only text content"),
        ({"messages": "hi"}, "messages must be a list of objects"),
        ({"n": 2}, "n=2 is not supported"),
        ({"tool_choice": "required"}, "tool_choice=required is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format=json_object is not supported"),
        ({"top_logprobs": 3}, "top_logprobs is not supported"),
        ({"model": 5}, "model must be a string"),
    ],
)
async def test_what_cannot_be_served_is_refused_in_the_openai_form(embedded, fields, words):
    answer = await _chat(embedded, **fields)
    assert (answer.status, answer.body["type"], answer.body["code"]) == (400, "BadRequestError", 400)
    assert words in answer.body["message"]


async def test_a_model_can_have_a_name_of_its_own(start, tiny_dir):
    api = await start(tiny_dir, served_model_name="tiny")
    assert [card["id"] for card in (await api.get("/v1/models")).body["data"]] == ["tiny"]
    assert (await api.get("/v1/models/tiny")).body["id"] == "tiny"


@pytest.mark.parametrize("stream", [True, False])
async def test_strands_openai_model_runs_a_tool_loop_on_it(start, scripted_dir, stream):
    pytest.importorskip("openai", reason="strands-agents[openai] is not installed")
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    calls = []

    @tool
    def add(a: int, b: int) -> int:
        """Add two integers.

        Args:
            a: One.
            b: The other.
        """
        calls.append((a, b))
        return a + b

    api = await start(scripted_dir)
    model = OpenAIModel(
        client_args={"base_url": f"{api.base_url}/v1", "api_key": "none"},
        model_id="scripted",
        params={"temperature": 0},
        stream=stream,
    )
    agent = Agent(model=model, tools=[add], system_prompt="Use the tool.", callback_handler=None)
    result = await agent.invoke_async("What is 2 + 3?")
    assert calls == [(2, 3)]
    assert result.stop_reason == "end_turn"
    assert str(result).strip() == "The sum is \\boxed{5}."
    assert result.metrics.accumulated_usage["outputTokens"] == 10 + 3
    assert agent.messages[1]["content"][0]["reasoningContent"]["reasoningText"]["text"] == "I add."
