"""Which groups of samples are worth training on; slime's `--dynamic-sampling-filter-path`.

Judges a group by what `group_rewards` would make of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from strands_rollout.group_rewards import reward_spread, rollouts_of

_SLIMES_MODULE: Final = "slime.rollout.filter_hub.base_types"
_LEAST_SPREAD: Final = 1e-6  # of slime 0.3's check_reward_nonzero_std


@dataclass(frozen=True, slots=True)
class FilterVerdict:
    """A stand-in for slime's DynamicFilterOutput.

    It is true where the group is kept: slime takes an output of a class that it does not know for a truth value.

    Attributes:
        keep: Whether the group is trained on.
        reason: Why not; slime counts dropped groups by it.
        keep_when_insufficient: Whether a dropped group may fill up a batch that would be too small.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False

    def __bool__(self) -> bool:
        return self.keep


def keep_informative_groups(args: Any, samples: Sequence[Any], **kwargs: object) -> Any:  # noqa: ANN401 - slime's
    """Keep a group whose trained rollouts differ in reward: the others have no advantage to learn from.

    Rollouts, excluded samples and rewards are those of `normalize_rewards`: siblings of a fan-out are one rollout, and
    a failed sample is none, so that a group does not seem informative because of an outage.

    Args:
        args: slime's; `reward_key` is read.
        samples: Those of one prompt; the siblings of a fan-out may be in lists of their own.
        kwargs: Ignored: slime may pass more.

    Returns:
        slime's DynamicFilterOutput, or a `FilterVerdict` outside of slime. The reason of a dropped group is
        `no_trained_rollout`, `one_trained_rollout`, or `zero_std_` and the common reward to one decimal, as slime's
        own filter has it.
    """
    del kwargs
    flat = [sample for part in samples for sample in (part if isinstance(part, list) else [part])]
    rewards = [rollout.reward for rollout in rollouts_of(args, flat) if rollout.reward is not None]
    keep = reward_spread(rewards) > _LEAST_SPREAD
    # slime has loaded its module before it calls a filter; nothing is imported here
    verdict = getattr(sys.modules.get(_SLIMES_MODULE), "DynamicFilterOutput", FilterVerdict)
    return verdict(keep=keep, reason=None if keep else _reason(rewards))


def _reason(rewards: Sequence[float]) -> str:
    if len(rewards) < 2:
        return "one_trained_rollout" if rewards else "no_trained_rollout"
    return f"zero_std_{round(rewards[0], 1)}"
