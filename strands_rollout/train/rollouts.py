"""Collects groups of finished samples for a step, each played by `generate` and graded by `reward_func`.

What an abort interrupted is resumed in the next step, as slime's partial rollouts. A place in the order of prompts is
all that a resumed run needs to know of it.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

from strands_rollout.evaluation.evaluate import Player
from strands_rollout.evaluation.rows import Row
from strands_rollout.samples import Sample


class PromptOrder:
    """An endless sequence of rows."""

    def __init__(self, rows: Sequence[Row], seed: int) -> None:
        self._rows, self._seed = rows, seed
        self._order_of_pass = functools.lru_cache(maxsize=2)(self._shuffled)

    def row(self, position: int) -> Row:
        """The row at a place, from 0."""
        passes, place = divmod(position, len(self._rows))
        return self._rows[self._order_of_pass(passes)[place]]

    def _shuffled(self, passes: int) -> list[int]:
        order = list(range(len(self._rows)))
        Random(sampling_seed(self._seed, passes)).shuffle(order)  # noqa: S311 - an order, not a secret
        return order


def sampling_seed(*parts: object) -> int:
    """A seed of 31 bits that depends on all parts, on any machine alike."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """What a step's rollouts are: `groups` prompts with `samples` episodes each.

    Attributes:
        extra_groups: Prompts that are begun beyond these; when enough are finished, the others are aborted and gone on
            with in the next step.
        seed: Decides the order of prompts and every episode's sampling seed.
        sampling_params: As slime hands them to `generate`.
        keeps_aborted: Hand out all groups that were begun, aborted episodes among them: a fault, for those who want to
            see it.
    """

    groups: int
    samples: int
    extra_groups: int
    concurrency: int
    seed: int
    sampling_params: Mapping[str, Any]
    keeps_aborted: bool = False


Abort: TypeAlias = Callable[[], Awaitable[None]]
"""Ends every request of the engine."""


@dataclass(slots=True)
class AbortFlag:
    """Whether the rollouts are being aborted; the setting `should_abort` asks it."""

    is_set: bool = False

    def __call__(self) -> bool:
        """Whether it is set."""
        return self.is_set


@dataclass(slots=True)
class Group:
    """The episodes of one prompt, by its position in the order of prompts.

    `episodes` are those that are finished or aborted, by their index in the group: the main agent's sample, and after
    it those of a fan-out's other agents and segments.
    """

    position: int
    episodes: dict[int, list[Sample]] = field(default_factory=dict)

    def finished(self) -> int:
        """How many of its episodes are over."""
        return sum(not self.was_aborted(at) for at in self.episodes)

    def was_aborted(self, at: int) -> bool:
        """Whether an episode was cut off."""
        return self.episodes[at][0].status is Sample.Status.ABORTED

    def samples(self) -> list[Sample]:
        """All of its samples in the order of their episodes, siblings next to each other."""
        return [sample for at in sorted(self.episodes) for sample in self.episodes[at]]


@dataclass(frozen=True, slots=True)
class Collected:
    """A step's groups in the order of their prompts, and how many of their episodes had been aborted before.

    A group is flat: where an episode fans out, its samples follow each other.
    """

    groups: list[list[Sample]]
    resumed: int


class RolloutCollector:
    """Plays groups; what is begun and not over waits here from step to step.

    `next_position` is of the first prompt that no group has yet; `waiting` are groups that an abort cut off.
    """

    def __init__(
        self,
        player: Player,
        rows: Sequence[Row],
        plan: RolloutPlan,
        abort: Callable[[], Awaitable[None]],
        flag: AbortFlag,
    ) -> None:
        self._player, self._plan, self._abort, self._flag = player, plan, abort, flag
        self._order = PromptOrder(rows, plan.seed)
        self._gate = asyncio.Semaphore(plan.concurrency)
        self.next_position = 0
        self.waiting: list[Group] = []

    async def collect(self) -> Collected:
        """Play until so many groups are over; those that are aborted wait for the next call.

        Raises:
            RolloutError: The abort could not be asked for.
        """
        plan = self._plan
        under_way = self.waiting + [self._begin() for _ in range(plan.groups + plan.extra_groups - len(self.waiting))]
        self.waiting = []
        resumed = sum(len(group.episodes) - group.finished() for group in under_way)
        tasks = {asyncio.create_task(self._play(group)): group for group in under_way}
        done: list[Group] = []
        try:
            for next_done in asyncio.as_completed(list(tasks)):
                await next_done
                done = [group for task, group in tasks.items() if task.done() and group.finished() == plan.samples]
                if len(done) >= plan.groups:
                    break
            if left := [task for task in tasks if not task.done()]:
                self._flag.is_set = True
                await self._abort()  # the episodes that still run return what they have
                await asyncio.gather(*left)
        finally:
            self._flag.is_set = False
            for task in tasks:
                task.cancel()
        # more may have ended while the others were cut off; they count in the next step
        chosen = sorted(done, key=lambda group: group.position)[: plan.groups]
        if plan.keeps_aborted:
            chosen = [group for group in under_way if group.episodes]
        self.waiting = [] if plan.keeps_aborted else [group for group in under_way if group not in chosen]
        return Collected([group.samples() for group in chosen], resumed)

    async def play_all(self, rows: Sequence[Row], name: str) -> list[Sample]:
        """One graded episode of each row, its main agent's sample, with seeds that depend on the row and the name."""

        async def play(at: int, row: Row) -> Sample:
            sample = _sample(row, index=at, group=at)
            async with self._gate:
                outcome = await self._player.play(sample, self._params(name, at))
            return outcome.sample

        return list(await asyncio.gather(*(play(at, row) for at, row in enumerate(rows))))

    def _begin(self) -> Group:
        group = Group(self.next_position)
        self.next_position += 1
        return group

    async def _play(self, group: Group) -> None:
        unfinished = [at for at in range(self._plan.samples) if at not in group.episodes or group.was_aborted(at)]
        await asyncio.gather(*(self._play_one(group, at) for at in unfinished))

    async def _play_one(self, group: Group, at: int) -> None:
        if at in group.episodes:
            sample = group.episodes[at][0]
        else:
            index = group.position * self._plan.samples + at
            sample = _sample(self._order.row(group.position), index=index, group=group.position)
        async with self._gate:
            if self._flag.is_set:
                return
            outcome = await self._player.play(sample, self._params("train", sample.index))
        group.episodes[at] = [outcome.sample, *outcome.siblings]

    def _params(self, name: str, index: int | None) -> dict[str, Any]:
        return {**self._plan.sampling_params, "sampling_seed": sampling_seed(self._plan.seed, name, index)}


def _sample(row: Row, *, index: int, group: int) -> Sample:
    metadata = copy.deepcopy(dict(row.metadata))
    return Sample(prompt=row.prompt, label=row.label, index=index, group_index=group, metadata=metadata)
