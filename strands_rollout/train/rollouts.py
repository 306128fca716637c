"""A step's rollouts: groups of samples that `generate` played and `reward_func` graded, and the batch made of them.

An aborted episode is resumed in the next step, as in slime's partial rollouts. A checkpoint stores only
the position in the order of prompts: a resumed run computes the order again from its seed.

A batch holds the samples as sequences for the loss, and their metrics; nothing here needs torch. This module also
checks the invariant of a run: under the same weights, the trainer's logprobs of sampled tokens equal the rollout's.
Both compute the same function of the same tokens. A difference beyond rounding has one of three causes. The trainer
sees other tokens or positions than the policy did; the rollout's logprobs are wrong; or trainer and engine compute
differently, for example with another precision.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Self

from strands_rollout.errors import TrajectoryError
from strands_rollout.play.options import TrainOptions, slime_sampling_params
from strands_rollout.play.player import Generate, Player
from strands_rollout.play.rows import Row
from strands_rollout.samples import (
    NO_JUDGE,
    Sample,
    facts_of,
    fan_out_part,
    finished_samples,
    parts_of,
    reward_details,
)
from strands_rollout.settings import REWARD_KEY, RolloutSettings
from strands_rollout.slime_plugin.drift import DriftMeter, EpisodeDrift, measure_some, totals_of
from strands_rollout.slime_plugin.reward_groups import normalize_rewards
from strands_rollout.template.tokens import Drift
from strands_rollout.tool_parsers import AUTO

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_SHOWN: Final = 10
_MAX_ERRORS: Final = 5
_SHOWN_CONTEXT_TOKENS: Final = 8
_MAX_LOG_RATIO: Final = 50.0
_GRPO: Final = SimpleNamespace(reward_key=REWARD_KEY, advantage_estimator="grpo")


class PromptOrder:
    """An endless sequence of rows, shuffled again for each pass over them."""

    def __init__(self, rows: Sequence[Row], seed: int) -> None:
        self._rows, self._seed = rows, seed
        self._order_of_pass = functools.lru_cache(maxsize=2)(self._shuffle)

    def row(self, position: int) -> Row:
        """Return the row at a position, from 0."""
        pass_number, index = divmod(position, len(self._rows))
        return self._rows[self._order_of_pass(pass_number)[index]]

    def _shuffle(self, pass_number: int) -> list[int]:
        order = list(range(len(self._rows)))
        Random(sampling_seed(self._seed, pass_number)).shuffle(order)  # noqa: S311 - an order, not a secret
        return order


def sampling_seed(*parts: object) -> int:
    """Return a 31-bit seed that depends on all parts and is the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(slots=True)
class AbortFlag:
    """A flag that is set while rollouts are aborted; the value of the setting `should_abort`."""

    is_set: bool = False

    def __call__(self) -> bool:
        """Return whether the flag is set."""
        return self.is_set


@dataclass(slots=True)
class Group:
    """The episodes of one prompt.

    Attributes:
        position: The position of the prompt in the order of prompts.
        episodes: The finished and aborted episodes by their index in the group. Each is the main agent's sample,
            followed by its siblings in a fan-out.
    """

    position: int
    episodes: dict[int, list[Sample]] = field(default_factory=dict)

    def finished_count(self) -> int:
        """Return the number of episodes that were played and not aborted, failed episodes included."""
        return sum(not self.was_aborted(index) for index in self.episodes)

    def was_aborted(self, index: int) -> bool:
        """Return whether an abort interrupted the episode with this index."""
        return self.episodes[index][0].status is Sample.Status.ABORTED

    def samples(self) -> list[Sample]:
        """Return all samples in the order of their episodes, siblings next to each other."""
        return [sample for index in sorted(self.episodes) for sample in self.episodes[index]]


