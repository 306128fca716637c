"""/v1/chat/completions, as far as the embedded engine offers it, on servers that parse calls and reasoning."""

import json

from prompts import ASK, ASK_THE_AGENT, TOOLS

ANSWER_KEYS = {"id", "object", "created", "model", "choices", "usage", "metadata"}
CHOICE_KEYS = {"index", "message", "logprobs", "finish_reason", "matched_stop"}
USAGE_KEYS = {
    "prompt_tokens",
    "total_tokens",
    "completion_tokens",
    "prompt_tokens_details",
    "reasoning_tokens",
    "completion_tokens_details",
}


async def _chat(engine, **fields):
    return await engine.post("/v1/chat/completions", {"model": "m", "messages": ASK, "temperature": 0, **fields})


async def test_an_answer_has_openais_form_and_the_weights_versions(engine):
    body = (await _chat(engine, max_tokens=5, ignore_eos=True)).body
    [choice] = body["choices"]
    assert (set(body), set(choice), set(body["usage"])) == (ANSWER_KEYS, CHOICE_KEYS, USAGE_KEYS)
    assert (body["object"], body["model"]) == ("chat.completion", "m")
    assert choice["message"]["role"] == "assistant"
    assert (choice["finish_reason"], choice["matched_stop"]) == ("length", None)
    usage = body["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (5, usage["prompt_tokens"] + 5)
    version = (await engine.get("/model_info")).body["weight_version"]
    assert body["metadata"] == {
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": 5}],
    }


async def test_a_chat_is_the_generation_from_its_rendered_prompt(shipped):
    # its lines are those of the text; line feeds around it are one of the differences
    body = (await _chat(shipped, max_tokens=12)).body
    rendered = f"<|im_start|>user\n{ASK[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    generated = await shipped.generate(text=rendered, temperature=0, max_new_tokens=12)
    assert body["usage"]["prompt_tokens"] == generated["meta_info"]["prompt_tokens"]
    message = body["choices"][0]["message"]
    assert message["content"].strip("\n") == generated["text"].strip("\n")
    assert message["reasoning_content"] is None


async def test_a_tool_call_is_parsed(narrow):
    body = (await _chat(narrow, tools=TOOLS, messages=ASK_THE_AGENT)).body
    [choice] = body["choices"]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("tool_calls", None)
    message = choice["message"]
    assert (set(message), message["content"]) == ({"role", "content", "reasoning_content", "tool_calls"}, "")
    assert len(message["reasoning_content"]) > 10
    [call] = message["tool_calls"]
    assert set(call) == {"id", "index", "type", "function"}
    assert call["id"].startswith("call_")
    assert (call["index"], call["type"], call["function"]["name"]) == (0, "function", "execute_python_code")
    assert set(json.loads(call["function"]["arguments"])) == {"code"}


async def test_stream_chunks_add_up_to_the_whole_answer(narrow):
    asked = {"model": "m", "messages": ASK_THE_AGENT, "temperature": 0, "tools": TOOLS}
    body = {**asked, "stream_options": {"include_usage": True}}
    whole = (await narrow.post("/v1/chat/completions", body)).body
    events = [event async for event in narrow.events("/v1/chat/completions", {**body, "stream": True})]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    message = whole["choices"][0]["message"]
    assert deltas[0]["role"] == "assistant"
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas).strip("\n") == (message[name] or "").strip("\n")
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    assert {call["index"] for call in calls} == {0}
    arguments = "".join(call["function"]["arguments"] or "" for call in calls)
    assert json.loads(arguments) == json.loads(message["tool_calls"][0]["function"]["arguments"])
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]]
    assert (finishes[-1], set(finishes[:-1])) == (whole["choices"][0]["finish_reason"], {None})
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
