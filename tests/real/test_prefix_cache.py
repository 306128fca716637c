"""On the real SGLang: a prompt is prefilled for its first sample alone, and a turn prefills only what is new."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from episode_stage import episodes_on

from strands_rollout.evaluation.demo import shipped_rows
from strands_rollout.evaluation.rows import read_rows

pytestmark = pytest.mark.real
QUESTION = read_rows(shipped_rows(), 1)[0].prompt[0]["content"]
SAMPLES = 8


async def test_further_samples_of_a_prompt_share_its_prefill_and_a_turn_prefills_only_what_is_new(
    sglang: str, shipped_tokenizer: Any, told: Any
) -> None:
    from prefix_cache import ours, strands_sglang  # the peer is installed for these tests alone

    episodes = await measured("strands-rollout", ours, sglang, shipped_tokenizer, told)
    await measured("strands-sglang 0.4.3", strands_sglang, sglang, shipped_tokenizer, told)
    # an engine always computes a request's last token, and it has not kept what it sampled last
    assert [episode[0].prefilled for episode in episodes] == [1] * SAMPLES
    later = [turn for episode in episodes for turn in episode[1:]]
    assert len(later) >= SAMPLES
    assert [turn for turn in later if turn.prefilled > turn.new_tokens + 2] == []


async def measured(name: str, play: Any, url: str, tokenizer: Any, told: Any) -> Any:
    """Eight episodes at once, after one that has left the prompt in an otherwise empty cache."""
    async with episodes_on(url, tokenizer) as stage:
        await stage.until_done("/flush_cache")
    await play(url, tokenizer, QUESTION)
    episodes = await asyncio.gather(*(play(url, tokenizer, QUESTION) for _ in range(SAMPLES)))
    later = [turn for episode in episodes for turn in episode[1:]]
    told(
        "prefix cache: eight samples of a prompt that one had before",
        model=name,
        prompt_tokens=episodes[0][0].prompt_tokens,
        first_turns_prefilled=sum(episode[0].prefilled for episode in episodes),
        later_turns=len(later),
        later_turns_new_tokens=sum(turn.new_tokens for turn in later),
        later_turns_prefilled=sum(turn.prefilled for turn in later),
    )
    return episodes
