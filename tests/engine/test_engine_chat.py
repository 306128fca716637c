"""Chat completions: turns taken apart, answers in OpenAI's form, and Strands' own OpenAIModel running on them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_qwen3 import TinyQwen3

from strands_rollout.code_tool.tool import execute_python_code
from strands_rollout.engine import SHIPPED_MODEL_DIR
from strands_rollout.engine.chat import ChatCall, ChatParts, split_turn
from strands_rollout.settings import SYSTEM_PROMPT

CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
CALL = ChatCall("add", '{"a": 2, "b": 3}')
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
        (f"{CALL_TEXT[:-5]}", ChatParts("", CALL_TEXT[:-5], ())),
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
        ({"n": 2}, "n=2 is not supported"),
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
async def test_strands_openai_model_runs_a_tool_loop_on_it(start, stream):
    pytest.importorskip("openai", reason="strands-agents[openai] is not installed")
    from strands import Agent
    from strands.models.openai import OpenAIModel

    api = await start(SHIPPED_MODEL_DIR)
    model = OpenAIModel(
        client_args={"base_url": f"{api.base_url}/v1", "api_key": "none"},
        model_id="shipped",
        params={"temperature": 0},
        stream=stream,
    )
    agent = Agent(model=model, tools=[execute_python_code], system_prompt=SYSTEM_PROMPT, callback_handler=None)
    result = await agent.invoke_async("Ben buys 17 apples at 2 dollars each. How many dollars does Ben spend?")
    blocks = [block for message in agent.messages for block in message["content"]]
    assert [block["toolResult"]["content"] for block in blocks if "toolResult" in block] == [[{"text": "34"}]]
    assert "reasoningContent" in blocks[1]
    assert (result.stop_reason, "\\boxed{34}" in str(result)) == ("end_turn", True)
    assert result.metrics.accumulated_usage["outputTokens"] > 20
