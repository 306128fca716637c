"""Rewards of one training step, normalised by group; slime's `--custom-reward-post-process-path`.

Knows which samples are one rollout (the siblings of a fan-out), which rollouts answer one prompt, and which samples are
trained. What a reward means is not its business. Needs no torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strands_rollout.episode_facts import fan_out_part

_LOGGER = logging.getLogger(__name__)
_CENTRED: Final = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_SCALED: Final = ("grpo", "gspo", "cispo")
_STD_EPSILON: Final = 1e-6  # slime 0.3's
_LARGEST_FLOAT32: Final = 3.4028234663852886e38  # the trainer's tensors are float32: more would be infinite there


@dataclass(frozen=True, slots=True)
class Rollout:
    """One draw from a prompt: a sample, or the siblings of a fan-out.

    Attributes:
        group: The `group_index` of its samples.
        trained: Positions of the samples that are trained, in a list of samples; none where all are excluded.
        reward: What each of those is rewarded with; None where it is compared with nothing: none of its samples is
            trained, or it has no usable reward.
    """

    group: Hashable
    trained: tuple[int, ...]
    reward: float | None


def normalize_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:  # noqa: ANN401 - slime's
    """Compare each rollout with the others of its group, as slime does by default where all groups are alike.

    A group is what has one `group_index`; without any, each `n_samples_per_prompt` rollouts in their order. Each
    rollout counts once in its group's mean and unbiased standard deviation, however many samples it became, and gives
    each of them the same reward: GRPO compares draws from one prompt, and a rollout is one draw with one outcome. That
    is the reward of the main agent's sample; of a foreign fan-out, which has no such sample, the mean of its trained
    samples' rewards, which depends on no order and is their reward where they agree.

    Left out of the statistics and given 0.0: a sample with `remove_sample` or the status FAILED; all siblings of a main
    agent that FAILED, whose outcome is the infrastructure's; and a rollout without a usable reward, that is, a finite
    number in float32. The last is logged as an error and not raised, since that would end the training run.

    Args:
        args: slime's; `advantage_estimator`, `rewards_normalization`, `grpo_std_normalization`, `reward_key` and
            `n_samples_per_prompt` are read.
        samples: Those of one training step, flat, as slime hands them over; not changed.

    Returns:
        The raw rewards (0.0 for an unusable one) and the normalised ones, one of each per sample, in order. Both are
        the raw ones where args ask for no normalisation or for an estimator that has none (ppo, reinforce_plus_plus).
    """
    raw = [_usable_reward(args, sample) or 0.0 for sample in samples]
    rollouts = rollouts_of(args, samples)
    _report_unusable(samples, rollouts)
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in _CENTRED or not getattr(args, "rewards_normalization", True):
        return raw, list(raw)
    scaled = estimator in _SCALED and bool(getattr(args, "grpo_std_normalization", True))
    normalized = [0.0] * len(samples)
    for group in _groups(args, rollouts):
        rewards = [rollout.reward for rollout in group if rollout.reward is not None]
        for rollout, reward in zip(group, _compared(rewards, scaled=scaled), strict=True):
            for position in rollout.trained:
                normalized[position] = reward
    return raw, normalized


def rollouts_of(args: Any, samples: Sequence[Any]) -> list[Rollout]:  # noqa: ANN401 - slime's
    """The rollouts of a flat list of samples, in order of their first sample; excluded ones have no reward.

    Samples are one rollout by their `rollout_id`, else by their `index`, within one `group_index`; else each is one.
    """
    members: dict[Hashable, list[int]] = {}
    for position, sample in enumerate(samples):
        members.setdefault((sample.group_index, *_identity(sample, position)), []).append(position)
    return [_rollout(args, samples, positions) for positions in members.values()]


def reward_spread(rewards: Sequence[float]) -> float:
    """Their unbiased standard deviation; exactly 0.0 where all are equal, for a single one and for none."""
    if not rewards or min(rewards) == max(rewards):
        return 0.0
    mean = _mean(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))


def _identity(sample: Any, position: int) -> tuple[str, int]:  # noqa: ANN401 - slime's Sample or ours
    """What the siblings of a rollout share; the name keeps a rollout_id apart from another sample's index."""
    if sample.rollout_id is not None:
        return "rollout_id", sample.rollout_id
    return ("index", sample.index) if sample.index is not None else ("position", position)


def _rollout(args: Any, samples: Sequence[Any], positions: Sequence[int]) -> Rollout:  # noqa: ANN401 - slime's
    mains = [position for position in positions if fan_out_part(samples[position]) == 0]
    trained = [position for position in positions if not _is_excluded(samples[position])]
    if not trained or any(_has_failed(samples[main]) for main in mains):
        return Rollout(samples[positions[0]].group_index, (), None)
    found = (_usable_reward(args, samples[position]) for position in mains or trained)
    rewards = [reward for reward in found if reward is not None]
    return Rollout(samples[positions[0]].group_index, tuple(trained), _mean(rewards) if rewards else None)


def _is_excluded(sample: Any) -> bool:  # noqa: ANN401 - slime's Sample or ours
    return bool(sample.remove_sample) or _has_failed(sample)


def _has_failed(sample: Any) -> bool:  # noqa: ANN401 - slime's Sample or ours
    return sample.status is type(sample).Status.FAILED


def _usable_reward(args: Any, sample: Any) -> float | None:  # noqa: ANN401 - slime's
    """The sample's reward where the trainer can compute with it; None where it is absent, no number, or not finite."""
    try:
        reward = float(sample.get_reward_value(args))
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError):
        return None
    return reward if abs(reward) <= _LARGEST_FLOAT32 else None


def _groups(args: Any, rollouts: Sequence[Rollout]) -> Iterable[list[Rollout]]:  # noqa: ANN401 - slime's
    """The rollouts that have a reward, by group; those without a group in slime's order, if that comes out even."""
    size = getattr(args, "n_samples_per_prompt", None)
    nameless = sum(rollout.group is None for rollout in rollouts)
    size = size if size and nameless % size == 0 else max(nameless, 1)
    groups: dict[Hashable, list[Rollout]] = {}
    seen = 0
    for rollout in rollouts:
        name: Hashable = ("nameless", seen // size) if rollout.group is None else rollout.group
        seen += rollout.group is None
        if rollout.reward is not None:
            groups.setdefault(name, []).append(rollout)
    return groups.values()


def _compared(rewards: Sequence[float], *, scaled: bool) -> list[float]:
    """Each reward less their mean; in units of their spread where `scaled`."""
    mean, unit = _mean(rewards), reward_spread(rewards) + _STD_EPSILON if scaled else 1.0
    return [(reward - mean) / unit for reward in rewards]


def _mean(rewards: Sequence[float]) -> float:
    """Equal rewards have exactly their own mean: rounding must not make a spread."""
    return rewards[0] if min(rewards) == max(rewards) else math.fsum(rewards) / len(rewards)


def _report_unusable(samples: Sequence[Any], rollouts: Sequence[Rollout]) -> None:
    """One line a step, with one of the rewards."""
    positions = [rollout.trained[0] for rollout in rollouts if rollout.trained and rollout.reward is None]
    if positions:
        first = samples[positions[0]]
        _LOGGER.error(
            "event=reward_unusable rollouts=%d first_index=%s first_reward=%.200r expected=finite_number used=0.0",
            len(positions),
            first.index,
            first.reward,
        )
