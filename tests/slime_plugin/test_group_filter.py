"""`keep_informative_groups`, with and without fallback: it keeps groups whose trained rollouts differ in reward.

`tests/slime` checks that slime accepts the result and that its own filter agrees.
"""

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from grouped_samples import arguments, group_of, sample_of

from strands_rollout import keep_informative_groups, keep_informative_groups_with_fallback
from strands_rollout.slime_plugin.slime_adapter import DRIVER_STATE_ATTR

FAN_OUT = [sample_of(reward, rollout=7, index=0, part=part) for part, reward in enumerate([1.0, 0.0, -1.0])]

FAILED_FAN_OUT = [
    sample_of(-1.0, rollout=7, part=part, status=status) for part, status in enumerate(["FAILED", "COMPLETED"])
]


def filter_group(samples: list[Any], **args: Any) -> tuple[bool, str | None]:
    verdict = keep_informative_groups(arguments(**args), samples, more="ignored")
    assert verdict.keep_when_insufficient is False
    assert bool(verdict) is verdict.keep  # older versions of slime read its truth value
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
def test_keep_informative_groups_drops_equal_rewards(samples: list[Any], reason: str) -> None:
    assert filter_group(samples) == (False, reason)


@pytest.mark.parametrize(
    "samples",
    [
        group_of(1.0, 0.0),
        [*group_of(1.0, 0.0), sample_of(None, index=9, status="FAILED", removed=True)],
        [*FAN_OUT, sample_of(0.0, index=1)],
        [FAN_OUT, [sample_of(0.0, index=1)]],
    ],
)
def test_keep_informative_groups_keeps_differing_rewards(samples: list[Any]) -> None:
    assert filter_group(samples) == (True, None)


@pytest.mark.parametrize(
    ("samples", "keep", "is_fallback"),
    [
        (group_of(1.0, 0.0), True, False),
        (group_of(1.0, 1.0), False, True),
        ([sample_of(-1.0, index=1, status="FAILED"), sample_of(1.0, index=2, removed=True)], False, False),
        ([], False, False),
    ],
)
def test_keep_informative_groups_with_fallback_marks_fallback(
    samples: list[Any], keep: bool, is_fallback: bool
) -> None:
    verdict = keep_informative_groups_with_fallback(arguments(), samples, more="ignored")
    assert (verdict.keep, verdict.keep_when_insufficient) == (keep, is_fallback)
    assert verdict.reason == keep_informative_groups(arguments(), samples).reason


@dataclass(frozen=True)
class OlderOutput:
    """`DynamicFilterOutput` of slime before 0.3.1, without a fallback."""

    keep: bool
    reason: str | None = None


@pytest.mark.parametrize(("remaining", "keep"), [(9, False), (8, True), (7, True), (None, False)])
def test_keep_informative_groups_with_fallback_on_older_slime(monkeypatch, remaining, keep) -> None:
    """Older slime draws new prompts if fewer groups than a batch remain after a drop."""
    module = SimpleNamespace(DynamicFilterOutput=OlderOutput)
    monkeypatch.setitem(sys.modules, "slime.rollout.filter_hub.base_types", module)  # type: ignore[arg-type]
    state = SimpleNamespace() if remaining is None else SimpleNamespace(remaining_batch_size=remaining)
    args = arguments(rollout_batch_size=8, **{DRIVER_STATE_ATTR: state})
    assert keep_informative_groups_with_fallback(args, group_of(1.0, 1.0)) == OlderOutput(keep, "zero_std_1.0")
    assert keep_informative_groups_with_fallback(args, group_of(1.0, 0.0)) == OlderOutput(keep=True)
    assert keep_informative_groups_with_fallback(args, []) == OlderOutput(keep=False, reason="no_trained_rollout")
