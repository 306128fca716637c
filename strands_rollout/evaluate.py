"""Runs rows of a data set through `generate` and `reward_func`, called as slime calls them, and checks every sample.

Knows slime's calling convention. Token exactness is checked against what crossed the wire, not against the model's own
record.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from strands_rollout.contract import contract_violations
from strands_rollout.dataset_rows import Row
from strands_rollout.reward import reward_func
from strands_rollout.rollout import generate
from strands_rollout.sample_type import Sample
from strands_rollout.slime_seam import load_tokenizer
from strands_rollout.token_audit import tito_violations
from strands_rollout.wire_recorder import WireRecorder, recording

REWARD_KEY: Final = "score"


def slime_sampling_params(temperature: float, max_new_tokens: int) -> dict[str, Any]:
    """The sampling parameters that slime 0.3 hands to `generate` in training (slime/rollout/sglang_rollout.py)."""
    return {
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": max_new_tokens,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What to run the rows with.

    Attributes:
        base_url: The engine's.
        tokenizer_dir: Folder of the served model's tokenizer.
        sampling_params: As slime hands them to `generate`; `max_new_tokens` is the budget of a whole response.
        concurrency: Episodes at once.
        seed: The first sample's sampling seed, the next one's is one more; None for none.
        settings: The mapping under `strands_rollout:` of a custom config.
    """

    base_url: str
    tokenizer_dir: Path
    sampling_params: Mapping[str, Any]
    concurrency: int = 16
    seed: int | None = None
    settings: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished sample, and what is wrong with it, in words."""

    sample: Sample
    contract_violations: list[str]
    tito_violations: list[str]

    @property
    def facts(self) -> Mapping[str, Any]:
        """The episode's facts, from the sample's metadata."""
        facts = self.sample.metadata.get("strands_rollout")
        return facts if isinstance(facts, dict) else {}

    @property
    def graded(self) -> Mapping[str, Any]:
        """What the reward function returned; empty where it was not asked."""
        return self.sample.reward if isinstance(self.sample.reward, dict) else {}


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of a run; the means are over the samples that were rewarded."""

    samples: int
    completed: int
    mean_reward: float
    accuracy: float
    tool_calls: int
    tito_violations: int
    contract_violations: int

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Summary:
        """The totals of these outcomes."""
        graded = [outcome.graded for outcome in outcomes if outcome.graded]
        count = max(len(graded), 1)
        return cls(
            samples=len(outcomes),
            completed=sum(outcome.sample.status is Sample.Status.COMPLETED for outcome in outcomes),
            mean_reward=round(sum(float(reward[REWARD_KEY]) for reward in graded) / count, 4),
            accuracy=round(sum(bool(reward["acc"]) for reward in graded) / count, 4),
            tool_calls=sum(int(outcome.facts.get("tool_calls", 0)) for outcome in outcomes),
            tito_violations=sum(len(outcome.tito_violations) for outcome in outcomes),
            contract_violations=sum(len(outcome.contract_violations) for outcome in outcomes),
        )

    @property
    def ok(self) -> bool:
        """Whether something was completed and nothing was violated."""
        return self.completed > 0 and not self.tito_violations and not self.contract_violations

    def to_dict(self) -> dict[str, int | float]:
        """The totals by name, in this order."""
        return asdict(self)


async def evaluate(
    rows: Sequence[Row], plan: RunPlan, *, on_done: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """One sample per row, in the order of the rows.

    Args:
        rows: The problems.
        plan: What to run them with.
        on_done: Told of each outcome when it is there.

    Raises:
        ConfigError: The URL or the tokenizer can't be used.
    """
    gate = asyncio.Semaphore(plan.concurrency)
    async with recording(plan.base_url) as recorder:
        args = _args(recorder, plan)
        tokenizer = load_tokenizer(str(plan.tokenizer_dir))

        async def run(index: int, row: Row) -> Outcome:
            async with gate:
                outcome = await _outcome(args, row, index, plan, recorder, tokenizer)
            on_done(outcome)
            return outcome

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(index, row)) for index, row in enumerate(rows)]
    return [task.result() for task in tasks]


def _args(recorder: WireRecorder, plan: RunPlan) -> SimpleNamespace:
    """The args of slime, as far as this package reads them."""
    host, _, port = recorder.url.removeprefix("http://").partition(":")
    return SimpleNamespace(
        hf_checkpoint=str(plan.tokenizer_dir),
        sglang_router_ip=host,
        sglang_router_port=int(port),
        reward_key=REWARD_KEY,
        eval_reward_key="acc",
        strands_rollout=plan.settings,
    )


async def _outcome(
    args: SimpleNamespace,
    row: Row,
    index: int,
    plan: RunPlan,
    recorder: WireRecorder,
    tokenizer: Any,  # noqa: ANN401 - any Hugging Face tokenizer
) -> Outcome:
    sample = Sample(prompt=row.prompt, label=row.label, index=index, group_index=index, session_id=uuid.uuid4().hex)
    params = dict(plan.sampling_params)
    if plan.seed is not None:
        params["sampling_seed"] = plan.seed + index
    sample = await generate(args, sample, params)
    if sample.status is not Sample.Status.ABORTED:
        sample.reward = await reward_func(args, sample)
    exchanges = recorder.episodes.get(str(sample.session_id), [])
    return Outcome(
        sample=sample,
        contract_violations=contract_violations(
            sample, decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)), reward_key=REWARD_KEY
        ),
        tito_violations=tito_violations(exchanges, sample),
    )
