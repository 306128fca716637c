"""The engine of the interruption tests: what it says of interrupted requests is true, and it sees what is broken."""

from typing import Any

import aiohttp
import pytest
from fake_sglang import ROUTING_HEADER, FakeSGLang
from interruptible_policy import (
    Disturb,
    InterruptiblePolicy,
    TaskFacts,
    abort_after,
    aborted_in_queue,
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

    async def ask(self, ids: list[int], *, key: str = "a") -> Any:
        self.sent += 1
        params = {"max_new_tokens": 99}
        request = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "rid": f"r{self.sent}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.fake.base_url}/generate", json=request, headers={ROUTING_HEADER: key}) as response,
        ):
            return await response.json()


def policy_of(tokenizer: Any, disturb: Disturb = lambda _asked: None) -> InterruptiblePolicy:
    return InterruptiblePolicy(tokenizer, {"sums": TURNS}, disturb)


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
