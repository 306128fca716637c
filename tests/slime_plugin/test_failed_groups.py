"""A training run whose groups all fail is ended, once and loudly; one that still has something to train on is not.

What slime makes of it is shown in `tests/slime`.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from strands_rollout import Sample, generate, log_rollout, normalize_rewards
from strands_rollout.errors import FailedGroupsError
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


def play(args: Any, plan: str, *, nameless: bool = False) -> list[int]:
    """Episodes one after the other; at which of them the run was ended.

    F failed, C completed, U untrained without a fault, A aborted; every two are a group.
    """
    statuses = {"F": "FAILED", "C": "COMPLETED", "U": "TRUNCATED", "A": "ABORTED"}
    ends = []
    for at, letter in enumerate(plan):
        sample = ended(statuses[letter], group=None if nameless else at // 2, index=None if nameless else at)
        with failed_groups_of(args).episode() as number:
            pass
        try:
            count_episode(args, number, sample)
        except FailedGroupsError:
            ends.append(at)
    return ends


@pytest.mark.parametrize("nameless", [False, True])
@pytest.mark.parametrize(
    ("plan", "ends"),
    [
        *(("FFFFFFFFF", [5, 6, 7, 8]), ("FFFFFFCFFFFF", [5]), ("FFFFFCFFFFFF", [11])),
        *(("FCFCFCFCFCFCFC", []), ("FFFFCCFFFFCC", [])),
    ],
)
def test_so_many_failed_groups_in_a_row_end_the_run(plan: str, ends: list[int], nameless: bool) -> None:
    assert play(args_of(), plan, nameless=nameless) == ends


def test_a_group_with_a_sample_that_did_not_fail_has_not_failed() -> None:
    assert play(args_of(), "FUFUFUFUFAFAFAFA") == []
    assert play(args_of(), "FUFFFAFFUUFF") == [11]


@pytest.mark.parametrize("limit", [None, 0])
def test_it_can_be_switched_off(limit: int | None) -> None:
    assert play(args_of(limit), "FF" * 50) == []


@pytest.mark.parametrize("failing", [248, 256])
def test_a_burst_ends_the_run_once_and_not_while_an_older_episode_may_succeed(failing: int) -> None:
    """32 groups of 8 at once: 31 of them fail at the same time, and the last is still running or fails too."""
    args = args_of(limit=8, size=8)
    running = [failed_groups_of(args).episode() for _ in range(256)]
    numbers = [episode.__enter__() for episode in running]
    ends = []
    for at in range(failing):
        running[at].__exit__(None, None, None)
        try:
            count_episode(args, numbers[at], ended("FAILED", group=at // 8, index=at))
        except FailedGroupsError as e:
            ends.append((at, str(e)[:80]))
    words = "got 32 failed groups of training samples in a row (256 episodes), by no fault of the policy"[:80]
    assert ends == ([(255, words)] if failing == 256 else [])


async def test_generate_ends_a_run_whose_setup_is_wrong() -> None:
    """No engine is asked, all concurrent episodes fail, and one of them says so."""
    args = SimpleNamespace(n_samples_per_prompt=2, strands_rollout={"no_such_setting": 1})
    samples = [Sample(prompt="2+2?", group_index=at // 2, index=at) for at in range(2 * MAX_FAILED_GROUPS)]
    given = await asyncio.gather(*(generate(args, sample, {}) for sample in samples), return_exceptions=True)
    errors = [one for one in given if isinstance(one, BaseException)]
    assert [type(error) for error in errors] == [FailedGroupsError]
    assert "setup_error: ConfigError: got the unknown setting strands_rollout.no_such_setting" in str(errors[0])


async def test_an_evaluation_neither_counts_nor_ends_the_run() -> None:
    args = SimpleNamespace(n_samples_per_prompt=1, strands_rollout={"no_such_setting": 1, "max_failed_groups": 2})
    for index in range(10):
        await generate(args, Sample(prompt="2+2?", index=index), {}, evaluation=True)
    await generate(args, Sample(prompt="2+2?", group_index=0, index=0), {})
    with pytest.raises(FailedGroupsError):
        await generate(args, Sample(prompt="2+2?", group_index=1, index=1), {})


@pytest.mark.parametrize("hook", ["log_rollout", "normalize_rewards"])
def test_a_fully_async_run_is_ended_with_its_step(hook: str, caplog: pytest.LogCaptureFixture) -> None:
    """slime's worker would log the exception of `generate`, and wait for groups without end."""

    def end_of_step(samples: list[Any]) -> None:
        if hook == "log_rollout":
            assert not log_rollout(0, args, samples, None, 1.0)
        else:
            normalize_rewards(args, samples)

    args = args_of(rollout_function_path=FULLY_ASYNC, reward_key=None)
    assert play(args, "FFFFFF") == []
    assert "event=groups_failed error=got 3 failed groups of training samples" in caplog.text
    failed, trained = ended("FAILED"), ended("COMPLETED", index=1)
    end_of_step([failed, trained])
    with pytest.raises(FailedGroupsError):
        end_of_step([failed])
    assert play(args, "C") == []
    end_of_step([failed])
