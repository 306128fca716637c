"""Agents on real SDKs, played by the policy: their append-only history is one sample, each sampled token trained."""

import functools
import itertools
from typing import Any

import clients
import pytest
from harness import run

from strands_rollout.gateway.openai import Responses
from strands_rollout.gateway.protocols import ItemCache, Reply

CALL = '<tool_call>\n{{"name": "add", "arguments": {{"a": "{}"}}}}\n</tool_call>'
QUESTION = "What is 17 * 2?"
TURNS = [
    f"<think>\nTwo of them.\n</think>\n\nBoth at once.\n{CALL.format('one')}\n{CALL.format('two')}<|im_end|>",
    f"<think>\nOne more.\n</think>\n\n{CALL.format('three')}<|im_end|>",
    f"{CALL.format('four')}<|im_end|>",
    "<think>\nNow I know.\n</think>\n\nIt is \\boxed{34}.<|im_end|>",
    "Yes, it is \\boxed{34}.<|im_end|>",
]
CLIENTS = [name for name, value in vars(clients).items() if isinstance(value, functools.partial)]


@pytest.mark.parametrize("client", [*CLIENTS, "messages_tool_runner"])
async def test_an_agent_on_a_real_sdk_is_one_sample_that_holds_each_sampled_token(
    client: str, shipped_tokenizer: Any
) -> None:
    result = await run(shipped_tokenizer, TURNS, prompt=QUESTION, settings={"agent_program": f"clients.{client}"})
    facts = result.facts["gateway"]
    assert (result.facts["error"], result.facts["stop_reason"]) == (None, "completed")
    assert result.fake.violations == []
    assert (facts["requests"], facts["forks"], facts["repeats"], facts["refused"]) == (5, 0, 0, {}), facts[
        "differences"
    ]
    response = result.sample.tokens[result.prompt_length :]
    trained = [token for token, mask in zip(response, result.sample.loss_mask, strict=True) if mask]
    assert trained == list(itertools.chain.from_iterable(reply.ids for reply in result.replied))
    assert result.context_after(0).count("34 for") == (1 if client == "chat_rewritten" else 2)
    assert clients.AGAIN in result.context_after(3)
    assert result.decode(result.sample.tokens).count(QUESTION) == 1


def test_a_tool_of_a_namespace_is_known_by_both_names() -> None:
    space = {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]}
    body = {"model": "policy", "input": "Hi.", "tools": [space]}
    protocol, use = Responses(), {"toolUseId": "call_1_0", "name": "files__read", "input": {}}
    request = protocol.read(body, ItemCache())
    assert [spec["name"] for spec in request.tools] == ["files__read"]
    [call] = protocol.whole(request, Reply("", "", [use], "tool_use"))["output"]
    assert (call["namespace"], call["name"]) == ("files", "read")
    result = {"type": "function_call_output", "call_id": "call_1_0", "output": "a"}
    again = protocol.read({**body, "input": [{"role": "user", "content": "Hi."}, call, result]}, ItemCache())
    assert again.messages[1]["content"] == [{"toolUse": use}]
