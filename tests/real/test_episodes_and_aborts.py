"""Aborts and resumes of episodes on the real SGLang."""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence

import pytest
import stage_tools
from episode_stage import GREEDY, LONG_TURN, EpisodeStage, facts_of, load_of, new_samples, tokens_of, until, until_idle
from harness import args_for
from other_process import finish_in_other_process

from strands_rollout import Sample

pytestmark = pytest.mark.real

EPISODES = 8
ReportRow = Callable[..., None]


async def aborted_when(stage, begun, params, report_row, when, **settings):
    """Start episodes, abort them once `begun` has returned, and return their samples."""
    flag = asyncio.Event()
    running = asyncio.create_task(stage.play(new_samples(EPISODES), params, should_abort=flag.is_set, **settings))
    await begun()
    samples = await back_after(flag, running, report_row, when)
    assert {sample.status for sample in samples} == {Sample.Status.ABORTED}
    await until_idle(stage.engine_url)
    return samples


async def back_after(
    flag: asyncio.Event, running: asyncio.Task[list[Sample]], report_row: ReportRow, when: str
) -> list[Sample]:
    """Set the abort flag, and return the samples when all are back."""
    clock = asyncio.get_running_loop().time
    raised = clock()
    flag.set()
    samples = await running
    report_row("aborts on SGLang", when=when, episodes=len(samples), all_back_after_s=round(clock() - raised, 2))
    return samples


async def test_generate_resumes_after_abort_in_turn(stage, report_row) -> None:
    undisturbed = await stage.play(new_samples(EPISODES), LONG_TURN)
    samples = await aborted_when(
        stage, lambda: stage.until_sampling(requests=EPISODES, tokens=100), LONG_TURN, report_row, "a turn is decoded"
    )
    for part, whole in zip(samples, undisturbed, strict=True):
        assert 0 < part.response_length < whole.response_length
        assert part.tokens == whole.tokens[: len(part.tokens)]
        assert facts_of(part)["stop_reason"] == "aborted"
    sampled_before = [sample.response_length for sample in samples]
    resumed = await stage.play(samples, LONG_TURN)
    assert tokens_of(resumed) == tokens_of(undisturbed)
    assert [sample.loss_mask for sample in resumed] == [sample.loss_mask for sample in undisturbed]
    for sample, before in zip(resumed, sampled_before, strict=True):
        facts = facts_of(sample)
        assert (facts["resumes"], facts["aborts"], facts["turns"]) == (1, 1, 1)
        first, second = stage.recorder.episodes[str(sample.session_id)]
        assert len(first.output_ids or []) == before
        assert len(second.input_ids) == len(first.input_ids) + before


async def test_generate_resumes_after_abort_in_tool(stage: EpisodeStage, report_row: ReportRow) -> None:
    tools = ["stage_tools.hanging_on_demand"]
    stage_tools.is_to_hang.set()

    def all_in_tools() -> Awaitable[None]:
        return until(lambda: len(stage_tools.began) >= EPISODES)

    samples = await aborted_when(stage, all_in_tools, GREEDY, report_row, "a tool runs", tools=tools)
    assert {facts_of(sample)["turns"] for sample in samples} == {1}
    stage_tools.is_to_hang.clear()
    resumed = await stage.play(samples, GREEDY, tools=tools)
    assert tokens_of(resumed) == tokens_of(await stage.play(new_samples(EPISODES), GREEDY, tools=tools))
    assert {facts_of(sample)["tool_errors"] for sample in resumed} == {0}


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_generate_restarts_after_abort_before_first_token(
    stage: EpisodeStage, mode: str, report_row: ReportRow
) -> None:
    await stage.control("/pause_generation", mode=mode)
    flag = asyncio.Event()
    running = asyncio.create_task(stage.play(new_samples(EPISODES), should_abort=flag.is_set, abort_grace_s=0.2))
    try:
        await until(lambda: len(stage.recorder.episodes) >= EPISODES)
        samples = await back_after(flag, running, report_row, f"paused ({mode})")
    finally:
        await stage.control("/continue_generation")
    assert {sample.status for sample in samples} == {Sample.Status.ABORTED}
    assert not any(any(sample.loss_mask or []) for sample in samples)
    assert tokens_of(await stage.play(samples)) == tokens_of(await stage.play(new_samples(EPISODES)))


