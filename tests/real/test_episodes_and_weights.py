"""Weight updates and pauses of the real SGLang during episodes: weight versions, logprobs, and no lost tokens."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import stage_tools
from episode_stage import LONG_TURN, EpisodeStage, facts_of, new_samples, tokens_of, until
from own_logprobs import logprobs_under, perturbed_copy

from strands_rollout import Sample

pytestmark = pytest.mark.real

EPISODES = 4
MODES = ("abort", "retract", "in_place")
# a high temperature, so that few tokens are nearly certain under any weights
HOT = {**LONG_TURN, "temperature": 2.0}
TOLERANCE = 1e-3
OTHERS = "1"
ReportRow = Callable[..., None]


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory, shipped_tokenizer: Any) -> Path:
    """Return a folder with a model that answers slightly differently from the shipped one."""
    return perturbed_copy(Path(shipped_tokenizer.name_or_path), tmp_path_factory.mktemp("weights") / "others", 0.2)


@pytest.fixture(autouse=True)
async def _as_it_was(stage: EpisodeStage) -> AsyncIterator[None]:
    yield
    await stage.control("/continue_generation")
    await stage.until_done(
        "/update_weights_from_disk", model_path=stage.tokenizer.name_or_path, weight_version="default"
    )


async def take_weights(stage: EpisodeStage, mode: str, folder: Path | str, version: str) -> None:
    """Update the weights like a trainer."""
    await stage.control("/pause_generation", mode=mode)
    # frozen requests keep their part of the cache
    flush = mode != "in_place"
    await stage.control("/update_weights_from_disk", model_path=str(folder), weight_version=version, flush_cache=flush)
    await stage.control("/continue_generation")


async def test_update_to_same_weights_changes_only_version(stage: EpisodeStage) -> None:
    longer = {**LONG_TURN, "max_new_tokens": 1200}  # long enough that no turn ends before the last update
    undisturbed = await stage.play(new_samples(EPISODES), longer)
    running = asyncio.create_task(stage.play(new_samples(EPISODES), longer))
    for version in range(2, 5):
        await stage.until_sampling(requests=EPISODES, tokens=50)
        await take_weights(stage, "abort", stage.tokenizer.name_or_path, str(version))
    samples = await running
    assert tokens_of(samples) == tokens_of(undisturbed)
    facts = [facts_of(sample) for sample in samples]
    assert min(fact["engine_aborts"] for fact in facts) > 0
    assert min(len(fact["weight_versions"]) for fact in facts) > 1
    for sample, fact in zip(samples, facts, strict=True):
        assert sampled_positions(sample) == [position for *_, position in spanned(sample)]
        assert fact["weight_versions"][-1] == sample.weight_versions[-1]


def spanned(sample: Sample) -> list[tuple[str, int]]:
    """Return version and position of each token in the sample's spans."""
    return [(version, at) for _, start, end, version in facts_of(sample)["spans"] for at in range(start, end)]


def sampled_positions(sample: Sample) -> list[int]:
    prompt = len(sample.tokens) - sample.response_length
    return [prompt + n for n, mask in enumerate(sample.loss_mask or []) if mask]


@pytest.mark.parametrize("mode", MODES)
async def test_spans_name_the_weights_of_each_logprob(stage, mode, other_weights, report_row) -> None:
    running = asyncio.create_task(stage.play(new_samples(EPISODES), HOT))
    await stage.until_sampling(requests=EPISODES, tokens=200)
    await take_weights(stage, mode, other_weights, OTHERS)
    samples = await running
    folders = {"default": Path(stage.tokenizer.name_or_path), OTHERS: other_weights}
    worst, alike = 0.0, 0
    for sample in samples:
        assert facts_of(sample)["weight_versions"] == ["default", OTHERS]
        assert sampled_positions(sample) == [position for _, position in spanned(sample)]
        scores = {name: logprobs_under(folder, sample, temperature=2.0) for name, folder in folders.items()}
        own, others = distances(sample, scores)
        if mode == "in_place":  # the new weights read keys and values of the old ones, which can't be recomputed here
            own = own[: facts_of(sample)["spans"][0][2] - sampled_positions(sample)[0]]
        worst = max(worst, *own)
        alike += sum(distance < TOLERANCE for distance in others)
    report_row("weights changed in mid-turn", mode=mode, episodes=EPISODES, largest_logprob_gap=f"{worst:.1e}")
    assert worst < TOLERANCE
    # if more tokens were alike, a wrong version, or a boundary shifted by a token, could pass
    assert alike < 0.2 * sum(len(spanned(sample)) for sample in samples)


