"""A step's samples as the sequences to train on: as they were sampled, or as a text pipeline would have them.

Knows samples, rewards and the kinds of rollouts; nothing of torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from strands_rollout.drift import Drift, measure_drift
from strands_rollout.episode_facts import episode_facts
from strands_rollout.finished_sample import finished_samples
from strands_rollout.group_rewards import normalize_rewards
from strands_rollout.reward_settings import REWARD_KEY
from strands_rollout.sample_type import Sample
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
        drifts: Of each rollout of which it was measured.
        dropped_groups: Groups without a spread of rewards, which teach nothing.
    """

    samples: list[Sample]
    sequences: list[TrainingSequence]
    drifts: list[Drift]
    dropped_groups: int


def step_batch(groups: Sequence[Sequence[Sample]], kind: RolloutKind, tokenizer: Any) -> StepBatch:  # noqa: ANN401
    """Normalise rewards by group, and turn every sample that trains a token into a sequence.

    Args:
        groups: Graded samples.
        kind: Whether tokens are taken as they are, or decoded and encoded again first.
        tokenizer: The policy's, a Hugging Face fast tokenizer.
    """
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
        drifts = _drifts_of_text(trained, again)
        tokens_of = _tokens_of_rollouts(trained, [one.loss_mask for one in again])
        sequences = [_from_text(text, one, tokens_of[one.rollout]) for text, one in zip(again, trained, strict=True)]
    else:
        drifts = _drifts(trained, tokenizer) if kind == "tito" else _drifts_of_endpoint(trained)
        tokens_of = _tokens_of_rollouts(trained, [one.sample.loss_mask or [] for one in trained])
        sequences = [_as_sampled(one, tokens_of[one.rollout]) for one in trained]
    dropped = sum(advantages == {0.0} for advantages in by_group.values())
    kept = [one for one in sequences if any(one.loss_mask)]
    return StepBatch(samples, kept, drifts, dropped)


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


def _drifts(trained: Sequence[_Trained], tokenizer: Any) -> list[Drift]:  # noqa: ANN401
    """What encoding again would change of each rollout's turns."""
    turns: dict[Hashable, list[list[int]]] = defaultdict(list)
    for one in trained:
        [view] = finished_samples(one.sample)
        turns[one.rollout] += view.turn_ids or []
    return measure_drift(list(turns.values()), tokenizer)


def _drifts_of_text(trained: Sequence[_Trained], again: Sequence[Retokenised]) -> list[Drift]:
    """What encoding again has changed of each rollout."""
    counts: dict[Hashable, Counter[str]] = defaultdict(Counter)
    for one, text in zip(trained, again, strict=True):
        counts[one.rollout].update(sampled=text.sampled_tokens, drifted=text.drifted_tokens)
    return [Drift(count["sampled"], count["drifted"]) for count in counts.values()]


def _drifts_of_endpoint(trained: Sequence[_Trained]) -> list[Drift]:
    """What a text endpoint, whose tokens are encoded again already, has changed of each sample."""
    all_facts = [episode_facts(one.sample) for one in trained]
    lost = [(facts["sampled_tokens"], facts["text_endpoint"]["unmatched_sampled"]) for facts in all_facts]
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