class RolloutCollector:
    """Player of groups, which keeps the unused groups of a step for the next step.

    Attributes:
        next_position: The position of the first prompt that has no group yet.
        waiting: The groups interrupted by an abort, and finished groups that were not needed. The next call of
            `collect` uses all of them.

    Args:
        player: Plays the episodes; they end early once `abort_flag` is set.
        rows: The prompts.
        options: The numbers of groups and episodes, and the seed.
        abort: Aborts every request of the engine.
        abort_flag: Set while a rollout is aborted.
        trains_aborted: True if `collect` returns all begun groups, with their aborted episodes. This is a deliberate
            fault, for experiments.
    """

    def __init__(
        self,
        player: Player,
        rows: Sequence[Row],
        options: TrainOptions,
        abort: Callable[[], Awaitable[None]],
        abort_flag: AbortFlag,
        *,
        trains_aborted: bool = False,
    ) -> None:
        self._player, self._options, self._abort, self._abort_flag = player, options, abort, abort_flag
        self._trains_aborted = trains_aborted
        self._order = PromptOrder(rows, options.seed)
        self._slots = asyncio.Semaphore(options.concurrency)
        self._sampling_params = slime_sampling_params(options.temperature, options.max_new_tokens)
        self.next_position = 0
        self.waiting: list[Group] = []

    async def collect(self) -> tuple[list[list[Sample]], int]:
        """Play until a step's groups are finished, then abort the unfinished groups, which the next call resumes.

        Returns:
            The finished groups, at most `prompts`, in the order of their prompts, each as a flat list of samples; and
            the number of resumed episodes. With `trains_aborted`, all begun groups are returned instead.

        Raises:
            RolloutError: The engine refused the abort, or did not answer it.
        """
        target = self._options.prompts
        missing = range(target + self._options.extra_prompts - len(self.waiting))
        new_groups = [Group(self.next_position + number) for number in missing]
        self.next_position += len(new_groups)
        running = self.waiting + new_groups
        self.waiting = []
        resumed = sum(len(group.episodes) - group.finished_count() for group in running)
        tasks = {asyncio.create_task(self._play(group)): group for group in running}
        finished: list[Group] = []
        try:
            for next_done in asyncio.as_completed(list(tasks)):
                await next_done
                ended = [group for task, group in tasks.items() if task.done()]
                finished = [group for group in ended if group.finished_count() == self._options.samples_per_prompt]
                if len(finished) >= target:
                    break
            if unfinished := [task for task in tasks if not task.done()]:
                self._abort_flag.is_set = True
                await self._abort()  # running episodes return their tokens so far
                await asyncio.gather(*unfinished)
        finally:
            self._abort_flag.is_set = False
            for task in tasks:
                task.cancel()
        if self._trains_aborted:
            return [group.samples() for group in running if group.episodes], resumed
        # more groups may have finished during the abort; they belong to the next step
        chosen = sorted(finished, key=lambda group: group.position)[:target]
        self.waiting = [group for group in running if group not in chosen]
        return [group.samples() for group in chosen], resumed

    async def play_all(self, rows: Sequence[Row], name: str) -> list[Sample]:
        """Play one episode of each row, seeded by the run's seed, `name` and index; return the main agents' samples."""

        async def play(index: int, row: Row) -> Sample:
            sample = row.sample(index=index, group_index=index)
            async with self._slots:
                outcome = await self._player.play(sample, self._params(name, index))
            return outcome.sample

        return list(await asyncio.gather(*(play(index, row) for index, row in enumerate(rows))))

    async def _play(self, group: Group) -> None:
        indices = range(self._options.samples_per_prompt)
        unfinished = [index for index in indices if index not in group.episodes or group.was_aborted(index)]
        await asyncio.gather(*(self._play_episode(group, index) for index in unfinished))

    async def _play_episode(self, group: Group, index: int) -> None:
        if index in group.episodes:
            sample = group.episodes[index][0]
        else:
            sample_index = group.position * self._options.samples_per_prompt + index
            sample = self._order.row(group.position).sample(index=sample_index, group_index=group.position)
        async with self._slots:
            if self._abort_flag.is_set:
                return
            outcome = await self._player.play(sample, self._params("train", sample.index))
        group.episodes[index] = [outcome.sample, *outcome.siblings]

    def _params(self, name: str, index: int | None) -> dict[str, Any]:
        return {**self._sampling_params, "sampling_seed": sampling_seed(self._options.seed, name, index)}


