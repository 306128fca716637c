"""Collects a step's groups of finished samples, each played by `generate` and graded by `reward_func`.

An episode that was aborted is resumed in the next step, as slime's partial rollouts. The position in the order of
prompts is all that a resumed run needs to know of that order.
"""

import asyncio
import functools
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from strands_rollout.evaluation.evaluate import Player
from strands_rollout.evaluation.options import slime_sampling_params
from strands_rollout.evaluation.rows import Row
from strands_rollout.samples import Sample
from strands_rollout.train.options import TrainOptions


class PromptOrder:
    """An endless sequence of rows, shuffled anew for each pass over them."""

    def __init__(self, rows: Sequence[Row], seed: int) -> None:
        self._rows, self._seed = rows, seed
        self._order_of_pass = functools.lru_cache(maxsize=2)(self._shuffled)

    def row(self, position: int) -> Row:
        """The row at a position, from 0."""
        passes, place = divmod(position, len(self._rows))
        return self._rows[self._order_of_pass(passes)[place]]

    def _shuffled(self, passes: int) -> list[int]:
        order = list(range(len(self._rows)))
        Random(sampling_seed(self._seed, passes)).shuffle(order)  # noqa: S311 - an order, not a secret
        return order


def sampling_seed(*parts: object) -> int:
    """A seed of 31 bits that depends on all parts, the same on any machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(slots=True)
class AbortFlag:
    """Whether the rollouts are being aborted: the setting `should_abort`, and so a value that JSON can hold."""

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
        """Whether an episode was interrupted by an abort."""
        return self.episodes[at][0].status is Sample.Status.ABORTED

    def samples(self) -> list[Sample]:
        """All of its samples in the order of their episodes, siblings next to each other."""
        return [sample for at in sorted(self.episodes) for sample in self.episodes[at]]


class RolloutCollector:
    """Plays groups; unfinished ones wait here from step to step.

    Attributes:
        next_position: Of the first prompt that has no group yet.
        waiting: Groups that an abort interrupted.

    Args:
        player: Plays the episodes; they end early once `aborting` is set.
        rows: The prompts.
        options: How many groups and episodes, and the seed of all.
        abort: Ends every request of the engine.
        aborting: Set while a rollout is being aborted.
        keeps_aborted: Hand out all groups that were begun, aborted episodes among them: a fault, for experiments.
    """

    def __init__(
        self,
        player: Player,
        rows: Sequence[Row],
        options: TrainOptions,
        abort: Callable[[], Awaitable[None]],
        aborting: AbortFlag,
        *,
        keeps_aborted: bool = False,
    ) -> None:
        self._player, self._options, self._abort, self._aborting = player, options, abort, aborting
        self._keeps_aborted = keeps_aborted
        self._order = PromptOrder(rows, options.seed)
        self._gate = asyncio.Semaphore(options.concurrency)
        self._sampling_params = slime_sampling_params(options.temperature, options.max_new_tokens)
        self.next_position = 0
        self.waiting: list[Group] = []

    async def collect(self) -> tuple[list[list[Sample]], int]:
        """Play until a step's groups are finished; those that are aborted wait for the next call.

        Returns:
            The groups in the order of their prompts, and how many of their episodes were resumed. A group is flat:
            where an episode fans out, its samples follow each other.

        Raises:
            RolloutError: The engine did not take the abort.
        """
        wanted = self._options.prompts
        new = [self._begin() for _ in range(wanted + self._options.extra_prompts - len(self.waiting))]
        running = self.waiting + new
        self.waiting = []
        resumed = sum(len(group.episodes) - group.finished() for group in running)
        tasks = {asyncio.create_task(self._play(group)): group for group in running}
        done: list[Group] = []
        try:
            for next_done in asyncio.as_completed(list(tasks)):
                await next_done
                done = [group for task, group in tasks.items() if task.done() and self._is_finished(group)]
                if len(done) >= wanted:
                    break
            if left := [task for task in tasks if not task.done()]:
                self._aborting.is_set = True
                await self._abort()  # the episodes that still run return what they have
                await asyncio.gather(*left)
        finally:
            self._aborting.is_set = False
            for task in tasks:
                task.cancel()
        if self._keeps_aborted:
            return [group.samples() for group in running if group.episodes], resumed
        # more may have ended while the others were aborted; they count in the next step
        chosen = sorted(done, key=lambda group: group.position)[:wanted]
        self.waiting = [group for group in running if group not in chosen]
        return [group.samples() for group in chosen], resumed

    async def play_all(self, rows: Sequence[Row], name: str) -> list[Sample]:
        """One graded episode of each row, its main agent's sample, with seeds that depend on the row and the name."""

        async def play(at: int, row: Row) -> Sample:
            sample = row.sample(index=at, group_index=at)
            async with self._gate:
                outcome = await self._player.play(sample, self._params(name, at))
            return outcome.sample

        return list(await asyncio.gather(*(play(at, row) for at, row in enumerate(rows))))

    def _begin(self) -> Group:
        group = Group(self.next_position)
        self.next_position += 1
        return group

    def _is_finished(self, group: Group) -> bool:
        return group.finished() == self._options.samples_per_prompt

    async def _play(self, group: Group) -> None:
        places = range(self._options.samples_per_prompt)
        unfinished = [at for at in places if at not in group.episodes or group.was_aborted(at)]
        await asyncio.gather(*(self._play_one(group, at) for at in unfinished))

    async def _play_one(self, group: Group, at: int) -> None:
        if at in group.episodes:
            sample = group.episodes[at][0]
        else:
            index = group.position * self._options.samples_per_prompt + at
            sample = self._order.row(group.position).sample(index=index, group_index=group.position)
        async with self._gate:
            if self._aborting.is_set:
                return
            outcome = await self._player.play(sample, self._params("train", sample.index))
        group.episodes[at] = [outcome.sample, *outcome.siblings]

    def _params(self, name: str, index: int | None) -> dict[str, Any]:
        return {**self._sampling_params, "sampling_seed": sampling_seed(self._options.seed, name, index)}
