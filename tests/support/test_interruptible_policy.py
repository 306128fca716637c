"""The engine of the interruption tests: what it says of interrupted requests is true, and it sees what is broken."""

from __future__ import annotations

import asyncio
import base64
from array import array
from typing import Any

import aiohttp
import pytest
from fake_sglang import ROUTING_HEADER, FakeSGLang
from interruptible_policy import (
    LAYERS,
    TOP_K,
    Asked,
    Disturb,
    InterruptiblePolicy,
    TaskFacts,
    abort_after,
    aborted_in_queue,
    hold_after,
    paced,
    prompt_of,
)

TURNS = ["I shall think about @KEY.<|im_end|>", "It is \\boxed{34}.<|im_end|>"]
FACTS = TaskFacts("sums/3")


class Client:
    """Speaks to the engine without our own client."""

    def __init__(self, fake: FakeSGLang, tokenizer: Any) -> None:
        self.fake, self.tokenizer, self.sent = fake, tokenizer, 0
        text = f"<|im_start|>user\n{prompt_of('sums', 3)}<|im_end|>\n<|im_start|>assistant\n"
        self.prompt = tokenizer.encode(text, add_special_tokens=False)

    async def ask(self, ids: list[int], *, key: str = "a", tokens: int = 99, **body: Any) -> Any:
        self.sent += 1
        params = {"max_new_tokens": tokens, "custom_params": {"return_top_p_token_ids": True}}
        request = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "rid": f"r{self.sent}", **body}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.fake.base_url}/generate", json=request, headers={ROUTING_HEADER: key}) as response,
        ):
            return await response.json()

    async def post(self, path: str, **body: Any) -> None:
        async with aiohttp.ClientSession() as http, http.post(f"{self.fake.worker_url}{path}", json=body) as response:
            assert response.status == 200

    async def load(self) -> dict[str, int]:
        url = f"{self.fake.worker_url}/v1/loads?include=core"
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            return dict((await response.json())["loads"][0])

    async def until_load(self, running: int, queued: int) -> None:
        async with asyncio.timeout(30):
            while await self.load() != {"num_running_reqs": running, "num_waiting_reqs": queued}:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


def policy_of(tokenizer: Any, disturb: Disturb = lambda _asked: None) -> InterruptiblePolicy:
    return InterruptiblePolicy(tokenizer, {"sums": TURNS}, disturb)


def numbers(text: str) -> list[int]:
    return array("i", base64.b64decode(text)).tolist()


@pytest.mark.parametrize("count", [0, 1, 4])
async def test_a_turn_that_was_aborted_is_answered_with_its_rest(shipped_tokenizer: Any, count: int) -> None:
    policy = policy_of(shipped_tokenizer, lambda asked: abort_after(count) if asked.visit == 0 else None)
    async with FakeSGLang(policy, weight_version="v1") as fake:
        client = Client(fake, shipped_tokenizer)
        first = await client.ask(client.prompt)
        fake.engine.update_weights("v2")
        second = await client.ask([*client.prompt, *first["output_ids"]])
    planned = list(policy.planned_ids("a", "sums")[0])
    assert len(planned) > 5
    assert [*first["output_ids"], *second["output_ids"]] == planned
    assert first["meta_info"]["finish_reason"]["type"] == "abort"
    assert ("prompt_tokens" in first["meta_info"]) == (count > 0)
    assert second["meta_info"]["finish_reason"] == {"type": "stop", "matched": planned[-1]}
    assert second["meta_info"]["weight_versions"] == [{"version": "v2", "start": 0, "end": len(planned) - count}]
    entries = first["meta_info"]["output_token_logprobs"] + second["meta_info"]["output_token_logprobs"]
    start = len(client.prompt)
    versions = ["v1"] * count + ["v2"] * (len(planned) - count)
    assert [e[0] for e in entries] == [FACTS.logprob(start + n, v) for n, v in enumerate(versions)]
    assert fake.violations == fake.episodes.dropped == policy.violations == []
    assert fake.episodes["a"].sequence == client.prompt + planned
    assert fake.episodes["a"].versions == [None] * start + versions