def held_out_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the accuracy, the mean reward and the means of its parts, and the number of episodes without a verdict.

    The number is left out if it is 0. The means exclude episodes without a verdict, because their reward would fail
    again in a repeated run. But an outage raises an error: a failed episode is not a wrong answer, and means over the
    remaining rows would not describe the held-out set.

    Raises:
        TrajectoryError: Episodes or their judge failed, or the reward failed for every answer.
    """
    views = finished_samples(samples)
    missing = [view for view in views if view.is_missing]
    rewards = [view.reward_details for view in views if not view.is_missing]
    outages = [view for view in missing if not view.is_ungraded or view.reward_details.get("method") == NO_JUDGE]
    if failed := [view.sample for view in (outages if rewards else missing)]:
        raise TrajectoryError(
            f"{len(failed)} of {len(samples)} held-out episodes failed, so the accuracy is unknown: "
            f"{error_summary(failed)}; run the same command again to resume"
        )
    return {
        "held_out_accuracy": _mean(float(bool(reward.get("acc"))) for reward in rewards),
        "held_out_reward": _mean(float(reward.get(REWARD_KEY, 0.0)) for reward in rewards),
        **{f"held_out_{key}": _mean(values) for key, values in parts_of(rewards).items()},
        **({"held_out_ungraded": float(len(missing))} if missing else {}),
    }


def error_summary(samples: Sequence[Sample]) -> str:
    """Return up to 5 distinct errors of episodes and their rewards, as text.

    If there is no episode or no error, the text says so.
    """
    if not samples:
        return "no episode has finished"
    errors = {facts_of(sample).error or reward_details(sample).get("error") for sample in samples} - {None, ""}
    return "; ".join(sorted(map(str, errors))[:_MAX_ERRORS]) or "no episode reported an error"


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One sample as input of the loss.

    Attributes:
        tokens: The ids of prompt plus response.
        prompt_length: The number of prompt tokens, at least 1.
        loss_mask: 0 or 1 per response token.
        log_probs: The behavior policy's logprobs, one per response token. None if they are unknown; the trainer then
            uses its own logprobs from before the update.
        sampled_log_probs: The sampling logprob of each response token, or None if unknown; for comparison only.
        version: The version of the weights that sampled all tokens; None if there were several, or it is unknown.
        advantage: The advantage of every trained token.
        rollout: A key that only the siblings of a fan-out share.
        denominator: The number of trained tokens of the rollout, siblings included; at least 1. By default, as in
            slime, a sample's loss is the sum over its trained tokens divided by this number.
    """

    tokens: list[int]
    prompt_length: int
    loss_mask: list[int]
    log_probs: list[float] | None
    sampled_log_probs: Sequence[float | None]
    version: str | None
    advantage: float
    rollout: Hashable
    denominator: int

    @property
    def trained_positions(self) -> list[int]:
        """The indices of the trained tokens in `tokens`, in ascending order."""
        return [self.prompt_length + position for position, mask in enumerate(self.loss_mask) if mask]

    @property
    def known_log_probs(self) -> list[tuple[int, float]]:
        """(index among the trained tokens, logprob) of each trained token whose sampling logprob is known."""
        pairs = zip(self.sampled_log_probs, self.loss_mask, strict=True)
        trained = [logprob for logprob, mask in pairs if mask]
        return [(index, logprob) for index, logprob in enumerate(trained) if logprob is not None]

    @property
    def trained_log_probs(self) -> list[float] | None:
        """The behavior policy's logprobs of the trained tokens; None if they are unknown."""
        if self.log_probs is None:
            return None
        return [logprob for logprob, mask in zip(self.log_probs, self.loss_mask, strict=True) if mask]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The training data of one step, with its metrics.

    Attributes:
        samples: All samples, flat, in the order of groups.
        sequences: The samples with at least one trained token, for the loss.
        drifts: The drift of the measured samples.
        measured: Details of the drift of the same samples; empty if the method does not train tokens as sampled.
        dropped_groups: The number of groups whose advantages are all 0, for example because their rewards are equal.
            `sequences` still has the samples of these groups. These samples have no gradient if KL and entropy are off.
        extra_metrics: The metrics that an experiment adds to the step's record.
    """

    samples: list[Sample]
    sequences: list[TrainingSequence]
    drifts: list[Drift]
    measured: list[EpisodeDrift]
    dropped_groups: int
    extra_metrics: dict[str, float]

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[Sequence[Sample]],
        sequences: Sequence[TrainingSequence],
        drifts: list[Drift],
        dropped_groups: int,
        *,
        measured: Sequence[EpisodeDrift] = (),
        extra_metrics: Mapping[str, float] | None = None,
    ) -> Self:
        """Return the batch of a step's groups, without sequences that have no trained token."""
        samples = [sample for group in groups for sample in group]
        trained = [sequence for sequence in sequences if any(sequence.loss_mask)]
        return cls(samples, trained, drifts, list(measured), dropped_groups, dict(extra_metrics or {}))

    def metrics(self, version: int) -> dict[str, float]:
        """Return the metrics for the step's record.

        Siblings of a fan-out count as one episode with the main agent's reward and status, except in `samples`,
        `response_length` and `drift_episodes`, which are about samples. `version` is the version of the weights before
        the update; tokens of older versions are stale.
        """
        episodes = [sample for sample in self.samples if not fan_out_part(sample)]
        views = finished_samples(episodes)
        graded = [view.reward_details for view in views if view.reward_details and not view.is_missing]
        statuses = Counter(sample.status for sample in episodes)
        sampled = sum(drift.sampled_tokens for drift in self.drifts)
        metrics: dict[str, float] = {
            "episodes": len(episodes),
            "samples": len(self.samples),
            "reward": _mean(float(reward["score"]) for reward in graded),
            "accuracy": _mean(float(reward["acc"]) for reward in graded),
            **{name: _mean(values) for name, values in parts_of(graded).items()},
            "response_length": _mean(sample.response_length for sample in self.samples),
            **{
                name: sum(float(getattr(facts_of(sample), name) or 0) for sample in self.samples)
                / max(len(episodes), 1)
                for name in ("sampled_tokens", "tool_calls", "turns")
            },
            "dropped_groups": self.dropped_groups,
            "ungraded": sum(view.is_ungraded for view in views),
            **{status.value: statuses[status] for status in Sample.Status if status is not Sample.Status.PENDING},
            **_staleness(self.samples, version),
        }
        metrics |= self.extra_metrics
        if sampled:
            metrics["drift_tokens"] = sum(drift.drift_tokens for drift in self.drifts) / sampled
            metrics["drift_episodes"] = _mean(float(drift.drift_tokens > 0) for drift in self.drifts)
        if self.measured:
            totals = totals_of(self.measured)
            metrics["off_policy_tokens"] = totals.off_policy_share
            if totals.mismatched_tokens is not None:
                metrics["mismatch_tokens"] = totals.mismatched_tokens
        return metrics


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """A sample with at least one trained token, with its advantage; siblings share the key `rollout`."""

    sample: Sample
    advantage: float
    rollout: Hashable

    @property
    def version(self) -> str | None:
        """The weight version that sampled all of the sample's tokens; None if there were several, or it is unknown."""
        versions = {version for *_, version in facts_of(self.sample).spans or []}
        return versions.pop() if len(versions) == 1 else None


