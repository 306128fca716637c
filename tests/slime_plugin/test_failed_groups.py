"""`max_failed_groups`: a training run whose groups all fail ends with `FailedGroupsError`.

`tests/slime` shows what slime does with the error.
"""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from grouped_samples import arguments, group_of

from strands_rollout import (
    Sample,
    generate,
    keep_informative_groups,
    keep_informative_groups_with_fallback,
    log_rollout,
    normalize_rewards,
    reward_func,
)
from strands_rollout.errors import EnvironmentFaultError, FailedGroupsError
from strands_rollout.slime_plugin.reward_groups import MAX_FAILED_GROUPS, count_episode, failed_groups_of

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


def args_of(limit: int | None = 3, size: int = 2, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(n_samples_per_prompt=size, strands_rollout={"max_failed_groups": limit}, **more)


def ended(status: str, *, removed: bool | None = None, group: int | None = 0, index: int | None = 0) -> Sample:
    facts = {"stop_reason": "engine_error", "error": "no engine."}
    removed = status != "COMPLETED" if removed is None else removed
    sample = Sample(status=Sample.Status[status], remove_sample=removed, group_index=group, index=index)
    sample.metadata = {"strands_rollout": facts}
    return sample


def play(args: Any, plan: str, *, without_ids: bool = False) -> list[int]:
    """Play episodes in sequence, and return the positions at which the run was ended.

    Each letter of `plan` is an episode; F: failed, C: completed, U: untrained without a fault, A: aborted. Two
    consecutive episodes are a group.
    """
    statuses = {"F": "FAILED", "C": "COMPLETED", "U": "TRUNCATED", "A": "ABORTED"}
    ends = []
    for at, letter in enumerate(plan):
        sample = ended(statuses[letter], group=None if without_ids else at // 2, index=None if without_ids else at)
        with failed_groups_of(args).running_episode() as number:
            pass
        try:
            count_episode(args, number, sample)
        except FailedGroupsError:
            ends.append(at)
    return ends


@pytest.mark.parametrize("without_ids", [False, True])
@pytest.mark.parametrize(
    ("plan", "ends"),
    [
        *(("FFFFFFFFF", [5, 6, 7, 8]), ("FFFFFFCFFFFF", [5]), ("FFFFFCFFFFFF", [11])),
        *(("FCFCFCFCFCFCFC", []), ("FFFFCCFFFFCC", [])),
    ],
)
def test_max_failed_groups_in_a_row_end_the_run(plan: str, ends: list[int], without_ids: bool) -> None:
    assert play(args_of(), plan, without_ids=without_ids) == ends


def test_count_episode_ignores_partly_failed_groups() -> None:
    assert play(args_of(), "FUFUFUFUFAFAFAFA") == []
    assert play(args_of(), "FUFFFAFFUUFF") == [11]


@pytest.mark.parametrize("limit", [None, 0])
def test_max_failed_groups_can_be_disabled(limit: int | None) -> None:
    assert play(args_of(limit), "FF" * 50) == []


@pytest.mark.parametrize("failing", [248, 256])
def test_failed_burst_ends_run_once_after_older_episodes(failing: int) -> None:
    """32 concurrent groups of 8: 31 groups fail at the same time; the last is still running or fails too."""
    args = args_of(limit=8, size=8)
    running = [failed_groups_of(args).running_episode() for _ in range(256)]
    numbers = [episode.__enter__() for episode in running]
    ends = []
    for at in range(failing):
        running[at].__exit__(None, None, None)
        try:
            count_episode(args, numbers[at], ended("FAILED", group=at // 8, index=at))
        except FailedGroupsError as e:
            ends.append((at, str(e)[:80]))
    message = "32 groups of training samples failed in a row (256 episodes), by no fault of the policy"[:80]
    assert ends == ([(255, message)] if failing == 256 else [])


async def test_generate_raises_failed_groups_error_on_wrong_setup() -> None:
    """All concurrent episodes fail without a request to an engine, and one of them raises the error."""
    args = SimpleNamespace(n_samples_per_prompt=2, strands_rollout={"no_such_setting": 1})
    samples = [Sample(prompt="2+2?", group_index=at // 2, index=at) for at in range(2 * MAX_FAILED_GROUPS)]
    results = await asyncio.gather(*(generate(args, sample, {}) for sample in samples), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    assert [type(error) for error in errors] == [FailedGroupsError]
    assert "setup_error: ConfigError: got the unknown setting strands_rollout.no_such_setting" in str(errors[0])


async def test_generate_ignores_failures_of_evaluation() -> None:
    args = SimpleNamespace(n_samples_per_prompt=1, strands_rollout={"no_such_setting": 1, "max_failed_groups": 2})
    for index in range(10):
        await generate(args, Sample(prompt="2+2?", index=index), {}, evaluation=True)
    await generate(args, Sample(prompt="2+2?", group_index=0, index=0), {})
    with pytest.raises(FailedGroupsError):
        await generate(args, Sample(prompt="2+2?", group_index=1, index=1), {})


@pytest.mark.parametrize("hook", ["log_rollout", "normalize_rewards"])
def test_fully_async_run_of_failed_episodes_ends_at_step(hook: str, caplog: pytest.LogCaptureFixture) -> None:
    """slime's fully-async worker would log an exception of `generate` and wait for groups forever."""

    def end_of_step(samples: list[Any]) -> None:
        if hook == "log_rollout":
            assert not log_rollout(0, args, samples, None, 1.0)
        else:
            normalize_rewards(args, samples)

    args = args_of(rollout_function_path=FULLY_ASYNC, reward_key=None)
    assert play(args, "FFFFFF") == []
    assert "event=groups_failed error=3 groups of training samples failed" in caplog.text
    failed, trained = ended("FAILED"), ended("COMPLETED", index=1)
    end_of_step([failed, trained])
    with pytest.raises(FailedGroupsError):
        end_of_step([failed])
    if hook == "log_rollout":  # a fan-out's samples may be in a list of their own
        end_of_step([[failed, trained]])
        with pytest.raises(FailedGroupsError):
            end_of_step([[failed, failed]])
    assert play(args, "C") == []
    end_of_step([failed])


class Rewards:
    """A reward that follows `plan`: R: right, X: raises, J: its judge is unavailable."""

    plan: ClassVar[Iterator[str]]

    @staticmethod
    def score(sample: Any) -> float:
        letter = next(Rewards.plan)
        if letter == "J":
            raise EnvironmentFaultError("the judge is unavailable")
        if letter == "X":
            raise KeyError("no such word")
        return 1.0


def graded_args(limit: int | None = 3, path: str | None = "strands_rollout.reward_func", **more: Any) -> Any:
    args = args_of(limit, custom_rm_path=path, reward_key="score", eval_reward_key="acc", **more)
    args.strands_rollout["reward"] = "test_failed_groups.Rewards.score"
    return args


async def grade_episodes(args: Any, plan: str, *, of_generate: bool = True, evaluation: bool = False) -> list[int]:
    """Grade completed episodes in sequence, and return the positions at which the run was ended."""
    Rewards.plan = iter(plan)
    ends: list[int] = []
    messages: list[str] = []
    for at, _ in enumerate(plan):
        sample = ended("COMPLETED", group=at // 2, index=at)
        sample.metadata["strands_rollout"] = {"stop_reason": "completed", "evaluation": evaluation}
        if of_generate and not evaluation:
            with failed_groups_of(args).running_episode() as number:
                pass
            count_episode(args, number, sample)
        elif not evaluation:
            sample.metadata = {}
        try:
            sample.reward = await reward_func(args, sample)
        except FailedGroupsError as e:
            ends.append(at)
            messages.append(str(e))
    assert all("the reward failed: " in message for message in messages)
    return ends


@pytest.mark.parametrize("of_generate", [True, False])
@pytest.mark.parametrize("letter", ["X", "J"])
async def test_reward_func_failures_end_the_run(letter: str, of_generate: bool) -> None:
    plan = (letter * 5 + "R" + letter * 7, [11, 12]) if of_generate else (letter * 7, [5, 6])
    assert await grade_episodes(graded_args(), plan[0], of_generate=of_generate) == plan[1]


async def test_reward_func_ignores_partly_failed_groups() -> None:
    assert await grade_episodes(graded_args(), "XRXRXRXRXRXR") == []


@pytest.mark.parametrize("limit", [None, 0])
async def test_reward_func_failures_can_be_ignored(limit: int | None) -> None:
    assert await grade_episodes(graded_args(limit), "X" * 30) == []


async def test_reward_func_ignores_failures_of_evaluation() -> None:
    assert await grade_episodes(graded_args(), "X" * 30, evaluation=True) == []


async def test_reward_func_under_custom_rm_path_counts_no_failure() -> None:
    """slime calls another function, which calls `reward_func` for some rows and may handle its failures."""
    assert await grade_episodes(graded_args(path="my.reward"), "X" * 30) == []


async def test_failed_episodes_and_rewards_count_as_one_group() -> None:
    args = graded_args()
    Rewards.plan = iter("X" * 20)

    async def play_one(at: int) -> None:
        sample = ended("FAILED" if at % 2 else "COMPLETED", removed=False, group=at // 2, index=at)
        with failed_groups_of(args).running_episode() as number:
            pass
        count_episode(args, number, sample)
        await reward_func(args, sample)

    for at in range(5):
        await play_one(at)
    with pytest.raises(FailedGroupsError):
        await play_one(5)


async def test_group_rm_scores_whole_group_before_ending_run() -> None:
    """slime's `--group-rm` passes whole groups to `reward_func`."""
    args = graded_args(limit=2, group_rm=True)
    Rewards.plan = iter("XX" * 9)
    for group in range(2):
        samples = [ended("COMPLETED", group=group, index=2 * group + at) for at in range(2)]
        for sample in samples:
            with failed_groups_of(args).running_episode() as number:
                pass
            count_episode(args, number, sample)
        if not group:
            await reward_func(args, samples)
    with pytest.raises(FailedGroupsError, match=r"2 groups of training samples failed .*\(4 episodes\).*KeyError"):
        await reward_func(args, samples)
    assert all(sample.remove_sample for sample in samples)


async def test_failed_groups_wait_for_pending_reward() -> None:
    """An older episode has left `generate` and waits for its reward, while all later episodes fail."""
    args, release = graded_args(), asyncio.Event()

    async def episode(index: int, status: str = "COMPLETED") -> Sample:
        sample = ended(status, removed=False, group=index // 2, index=index)
        with failed_groups_of(args).running_episode() as number:
            await asyncio.sleep(0)
        count_episode(args, number, sample)
        return sample

    SlowReward.release = release
    args.strands_rollout["reward"] = "test_failed_groups.SlowReward.score"
    older = await episode(0)
    rewarding = asyncio.create_task(reward_func(args, older))
    await asyncio.sleep(0)
    for index in range(2, 30):
        await episode(index, "FAILED")
    release.set()
    assert (await rewarding)["score"] == 1.0
    assert older.metadata["strands_rollout"].keys() == {"stop_reason", "error"}
    for index in range(30, 35):
        await episode(index, "FAILED")
    with pytest.raises(FailedGroupsError):
        await episode(35, "FAILED")


class SlowReward:
    release: ClassVar[asyncio.Event]

    @staticmethod
    async def score(sample: Any) -> float:
        await SlowReward.release.wait()
        return 1.0


async def test_fully_async_run_of_failed_rewards_ends_at_step(caplog: pytest.LogCaptureFixture) -> None:
    args = graded_args(rollout_function_path=FULLY_ASYNC)
    assert await grade_episodes(args, "X" * 6) == []
    assert "event=groups_failed error=3 groups of training samples failed" in caplog.text
    with pytest.raises(FailedGroupsError):
        normalize_rewards(args, [ended("COMPLETED", removed=True)])


@pytest.mark.parametrize("reward", [None, float("nan"), "good"])
@pytest.mark.parametrize("group_filter", [keep_informative_groups, keep_informative_groups_with_fallback])
def test_group_filter_ends_run_without_numeric_rewards(reward: Any, group_filter: Any) -> None:
    """Without the error, slime would draw prompts forever, because the filter keeps no group."""
    args = arguments(strands_rollout={"max_failed_groups": 3}, custom_rm_path="my.reward")
    for group in (0, 1):
        assert not group_filter(args, group_of(reward, reward, group=group)).keep
    assert group_filter(args, group_of(1.0, 0.0, group=2)).keep
    for group in (3, 4):
        assert not group_filter(args, group_of(reward, reward, group=group)).keep
    with pytest.raises(FailedGroupsError, match=r"3 groups of training samples failed .*: got the reward"):
        group_filter(args, group_of(reward, reward, group=5))


def test_group_filter_does_not_count_untrained_groups() -> None:
    args = arguments(strands_rollout={"max_failed_groups": 1}, custom_rm_path="my.reward")
    untrained = group_of(0.0, 0.0)
    for sample in untrained:
        sample.remove_sample, sample.loss_mask = True, [0, 0]
    assert not keep_informative_groups(args, untrained).keep
    assert not keep_informative_groups(args, group_of(1.0, 1.0)).keep
