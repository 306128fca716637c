"""Agents on real SDKs, with the policy as their model: an append-only history is one sample with all its tokens."""

import base64
import functools
import itertools
from operator import attrgetter
from pathlib import Path
from typing import Any

import clients
import pytest
from fake_sglang import FakeSGLang
from harness import args_for, run
from programs import PATHS, filled
from strands import tool
from vision import VisionEngine, image_block, picture, save_llava

from strands_rollout import Sample, generate
from strands_rollout.gateway.openai import Responses
from strands_rollout.gateway.program import Endpoint
from strands_rollout.record.record import Reply

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
async def test_agent_on_an_sdk_is_one_sample_with_each_token(client: str, shipped_tokenizer: Any) -> None:
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


@pytest.mark.parametrize("client", CLIENTS)
async def test_sdk_continues_an_answer_of_reasoning_only(shipped_tokenizer, client):
    turns = ["<think>\nHm, hm.\n</think>\n\n<|im_end|>", "It is 34.<|im_end|>"]
    result = await run(shipped_tokenizer, turns, prompt=QUESTION, settings={"agent_program": f"clients.{client}"})
    facts = result.facts
    assert (result.sample.status.value, facts["error"], facts["turns"]) == ("completed", None, 2)
    assert (facts["gateway"]["forks"], facts["gateway"]["differences"]) == (0, [])
    assert sum(result.sample.loss_mask) == sum(len(reply.ids) for reply in result.replied)


@pytest.mark.parametrize("api", [clients.CHAT, clients.MESSAGES])
async def test_sdks_list_the_model(api: clients.Api, stage: Any) -> None:
    async with stage([], model_id="org/policy") as made:
        endpoint = Endpoint(f"{made.gateway.base_url}/v1", made.key, "org/policy")
        async with api.client(endpoint, is_async=True) as client:
            [listed] = [card async for card in client.models.list()]
            found = await client.models.retrieve("org/policy")
    assert listed == found
    years = found.created_at.year - 1970 if api is clients.MESSAGES else found.created
    assert (found.id, years) == ("org/policy", 0)


def test_responses_tool_of_a_namespace_has_both_names() -> None:
    space = {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]}
    body = {"model": "policy", "input": "Hi.", "tools": [space]}
    protocol, use = Responses(), {"toolUseId": "call_1_0", "name": "files__read", "input": {}}
    request = protocol.read_body(body)
    assert [spec["name"] for spec in request.tools] == ["files__read"]
    [call] = protocol.response_body(request, Reply("", "", [use], "tool_use"))["output"]
    assert (call["namespace"], call["name"]) == ("files", "read")
    result = {"type": "function_call_output", "call_id": "call_1_0", "output": "a"}
    again = protocol.read_body({**body, "input": [{"role": "user", "content": "Hi."}, call, result]})
    assert again.messages[1]["content"] == [{"toolUse": use}]


DRAWN = [{"text": "Two:"}, image_block(picture(60, 90, seed=2)), image_block(picture(seed=3, mode="RGBA"))]


@tool(name="add", description="Adds.", inputSchema={"json": clients.PARAMETERS})
def add_in_process(a: str) -> Any:
    return {"status": "success", "content": DRAWN}


def _part(api: clients.Api, block: Any) -> dict[str, Any]:
    if "text" in block:
        return {"type": "input_text" if api is clients.RESPONSES else "text", **block}
    data = base64.b64encode(block["image"]["source"]["bytes"]).decode()
    if api is clients.MESSAGES:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    url = f"data:image/png;base64,{data}"
    is_response = api is clients.RESPONSES
    return (
        {"type": "input_image", "image_url": url} if is_response else {"type": "image_url", "image_url": {"url": url}}
    )


async def _shows(api: clients.Api, task: Any, endpoint: Any) -> None:
    async with api.client(endpoint, is_async=True) as client:
        ask = attrgetter(api.resource)(client).create
        history = [{"role": "user", "content": [_part(api, block) for block in task.messages[0]["content"]]}]
        said, calls = api.said(await ask(model=endpoint.model, **api.request(history)))
        [result] = api.results(calls)
        place = result["content"][0] if api is clients.MESSAGES else result
        place["output" if api is clients.RESPONSES else "content"] = [_part(api, block) for block in DRAWN]
        await ask(model=endpoint.model, **api.request([*history, *said, result]))


shows_chat = functools.partial(_shows, clients.CHAT)
shows_responses = functools.partial(_shows, clients.RESPONSES)
shows_messages = functools.partial(_shows, clients.MESSAGES)


async def test_images_equal_those_of_an_agent_in_process(tmp_path: Path) -> None:
    processor, samples, asked = save_llava(tmp_path), [], []
    parts = [{"type": "image", "image": picture(seed=1)}, {"type": "text", "text": QUESTION}]
    programs = [{"agent_program": f"{__name__}.shows_{api}"} for api in PATHS]
    for player in ({"tools": [f"{__name__}.add_in_process"]}, *programs):
        engine = VisionEngine(processor, [CALL.format("one") + "<|im_end|>", TURNS[-1]])
        async with FakeSGLang(engine, context_length=8192) as fake:
            given = {**player, "system_prompt": clients.SYSTEM}
            args = args_for(fake.base_url, processor.tokenizer, strands_rollout=given)
            args.hf_checkpoint = str(tmp_path)
            sample = Sample(prompt=[{"role": "user", "content": parts}], index=0)
            samples.append(filled(await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 2048})))
        asked.append([(one.input_ids, one.body["image_data"]) for one in fake.requests])
    assert [len(images) for _, images in asked[0]] == [1, 3]
    assert asked[1:] == asked[:1] * 3
    assert samples[1:] == samples[:1] * 3
    assert samples[0]["status"] == "completed"
    assert len(samples[0]["multimodal_train_inputs"]["pixel_values"]) == 3
