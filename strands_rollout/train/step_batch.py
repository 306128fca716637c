"""A step's samples as the sequences to train on: as they were sampled, or as a text pipeline would have them.

Knows samples, rewards and the kinds of rollouts; nothing of torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from strands_rollout.drift import Drift
from strands_rollout.episode_facts import episode_facts
from strands_rollout.finished_sample import FinishedSample, finished_samples
from strands_rollout.group_rewards import normalize_rewards
from strands_rollout.retokenisation.meter import DriftMeter, EpisodeDrift, measure_some
from strands_rollout.reward_settings import REWARD_KEY
from strands_rollout.sample_type import Sample
from strands_rollout.tool_parsers import AUTO
from strands_rollout.train.retokenised import Retokenised, retokenise
from strands_rollout.train.sequence import TrainingSequence
from strands_rollout.train.train_options import RolloutKind

_GRPO: Final = SimpleNamespace(reward_key=REWARD_KEY, advantage_estimator="grpo")


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step trains on.

    Attributes:
        samples: All of the step, flat, in the order of their groups.
        sequences: Those that train a token.
        drifts: Of each sample of which it was measured.
        measured: All that was measured of those, where tokens are taken as they were sampled.
        dropped_groups: Groups without a spread of rewards, which teach nothing.
    """

    samples: list[Sample]
    sequences: list[TrainingSequence]
    drifts: list[Drift]
    measured: list[EpisodeDrift]
    dropped_groups: int


def step_batch(
    groups: Sequence[Sequence[Sample]],
    kind: RolloutKind,
    tokenizer: Any,  # noqa: ANN401
    *,
    tool_parser: str = AUTO,
) -> StepBatch:
    """Normalise rewards by group, and turn every sample that trains a token into a sequence.

    Args:
        groups: Graded samples.
        kind: Whether tokens are taken as they are, or decoded and encoded again first.
        tokenizer: The policy's, a Hugging Face fast tokenizer.
        tool_parser: The format of its calls; "auto" for the one that its template writes.
    """
    measured: list[EpisodeDrift] = []
    samples = [sample for group in groups for sample in group]
    _, advantages = normalize_rewards(_GRPO, samples)
    by_group: dict[object, set[float]] = defaultdict(set)
    for sample, advantage in zip(samples, advantages, strict=True):
        by_group[sample.group_index].add(advantage)
    trained = [
        _Trained(sample, advantage, _rollout_of(sample, position))
        for position, (sample, advantage) in enumerate(zip(samples, advantages, strict=True))
        if sample.loss_mask and any(sample.loss_mask)
    ]
    if kind == "retokenised":
        again = [retokenise(one.sample, tokenizer) for one in trained]
        drifts = [Drift(one.sampled_tokens, one.drifted_tokens) for one in again]
        tokens_of = _tokens_of_rollouts(trained, [one.loss_mask for one in again])
        sequences = [_from_text(text, one, tokens_of[one.rollout]) for text, one in zip(again, trained, strict=True)]
    else:
        views = finished_samples([one.sample for one in trained])
        if kind == "tito":
            measured = measure_some(views, DriftMeter(tokenizer, tool_parser=tool_parser))
            drifts = [Drift(one.sampled_tokens, one.turn_drift) for one in measured]
        else:
            drifts = _drifts_of_endpoint(views)
        tokens_of = _tokens_of_rollouts(trained, [one.sample.loss_mask or [] for one in trained])
        sequences = [_as_sampled(one, tokens_of[one.rollout]) for one in trained]
    dropped = sum(advantages == {0.0} for advantages in by_group.values())
    kept = [one for one in sequences if any(one.loss_mask)]
    return StepBatch(samples, kept, drifts, measured, dropped)


@dataclass(frozen=True, slots=True)
class _Trained:
    """A sample that trains a token, and what it shares with its siblings."""

    sample: Sample
    advantage: float
    rollout: Hashable


def _tokens_of_rollouts(trained: Sequence[_Trained], masks: Sequence[list[int]]) -> dict[Hashable, int]:
    """Trained tokens of each rollout."""
    tokens: dict[Hashable, int] = defaultdict(int)
    for one, mask in zip(trained, masks, strict=True):
        tokens[one.rollout] += sum(mask)
    return tokens


def _drifts_of_endpoint(samples: Sequence[FinishedSample]) -> list[Drift]:
    """What a text endpoint, whose tokens are encoded again already, has changed of each sample."""
    lost = [(view.facts["sampled_tokens"], view.facts["text_endpoint"]["unmatched_sampled"]) for view in samples]
    return [Drift(sampled, unmatched) for sampled, unmatched in lost if unmatched is not None]


def _as_sampled(trained: _Trained, denominator: int) -> TrainingSequence:
    sample = trained.sample
    return TrainingSequence(
        tokens=sample.tokens,
        prompt_length=len(sample.tokens) - sample.response_length,
        loss_mask=sample.loss_mask or [],
        log_probs=sample.rollout_log_probs,
        sampled_log_probs=sample.rollout_log_probs or [None] * sample.response_length,
        version=_version_of(sample),
        advantage=trained.advantage,
        rollout=trained.rollout,
        denominator=denominator,
    )


def _from_text(one: Retokenised, trained: _Trained, denominator: int) -> TrainingSequence:
    return TrainingSequence(
        tokens=one.tokens,
        prompt_length=one.prompt_length,
        loss_mask=one.loss_mask,
        log_probs=None,
        sampled_log_probs=one.aligned_log_probs,
        version=_version_of(trained.sample),
        advantage=trained.advantage,
        rollout=trained.rollout,
        denominator=max(denominator, 1),
    )


def _version_of(sample: Sample) -> str | None:
    versions = {version for *_, version in episode_facts(sample).get("spans") or []}
    return versions.pop() if len(versions) == 1 else None


def _rollout_of(sample: Sample, position: int) -> Hashable:
    return ("position", position) if sample.rollout_id is None else ("rollout", sample.rollout_id)
