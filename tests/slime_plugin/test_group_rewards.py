"""`normalize_rewards`: advantages by group, excluded and stale samples, samples of a fan-out.

`tests/slime` compares the result with slime's own code where no sample is fanned out or excluded.
"""

import copy
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from grouped_samples import arguments, group_of, sample_of
from harness import ANSWER, run

from strands_rollout import normalize_rewards
from strands_rollout.record.weight_versions import KNOWN_VERSIONS

UNUSABLE = [None, math.nan, -math.inf, 1e39, "0.5", {"score": 1.0}, 10**400, 1j, np.float32("nan"), Decimal("NaN")]
# computed by hand: (reward - mean) / (unbiased standard deviation + 1e-6)
TABLE = [
    ([1.0, 0.0, 0.0, 1.0], [0.8660239, -0.8660239, -0.8660239, 0.8660239]),
    ([1.0, -1.0, -1.0, -1.0], [1.4999985, -0.4999995, -0.4999995, -0.4999995]),
    ([0.0, 1.0], [-0.7071058, 0.7071058]),
    ([3.0, 1.0, 2.0], [0.999999, -0.999999, 0.0]),
]


FAN_OUT_REWARDS = {2: -5.0, 0: 1.0, 1: 9.0}
FAILED_MAIN = [sample_of(-1.0, rollout=7, part=0, status="FAILED"), sample_of(-1.0, rollout=7, part=1)]


def normalize(samples: list[Any], **args: Any) -> list[float]:
    return normalize_rewards(arguments(**args), samples)[1]


@pytest.mark.parametrize(("rewards", "expected"), TABLE)
def test_normalize_rewards_matches_hand_computed_values(rewards: list[float], expected: list[float]) -> None:
    for estimator in ("grpo", "gspo", "cispo"):
        raw, result = normalize_rewards(arguments(advantage_estimator=estimator), group_of(*rewards))
        assert raw == rewards
        assert result == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "args",
    [{"advantage_estimator": "ppo"}, {"advantage_estimator": "reinforce_plus_plus"}, {"rewards_normalization": False}],
)
def test_normalize_rewards_keeps_raw_if_disabled(args: dict[str, Any]) -> None:
    samples = [*group_of(1.0, -1.0), sample_of(0.5, index=2, status="FAILED", removed=True)]
    assert normalize_rewards(arguments(**args), samples) == ([1.0, -1.0, 0.5], [1.0, -1.0, 0.5])


@pytest.mark.parametrize(
    "args", [{"advantage_estimator": "reinforce_plus_plus_baseline"}, {"grpo_std_normalization": False}]
)
@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (group_of(1.0, -1.0, -1.0, -1.0), [1.5, -0.5, -0.5, -0.5]),
        (
            [sample_of(10 * group + n, group=group, index=n) for n, group in enumerate([0, 1, 1, 0])],
            [-1.5, -0.5, 0.5, 1.5],
        ),
        (
            [*(sample_of(reward, rollout=7, removed=reward > 1) for reward in (1, 0, 50)), sample_of(0, index=1)],
            [0.25, 0.25, 0.0, -0.25],
        ),
        (
            [
                *(sample_of(reward, rollout=7, part=part) for part, reward in FAN_OUT_REWARDS.items()),
                sample_of(0.0, index=1),
            ],
            [0.5, 0.5, 0.5, -0.5],
        ),
        ([*FAILED_MAIN, *group_of(1.0, 0.0)], [0.0, 0.0, 0.5, -0.5]),
        ([sample_of(1.0, index=0), sample_of(1.0, index=0), sample_of(0.0, index=1)], [0.5, 0.5, -0.5]),
        ([sample_of(reward) for reward in (1.0, 1.0, 0.0, 0.0)], [0.5, 0.5, -0.5, -0.5]),
        ([sample_of(1.0, index=0), sample_of(0.0, index=1, status="TRUNCATED")], [0.5, -0.5]),
    ],
    ids=[
        "one group",
        "two groups",
        "a fan-out without a main sample: mean of its trained samples",
        "siblings: the main agent's reward",
        "a failed main agent",
        "rollouts by index",
        "no index",
        "a truncated sample counts",
    ],
)
def test_normalize_rewards_centres_by_group_and_rollout(
    samples: list[Any], expected: list[float], args: dict[str, Any]
) -> None:
    assert normalize(samples, **args) == expected


def test_normalize_rewards_groups_by_order_without_index() -> None:
    samples = [sample_of(reward, group=None, index=number) for number, reward in enumerate([1, 0, 30, 10])]
    samples[1].remove_sample = True
    assert normalize(samples, n_samples_per_prompt=2, grpo_std_normalization=False) == [0.0, 0.0, 10.0, -10.0]
    uneven = normalize(samples[:3], n_samples_per_prompt=2, grpo_std_normalization=False)
    assert uneven == [-14.5, 0.0, 14.5]


