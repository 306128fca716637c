"""Which groups are worth training on: those whose trained rollouts differ in reward.

That slime takes the verdict, and its own filter agrees, is shown in `tests/slime`.
"""

from typing import Any

import pytest
from grouped_samples import arguments, group_of, sample_of

from strands_rollout import keep_informative_groups, keep_informative_groups_with_fallback

FAN_OUT = [sample_of(reward, rollout=7, index=0, part=part) for part, reward in enumerate([1.0, 0.0, -1.0])]

FAILED_FAN_OUT = [
    sample_of(-1.0, rollout=7, part=part, status=status) for part, status in enumerate(["FAILED", "COMPLETED"])
]


def verdict_on(samples: list[Any], **args: Any) -> tuple[bool, str | None]:
    verdict = keep_informative_groups(arguments(**args), samples, more="ignored")
    assert verdict.keep_when_insufficient is False
    assert bool(verdict) is verdict.keep  # a slime that doesn't know the class takes it for a truth value
    return verdict.keep, verdict.reason


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        (group_of(1.0, 1.0, 1.0), "zero_std_1.0"),
        (group_of(1.0), "one_trained_rollout"),
        ([*group_of(1.0), sample_of(-1.0, index=9, status="FAILED")], "one_trained_rollout"),
        ([*group_of(1.0, 1.0), sample_of(-1.0, index=9, removed=True)], "zero_std_1.0"),
        ([sample_of(-1.0, index=1, status="FAILED"), sample_of(1.0, index=2, removed=True)], "no_trained_rollout"),
        ([], "no_trained_rollout"),
        ([*FAILED_FAN_OUT, sample_of(1.0, index=1)], "one_trained_rollout"),
        ([*FAN_OUT, sample_of(1.0, index=1)], "zero_std_1.0"),
    ],
)
def test_a_group_without_spread_is_dropped_for_a_reason(samples: list[Any], reason: str) -> None:
    assert verdict_on(samples) == (False, reason)


@pytest.mark.parametrize(
    "samples",
    [
        group_of(1.0, 0.0),
        [*group_of(1.0, 0.0), sample_of(None, index=9, status="FAILED", removed=True)],
        [*FAN_OUT, sample_of(0.0, index=1)],
        [FAN_OUT, [sample_of(0.0, index=1)]],
    ],
)
def test_a_group_with_spread_is_kept(samples: list[Any]) -> None:
    assert verdict_on(samples) == (True, None)


@pytest.mark.parametrize(
    ("samples", "keep", "is_fallback"),
    [
        (group_of(1.0, 0.0), True, False),
        (group_of(1.0, 1.0), False, True),
        ([sample_of(-1.0, index=1, status="FAILED"), sample_of(1.0, index=2, removed=True)], False, False),
        ([], False, False),
    ],
)
def test_a_group_with_a_trained_rollout_is_a_fallback(samples: list[Any], keep: bool, is_fallback: bool) -> None:
    verdict = keep_informative_groups_with_fallback(arguments(), samples, more="ignored")
    assert (verdict.keep, verdict.keep_when_insufficient) == (keep, is_fallback)
    assert verdict.reason == keep_informative_groups(arguments(), samples).reason