async def test_replay_data_holds_position_and_version_and_starts_where_it_was_asked_to(shipped_tokenizer: Any) -> None:
    policy = policy_of(shipped_tokenizer, lambda asked: abort_after(2) if asked.visit == 0 else None)
    async with FakeSGLang(policy, weight_version="v1") as fake:
        client = Client(fake, shipped_tokenizer)
        first = await client.ask(client.prompt, return_routed_experts=True)
        fake.engine.update_weights("v2")
        ids = client.prompt + first["output_ids"]
        start = len(ids) - 1
        second = await client.ask(ids, return_routed_experts=True, routed_experts_start_len=start)
    total = len(ids) + len(second["output_ids"])
    rows = numbers(first["meta_info"]["routed_experts"]) + numbers(second["meta_info"]["routed_experts"])
    assert len(rows) == (total - 1) * LAYERS * TOP_K
    versions = ["v1"] * start + ["v2"] * (total - 1 - start)
    assert rows == [number for p, version in enumerate(versions) for number in FACTS.experts(p, version)]
    kept, offsets = (numbers(second["meta_info"][f"top_p_token_{name}"]) for name in ("ids", "offsets"))
    assert offsets[0] == 0
    assert offsets[-1] == len(kept)
    assert [kept[n] for n in offsets[:-1]] == second["output_ids"]


async def test_a_pause_aborts_what_runs_and_is_queued_and_lets_the_rest_wait(shipped_tokenizer: Any) -> None:
    def disturb(asked: Asked) -> Any:
        return {"runs": hold_after(2), "queued": paced(0.01, queued_s=9)}.get(asked.key) if asked.visit == 0 else None

    policy = policy_of(shipped_tokenizer, disturb)
    async with FakeSGLang(policy, weight_version="v1") as fake:
        client = Client(fake, shipped_tokenizer)
        asking = [asyncio.create_task(client.ask(client.prompt, key=key)) for key in ("runs", "queued")]
        await client.until_load(1, 1)
        await client.post("/pause_generation", mode="abort")
        runs, queued = await asyncio.gather(*asking)
        assert [len(answer["output_ids"]) for answer in (runs, queued)] == [2, 0]
        waiting = asyncio.create_task(client.ask(client.prompt + runs["output_ids"], key="runs"))
        await fake.arrived(3)
        await client.post("/abort_request", rid="", abort_all=True)  # SGLang does not find one that waits
        await client.post("/update_weights_from_disk", model_path="x", weight_version="v2")
        assert await client.load() == {"num_running_reqs": 0, "num_waiting_reqs": 0}
        assert not waiting.done()
        await client.post("/continue_generation")
        answer = await waiting
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert answer["meta_info"]["weight_version"] == "v2"
    assert fake.violations == []


async def test_dropped_tokens_restarts_and_foreign_tokens_are_seen(shipped_tokenizer: Any) -> None:
    policy = policy_of(shipped_tokenizer, lambda asked: aborted_in_queue if asked.visit == 0 else abort_after(2))
    async with FakeSGLang(policy) as fake:
        client = Client(fake, shipped_tokenizer)
        await client.ask(client.prompt)
        first = await client.ask(client.prompt)  # nothing had been sampled: a mere repetition
        assert fake.episodes["a"].restarts == 0
        continued = client.prompt + first["output_ids"]
        await client.ask(continued)
        await client.ask(continued)
        words = "request 3: it repeats the last one, to which 2 tokens were answered"
        assert (fake.episodes.dropped, fake.violations) == ([words], [])
        await client.ask(client.prompt)
        assert fake.episodes["a"].restarts == 1
        await client.ask([*client.prompt, 5, 5, 5], key="b")
    assert len(policy.violations) == 1
