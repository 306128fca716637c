"""The prefix cache of the real SGLang: each request of an episode finds all tokens of the request before it.

"All" is the request's input and its answer, except the answer's last token: the engine has not read that token yet.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from episode_stage import GREEDY, LONG_TURN, EpisodeStage, episodes_on, facts_of, new_samples, until_sampling
from gateway_stage import NAMES, gateway_before
from ray_cluster import ray_cluster
from worker_front import Passage, WorkerFront

from strands_rollout.slime_plugin.workers import close_pools

pytestmark = pytest.mark.real
EPISODES = 4


@asynccontextmanager
async def fresh_stage(
    sglang: str, tokenizer: Any, router: str | None = None
) -> AsyncIterator[tuple[EpisodeStage, WorkerFront]]:
    """Yield a stage, through a router if one is named, and the proxy in front of the engine; flush the cache first."""
    async with episodes_on(sglang, tokenizer) as direct, WorkerFront(sglang) as front:
        await direct.until_done("/flush_cache")
        routing = gateway_before(front.base_url, router=router) if router else nullcontext(front)
        async with routing as entry, episodes_on(entry.base_url, tokenizer) as stage:
            yield stage, front


def requests_of(front: WorkerFront, count: int) -> list[list[Passage]]:
    """Return the requests of each of `count` episodes, in their order."""
    found: dict[str, list[Passage]] = {}
    for passage in front.passages:
        found.setdefault(passage.key, []).append(passage)
    assert len(found) == count
    return list(found.values())


def missed_tokens(requests: Sequence[Passage]) -> list[int]:
    """Return for each request but the first how many tokens of the preceding request and its answer were not cached."""
    return [
        len(before.body["input_ids"]) + before.meta_info["completion_tokens"] - later.meta_info["cached_tokens"]
        for before, later in pairwise(requests)
    ]


def check_and_report(report_row: Any, how: str, episodes: Sequence[Sequence[Passage]]) -> None:
    """Check that no later request missed more than the last sampled token, and report the shares of cached tokens."""
    assert min(map(len, episodes)) > 1
    assert {missed for requests in episodes for missed in missed_tokens(requests)} == {1}
    later = [request for requests in episodes for request in requests[1:]]
    sent = sum(len(request.body["input_ids"]) for request in later)
    cached = sum(request.meta_info["cached_tokens"] for request in later)
    report_row(
        "prefix cache between the requests of an episode",
        how=how,
        episodes=len(episodes),
        later_requests=len(later),
        of_the_tokens_before="all but the last",
        of_all_sent_tokens=f"{cached / sent:.1%}",
    )


@pytest.mark.parametrize("router", [None, *NAMES])
async def test_generate_turns_find_their_prefix_cached(
    router: str | None, sglang: str, shipped_tokenizer: Any, report_row: Any
) -> None:
    async with fresh_stage(sglang, shipped_tokenizer, router) as (stage, front):
        await stage.play(new_samples(EPISODES))
    how = "directly" if router is None else f"through {NAMES[router]}"
    check_and_report(report_row, how, requests_of(front, EPISODES))


async def test_episode_workers_turns_find_their_prefix_cached(
    sglang: str, shipped_tokenizer: Any, report_row: Any
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    async with fresh_stage(sglang, shipped_tokenizer) as (stage, front):
        with ray_cluster({"one": 2}, Path(__file__).parent):
            try:
                await stage.play(new_samples(EPISODES), episode_workers=1)
            finally:
                close_pools()
    check_and_report(report_row, "from an episode worker", requests_of(front, EPISODES))


async def ask_three_times(task: Any, endpoint: Any) -> None:
    """An agent program: a chat of three requests with an OpenAI client."""
    messages: list[Any] = [{"role": "user", "content": task.text}]
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        for _ in range(3):
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=40)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Go on."}]


async def test_gateway_turns_find_their_prefix_cached(sglang: str, shipped_tokenizer: Any, report_row: Any) -> None:
    async with fresh_stage(sglang, shipped_tokenizer) as (stage, front):
        await stage.play(new_samples(EPISODES), agent_program=f"{__name__}.{ask_three_times.__name__}")
    check_and_report(report_row, "from the gateway", requests_of(front, EPISODES))


async def test_generate_resumed_turn_finds_its_prefix_cached(
    sglang: str, shipped_tokenizer: Any, report_row: Any
) -> None:
    aborted = asyncio.Event()
    async with fresh_stage(sglang, shipped_tokenizer) as (stage, front):
        playing = asyncio.create_task(stage.play(new_samples(EPISODES), LONG_TURN, should_abort=aborted.is_set))
        await until_sampling(EPISODES, sglang, tokens=20 * EPISODES)
        aborted.set()
        samples = await playing
        assert all(sample.tokens for sample in samples)
        samples = await stage.play(samples, LONG_TURN)
    assert [facts_of(sample)["resumes"] for sample in samples] == [1] * EPISODES
    check_and_report(report_row, "after an abort in a turn", requests_of(front, EPISODES))


async def test_generate_siblings_find_the_group_prompt_cached(
    sglang: str, shipped_tokenizer: Any, report_row: Any
) -> None:
    async with fresh_stage(sglang, shipped_tokenizer) as (stage, front):
        first, *siblings = [new_samples(1)[0] for _ in range(EPISODES)]
        await stage.play([first], {**GREEDY, "temperature": 1.0})
        await stage.play(siblings, {**GREEDY, "temperature": 1.0})
    prompts = [requests[0] for requests in requests_of(front, EPISODES)]
    cached = [prompt.meta_info["cached_tokens"] for prompt in prompts]
    # the engine reads at least the last token of a prompt, whose logits it needs
    assert cached == [0, *[len(prompt.body["input_ids"]) - 1 for prompt in prompts[1:]]]
    report_row(
        "prefix cache between the samples of a group", samples=EPISODES, siblings_prompts="all but the last token"
    )
