"""A step's samples as the sequences that the loss reads. Knows samples and rewards; nothing of torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, Self

from strands_rollout.evaluation.evaluate import Generate, Player
from strands_rollout.samples import Sample, episode_facts, finished_samples
from strands_rollout.settings import REWARD_KEY, RolloutSettings
from strands_rollout.slime_plugin.retokenisation import DriftMeter, EpisodeDrift, measure_some
from strands_rollout.slime_plugin.reward_groups import normalize_rewards
from strands_rollout.template.drift import Drift
from strands_rollout.tool_parsers import AUTO
from strands_rollout.train.options import TrainOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GRPO: Final = SimpleNamespace(reward_key=REWARD_KEY, advantage_estimator="grpo")


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One sample as the loss sees it.

    Attributes:
        tokens: Prompt, then response.
        prompt_length: Tokens of the prompt, at least 1.
        loss_mask: 0 or 1 per response token.
        log_probs: The behaviour policy's, one per response token; None where they are unknown: the trainer then takes
            its own from before the update.
        sampled_log_probs: To compare with alone: the logprob at which each response token was sampled, None where it
            is unknown.
        version: Of the weights that sampled all of its tokens; None where there were several, or it is unknown.
        advantage: Of every trained token.
        rollout: What the siblings of a fan-out have in common, and nobody else.
        denominator: Trained tokens of its rollout, siblings included; at least 1. The loss of a sample is its sum by
            this number, as slime's by default.
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
        """For each trained token whose sampling logprob is known: which of the trained ones it is, and that logprob."""
        trained = (
            value for value, is_trained in zip(self.sampled_log_probs, self.loss_mask, strict=True) if is_trained
        )
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

    `drifts` are of each sample of which it was measured, `measured` is all that was measured of those, where tokens
    are taken as they were sampled. `dropped_groups` have no spread of rewards and teach nothing; `extra_figures` are
    what an experiment adds to the step's record.
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


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """A graded sample that trains a token, and what it shares with its siblings."""

    sample: Sample
    advantage: float
    rollout: Hashable

    @property
    def version(self) -> str | None:
        """The weight version that sampled all of it."""
        versions = {version for *_, version in episode_facts(self.sample).get("spans") or []}
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
    """How episodes come about and what is trained on: here the tokens as they were sampled.

    An experiment is a subclass.

    Attributes:
        rollout: Its name in options.json and in the summary.
        ablation: Likewise, of what it does wrong on purpose.
        is_exact: Whether the trainer's logprobs must be the rollout's.
        keeps_contract: Whether samples must be what slime takes.
        keeps_aborted: See `RolloutPlan`.
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
        self, groups: Sequence[Sequence[Sample]], tokenizer: PreTrainedTokenizerBase, *, tool_parser: str = AUTO
    ) -> StepBatch:
        """Normalize rewards by group, and turn every sample that trains a token into a sequence.

        `tool_parser` is the format of the policy's calls; "auto" for the one that its template writes.
        """
        trained, dropped = trained_samples(groups)
        views = finished_samples([one.sample for one in trained])
        measured = measure_some(views, DriftMeter(tokenizer, tool_parser=tool_parser))
        drifts = [Drift(one.sampled_tokens, one.turn_drift) for one in measured]
        return StepBatch.of(groups, sequences_as_sampled(trained), drifts, dropped, measured=measured)
