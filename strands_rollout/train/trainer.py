"""The loop: rollouts under the weights as they are, one update, the new weights to the engine, and again.

Glue between episodes and the policy. Read `Trainer.run` first.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from strands_rollout.config import settings_from_args
from strands_rollout.contract import contract_violations
from strands_rollout.dataset_rows import Row
from strands_rollout.episode_facts import episode_facts
from strands_rollout.errors import TrajectoryError
from strands_rollout.evaluate import Player
from strands_rollout.finished_sample import kept
from strands_rollout.reward_settings import REWARD_KEY
from strands_rollout.sample_type import Sample
from strands_rollout.step_dump import write_step_dump
from strands_rollout.train.ablations import Ablations
from strands_rollout.train.checkpoint import Progress
from strands_rollout.train.logprob_gap import LogprobGap, check_gap
from strands_rollout.train.policy import Measured, Policy
from strands_rollout.train.rollouts import Collected, RolloutCollector
from strands_rollout.train.run_folder import TrainFolder
from strands_rollout.train.step_batch import StepBatch, step_batch
from strands_rollout.train.step_log import StepLog, StepRecord
from strands_rollout.train.step_record import batch_figures, gap_figures
from strands_rollout.train.train_options import TrainOptions
from strands_rollout.train.weight_sync import WeightSync

_MOST_SHOWN: Final = 5


@dataclass(slots=True)
class Trainer:
    """A run under way.

    Attributes:
        options: What was asked.
        policy: Under training.
        player: Plays and grades episodes.
        collector: Collects a step's.
        sync: Gives the engine weights.
        folder: The run's.
        held_out: Rows to measure accuracy on.
        phase: Told what is being done now.
        first_step: 0, or the step that a checkpoint goes on with.
        facts: What the summary tells of single steps, by name.
    """

    options: TrainOptions
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

    async def run(self, log: StepLog, tell: Callable[[StepRecord], None]) -> None:
        """Train to the last step, with a record of each.

        Args:
            log: Of this run.
            tell: Told of each record when its step is over.

        Raises:
            RolloutError: The engine, the samples or the disk fail; steps that are over are kept.
        """
        await self._load_weights(self.first_step)
        pending: asyncio.Task[Collected] | None = None
        held_out = await self._measure_held_out(self.first_step)
        try:
            for step in range(self.first_step, self.options.steps):
                self.phase("rollout")
                started = time.monotonic()
                collected = await (pending or asyncio.create_task(self.collector.collect()))
                rollout_s, next_position = time.monotonic() - started, self.collector.next_position
                is_ahead = self.options.is_async and step + 1 < self.options.steps
                pending = asyncio.create_task(self.collector.collect()) if is_ahead else None
                trained = await self._train(step, collected)
                if pending is not None:
                    await asyncio.wait([pending])  # an engine would wait for its requests all the same
                started = time.monotonic()
                await self._load_weights(step + 1)
                times = {"rollout_s": rollout_s, "sync_s": time.monotonic() - started}
                record = {"step": step, "weight_version": step, "resumed": collected.resumed}
                tell(log.append(record | held_out | trained | times))
                self._save(step + 1, next_position)
                held_out = await self._measure_held_out(step + 1)
        finally:
            if pending is not None:
                pending.cancel()

    async def _train(self, step: int, collected: Collected) -> dict[str, Any]:
        """Check the step's samples, learn from them, and tell what came of it."""
        self.phase("training")
        started = time.monotonic()
        batch = await self._batch(step, collected)
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

    async def _batch(self, step: int, collected: Collected) -> StepBatch:
        samples = [sample for group in collected.groups for sample in group]
        ablations = Ablations(self.options.ablation, self.player)
        await ablations.apply(samples)
        write = functools.partial(write_step_dump, self.player.args, "rollout", step, collected.groups)
        await asyncio.to_thread(kept, "dump", write)
        if not any(sample.loss_mask and any(sample.loss_mask) for sample in samples):
            raise TrajectoryError(f"no sample of step {step} trains a token; their errors: {_errors_of(samples)}")
        if self.options.checks and self.options.rollout != "openai":
            _check_samples(step, samples)
        tool_parser = settings_from_args(self.player.args).tool_parser
        batch = functools.partial(step_batch, tool_parser=tool_parser)
        return await asyncio.to_thread(batch, collected.groups, self.options.rollout, self.player.tokenizer)

    def _check_gap(self, step: int, batch: StepBatch, before: Sequence[Measured]) -> None:
        if self.options.checks and self.options.rollout == "tito":
            # a resumed run's first steps may hold only what older weights have sampled; at step 0 a version that the
            # engine does not tell, or tells wrongly, must not hide what differs
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
        """Accuracy on the held-out rows under this version of the weights, where it is due."""
        is_last = version == self.options.steps
        if version % self.options.eval_every and not is_last:
            return {}
        started = time.monotonic()
        self.phase("held out")
        samples = await self.collector.play_all(self.held_out, "held out")
        lost = [sample for sample in samples if sample.status in (Sample.Status.FAILED, Sample.Status.ABORTED)]
        if lost:  # an outage is no wrong answer, and the rows that are left are another set
            raise TrajectoryError(
                f"{len(lost)} of {len(samples)} held-out episodes failed, so that there is no accuracy: "
                f"{_errors_of(lost)}; run the same command again to go on"
            )
        verdicts = [bool(sample.reward.get("acc")) for sample in samples if isinstance(sample.reward, Mapping)]
        accuracy = sum(verdicts) / max(len(verdicts), 1)
        self.facts |= {"accuracy_start": accuracy} if version == 0 else {}
        self.facts |= {"accuracy_end": accuracy} if is_last else {}
        return {"held_out_accuracy": accuracy, "eval_s": time.monotonic() - started}

    def _save(self, step: int, next_position: int) -> None:
        """A checkpoint before `step`, where it is due; rollouts that run ahead are not in it, and are played again."""
        if step % self.options.save_every and step != self.options.steps:
            return
        checkpoints = self.folder.checkpoints
        part = checkpoints.begin(step)
        self.policy.save(part / "policy.pt")
        checkpoints.finish(part, Progress(step, next_position, self.collector.waiting, self.facts))


def _errors_of(samples: Sequence[Sample]) -> str:
    """A few of them."""
    errors = sorted({str(episode_facts(sample).get("error")) for sample in samples})
    return "; ".join(errors[:_MOST_SHOWN]) or "none is over"


def _check_samples(step: int, samples: Sequence[Sample]) -> None:
    """Refuse samples that slime's trainer would not take."""
    found = [
        f"sample {sample.index}: {words}"
        for sample in samples
        for words in contract_violations(sample, reward_key=REWARD_KEY)
    ]
    if found:
        raise TrajectoryError(
            f"{len(found)} violations of slime's contract in step {step}: {'; '.join(found[:_MOST_SHOWN])}"
        )
