"""On the real SGLang: a prompt is prefilled for its first samples alone, and a turn prefills only what is new."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest

from strands_rollout.dataset_rows import read_rows
from strands_rollout.demo import shipped_rows

pytestmark = pytest.mark.real
QUESTION = read_rows(shipped_rows(), 1)[0].prompt[0]["content"]


def flush(url: str) -> None:
    request = urllib.request.Request(f"{url}/flush_cache", method="POST")  # noqa: S310 - http
    assert urllib.request.urlopen(request, timeout=20).status == 200  # noqa: S310


async def test_eight_samples_of_a_prompt_share_its_prefill_and_a_turn_prefills_only_what_is_new(
    sglang: str, shipped_tokenizer: Any, told: Any
) -> None:
    from prefix_cache import SAMPLES, ours, strands_sglang  # the peer is installed for these tests alone

    prefilled = {}
    for name, play in (("strands-rollout", ours), ("strands-sglang 0.4.3", strands_sglang)):
        prefilled[name] = await measured(name, play, sglang, shipped_tokenizer, told)
    first, later, prompt, new, turns = prefilled["strands-rollout"]
    # an engine always computes a request's last token, and it has not kept what it sampled last; a second sample is
    # prefilled beside the first where it comes before the first one's prefill is in the cache
    assert first <= 2 * prompt + SAMPLES
    assert later <= new + 2 * turns
    assert 2 * first < prefilled["strands-sglang 0.4.3"][0]


async def measured(name: str, play: Any, url: str, tokenizer: Any, told: Any) -> tuple[int, int, int, int, int]:
    flush(url)
    episodes = await play(url, tokenizer, QUESTION)
    first = [episode[0] for episode in episodes]
    later = [turn for episode in episodes for turn in episode[1:]]
    assert later, "no episode had a second turn"
    result = (
        sum(turn.prefilled for turn in first),
        sum(turn.prefilled for turn in later),
        first[0].prompt_tokens,
        sum(turn.new_tokens for turn in later),
        len(later),
    )
    told(
        "prefix cache: eight samples of one prompt",
        model=name,
        prompt_tokens=result[2],
        first_turns_prefilled=result[0],
        later_turns=result[4],
        later_turns_new_tokens=result[3],
        later_turns_prefilled=result[1],
    )
    return result
