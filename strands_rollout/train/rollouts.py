"""A step's rollouts: groups of samples that `generate` played and `reward_func` graded, and the batch made of them.

An episode that was aborted is resumed in the next step, as slime's partial rollouts. The position in the order of
prompts is all that a resumed run needs to know of that order.

A batch has the samples as the sequences that the loss reads, and in numbers; nothing here needs torch. A run's
invariant is checked here too: the trainer's logprobs of sampled tokens are the rollout's. Under the same weights both
compute the same function of the same tokens. A difference means that the trainer sees other tokens than the policy did,
at other places, or with other logprobs than it sampled them with.
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

_MOST_SHOWN: Final = 10
_MOST_ERRORS: Final = 5
_CONTEXT_TOKENS: Final = 8
_MOST_RATIO: Final = 50.0
_GRPO: Final = SimpleNamespace(reward_key=REWARD_KEY, advantage_estimator="grpo")


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
        missing = range(wanted + self._options.extra_prompts - len(self.waiting))
        new = [Group(self.next_position + number) for number in missing]
        self.next_position += len(new)
        running = self.waiting + new
        self.waiting = []
        resumed = sum(len(group.episodes) - group.finished() for group in running)
        tasks = {asyncio.create_task(self._play(group)): group for group in running}
        done: list[Group] = []
        try:
            for next_done in asyncio.as_completed(list(tasks)):
                await next_done
                over = [group for task, group in tasks.items() if task.done()]
                done = [group for group in over if group.finished() == self._options.samples_per_prompt]
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


def held_out_figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Return accuracy, mean reward and parts of held-out episodes, and how many the user's own reward could not grade.

    An outage is no wrong answer, and the rows that are left would be another set. A reward that raises for some answers
    would do so again: these are left out.

    Raises:
        TrajectoryError: Episodes or their judge failed; or the reward failed for every answer.
    """
    views = finished_samples(samples)
    missing = [one for one in views if one.is_missing]
    rewards = [one.graded for one in views if not one.is_missing]
    outages = [one for one in missing if not one.is_ungraded or one.graded.get("method") == NO_JUDGE]
    if lost := [one.sample for one in (outages if rewards else missing)]:
        raise TrajectoryError(
            f"{len(lost)} of {len(samples)} held-out episodes failed, so that there is no accuracy: "
            f"{errors_of(lost)}; run the same command again to resume"
        )
    return {
        "held_out_accuracy": _mean(float(bool(reward.get("acc"))) for reward in rewards),
        "held_out_reward": _mean(float(reward.get(REWARD_KEY, 0.0)) for reward in rewards),
        **{f"held_out_{key}": _mean(values) for key, values in parts_of(rewards).items()},
        **({"held_out_ungraded": float(len(missing))} if missing else {}),
    }


