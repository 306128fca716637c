"""Records of tool calls and requests in a sample's metadata: tool, status, start and seconds."""

import asyncio
import json
from typing import Any

from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, TOOL_CALL, args_for, call_text, ids_of, run
from strands import tool

from strands_rollout import Sample, generate


@tool
async def fail() -> str:
    """Raise."""
    raise ValueError("no")


@tool
async def hang() -> str:
    """Wait forever."""
    await asyncio.Event().wait()
    return ""


@tool
async def wait() -> str:
    """Wait until both calls run, then 30 ms more."""
    await both_started.wait()
    await asyncio.sleep(0.03)
    return ""


both_started = asyncio.Barrier(2)


def call(name: str) -> str:
    return TOOL_CALL.format(name=name, arguments="{}")


async def test_facts_calls_have_tool_status_and_seconds(shipped_tokenizer: Any) -> None:
    settings = {"tools": [f"{__name__}.fail", f"{__name__}.hang"], "tool_timeout_s": 0.05}
    played = await run(shipped_tokenizer, [call("fail"), call("hang"), ANSWER], settings=settings)
    calls = played.facts["calls"]
    assert [(call["id"], call["tool"], call["status"]) for call in calls] == [
        ("call_1_0", "fail", "error"),
        ("call_2_0", "hang", "timeout"),
    ]
    assert calls[1]["s"] >= 0.05
    assert sum(call["s"] for call in calls) <= played.facts["duration_s"]
    assert [len(played.facts["turn_s"]), sum(played.facts["turn_s"])] == [3, played.facts["generate_s"]]
    json.dumps(played.facts)


async def test_facts_calls_of_the_code_tool_have_exit_codes(shipped_tokenizer: Any) -> None:
    settings = {"executor": {"name": "subprocess"}}
    codes = [call_text("print(1)"), call_text("raise SystemExit(3)"), ANSWER]
    played = await run(shipped_tokenizer, codes, settings=settings)
    success, failure = (call["sandbox"] for call in played.facts["calls"])
    assert (success["exit_code"], success["killed_by"], failure["exit_code"]) == (0, None, 3)
    assert 0 < success["run_s"] <= played.facts["calls"][0]["s"]


async def test_facts_requests_and_calls_have_start_times(shipped_tokenizer: Any) -> None:
    def slow(_body: dict[str, Any], number: int) -> Reply:
        text = (call("wait") + call("wait"), ANSWER)[number]
        return Reply.tokens(ids_of(shipped_tokenizer, text)).paced(0.0, queued_s=0.05)

    async with FakeSGLang(slow, context_length=8192) as fake:
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout={"tools": [f"{__name__}.wait"]})
        sample = await generate(args, Sample(prompt="?", index=0), {"max_new_tokens": 512})
    facts = sample.metadata["strands_rollout"]
    (first, first_at, first_s), (second, second_at, second_s) = facts["requests"]
    calls = facts["calls"]
    assert (first, second, facts["tool_parser"]) == (0, 1, "hermes")
    assert 0 <= first_at <= first_at + first_s <= min(call["at_s"] for call in calls) + 0.001
    # the calls overlap
    assert max(call["at_s"] for call in calls) < min(call["at_s"] + call["s"] for call in calls)
    assert max(call["at_s"] + call["s"] for call in calls) <= second_at + 0.001
    assert second_at + second_s <= facts["duration_s"] + 0.01
