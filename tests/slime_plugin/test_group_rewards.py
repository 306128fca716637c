"""Rewards by group: who is compared with whom, who is left out, and what each sample of a fan-out gets.

That the result is slime's own where nothing is fanned out or excluded is shown in `tests/slime` with slime's code.
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
# worked out by hand: (reward - mean) / (unbiased standard deviation + 1e-6)
TABLE = [
    ([1.0, 0.0, 0.0, 1.0], [0.8660239, -0.8660239, -0.8660239, 0.8660239]),
    ([1.0, -1.0, -1.0, -1.0], [1.4999985, -0.4999995, -0.4999995, -0.4999995]),
    ([0.0, 1.0], [-0.7071058, 0.7071058]),
    ([3.0, 1.0, 2.0], [0.999999, -0.999999, 0.0]),
]


FANNED = {2: -5.0, 0: 1.0, 1: 9.0}
FAILED_MAIN = [sample_of(-1.0, rollout=7, part=0, status="FAILED"), sample_of(-1.0, rollout=7, part=1)]


def normalized(samples: list[Any], **args: Any) -> list[float]:
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
            [*(sample_of(reward, rollout=7, part=part) for part, reward in FANNED.items()), sample_of(0.0, index=1)],
            [0.5, 0.5, 0.5, -0.5],
        ),
        ([*FAILED_MAIN, *group_of(1.0, 0.0)], [0.0, 0.0, 0.5, -0.5]),
        ([sample_of(1.0, index=0), sample_of(1.0, index=0), sample_of(0.0, index=1)], [0.5, 0.5, -0.5]),
        ([sample_of(reward) for reward in (1.0, 1.0, 0.0, 0.0)], [0.5, 0.5, -0.5, -0.5]),
        ([sample_of(1.0, index=0), sample_of(0.0, index=1, status="TRUNCATED")], [0.5, -0.5]),
    ],
    ids=[
        "one group",
        "groups among each other",
        "a foreign fan-out has its trained mean",
        "siblings have the main agent's",
        "a failed main agent",
        "an index tells a rollout",
        "nothing tells them",
        "a truncated sample counts",
    ],
)
def test_normalize_rewards_centres_by_group_and_rollout(
    samples: list[Any], expected: list[float], args: dict[str, Any]
) -> None:
    assert normalized(samples, **args) == expected


def test_normalize_rewards_groups_by_order_without_index() -> None:
    samples = [sample_of(reward, group=None, index=number) for number, reward in enumerate([1, 0, 30, 10])]
    samples[1].remove_sample = True
    assert normalized(samples, n_samples_per_prompt=2, grpo_std_normalization=False) == [0.0, 0.0, 10.0, -10.0]
    uneven = normalized(samples[:3], n_samples_per_prompt=2, grpo_std_normalization=False)
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
    assert result == [0.0, *normalized(trained)]
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
    ids=["no sample", "one", "equal", "one trained"],
)
@pytest.mark.parametrize("scaled", [True, False])
def test_normalize_rewards_gives_zero_without_spread(samples: list[Any], scaled: bool) -> None:
    assert normalized(samples, grpo_std_normalization=scaled) == [0.0] * len(samples)


@pytest.mark.parametrize("reward", UNUSABLE)
def test_normalize_rewards_logs_unusable_rewards(reward: Any, caplog: pytest.LogCaptureFixture) -> None:
    trained = group_of(1.0, 0.0, 0.0)
    broken = [sample_of(reward, index=8), sample_of(reward, index=9)]
    raw, result = normalize_rewards(arguments(), [*trained, *broken])
    assert raw == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert result == [*normalized(trained), 0.0, 0.0]
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "event=reward_unusable rollouts=2 first_index=8" in record.message


@pytest.mark.parametrize("reward", [None, 1.0, {"acc": 1.0}])
def test_normalize_rewards_reads_reward_key(reward: Any) -> None:
    samples = [*group_of({"score": 1.0, "acc": 0.0}, {"score": 0.0}), sample_of(reward, index=9)]
    assert normalized(samples, reward_key="score", grpo_std_normalization=False) == [0.5, -0.5, 0.0]


def aged(versions: Sequence[Sequence[str]]) -> list[Any]:
    """One sample for each list of weight versions, all of one group."""
    samples = group_of(*(float(number) for number in range(len(versions))))
    for sample, named in zip(samples, versions, strict=True):
        sample.weight_versions = list(named)
    return samples


@pytest.fixture
def no_version_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KNOWN_VERSIONS, "newest", None)


@pytest.mark.parametrize(
    ("seen", "limit", "versions", "left_out"),
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
@pytest.mark.usefixtures("no_version_yet")
def test_normalize_rewards_removes_stale_samples(
    seen: int | None, limit: int | None, versions: Any, left_out: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    KNOWN_VERSIONS.note(seen)
    samples = aged(versions)
    args = arguments(strands_rollout={"max_sample_staleness": limit})
    _, rewards = normalize_rewards(args, samples)
    assert [number for number, sample in enumerate(samples) if sample.remove_sample] == left_out
    assert [rewards[number] for number in left_out] == [0.0] * len(left_out)
    kept = [reward for number, reward in enumerate(rewards) if number not in left_out]
    assert sum(kept) == pytest.approx(0.0)
    assert len(caplog.messages) == bool(left_out)


@pytest.mark.usefixtures("no_version_yet")
def test_normalize_rewards_removes_samples_before_restart(caplog: pytest.LogCaptureFixture) -> None:
    KNOWN_VERSIONS.note("2")
    now, before = KNOWN_VERSIONS.numbering, "of-a-process-that-died"
    numberings = [[before], [before, now], [now], [now]]
    samples = aged([["41"], ["41", "1"], ["1"], ["2"]])
    for sample, named in zip(samples, numberings, strict=True):
        sample.metadata = {"strands_rollout": {"version_numberings": named}}
    normalize_rewards(arguments(strands_rollout={"max_sample_staleness": 1}), samples)
    assert [sample.remove_sample for sample in samples] == [True, False, False, False]
    assert "samples=1 of=4 oldest=before_a_restart" in caplog.text


@pytest.mark.usefixtures("no_version_yet")
def test_normalize_rewards_removes_only_the_stale_sibling() -> None:
    KNOWN_VERSIONS.note("9")
    samples = [sample_of(1.0, rollout=7, part=0), sample_of(1.0, rollout=7, part=1), sample_of(0.0, rollout=8, part=0)]
    for sample, version in zip(samples, ("9", "5", "8"), strict=True):
        sample.weight_versions = [version]
    normalize_rewards(arguments(strands_rollout={"max_sample_staleness": 2}), samples)
    assert [sample.remove_sample for sample in samples] == [False, True, False]
    assert sum(samples[1].loss_mask) == 0


@pytest.mark.usefixtures("no_version_yet")
def test_normalize_rewards_tolerates_invalid_settings() -> None:
    samples = aged([["1"], ["9"]])
    normalize_rewards(arguments(strands_rollout={"max_sample_stalenes": 1}), samples)
    assert not any(sample.remove_sample for sample in samples)


@pytest.mark.usefixtures("no_version_yet")
async def test_known_versions_note_each_engine_answer(shipped_tokenizer: Any) -> None:
    await run(shipped_tokenizer, [ANSWER], settings={"tools": []}, weight_version="12")
    old, new = aged([["9"], ["11"]])
    normalize_rewards(arguments(strands_rollout={"max_sample_staleness": 2}), [old, new])
    assert (old.remove_sample, new.remove_sample) == (True, False)