def distances(sample: Sample, scores: dict[str, dict[int, float]]) -> tuple[list[float], list[float]]:
    """Return each logprob's distance from its value under the weights of its span, and under the other weights."""
    start = len(sample.tokens) - sample.response_length
    got = sample.rollout_log_probs or []
    own = [abs(got[at - start] - scores[version][at]) for version, at in spanned(sample)]
    (first, second) = scores
    other = {first: second, second: first}
    return own, [abs(got[at - start] - scores[other[version]][at]) for version, at in spanned(sample)]


async def test_update_during_tool_applies_to_later_turns(stage, other_weights) -> None:
    stage_tools.is_to_hang.set()
    running = asyncio.create_task(stage.play(new_samples(EPISODES), tools=["stage_tools.hanging_on_demand"]))
    await until(lambda: len(stage_tools.began) >= EPISODES)
    await take_weights(stage, "retract", other_weights, OTHERS)
    stage_tools.is_to_hang.clear()
    folders = {"default": Path(stage.tokenizer.name_or_path), OTHERS: other_weights}
    for sample in await running:
        versions = [version for _, _, _, version in facts_of(sample)["spans"]]
        assert versions == ["default"] + [OTHERS] * (len(versions) - 1)
        assert len(versions) > 1
        own, _ = distances(sample, {version: logprobs_under(folder, sample) for version, folder in folders.items()})
        assert max(own) < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
async def test_pause_during_turn_changes_nothing(stage: EpisodeStage, mode: str) -> None:
    undisturbed = await stage.play(new_samples(EPISODES), LONG_TURN)
    running = asyncio.create_task(stage.play(new_samples(EPISODES), LONG_TURN))
    await stage.until_sampling(requests=EPISODES, tokens=50)
    await stage.control("/pause_generation", mode=mode)
    if mode == "in_place":  # frozen requests hold the cache
        assert await stage.post("/flush_cache") == 400
    else:  # retracted requests release it once SGLang has cleaned up
        await stage.until_done("/flush_cache")
    await asyncio.sleep(0.3)
    assert not running.done()
    await stage.control("/continue_generation")
    samples = await running
    assert tokens_of(samples) == tokens_of(undisturbed)
    aborts = sum(facts_of(sample)["engine_aborts"] for sample in samples)
    assert aborts > 0 if mode == "abort" else aborts == 0


@pytest.mark.parametrize("mode", MODES)
async def test_episode_timeout_s_bounds_endless_pause(stage, mode, report_row) -> None:
    clock = asyncio.get_running_loop().time
    running = asyncio.create_task(stage.play(new_samples(EPISODES), LONG_TURN, episode_timeout_s=15.0))
    await stage.until_sampling(requests=EPISODES)
    await stage.control("/pause_generation", mode=mode)
    paused = clock()
    samples = await running
    seconds = clock() - paused
    assert {facts_of(sample)["stop_reason"] for sample in samples} == {"episode_timeout"}
    assert {sample.status for sample in samples} == {Sample.Status.TRUNCATED}
    # a paused engine does not return what it has sampled
    assert all(sample.remove_sample or mode == "abort" for sample in samples)
    report_row("a pause without an end", mode=mode, episode_timeout_s=15.0, all_back_after_s=round(seconds, 1))
