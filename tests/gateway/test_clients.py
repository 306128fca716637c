"""Agents on real SDKs, played by the policy: their append-only history is one sample, each sampled token trained."""

import itertools
from typing import Any

import pytest
from harness import run

CALL = '<tool_call>\n{{"name": "add", "arguments": {{"a": "{}"}}}}\n</tool_call>'
TURNS = [
    f"<think>\nTwo of them.\n</think>\n\nBoth at once.\n{CALL.format('one')}\n{CALL.format('two')}<|im_end|>",
    f"<think>\nOne more.\n</think>\n\n{CALL.format('three')}<|im_end|>",
    f"{CALL.format('four')}<|im_end|>",
    "<think>\nNow I know.\n</think>\n\nIt is \\boxed{34}.<|im_end|>",
    "Yes, it is \\boxed{34}.<|im_end|>",
]


@pytest.mark.parametrize(
    "client",
    [
        *("chat", "chat_stream", "responses", "responses_stream", "responses_by_id"),
        *("messages", "messages_stream", "messages_by_id", "messages_tool_runner"),
        *("strands_chat", "strands_chat_whole", "strands_responses", "strands_responses_by_id", "strands_messages"),
    ],
)
async def test_an_agent_on_a_real_sdk_is_one_sample_that_holds_each_sampled_token(
    client: str, shipped_tokenizer: Any
) -> None:
    result = await run(shipped_tokenizer, TURNS, settings={"agent_program": f"clients.{client}"})
    facts = result.facts["gateway"]
    assert (result.facts["error"], result.facts["stop_reason"]) == (None, "completed")
    assert result.fake.violations == []
    assert (facts["requests"], facts["forks"], facts["repeats"], facts["refused"]) == (5, 0, 0, {}), facts[
        "differences"
    ]
    response = result.sample.tokens[result.prompt_length :]
    trained = [token for token, mask in zip(response, result.sample.loss_mask, strict=True) if mask]
    assert trained == list(itertools.chain.from_iterable(reply.ids for reply in result.replied))
    assert result.context_after(0).index("34 for") < result.context_after(0).rindex("34 for")  # both results
    assert "Are you sure?" in result.context_after(3)
