"""Routed experts and kept top-p ids: requested, stitched over turns, aborts and rollouts, and never guessed."""

import base64
from array import array
from dataclasses import replace
from typing import Any

import pytest
from fake_sglang import Reply
from interruptible_policy import (
    ANSWER,
    LAYERS,
    TOP_K,
    Change,
    PolicyRequest,
    TaskFacts,
    abort_after,
    aborted_in_queue,
    call,
    hold_after,
    turn,
)
from slime_interruptions import PROGRAM, Begin, Scene, facts_of, task_of
from slime_run import trained_tokens

pytest.importorskip("pybase64", reason="slime decodes replay data with pybase64")
pytestmark = pytest.mark.slime

PLANS = {
    "slow": [turn("I shall work on this.", call("work")), turn("And on that.", call("work", "a")), ANSWER],
    "other": [turn(call("work")), ANSWER],
    "quick": [ANSWER],
}
ROUTING = {"use_rollout_routing_replay": True, "num_layers": LAYERS, "moe_router_topk": TOP_K}
TOP_P = {"rollout_top_p": 0.9}
BOTH = {**ROUTING, **TOP_P}
TOO_LONG = "The input (9 tokens) is longer than the model's context length (5 tokens)."


def readers(scene: Scene, sample: Any) -> list[str]:
    """Return the weight version that read each token but the last: the version of the next sampled token."""
    versions = scene.engine.episodes[sample.session_id].versions
    found, last = [], ""
    for version in reversed(versions[1:]):
        last = version or last
        found.append(last)
    return found[::-1]


def replay_problems(scene: Scene, samples: list[Any]) -> list[str]:
    """Return differences between the samples' replay data and the engine's."""
    found = []
    for sample in samples:
        expected_facts = TaskFacts(task_of(sample))
        if scene.rollouts.args.use_rollout_routing_replay:
            rows = [expected_facts.experts(n, version) for n, version in enumerate(readers(scene, sample))]
            got = sample.rollout_routed_experts.reshape(len(sample.tokens) - 1, -1).tolist()
            found += [f"sample {sample.index}: experts of row {n}" for n in range(len(rows)) if rows[n] != got[n]]
        if scene.rollouts.args.rollout_top_p != 1.0:
            found += _kept_problems(scene, sample, expected_facts)
    return found


def _kept_problems(scene: Scene, sample: Any, expected_facts: TaskFacts) -> list[str]:
    versions = scene.engine.episodes[sample.session_id].versions
    ids, offsets = sample.rollout_top_p_token_ids.tolist(), sample.rollout_top_p_token_offsets.tolist()
    start = len(sample.tokens) - sample.response_length
    got = [ids[offsets[n] : offsets[n + 1]] for n in range(sample.response_length)]
    expected = [
        [] if versions[n] is None else expected_facts.top_p_ids(n, str(versions[n]), sample.tokens[n])
        for n in range(start, len(sample.tokens))
    ]
    return [f"sample {sample.index}: kept ids of token {n}" for n in range(len(got)) if got[n] != expected[n]]


def starts_of(scene: Scene, sample: Any) -> list[tuple[int, int]]:
    """Return for each request of a sample the number of tokens sent, and the first requested row of experts."""
    requests = [request.body for request in scene.engine.requests if request.key == sample.session_id]
    assert all(body["return_routed_experts"] for body in requests)
    return [(len(body["input_ids"]), body.get("routed_experts_start_len", 0)) for body in requests]


def all_rows(body: dict[str, Any]) -> object:
    """Drop the field that limits the rows, like an engine that ignores it and always sends all rows."""
    return body.pop("routed_experts_start_len", None)


@pytest.mark.parametrize(
    ("replayed", "forgets"),
    [(BOTH, lambda _body: None), (TOP_P, lambda _body: None), (ROUTING, all_rows), ({**BOTH, **PROGRAM}, all_rows)],
)
async def test_replay_data_is_stitched_over_turns_and_aborts(begin, replayed, forgets) -> None:
    aborts = {0: aborted_in_queue, 1: abort_after(3), 2: abort_after(2), 4: abort_after(1)}
    scene = await begin(PLANS, ["slow", "other"], lambda asked: aborts.get(asked.visit), forgets=forgets, **replayed)
    ranks = await scene.rollouts.train()
    samples = scene.rollouts.samples
    assert ({sample.status.value for sample in samples}, scene.problems(samples)) == ({"completed"}, [])
    assert replay_problems(scene, samples) == []
    assert sum(map(trained_tokens, ranks)) == sum(len(scene.planned_ids(sample)) for sample in samples)


