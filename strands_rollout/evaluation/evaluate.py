"""Play a sample for each row, check it, and sum up the outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strands_rollout.play.player import Outcome, open_player
from strands_rollout.play.rows import Row
from strands_rollout.samples import Sample, finished_samples
from strands_rollout.settings import REWARD_KEY


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Options of a run: the engine, the tokenizer, the sampling, the concurrency and the settings.

    Attributes:
        sampling_params: As slime passes them to `generate`: `max_new_tokens` is the budget of a whole response.
        concurrency: Maximum number of samples played at once.
        seed: The seed of the first sample; the seed grows by 1 per sample. If it is None, no sample has a seed.
        settings: The mapping under `strands_rollout:` of a settings file.
    """

    base_url: str
    tokenizer_dir: Path
    sampling_params: Mapping[str, Any]
    concurrency: int = 16
    seed: int | None = None
    settings: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of a run.

    Mean reward and accuracy exclude failed, aborted and ungraded samples; both are 0 if no other samples are left.
    """

    samples: int
    completed: int
    mean_reward: float
    accuracy: float
    tool_calls: int
    tito_violations: int
    contract_violations: int

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Summary:
        """Return the totals of the outcomes."""
        views = finished_samples([outcome.sample for outcome in outcomes])
        graded = [view.reward_details for view in views if view.reward_details and not view.is_missing]
        count = max(len(graded), 1)
        return cls(
            samples=len(outcomes),
            completed=sum(outcome.sample.status is Sample.Status.COMPLETED for outcome in outcomes),
            mean_reward=round(sum(float(reward[REWARD_KEY]) for reward in graded) / count, 4),
            accuracy=round(sum(bool(reward["acc"]) for reward in graded) / count, 4),
            tool_calls=sum(outcome.facts.tool_calls or 0 for outcome in outcomes),
            tito_violations=sum(len(outcome.tito_violations) for outcome in outcomes),
            contract_violations=sum(len(outcome.contract_violations) for outcome in outcomes),
        )

    @property
    def ok(self) -> bool:
        """True if at least one sample was completed and no check found a violation."""
        return self.completed > 0 and not self.tito_violations and not self.contract_violations

    def to_dict(self) -> dict[str, int | float]:
        """Return the totals by name, in the order of the fields."""
        return asdict(self)


async def evaluate(
    rows: Sequence[Row], plan: RunPlan, *, on_done: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Play and check a sample per row; return the outcomes in the order of the rows.

    `on_done` is called with each outcome as soon as the sample is graded.

    Raises:
        ConfigError: The URL or the tokenizer can't be used.
    """
    slots = asyncio.Semaphore(plan.concurrency)
    settings = {**(plan.settings or {}), "max_failed_groups": None}  # failures must not end a run that trains nothing
    async with open_player(plan.base_url, plan.tokenizer_dir, settings, audited=True) as player:

        async def run(index: int, row: Row) -> Outcome:
            sample = row.sample(index=index, group_index=index)
            seed = {} if plan.seed is None else {"sampling_seed": plan.seed + index}
            async with slots:
                outcome = await player.play(sample, {**plan.sampling_params, **seed})
            on_done(outcome)
            return outcome

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(index, row)) for index, row in enumerate(rows)]
    return [task.result() for task in tasks]
