"""The loop: rollouts under the current weights, one update, the new weights to the engine, and again.

Read `Trainer.run` first.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import httpx

from strands_rollout.client.transport import create_client
from strands_rollout.errors import EngineError, EngineUnavailableError, TrajectoryError
from strands_rollout.evaluation.evaluate import Player
from strands_rollout.evaluation.rows import Row
from strands_rollout.samples import Sample, episode_facts, kept, reward_details
from strands_rollout.settings import REWARD_KEY, settings_from_args
from strands_rollout.slime_plugin.reward import NO_JUDGE
from strands_rollout.slime_plugin.sample_contract import contract_violations
from strands_rollout.slime_plugin.transcripts import write_step_dump
from strands_rollout.train.batch import (
    LogprobGap,
    StepBatch,
    TrainingMethod,
    batch_figures,
    check_gap,
    gap_figures,
)
from strands_rollout.train.options import TrainOptions
from strands_rollout.train.policy import Measured, Policy
from strands_rollout.train.rollouts import RolloutCollector
from strands_rollout.train.run_folder import RunState, StepLog, StepRecord, TrainFolder

_TIMEOUT_S: Final = 120.0
_MOST_SHOWN: Final = 5
Rollouts: TypeAlias = tuple[list[list[Sample]], int]


class WeightSync:
    """Gives one engine new weights, and aborts its requests; an async context manager."""

    def __init__(self, base_url: str) -> None:
        self._http = create_client(base_url)

    async def __aenter__(self) -> WeightSync:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def load(self, folder: Path, version: int | str) -> None:
        """Load the weights of a model folder, an absolute path that the engine can read; its prefix cache is emptied.

        Raises:
            EngineError: It refused.
            EngineUnavailableError: It did not answer.
        """
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        answer = await self._post("/update_weights_from_disk", body)
        if not answer.get("success"):
            raise EngineError(f"the engine did not load the weights of {folder}: {answer.get('message')!r:.500}")

    async def abort_all(self) -> None:
        """End every request that runs or waits; each answers with what it has sampled."""
        await self._post("/abort_request", {"abort_all": True})

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            response = await self._http.post(path, json=body, timeout=_TIMEOUT_S)
        except httpx.HTTPError as e:
            raise EngineUnavailableError(f"the engine did not answer {path}: {type(e).__name__} {e}") from e
        if response.status_code not in (200, 400):
            raise EngineError(f"the engine answered {path} with {response.status_code}: {response.text[:500]!r}")
        try:
            answer = response.json()
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}


@dataclass(slots=True)
class Trainer:
    """A training run.

    Attributes:
        held_out: Rows to measure accuracy on.
        phase: Called with the name of what begins, to show it.
        first_step: 0, or the step at which a checkpoint resumes.
        facts: What the summary will report of single steps, by name.
    """

    options: TrainOptions
    method: TrainingMethod
    policy: Policy
    player: Player
    collector: RolloutCollector
    sync: WeightSync
    folder: TrainFolder
    held_out: Sequence[Row]
    phase: Callable[[str], None]
    first_step: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    _is_checked: bool = False

    async def run(self, log: StepLog, on_step: Callable[[StepRecord], None]) -> None:
        """Train to the last step, and log a record of each; `on_step` is called with it.

        Raises:
            RolloutError: The engine, the samples or the disk fail; steps that are over are kept.
        """
        await self._load_weights(self.first_step)
        pending: asyncio.Task[Rollouts] | None = None
        held_out = await self._measure_held_out(self.first_step)
        try:
            for step in range(self.first_step, self.options.steps):
                self.phase("rollout")
                started = time.monotonic()
                groups, resumed = await (pending or self.collector.collect())
                rollout_s, next_position = time.monotonic() - started, self.collector.next_position
                is_ahead = self.options.is_async and step + 1 < self.options.steps
                pending = asyncio.create_task(self.collector.collect()) if is_ahead else None
                trained = await self._train(step, groups)
                if pending is not None:
                    await asyncio.wait([pending])  # an engine would wait for its requests all the same
                started = time.monotonic()
                await self._load_weights(step + 1)
                times = {"rollout_s": rollout_s, "sync_s": time.monotonic() - started}
                record = {"step": step, "weight_version": step, "resumed": resumed}
                on_step(log.append(record | held_out | trained | times))
                self._save(step + 1, next_position)
                held_out = await self._measure_held_out(step + 1)
        finally:
            if pending is not None:
                pending.cancel()

    async def _train(self, step: int, groups: Sequence[Sequence[Sample]]) -> dict[str, Any]:
        """Check the step's samples and learn from them; the figures of its record."""
        self.phase("training")
        started = time.monotonic()
        batch = await self._batch(step, groups)
        before = await asyncio.to_thread(self.policy.measure, batch.sequences)
        gap = LogprobGap.of(batch.sequences, [one.log_probs.tolist() for one in before])
        if step == 0 and gap.tokens:
            self.facts |= {"logprob_gap_max_step0": gap.largest, "logprob_gap_mean_step0": gap.mean}
        if not self._is_checked:
            self._check_gap(step, batch, before)
        done = step / self.options.steps
        figures = await asyncio.to_thread(self.policy.update, batch.sequences, before, progress=done)
        entropy = [value for one in before for value in one.entropy.tolist()]
        return {
            **batch_figures(batch, step),
            **gap_figures(gap),
            "entropy": sum(entropy) / len(entropy) if entropy else None,
            **figures.to_record(),
            "train_s": time.monotonic() - started,
        }

    async def _batch(self, step: int, groups: Sequence[Sequence[Sample]]) -> StepBatch:
        samples = [sample for group in groups for sample in group]
        await self.method.prepare(samples, self.player)
        write = functools.partial(write_step_dump, self.player.args, "rollout", step, groups)
        await asyncio.to_thread(kept, "dump", write)
        if not any(sample.loss_mask and any(sample.loss_mask) for sample in samples):
            raise TrajectoryError(f"no sample of step {step} trains a token; their errors: {_errors_of(samples)}")
        if self.options.checks and self.method.keeps_contract:
            violated = [(sample.index, contract_violations(sample, reward_key=REWARD_KEY)) for sample in samples]
            found = [f"sample {index}: {words}" for index, violations in violated for words in violations]
            if found:  # slime's trainer would not take them
                raise TrajectoryError(
                    f"{len(found)} violations of slime's contract in step {step}: {'; '.join(found[:_MOST_SHOWN])}"
                )
        tool_parser = settings_from_args(self.player.args).tool_parser
        batch = functools.partial(self.method.batch, tool_parser=tool_parser)
        return await asyncio.to_thread(batch, groups, self.player.tokenizer)

    def _check_gap(self, step: int, batch: StepBatch, before: Sequence[Measured]) -> None:
        if self.options.checks and self.method.is_exact:
            # a resumed run's first steps may hold only what older weights have sampled; at step 0 a version that the
            # engine does not report, or reports wrongly, must not hide what differs
            all_pairs = zip(batch.sequences, before, strict=True)
            pairs = [pair for pair in all_pairs if step == 0 or pair[0].version == str(step)]
            if pairs or step == 0:
                trainer = [one.log_probs.tolist() for _, one in pairs]
                check_gap([sequence for sequence, _ in pairs], trainer, self.options.gap_limit, self.player.decode)
                self._is_checked = True

    async def _load_weights(self, version: int) -> None:
        await asyncio.to_thread(self.policy.write_weights, self.folder.weights)
        await self.sync.load(self.folder.weights, version)

    async def _measure_held_out(self, version: int) -> dict[str, float]:
        """Accuracy and mean reward on the held-out rows under this version of the weights, where it is due."""
        is_last = version == self.options.steps
        if version % self.options.eval_every and not is_last:
            return {}
        started = time.monotonic()
        self.phase("held out")
        samples = await self.collector.play_all(self.held_out, "held out")
        over = (Sample.Status.FAILED, Sample.Status.ABORTED)
        rewards = [reward_details(sample) for sample in samples]
        fails = all(reward.get("error") for reward in rewards)  # a reward that raises for every answer
        judged = zip(samples, rewards, strict=True)
        lost = [one for one, reward in judged if fails or one.status in over or reward.get("method") == NO_JUDGE]
        if lost:  # an outage is no wrong answer, and the rows that are left are another set
            raise TrajectoryError(
                f"{len(lost)} of {len(samples)} held-out episodes failed, so that there is no accuracy: "
                f"{_errors_of(lost)}; run the same command again to resume"
            )
        found = {
            "accuracy": sum(bool(reward.get("acc")) for reward in rewards) / max(len(rewards), 1),
            "held_out_reward": sum(float(reward.get(REWARD_KEY, 0.0)) for reward in rewards) / max(len(rewards), 1),
        }
        for name, value in found.items():
            self.facts |= {f"{name}_start": value} if version == 0 else {}
            self.facts |= {f"{name}_end": value} if is_last else {}
        held_out = {"held_out_accuracy": found["accuracy"], "held_out_reward": found["held_out_reward"]}
        return {**held_out, "eval_s": time.monotonic() - started}

    def _save(self, step: int, next_position: int) -> None:
        """A checkpoint before `step`, where it is due; rollouts that run ahead are not in it, and are played again."""
        if step % self.options.save_every == 0 or step == self.options.steps:
            state = RunState(step, next_position, self.collector.waiting, self.facts)
            self.folder.save_checkpoint(state, self.policy.save)


def _errors_of(samples: Sequence[Sample]) -> str:
    """A few of them."""
    errors = sorted({str(episode_facts(one).get("error") or reward_details(one).get("error")) for one in samples})
    return "; ".join(errors[:_MOST_SHOWN]) or "none is over"
