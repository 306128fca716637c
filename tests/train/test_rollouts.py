"""Collecting groups: order, seeds, aborted episodes. The player is scripted; no engine runs."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from sequences import options

from strands_rollout.evaluation.rows import Row
from strands_rollout.samples import Sample
from strands_rollout.train.rollouts import AbortFlag, PromptOrder, RolloutCollector

ROWS = [Row(f"question {number}", str(number)) for number in range(10)]


@dataclass
class ScriptedPlayer:
    """Ends an episode at once, or, where its group is held, when the rollout is aborted."""

    aborting: AbortFlag
    held: set[int] = field(default_factory=set)
    seeds: dict[int, int] = field(default_factory=dict)
    starts: Counter[int] = field(default_factory=Counter)
    running: int = 0
    most_running: int = 0
    agents: int = 1

    async def play(self, sample: Sample, params: Any) -> Any:
        self.starts[sample.index] += 1
        self.seeds[sample.index] = params["sampling_seed"]
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        sample.status = Sample.Status.COMPLETED
        await asyncio.sleep(0)
        if sample.group_index in self.held:
            while not self.aborting.is_set:  # noqa: ASYNC110 - the flag is no event
                await asyncio.sleep(0)
            sample.status = Sample.Status.ABORTED
        self.running -= 1
        siblings = [replace(sample, response=f"agent {number}") for number in range(1, self.agents)]
        return SimpleNamespace(sample=sample, siblings=siblings)


def collector_of(held: set[int] | None = None, **changed: Any) -> tuple[RolloutCollector, ScriptedPlayer]:
    """By default three groups of two episodes, four at once."""
    aborting = AbortFlag()
    player = ScriptedPlayer(aborting, held or set())

    async def abort() -> None:
        assert aborting.is_set  # episodes must know of it before their requests end

    few = options(**{"prompts": 3, "samples_per_prompt": 2, "concurrency": 4, "seed": 5, **changed})
    return RolloutCollector(player, ROWS, few, abort, aborting), player  # type: ignore[arg-type]


def positions(groups: list[list[Sample]]) -> list[int]:
    return [group[0].group_index or 0 for group in groups]


def test_the_order_takes_every_row_once_before_any_again() -> None:
    order = PromptOrder(ROWS, seed=1)
    first, second = ([order.row(at + start).label for at in range(10)] for start in (0, 10))
    assert sorted(first) == sorted(second) == sorted(row.label for row in ROWS)
    assert first != second
    assert [PromptOrder(ROWS, seed=1).row(at).label for at in (13, 2)] == [second[3], first[2]]
    assert [PromptOrder(ROWS, seed=2).row(at).label for at in range(10)] != first


async def test_groups_are_samples_of_one_prompt_and_the_next_call_goes_on_with_the_next_prompts() -> None:
    collector, player = collector_of()
    (first, _), (second, _) = await collector.collect(), await collector.collect()
    assert positions(first) + positions(second) == [0, 1, 2, 3, 4, 5]
    for group in first:
        assert len(group) == 2
        assert len({str(sample.prompt) for sample in group}) == 1
    assert sorted(player.seeds) == list(range(12))
    assert len(set(player.seeds.values())) == 12
    assert player.most_running <= 4
    assert collector.waiting == []


async def test_unfinished_episodes_are_aborted_and_resumed_in_the_next_step() -> None:
    collector, player = collector_of(extra_prompts=1, held={1})
    first, resumed = await collector.collect()
    assert (positions(first), resumed) == ([0, 2, 3], 0)
    assert [group.position for group in collector.waiting] == [1]
    player.held.clear()
    second, resumed = await collector.collect()
    assert resumed == 2
    assert 1 in positions(second)
    assert all(sample.status is Sample.Status.COMPLETED for group in second for sample in group)
    assert player.starts[2] == player.starts[3] == 2  # both samples of the held prompt, and no other
    assert sum(player.starts.values()) == 2 * 7 + 2  # a surplus finished prompt waits, and is not replayed


async def test_siblings_of_a_fan_out_are_one_episode_of_their_group() -> None:
    collector, player = collector_of()
    player.agents = 3
    first, _ = await collector.collect()
    assert positions(first) == [0, 1, 2]
    expected = [(index, name) for index in (0, 1) for name in ("", "agent 1", "agent 2")]
    assert [(one.index, one.response) for one in first[0]] == expected
    assert len(await collector.play_all(ROWS, "held out")) == len(ROWS)


async def test_a_cancelled_step_leaves_no_episode_running() -> None:
    collector, player = collector_of(held={0})
    task = asyncio.create_task(collector.collect())
    async with asyncio.timeout(30):
        while not player.starts[0]:  # noqa: ASYNC110 - the player has no event
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while any(one is not asyncio.current_task() for one in asyncio.all_tasks()):  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_held_out_rows_are_played_with_their_metadata_and_the_same_seeds_every_time() -> None:
    row = Row("question", "1", metadata={"strands_rollout_settings": {"max_tool_calls": 1}})
    collector, player = collector_of()
    first = await collector.play_all([*ROWS, row], "held out")
    seeds = dict(player.seeds)
    await collector.collect()
    player.seeds.clear()
    await collector.play_all([*ROWS, row], "held out")
    assert player.seeds == seeds
    assert [sample.label for sample in first] == [one.label for one in [*ROWS, row]]
    assert first[-1].metadata["strands_rollout_settings"] == {"max_tool_calls": 1}
    assert first[-1].metadata is not row.metadata