async def test_replay_data_requests_only_unknown_rows(begin: Begin) -> None:
    scene = await begin(PLANS, ["slow"], lambda asked: abort_after(3) if asked.visit == 0 else None, **ROUTING)
    await scene.rollouts.train()
    for sample in scene.rollouts.samples:
        spans = facts_of(sample)["spans"]
        prompt, cut = len(sample.tokens) - sample.response_length, spans[0][1] + 3
        ends = {turn: end for turn, _start, end, _version in spans}
        turns = [(spans[-2][1], ends[0] - 1), (spans[-1][1], ends[1] - 1)]
        assert starts_of(scene, sample) == [(prompt, 0), (cut, cut - 1), *turns]


@pytest.mark.parametrize(("at", "player"), [({1: 0}, {}), ({1: 5}, {}), ({1: 0}, PROGRAM), ({1: 5}, PROGRAM)])
async def test_replay_data_survives_resume(begin, at, player) -> None:
    held = dict(at)

    def disturb(asked: PolicyRequest) -> Change | None:
        if asked.name == "quick":
            return lambda rest: rest.after(1.5 if player else 0.3)  # a program is started first
        return hold_after(held[asked.turn]) if asked.turn in held else None

    sizes = {"rollout_batch_size": 1, "over_sampling_batch_size": 2, "partial_rollout": True}
    scene = await begin(PLANS, ["slow", "quick"], disturb, **BOTH, **sizes, **player)
    await scene.rollouts.train()
    held.clear()
    await scene.update_weights("2")
    scene.rollouts.args.over_sampling_batch_size = 1
    ranks = await scene.rollouts.train(1)
    samples = scene.rollouts.samples
    assert (scene.problems(samples), replay_problems(scene, samples)) == ([], [])
    assert {facts_of(sample)["resumes"] for sample in samples} == {1}
    assert [facts_of(sample)["weight_versions"] for sample in samples] == [["1", "2"]] * 2
    assert sum(map(trained_tokens, ranks)) == sum(len(scene.planned_ids(sample)) for sample in samples)


def answered_with(**meta: Any) -> Change:
    return lambda rest: replace(rest, meta=meta)


NO_EXPERTS = answered_with(routed_experts=None)
NO_KEPT_IDS = answered_with(top_p_token_ids=None, top_p_token_offsets=None)
REFUSED, OVERLONG = Reply.status(422, "refused"), Reply.status(400, {"error": {"message": TOO_LONG}})
THREE_ROWS = base64.b64encode(array("i", range(1, 1 + 3 * LAYERS * TOP_K)).tobytes()).decode()
LACKING = [
    *((ROUTING, {turn: NO_EXPERTS}, "failed", "--enable-return-routed-experts, and use a router") for turn in (0, 1)),
    *((TOP_P, {turn: NO_KEPT_IDS}, "failed", "--rollout-top-p 1") for turn in (0, 1)),
    *((ROUTING, {turn: answered_with(routed_experts=THREE_ROWS)}, "failed", "routed experts") for turn in (0, 1)),
    *((replayed, {turn: REFUSED}, "failed", "") for replayed in (ROUTING, TOP_P) for turn in (0, 1)),
    *((replayed, {0: OVERLONG}, "truncated", "") for replayed in (ROUTING, TOP_P)),
]


@pytest.mark.parametrize(("replayed", "troubles", "status", "words"), LACKING)
async def test_missing_replay_data_fails_group_not_batch(begin, replayed, troubles, status, words):
    def disturb(asked: PolicyRequest) -> Reply | Change | None:
        return troubles.get(asked.turn) if asked.name == "other" else None

    scene = await begin(PLANS, ["other", "slow"], disturb, **replayed)
    ranks = await scene.rollouts.train()
    lacking, whole = scene.rollouts.groups
    assert [sample.status.value for sample in lacking] == [status] * 2
    assert all(words in (facts_of(sample)["error"] or "") for sample in lacking)
    assert [sample.status.value for sample in whole] == ["completed"] * 2
    assert (replay_problems(scene, whole), scene.problems(scene.rollouts.samples)) == ([], [])
    assert sum(map(trained_tokens, ranks)) == sum(len(scene.planned_ids(sample)) for sample in whole)


async def test_aborted_tokens_without_replay_data_are_resampled(begin: Begin) -> None:
    def disturb(asked: PolicyRequest) -> Change | None:
        if asked.visit:
            return None
        return lambda rest: replace(rest.aborted_after(4), meta={**rest.aborted_after(4).meta, "routed_experts": None})

    scene = await begin(PLANS, ["other"], disturb, **ROUTING)
    await scene.rollouts.train()
    samples = scene.rollouts.samples
    # a dropped answer is requested again
    assert len(scene.engine.episodes.dropped) == 2
    scene.engine.episodes.dropped.clear()
    assert [words for words in scene.problems(samples) if "it began again 1 times" not in words] == []
    assert replay_problems(scene, samples) == []
    assert all(scene.sampled_ids(sample) == scene.planned_ids(sample) for sample in samples)