def trained_samples(groups: Sequence[Sequence[Sample]]) -> tuple[list[TrainedSample], int]:
    """Normalize rewards by group, and select the samples with a trained token.

    Returns:
        The selected samples with their advantages, and the number of groups whose advantages are all 0.
    """
    samples = [sample for group in groups for sample in group]
    _, advantages = normalize_rewards(_GRPO, samples)
    by_group: dict[object, set[float]] = defaultdict(set)
    for sample, advantage in zip(samples, advantages, strict=True):
        by_group[sample.group_index].add(advantage)
    trained = [
        TrainedSample(
            sample, advantage, ("position", position) if sample.rollout_id is None else ("rollout", sample.rollout_id)
        )
        for position, (sample, advantage) in enumerate(zip(samples, advantages, strict=True))
        if sample.loss_mask and any(sample.loss_mask)
    ]
    return trained, sum(advantages == {0.0} for advantages in by_group.values())


def trained_tokens_by_rollout(trained: Sequence[TrainedSample], masks: Sequence[list[int]]) -> dict[Hashable, int]:
    """Return the number of trained tokens of each rollout; `masks` are the samples' loss masks."""
    tokens: dict[Hashable, int] = defaultdict(int)
    for trained_sample, mask in zip(trained, masks, strict=True):
        tokens[trained_sample.rollout] += sum(mask)
    return tokens


