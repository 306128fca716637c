"""Answers in each API: token usage, and the ids of answers to which later requests may refer."""

import json
from typing import Any

import pytest
from fake_sglang import Reply
from harness import ids_of
from test_matching import ASK, END

from strands_rollout.errors import PromptError
from strands_rollout.gateway.openai import Responses

CACHED = 10


def _cached(tokenizer: Any) -> Reply:
    return Reply.tokens(ids_of(tokenizer, END), cached_tokens=CACHED)


async def test_usage_counts_cached_tokens_as_each_api_does(stage, shipped_tokenizer):
    """Anthropic counts only input tokens that were not cached, OpenAI counts all."""
    found, bodies = {}, {"chat": "messages", "responses": "input", "messages": "messages"}
    for api, name in bodies.items():
        async with stage([_cached(shipped_tokenizer)]) as made:
            _, answer = await made.post(api, {name: [ASK], "max_tokens": 64})
            read, written = len(made.fake.requests[0].input_ids), len(ids_of(shipped_tokenizer, END))
            found[api] = answer["usage"]
    assert found["chat"]["prompt_tokens_details"] == {"cached_tokens": CACHED}
    assert (found["chat"]["prompt_tokens"], found["chat"]["completion_tokens"]) == (read, written)
    assert found["chat"]["total_tokens"] == found["responses"]["total_tokens"] == read + written
    assert found["responses"]["input_tokens_details"] == {"cached_tokens": CACHED}
    assert (found["responses"]["input_tokens"], found["responses"]["output_tokens"]) == (read, written)
    assert found["messages"] == {
        "input_tokens": read - CACHED,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": CACHED,
        "output_tokens": written,
    }


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
async def test_chat_stream_ends_with_requested_usage(stage, options):
    async with stage([END]) as made:
        _, text = await made.post("chat", {"messages": [ASK], "stream": True, "stream_options": options})
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
    assert [chunk["choices"] == [] for chunk in chunks if "usage" in chunk] == (
        [True] if options and options["include_usage"] else []
    )
    assert text.endswith("data: [DONE]\n\n")


def test_protocol_remember_drops_the_oldest_answers() -> None:
    protocol = Responses()
    for number in range(300):
        protocol.remember(f"resp_{number}", {"input": [number]})
    assert protocol.recall("previous_response_id", "resp_299") == {"input": [299]}
    assert protocol.recall("previous_response_id", "resp_44") == {"input": [44]}
    with pytest.raises(PromptError, match="resp_43.*expected the id of one of this session's last answers"):
        protocol.recall("previous_response_id", "resp_43")