async def test_generate_abort_reaches_queued_requests(stage, report_row) -> None:
    waited: list[Sample] = []
    while not waited:  # as others end, queued requests may start before their own abort arrives
        samples = await aborted_when_one_waits(stage, report_row)
        assert {sample.status for sample in samples} == {Sample.Status.ABORTED}
        await until_idle(stage.engine_url)
        waited = [sample for sample in samples if not any(sample.loss_mask or [])][:EPISODES]
    undisturbed = await stage.play([new_samples(len(samples))[sample.index or 0] for sample in waited])
    assert tokens_of(await stage.play(waited)) == tokens_of(undisturbed)


async def aborted_when_one_waits(stage: EpisodeStage, report_row: ReportRow) -> list[Sample]:
    """Abort more episodes than the engine runs at once, while some sample and some wait; return their samples."""
    # SGLang reserves most of each request's max_new_tokens, and queues the requests for which nothing is left
    new = new_samples((await load_of(stage.engine_url))["max_total_num_tokens"] // 1024)
    flag, begun = asyncio.Event(), len(stage.recorder.episodes)
    await stage.control("/pause_generation", mode="retract")
    params = {**LONG_TURN, "max_new_tokens": 1700}
    running = asyncio.create_task(stage.play(new, params, should_abort=flag.is_set))
    await until(lambda: len(stage.recorder.episodes) >= begun + len(new))
    await stage.control("/continue_generation")  # all at once: while requests sample, SGLang reserves less for each

    async def is_one_queued() -> bool:
        return (await load_of(stage.engine_url))["num_waiting_reqs"] > 0

    await until(is_one_queued)
    await stage.until_sampling(requests=EPISODES, tokens=10 * len(new))
    return await back_after(flag, running, report_row, "some are queued")


def is_open(sample: Sample) -> bool:
    return sample.status in (Sample.Status.PENDING, Sample.Status.ABORTED)


async def cut_to_pieces(stage: EpisodeStage, run_s: float) -> tuple[list[Sample], int]:
    """Abort and resume episodes until each is finished; return them and the number of aborts."""
    clock, aborts, samples = asyncio.get_running_loop().time, 0, new_samples(EPISODES)
    while any(map(is_open, samples)):
        end = clock() + run_s
        again = [copy.deepcopy(sample) for sample in samples if is_open(sample)]
        back = await stage.play(again, should_abort=lambda end=end: clock() > end)
        aborts += sum(map(is_open, back))
        run_s += 0.05  # each round gets further than the last, also on a slow machine
        by_index = {sample.index: sample for sample in back}
        samples = [by_index.get(sample.index, sample) for sample in samples]
    return samples, aborts


async def test_generate_resumes_after_repeated_aborts(stage: EpisodeStage) -> None:
    undisturbed = await stage.play(new_samples(EPISODES))
    for run_s in (0.1, 0.17, 0.24):
        samples, aborts = await cut_to_pieces(stage, run_s)
        assert tokens_of(samples) == tokens_of(undisturbed)
        assert [sample.loss_mask for sample in samples] == [sample.loss_mask for sample in undisturbed]
        assert [sample.reward for sample in samples] == [sample.reward for sample in undisturbed]
        assert aborts >= sum(facts_of(sample)["aborts"] for sample in samples)


async def test_generate_resumes_in_another_process(stage: EpisodeStage, report_row: ReportRow) -> None:
    undisturbed = await stage.play(new_samples(EPISODES), LONG_TURN)
    samples = await aborted_when(
        stage, lambda: stage.until_sampling(requests=EPISODES, tokens=50), LONG_TURN, report_row, "a turn is decoded"
    )
    args = args_for(stage.recorder.url, stage.tokenizer, reward_key="score", strands_rollout={})
    finished = await finish_in_other_process(args, LONG_TURN, samples)
    assert stage.violations(finished) == []
    assert tokens_of(finished) == tokens_of(undisturbed)
    assert {facts_of(sample)["resumes"] for sample in finished} == {1}


async def test_generate_continues_after_foreign_abort_all(stage: EpisodeStage) -> None:
    undisturbed = await stage.play(new_samples(EPISODES), LONG_TURN)
    running = asyncio.create_task(stage.play(new_samples(EPISODES), LONG_TURN))
    await aborted_by_another(stage, running)
    samples = await running
    assert tokens_of(samples) == tokens_of(undisturbed)
    assert sum(facts_of(sample)["engine_aborts"] for sample in samples) > 0
    assert {facts_of(sample)["aborts"] for sample in samples} == {0}


async def aborted_by_another(stage: EpisodeStage, running: asyncio.Task[Sequence[Sample]]) -> None:
    """Abort all requests at the engine, like a weight updater."""
    await stage.until_sampling(requests=EPISODES, tokens=50)
    await stage.control("/abort_request", rid="", abort_all=True)
    assert not running.done()