def errors_of(samples: Sequence[Sample]) -> str:
    """A few errors of these episodes and their rewards."""
    errors = sorted({str(facts_of(one).error or reward_details(one).get("error")) for one in samples})
    return "; ".join(errors[:_MOST_ERRORS]) or "none is over"


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One sample as the loss sees it.

    Attributes:
        tokens: Prompt, then response.
        prompt_length: Tokens of the prompt, at least 1.
        loss_mask: 0 or 1 per response token.
        log_probs: The behaviour policy's, one per response token; None where they are unknown: the trainer then takes
            its own from before the update.
        sampled_log_probs: The logprob at which each response token was sampled, None where it is unknown; only to
            compare with.
        version: Of the weights that sampled all of its tokens; None where there were several, or it is unknown.
        advantage: Of every trained token.
        rollout: The same for the siblings of a fan-out, and for no other sequence.
        denominator: Trained tokens of its rollout, siblings included; at least 1. The loss of a sample is its sum
            divided by this number, as slime's by default.
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
        """Places in `tokens` of the trained tokens, ascending."""
        return [self.prompt_length + at for at, is_trained in enumerate(self.loss_mask) if is_trained]

    @property
    def known_pairs(self) -> list[tuple[int, float]]:
        """For each trained token whose sampling logprob is known: its index among them, and that logprob."""
        pairs = zip(self.sampled_log_probs, self.loss_mask, strict=True)
        trained = [value for value, is_trained in pairs if is_trained]
        return [(at, value) for at, value in enumerate(trained) if value is not None]

    @property
    def trained_log_probs(self) -> list[float] | None:
        """The behaviour policy's logprobs of the trained tokens."""
        if self.log_probs is None:
            return None
        return [value for value, is_trained in zip(self.log_probs, self.loss_mask, strict=True) if is_trained]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step trains on: all samples, flat in the order of groups, and those that train a token as sequences.

    `drifts` are of the samples of which it was measured; `measured` has more of them, where tokens are trained as they
    were sampled. `dropped_groups` have no spread of rewards and teach nothing; `extra_figures` are what an experiment
    adds to the step's record.
    """

    samples: list[Sample]
    sequences: list[TrainingSequence]
    drifts: list[Drift]
    measured: list[EpisodeDrift]
    dropped_groups: int
    extra_figures: dict[str, float]

    @classmethod
    def of(
        cls,
        groups: Sequence[Sequence[Sample]],
        sequences: Sequence[TrainingSequence],
        drifts: list[Drift],
        dropped_groups: int,
        *,
        measured: Sequence[EpisodeDrift] = (),
        extra_figures: Mapping[str, float] | None = None,
    ) -> Self:
        """The batch of a step's groups, without sequences that train nothing."""
        samples = [sample for group in groups for sample in group]
        kept = [one for one in sequences if any(one.loss_mask)]
        return cls(samples, kept, drifts, list(measured), dropped_groups, dict(extra_figures or {}))

    def figures(self, version: int) -> dict[str, float]:
        """What the step's record says of it; siblings of a fan-out are one episode: the main agent's reward and status.

        `version` is of the weights that are about to be updated; older tokens are stale.
        """
        episodes = [sample for sample in self.samples if not fan_out_part(sample)]
        views = finished_samples(episodes)
        graded = [view.graded for view in views if view.graded and not view.is_missing]
        statuses = Counter(sample.status for sample in episodes)
        sampled = sum(drift.sampled_tokens for drift in self.drifts)
        figures: dict[str, float] = {
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
        figures |= self.extra_figures
        if sampled:
            figures["drift_tokens"] = sum(drift.drift_tokens for drift in self.drifts) / sampled
            figures["drift_episodes"] = _mean(float(drift.drift_tokens > 0) for drift in self.drifts)
        if self.measured:
            totals = totals_of(self.measured)
            figures["off_policy_tokens"] = totals.off_policy_share
            if totals.mismatched_tokens is not None:
                figures["mismatch_tokens"] = totals.mismatched_tokens
        return figures


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """A graded sample that trains a token; `rollout` is the same for its siblings."""

    sample: Sample
    advantage: float
    rollout: Hashable

    @property
    def version(self) -> str | None:
        """The weight version that sampled all of it."""
        versions = {version for *_, version in facts_of(self.sample).spans or []}
        return versions.pop() if len(versions) == 1 else None


def trained_samples(groups: Sequence[Sequence[Sample]]) -> tuple[list[TrainedSample], int]:
    """The samples that train a token, rewards normalized by group, and how many groups have no spread of rewards."""
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


def tokens_of_rollouts(trained: Sequence[TrainedSample], masks: Sequence[list[int]]) -> dict[Hashable, int]:
    """Trained tokens of each rollout."""
    tokens: dict[Hashable, int] = defaultdict(int)
    for one, mask in zip(trained, masks, strict=True):
        tokens[one.rollout] += sum(mask)
    return tokens


def sequences_as_sampled(trained: Sequence[TrainedSample]) -> list[TrainingSequence]:
    """Their tokens as the policy sampled them, at the logprobs that the rollout has."""
    tokens_of = tokens_of_rollouts(trained, [one.sample.loss_mask or [] for one in trained])
    return [
        TrainingSequence(
            tokens=one.sample.tokens,
            prompt_length=len(one.sample.tokens) - one.sample.response_length,
            loss_mask=one.sample.loss_mask or [],
            log_probs=one.sample.rollout_log_probs,
            sampled_log_probs=one.sample.rollout_log_probs or [None] * one.sample.response_length,
            version=one.version,
            advantage=one.advantage,
            rollout=one.rollout,
            denominator=tokens_of[one.rollout],
        )
        for one in trained
    ]


class TrainingMethod:
    """How episodes are played and what is trained: here the tokens as they were sampled. An experiment is a subclass.

    Attributes:
        rollout: Its name in options.json and in the summary.
        ablation: The name of its deliberate fault, likewise.
        is_exact: Whether the trainer's logprobs must be the rollout's.
        keeps_contract: Whether samples must be what slime takes.
        keeps_aborted: See `RolloutCollector`.
        generate: Plays an episode; None for `strands_rollout.generate`.
    """

    rollout: str = "tito"
    ablation: str = "none"
    is_exact: bool = True
    keeps_contract: bool = True
    keeps_aborted: bool = False
    generate: Generate | None = None

    def check(self, options: TrainOptions, settings: RolloutSettings) -> None:
        """Raise ConfigError for options that the method can't be used with."""

    async def prepare(self, samples: Sequence[Sample], player: Player) -> None:
        """Change a step's finished samples in place, before anything is made of them."""

    def batch(
        self,
        groups: Sequence[Sequence[Sample]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        tool_parser: str = AUTO,
        checks_context: bool = True,
    ) -> StepBatch:
        """Normalize rewards by group, and turn every sample that trains a token into a sequence.

        `tool_parser` is the format of the policy's calls, "auto" for the one that its template writes; `checks_context`
        compares contexts with what the template renders.
        """
        trained, dropped = trained_samples(groups)
        views = finished_samples([one.sample for one in trained])
        measured = measure_some(views, DriftMeter(tokenizer, tool_parser=tool_parser, checks_context=checks_context))
        drifts = [Drift(one.sampled_tokens, one.turn_drift) for one in measured]
        return StepBatch.of(groups, sequences_as_sampled(trained), drifts, dropped, measured=measured)


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """How far the trainer's logprobs are from the rollout's, in nats, over all tokens where both are known.

    `k3` estimates KL(rollout || trainer), the mean over tokens. All is 0 where no token was compared.
    """

    largest: float
    mean: float
    k3: float
    tokens: int

    @classmethod
    def of(cls, sequences: Sequence[TrainingSequence], trainer: Sequence[Sequence[float]]) -> LogprobGap:
        """The gap over all trained tokens whose sampling logprob is known.

        `trainer` has the trainer's logprobs of each one's trained tokens, under the weights that sampled them.
        """
        log_ratios = [
            own[at] - sampled
            for sequence, own in zip(sequences, trainer, strict=True)
            for at, sampled in sequence.known_pairs
        ]
        if not log_ratios:
            return cls(0.0, 0.0, 0.0, 0)
        k3 = [math.expm1(min(ratio, _MOST_RATIO)) - ratio for ratio in log_ratios]
        return cls(
            largest=max((abs(ratio) for ratio in log_ratios), key=lambda gap: math.inf if math.isnan(gap) else gap),
            mean=math.fsum(map(abs, log_ratios)) / len(log_ratios),
            k3=math.fsum(k3) / len(log_ratios),
            tokens=len(log_ratios),
        )

    def figures(self) -> dict[str, float]:
        """The gap by the names of the log; empty where no token could be compared."""
        if not self.tokens:
            return {}
        return {"kl_k3": self.k3, "logprob_gap_max": self.largest, "logprob_gap_mean": self.mean}


def check_gap(
    sequences: Sequence[TrainingSequence],
    trainer: Sequence[Sequence[float]],
    limit: float,
    decode: Callable[[Sequence[int]], str],
) -> None:
    """Refuse to train where the two disagree by more than `limit`, in nats; less is taken for rounding.

    The sequences were sampled by the weights that are about to be updated; `trainer` is as for `LogprobGap.of`.

    Raises:
        TrajectoryError: The gap is larger; the message shows the tokens with the largest differences. Or there is no
            token to compare.
    """
    gap = LogprobGap.of(sequences, trainer)
    if not gap.tokens:
        raise TrajectoryError(
            "got no token whose logprob under these weights is known; expected the rollout's logprobs, and spans with "
            "the weight version of the engine: it can't be checked that trainer and engine agree (--unchecked goes on)"
        )
    if gap.largest <= limit:
        return
    rows = [
        (abs(theirs - own[at]), number, sequence.trained_positions[at], theirs, own[at])
        for number, (sequence, own) in enumerate(zip(sequences, trainer, strict=True))
        for at, theirs in sequence.known_pairs
    ]
    shown = "".join(
        f"\n  sequence {number}, {_place(sequences[number].tokens, position, decode)}: rollout {theirs:.4f}, trainer "
        f"{ours:.4f}"
        for _, number, position, theirs, ours in sorted(rows, reverse=True)[:_MOST_SHOWN]
    )
    raise TrajectoryError(
        f"under the same weights the trainer's logprobs differ from the rollout's by up to {gap.largest:.3g} (mean "
        f"{gap.mean:.3g}), {sum(row[0] > limit for row in rows)} of {len(rows)} trained tokens by more than {limit:g}; "
        "expected rounding alone. Either the tokens, their places or the mask are wrong, or the engine does not "
        f"compute as the trainer does (a lower precision: raise --gap-limit). The largest differences:{shown}"
    )


def _place(tokens: Sequence[int], position: int, decode: Callable[[Sequence[int]], str]) -> str:
    before = tokens[max(0, position - _CONTEXT_TOKENS) : position]
    return f"token {position} of {len(tokens)}: {decode([tokens[position]])!r} after {decode(before)!r}"


def _staleness(samples: Iterable[Sample], version: int) -> dict[str, float]:
    """Shares of sampled tokens that older weights have sampled, by the versions that their spans name."""
    tokens_of_age: Counter[int] = Counter()
    for sample in samples:
        for _, start, end, sampled_by in facts_of(sample).spans or []:
            age = version - int(sampled_by) if str(sampled_by).isdecimal() else 0
            tokens_of_age[age] += end - start
    total = tokens_of_age.total()
    stale = sum(count for age, count in tokens_of_age.items() if age > 0)
    return {"stale_tokens": stale / total if total else 0.0, "staleness_max": max(tokens_of_age, default=0)}


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
