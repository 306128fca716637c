"""Episodes through both real routers at once, started as slime starts them, while SIGKILL ends real workers.

In the table "faults" at the end of the test run, `recovery_s` is the number of seconds from the moment when a worker
answers again to the end of all new episodes.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import stage_tools
from episode_stage import GREEDY, SAMPLED, EpisodeStage, episodes_on, facts_of, new_samples, until
from gateway_stage import (
    AS_SLIME_STARTS_IT,
    LINGERING,
    NAMES,
    OWN_VERSION,
    Ends,
    ends_of,
    gateway_before,
    post,
    versions_of,
)
from worker_front import WorkerFront

from strands_rollout.play.audit import Exchange

pytestmark = pytest.mark.real
EPISODES = 12
PATIENCE_S = 10.0


@asynccontextmanager
async def both_routers(*workers: str, tokenizer: Any) -> AsyncIterator[dict[str, EpisodeStage]]:
    """Yield a stage per router on the same workers; sglang-router alternates between them, since it ignores keys."""
    turns = ("--policy", "round_robin", *AS_SLIME_STARTS_IT)
    async with (
        gateway_before(*workers, router="smg") as smg,
        gateway_before(*workers, router="sglang-router", flags=turns) as forerunner,
        episodes_on(smg.base_url, tokenizer) as through_smg,
        episodes_on(forerunner.base_url, tokenizer) as through_forerunner,
    ):
        yield {"smg": through_smg, "sglang-router": through_forerunner}


def begin(stages: dict[str, EpisodeStage], params: Any, **settings: Any) -> dict[str, asyncio.Task[Any]]:
    return {
        router: asyncio.create_task(stage.play(new_samples(EPISODES), params, **settings))
        for router, stage in stages.items()
    }


async def ended(playing: dict[str, asyncio.Task[Any]]) -> dict[str, Ends]:
    return {router: ends_of(await task) for router, task in playing.items()}


def waiting(stages: dict[str, EpisodeStage]) -> int:
    """Return the number of unanswered requests. It includes failed requests, so it is used only before any fault."""
    return sum(exchange.output_ids is None for stage in stages.values() for exchange in exchanges(stage))


def exchanges(stage: EpisodeStage) -> list[Exchange]:
    return [exchange for episode in stage.recorder.episodes.values() for exchange in episode]


@pytest.fixture
def tools_hang() -> Iterator[None]:
    """Make tool calls hang until the test releases them, or until it ends."""
    stage_tools.began.clear()
    stage_tools.is_to_hang.set()
    yield
    stage_tools.is_to_hang.clear()


@pytest.mark.usefixtures("tools_hang")
async def test_generate_survives_killed_and_restarted_worker(sglang, own_worker, shipped_tokenizer, report_row):
    own = await own_worker.running()
    async with WorkerFront(sglang) as front, both_routers(front.base_url, own, tokenizer=shipped_tokenizer) as stages:

        def some_wait_there() -> bool:
            at_the_other = sum(not passage.meta_info for passage in front.passages)
            return waiting(stages) - at_the_other >= 2

        playing = begin(stages, GREEDY, tools=["stage_tools.hanging_on_demand"])
        await until(lambda: len(stage_tools.began) == len(stages) * EPISODES)
        # later turns find a worker that does not answer
        await post(f"{own}/pause_generation", mode="retract")
        stage_tools.is_to_hang.clear()
        await until(some_wait_there)
        own_worker.kill()
        for router, ends in (await ended(playing)).items():
            moved = sum(len(versions_of(sample)) == 2 for sample in ends.exact)
            report_row("faults", fault="one of two workers killed", router=NAMES[router], **ends.counts, moved=moved)
            assert (len(ends.exact) + len(ends.masked), ends.lost) == (EPISODES, [])
        assert await own_worker.running() == own
        await asyncio.gather(*(until_used(router, stage, report_row) for router, stage in stages.items()))


async def until_used(router: str, stage: EpisodeStage, report_row: Any) -> None:
    """Play new episodes, all exact, until the restarted worker samples one."""
    clock = asyncio.get_running_loop().time
    started, used = clock(), set[str]()
    while OWN_VERSION not in used:
        ends = ends_of(await stage.play(new_samples(EPISODES), SAMPLED))
        assert (len(ends.exact), ends.reasons, ends.lost) == (EPISODES, set(), [])
        used = set.union(*map(versions_of, ends.exact))
    row = {"fault": "the killed worker is back", "router": NAMES[router], **ends.counts}
    report_row("faults", **row, recovery_s=round(clock() - started, 1))


async def test_generate_survives_loss_of_all_workers(sglang, own_worker, shipped_tokenizer, report_row) -> None:
    own, clock = await own_worker.running(), asyncio.get_running_loop().time
    async with WorkerFront(sglang) as front, both_routers(front.base_url, own, tokenizer=shipped_tokenizer) as stages:
        playing = begin(stages, LINGERING, engine_patience_s=PATIENCE_S)
        # sglang-router sends the turns of about half of its episodes to each worker
        await until(lambda: waiting(stages) == 2 * EPISODES and len(front.passages) >= EPISODES // 2)
        own_worker.kill()
        await front.close()
        gone = clock()
        for router, ends in (await ended(playing)).items():
            given_up_after_s = round(clock() - gone, 1)
            row = {"fault": "all workers gone", "router": NAMES[router], **ends.counts}
            report_row("faults", **row, gave_up_after_s=given_up_after_s)
            assert (len(ends.exact) + len(ends.masked), ends.lost) == (EPISODES, [])
            assert ends.masked
            assert all(facts_of(sample)["stop_reason"] == "engine_error" for sample in ends.masked)
            assert all("attempts; the last failed with: HTTP 50" in reason for reason in ends.reasons), ends.reasons
        await front.open()
        back = clock()
        for router, ends in (await ended(begin(stages, SAMPLED))).items():
            recovery_s = round(clock() - back, 1)
            report_row(
                "faults", fault="one killed worker is back", router=NAMES[router], **ends.counts, recovery_s=recovery_s
            )
            assert (len(ends.exact), ends.reasons, ends.lost) == (EPISODES, set(), [])