@pytest.mark.parametrize(
    "excluded", [{"status": "FAILED"}, {"removed": True}, {"removed": True, "rollout": 9, "part": 0}]
)
@pytest.mark.parametrize("reward", [-1.0, None])
def test_normalize_rewards_ignores_excluded_samples(
    excluded: dict[str, Any], reward: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trained = group_of(1.0, 1.0, 0.0)
    samples = [sample_of(reward, index=9, **excluded), *trained]
    before = copy.deepcopy(samples)
    raw, result = normalize_rewards(arguments(), samples)
    assert repr(samples) == repr(before)
    assert result == [0.0, *normalize(trained)]
    assert raw[0] == (-1.0 if reward == -1.0 else 0.0)
    assert caplog.records == []


@pytest.mark.parametrize(
    "samples",
    [
        [],
        group_of(1.0),
        group_of(0.1, 0.1, 0.1),
        [sample_of(1.0, index=0), sample_of(0.0, index=1, removed=True)],
    ],
    ids=["no sample", "one sample", "equal rewards", "one trained sample"],
)
@pytest.mark.parametrize("scaled", [True, False])
def test_normalize_rewards_gives_zero_without_spread(samples: list[Any], scaled: bool) -> None:
    assert normalize(samples, grpo_std_normalization=scaled) == [0.0] * len(samples)


@pytest.mark.parametrize("reward", UNUSABLE)
def test_normalize_rewards_logs_unusable_rewards(reward: Any, caplog: pytest.LogCaptureFixture) -> None:
    trained = group_of(1.0, 0.0, 0.0)
    unusable = [sample_of(reward, index=8), sample_of(reward, index=9)]
    raw, result = normalize_rewards(arguments(), [*trained, *unusable])
    assert raw == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert result == [*normalize(trained), 0.0, 0.0]
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "event=reward_unusable rollouts=2 first_index=8" in record.message


@pytest.mark.parametrize("reward", [None, 1.0, {"acc": 1.0}])
def test_normalize_rewards_reads_reward_key(reward: Any) -> None:
    samples = [*group_of({"score": 1.0, "acc": 0.0}, {"score": 0.0}), sample_of(reward, index=9)]
    assert normalize(samples, reward_key="score", grpo_std_normalization=False) == [0.5, -0.5, 0.0]


def samples_of_versions(versions: Sequence[Sequence[str]]) -> list[Any]:
    """Return a group with one sample for each list of weight versions."""
    samples = group_of(*(float(number) for number in range(len(versions))))
    for sample, sample_versions in zip(samples, versions, strict=True):
        sample.weight_versions = list(sample_versions)
    return samples


@pytest.fixture
def no_known_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KNOWN_VERSIONS, "newest", None)


@pytest.mark.parametrize(
    ("newest", "limit", "versions", "removed"),
    [
        (None, 2, [["7"], ["5"], ["4"], ["4", "5"]], [2]),
        (9, 2, [["7"], ["6"], ["5", "8"], []], [1]),
        (9, 0, [["9"], ["8"], ["default"], ["8", "9"]], [1]),
        (30, 5, [["7"], ["7"], ["8"], ["9"]], [0, 1, 2, 3]),
        (None, 0, [["default"], [], ["10", "9"], ["9"]], []),
        (10, 0, [["default"], [], ["10", "9"], ["10"]], [2]),
        (2, 1, [["41", "1", "1"], ["1"], ["2"], ["0"]], [3]),
        (30, None, [["7"], ["8"]], []),
    ],
)
@pytest.mark.usefixtures("no_known_version")
def test_normalize_rewards_removes_stale_samples(
    newest: int | None, limit: int | None, versions: Any, removed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    KNOWN_VERSIONS.note(newest)
    samples = samples_of_versions(versions)
    args = arguments(strands_rollout={"max_sample_staleness": limit})
    _, rewards = normalize_rewards(args, samples)
    assert [number for number, sample in enumerate(samples) if sample.remove_sample] == removed
    assert [rewards[number] for number in removed] == [0.0] * len(removed)
    remaining = [reward for number, reward in enumerate(rewards) if number not in removed]
    assert sum(remaining) == pytest.approx(0.0)
    assert len(caplog.messages) == bool(removed)


@pytest.mark.usefixtures("no_known_version")
def test_normalize_rewards_removes_samples_before_restart(caplog: pytest.LogCaptureFixture) -> None:
    KNOWN_VERSIONS.note("2")
    now, before = KNOWN_VERSIONS.numbering, "of-an-earlier-process"
    numberings = [[before], [before, now], [now], [now]]
    samples = samples_of_versions([["41"], ["41", "1"], ["1"], ["2"]])
    for sample, sample_numberings in zip(samples, numberings, strict=True):
        sample.metadata = {"strands_rollout": {"version_numberings": sample_numberings}}
    normalize_rewards(arguments(strands_rollout={"max_sample_staleness": 1}), samples)
    assert [sample.remove_sample for sample in samples] == [True, False, False, False]
    assert "samples=1 of=4 oldest=before_a_restart" in caplog.text


@pytest.mark.usefixtures("no_known_version")
def test_normalize_rewards_removes_only_the_stale_sibling() -> None:
    KNOWN_VERSIONS.note("9")
    samples = [sample_of(1.0, rollout=7, part=0), sample_of(1.0, rollout=7, part=1), sample_of(0.0, rollout=8, part=0)]
    for sample, version in zip(samples, ("9", "5", "8"), strict=True):
        sample.weight_versions = [version]
    normalize_rewards(arguments(strands_rollout={"max_sample_staleness": 2}), samples)
    assert [sample.remove_sample for sample in samples] == [False, True, False]
    assert sum(samples[1].loss_mask) == 0


@pytest.mark.usefixtures("no_known_version")
def test_normalize_rewards_tolerates_invalid_settings() -> None:
    samples = samples_of_versions([["1"], ["9"]])
    normalize_rewards(arguments(strands_rollout={"max_sample_stalenes": 1}), samples)
    assert not any(sample.remove_sample for sample in samples)


@pytest.mark.usefixtures("no_known_version")
async def test_known_versions_note_each_engine_answer(shipped_tokenizer: Any) -> None:
    await run(shipped_tokenizer, [ANSWER], settings={"tools": []}, weight_version="12")
    old, new = samples_of_versions([["9"], ["11"]])
    normalize_rewards(arguments(strands_rollout={"max_sample_staleness": 2}), [old, new])
    assert (old.remove_sample, new.remove_sample) == (True, False)
