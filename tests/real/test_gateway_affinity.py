"""The worker to which the real routers send each turn, and the use of that worker's prefix cache.

The two workers have the same weights, but report different weight versions, so that a token's version identifies the
worker that sampled it.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from episode_stage import GREEDY, new_samples
from gateway_stage import NAMES, OwnWorker, ends_of, two_workers, versions_of
from worker_front import Passage, WorkerFront

from strands_rollout import Sample

pytestmark = pytest.mark.real
# the probability that so many keys all go to the same one of two workers is below 10**-9
EPISODES = 32


def turns_by_key(fronts: Sequence[WorkerFront]) -> dict[str, list[Passage]]:
    """Return the requests of each key, shortest first."""
    found: dict[str, list[Passage]] = {}
    for passage in sorted((p for front in fronts for p in front.passages), key=lambda p: len(p.body["input_ids"])):
        found.setdefault(passage.key, []).append(passage)
    return found


def finds_itself_cached(turns: Sequence[Passage]) -> bool:
    """Return whether each turn found the turn before it cached, except that turn's last sampled token."""
    return all(
        later.meta_info["cached_tokens"] >= len(turn.body["input_ids"]) + turn.meta_info["completion_tokens"] - 1
        for turn, later in pairwise(turns)
    )


async def test_smg_keeps_session_on_worker_with_prefix_cache(
    sglang: str, own_worker: OwnWorker, shipped_tokenizer: Any, report_row: Any
) -> None:
    async with two_workers(sglang, await own_worker.running(), shipped_tokenizer) as (stage, _, fronts):
        samples = await stage.play(new_samples(EPISODES), GREEDY)  # each episode has two or more turns
    assert len(ends_of(samples).exact) == EPISODES
    keys = [{passage.key for passage in front.passages} for front in fronts]
    assert keys[0] | keys[1] == {sample.session_id for sample in samples}
    assert (keys[0] & keys[1], all(keys)) == (set(), True)
    assert all(len(versions_of(sample)) == 1 for sample in samples)
    assert len(set.union(*map(versions_of, samples))) == 2
    turns = turns_by_key(fronts)
    assert min(map(len, turns.values())) > 1
    assert all(map(finds_itself_cached, turns.values()))
    add_outcome(report_row, "smg", "consistent_hashing", samples, turns)


@pytest.mark.parametrize("policy", ["cache_aware", "round_robin"])
async def test_sglang_router_without_affinity_stays_exact(
    policy: str, sglang: str, own_worker: OwnWorker, shipped_tokenizer: Any, report_row: Any
) -> None:
    own, flags = await own_worker.running(), ("--policy", policy)
    async with two_workers(sglang, own, shipped_tokenizer, router="sglang-router", flags=flags) as (stage, _, fronts):
        samples = await stage.play(new_samples(EPISODES), GREEDY)
        alone = await stage.play_one(GREEDY)  # one turn after the other
    samples.append(alone)
    assert len(ends_of(samples).exact) == EPISODES + 1
    assert {passage.key for front in fronts for passage in front.passages} == {s.session_id for s in samples}
    if policy == "round_robin":
        assert len(versions_of(alone)) == 2
    add_outcome(report_row, "sglang-router", policy, samples, turns_by_key(fronts))


def add_outcome(
    report_row: Any, router: str, policy: str, samples: Sequence[Sample], turns: dict[str, list[Passage]]
) -> None:
    later = [turn for passages in turns.values() for turn in passages[1:]]
    cached = sum(turn.meta_info["cached_tokens"] for turn in later)
    report_row(
        "affinity of turns on two workers",
        router=NAMES[router],
        policy=policy,
        episodes=len(samples),
        at_one_worker=sum(len(versions_of(sample)) == 1 for sample in samples),
        workers_used=len(set.union(*map(versions_of, samples))),
        later_turns=len(later),
        later_turns_cached=f"{cached / sum(len(turn.body['input_ids']) for turn in later):.0%}",
    )
