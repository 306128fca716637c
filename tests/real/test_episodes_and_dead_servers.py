"""A real SGLang that dies during episodes: they continue on its replacement, else they are masked.

In the table "faults" at the end of the test run, `recovery_s` is the number of seconds from the moment when a server
is back at the address to the end of the last episode.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stage_tools
from episode_stage import LONG_TURN, episodes_on, facts_of, new_samples, tokens_of, until
from gateway_stage import OWN_VERSION, Ends, ends_of
from worker_front import WorkerFront

pytestmark = pytest.mark.real

EPISODES = 12
DEAD_S = 2.0
PATIENCE_S = 5.0
HANGING = ["stage_tools.hanging_on_demand"]
ReportRow = Callable[..., None]


@pytest.fixture
def tools_hang() -> Iterator[None]:
    """Clear the record of tool calls; release calls that still hang after the test."""
    stage_tools.began.clear()
    yield
    stage_tools.is_to_hang.clear()


@pytest.mark.usefixtures("tools_hang")
async def test_generate_survives_replaced_server(sglang, own_worker, shipped_tokenizer, report_row):
    async with episodes_on(sglang, shipped_tokenizer) as plain:
        undisturbed = [
            *await plain.play(new_samples(EPISODES), tools=HANGING),
            *await plain.play(new_samples(EPISODES), LONG_TURN),
        ]
    stage_tools.began.clear()
    stage_tools.is_to_hang.set()
    clock, own = asyncio.get_running_loop().time, await own_worker.running()
    async with WorkerFront(own) as front, episodes_on(front.base_url, shipped_tokenizer) as stage:
        with_tools = asyncio.create_task(stage.play(new_samples(EPISODES), tools=HANGING))
        await until(lambda: len(stage_tools.began) >= EPISODES)
        of_one_turn = asyncio.create_task(stage.play(new_samples(EPISODES), LONG_TURN))
        await stage.until_sampling(requests=EPISODES, tokens=100)
        own_worker.kill()
        await front.close()
        await asyncio.sleep(DEAD_S)
        stage_tools.is_to_hang.clear()
        front.worker_url = sglang
        await front.open()
        back = clock()
        samples = [*await with_tools, *await of_one_turn]
        add_outcome(
            report_row, "server killed, another at its address", ends_of(samples), recovery_s=round(clock() - back, 1)
        )
    assert tokens_of(samples) == tokens_of(undisturbed)
    # answered turns are kept; the interrupted turn is sampled again by the other server
    assert {tuple(facts_of(sample)["weight_versions"]) for sample in samples[:EPISODES]} == {(OWN_VERSION, "default")}
    assert {version for sample in samples[EPISODES:] for version in sample.weight_versions} == {"default"}
    assert {facts_of(sample)["engine_aborts"] for sample in samples} == {0}


async def test_generate_masks_samples_when_server_stays_away(
    sglang: str, shipped_tokenizer: Any, report_row: ReportRow
) -> None:
    clock = asyncio.get_running_loop().time
    async with episodes_on(sglang, shipped_tokenizer) as plain:
        undisturbed = await plain.play(new_samples(EPISODES), LONG_TURN)
    async with WorkerFront(sglang) as front, episodes_on(front.base_url, shipped_tokenizer) as stage:
        running = asyncio.create_task(stage.play(new_samples(EPISODES), LONG_TURN, engine_patience_s=PATIENCE_S))
        await stage.until_sampling(requests=EPISODES, tokens=100)
        await front.close()
        gone = clock()
        ends = ends_of(await running)
        add_outcome(report_row, "server gone for good", ends, gave_up_after_s=round(clock() - gone, 1))
        assert (len(ends.masked), ends.exact, ends.lost) == (EPISODES, [], [])
        assert {facts_of(sample)["stop_reason"] for sample in ends.masked} == {"engine_error"}
        assert all("attempts; the last failed with" in reason for reason in ends.reasons), ends.reasons
        await front.open()
        back = clock()
        again = ends_of(await stage.play(ends.masked, LONG_TURN))
        add_outcome(report_row, "masked ones tried again", again, recovery_s=round(clock() - back, 1))
    assert tokens_of(again.exact) == tokens_of(undisturbed)


def add_outcome(report_row: ReportRow, fault: str, ends: Ends, **more: Any) -> None:
    report_row("faults", fault=fault, router="none", **ends.counts, **more)