def sequences_as_sampled(trained: Sequence[TrainedSample]) -> list[TrainingSequence]:
    """Return sequences of the tokens that the policy sampled, with the rollout's logprobs."""
    denominators = trained_tokens_by_rollout(trained, [entry.sample.loss_mask or [] for entry in trained])
    return [
        TrainingSequence(
            tokens=entry.sample.tokens,
            prompt_length=len(entry.sample.tokens) - entry.sample.response_length,
            loss_mask=entry.sample.loss_mask or [],
            log_probs=entry.sample.rollout_log_probs,
            sampled_log_probs=entry.sample.rollout_log_probs or [None] * entry.sample.response_length,
            version=entry.version,
            advantage=entry.advantage,
            rollout=entry.rollout,
            denominator=denominators[entry.rollout],
        )
        for entry in trained
    ]


class TrainingMethod:
    """A way to play episodes and to turn them into training data; this class trains the tokens as they were sampled.

    Experiments are subclasses.

    Attributes:
        rollout: The name of the method in options.json and in the summary.
        ablation: The name of the deliberate fault in options.json and in the summary; "none" without a fault.
        is_exact: True if the trainer's logprobs must equal the rollout's; checked if `TrainOptions.checks`.
        follows_contract: True if samples must follow slime's contract; checked if `TrainOptions.checks`.
        trains_aborted: See `RolloutCollector`.
        generate: The function that plays an episode; None for `strands_rollout.generate`.
    """

    rollout: str = "tito"
    ablation: str = "none"
    is_exact: bool = True
    follows_contract: bool = True
    trains_aborted: bool = False
    generate: Generate | None = None

    def check(self, options: TrainOptions, settings: RolloutSettings) -> None:
        """Raise ConfigError for options that the training method does not support; this base class supports all."""

    async def prepare(self, samples: Sequence[Sample], player: Player) -> None:
        """Change a step's samples in place before they are dumped, checked and batched; this class changes nothing."""

    def batch(
        self,
        groups: Sequence[Sequence[Sample]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        tool_parser: str = AUTO,
        checks_context: bool = True,
    ) -> StepBatch:
        """Normalize rewards by group, and turn every sample with a trained token into a sequence.

        Args:
            groups: Samples by prompt.
            tokenizer: The policy's tokenizer, to measure drift.
            tool_parser: The format of the policy's calls; "auto" detects it from the chat template.
            checks_context: True if contexts are compared with the template's rendering.
        """
        trained, dropped = trained_samples(groups)
        views = finished_samples([entry.sample for entry in trained])
        measured = measure_some(views, DriftMeter(tokenizer, tool_parser=tool_parser, checks_context=checks_context))
        drifts = [Drift(drift.sampled_tokens, drift.turn_drift) for drift in measured]
        return StepBatch.from_groups(groups, sequences_as_sampled(trained), drifts, dropped, measured=measured)


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """The difference between the trainer's and the rollout's logprobs, in nats, over tokens where both are known.

    `k3` is the mean over tokens of an estimate of KL(rollout || trainer). All values are 0 if no token was compared.
    """

    largest: float
    mean: float
    k3: float
    tokens: int

    @classmethod
    def between(cls, sequences: Sequence[TrainingSequence], trainer: Sequence[Sequence[float]]) -> LogprobGap:
        """Return the gap over all trained tokens whose sampling logprob is known.

        `trainer` holds the trainer's logprobs of each sequence's trained tokens under its current weights. For tokens
        that older weights sampled, the gap includes the change of the weights.
        """
        log_ratios = [
            trainer_log_probs[index] - sampled
            for sequence, trainer_log_probs in zip(sequences, trainer, strict=True)
            for index, sampled in sequence.known_log_probs
        ]
        if not log_ratios:
            return cls(0.0, 0.0, 0.0, 0)
        k3 = [math.expm1(min(ratio, _MAX_LOG_RATIO)) - ratio for ratio in log_ratios]
        return cls(
            largest=max((abs(ratio) for ratio in log_ratios), key=lambda gap: math.inf if math.isnan(gap) else gap),
            mean=math.fsum(map(abs, log_ratios)) / len(log_ratios),
            k3=math.fsum(k3) / len(log_ratios),
            tokens=len(log_ratios),
        )

    def metrics(self) -> dict[str, float]:
        """Return the gap by the metrics' names; empty if no token was compared."""
        if not self.tokens:
            return {}
        return {"kl_k3": self.k3, "logprob_gap_max": self.largest, "logprob_gap_mean": self.mean}


def check_gap(
    sequences: Sequence[TrainingSequence],
    trainer: Sequence[Sequence[float]],
    limit: float,
    decode: Callable[[Sequence[int]], str],
) -> None:
    """Check that the trainer's and the rollout's logprobs differ by rounding alone: at most `limit`, in nats.

    Pass only sequences that were sampled with the weights before the update. For `trainer`, see `LogprobGap.between`.

    Raises:
        TrajectoryError: The gap is larger (the message shows the tokens with the largest differences), or there is no
            token to compare.
    """
    gap = LogprobGap.between(sequences, trainer)
    if not gap.tokens:
        raise TrajectoryError(
            "can't compare trainer and engine: no token has a known logprob and was sampled by the current weights; "
            "expected the rollout's logprobs, and spans with the engine's weight version. --unchecked skips this check"
        )
    if gap.largest <= limit:
        return
    rows = [
        (abs(sampled - own[index]), number, sequence.trained_positions[index], sampled, own[index])
        for number, (sequence, own) in enumerate(zip(sequences, trainer, strict=True))
        for index, sampled in sequence.known_log_probs
    ]
    shown = "".join(
        f"\n  sequence {number}, {_describe_token(sequences[number].tokens, position, decode)}: "
        f"rollout {sampled:.4f}, trainer {own:.4f}"
        for _, number, position, sampled, own in sorted(rows, reverse=True)[:_MAX_SHOWN]
    )
    raise TrajectoryError(
        f"under the same weights the trainer's logprobs differ from the rollout's by up to {gap.largest:.3g} (mean "
        f"{gap.mean:.3g}), {sum(row[0] > limit for row in rows)} of {len(rows)} trained tokens by more than {limit:g}; "
        "expected rounding alone. Either the tokens, their positions or the mask are wrong, or the engine computes "
        f"differently (if it uses a lower precision, raise --gap-limit). The largest differences:{shown}"
    )


def _describe_token(tokens: Sequence[int], position: int, decode: Callable[[Sequence[int]], str]) -> str:
    before = tokens[max(0, position - _SHOWN_CONTEXT_TOKENS) : position]
    return f"token {position} of {len(tokens)}: {decode([tokens[position]])!r} after {decode(before)!r}"


def _staleness(samples: Iterable[Sample], version: int) -> dict[str, float]:
    tokens_by_age: Counter[int] = Counter()
    for sample in samples:
        for _, start, end, span_version in facts_of(sample).spans or []:
            # a token of an unknown version counts as sampled by the current weights
            age = version - int(span_version) if str(span_version).isdecimal() else 0
            tokens_by_age[age] += end - start
    total = tokens_by_age.total()
    stale = sum(count for age, count in tokens_by_age.items() if age > 0)
    return {"stale_tokens": stale / total if total else 0.0, "staleness_max": max(tokens_by_age, default=0)}


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
