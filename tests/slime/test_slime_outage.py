"""slime's own loops with an unavailable engine or reward: for a while, for good, and in an evaluation."""

import asyncio
import gc
import re
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import slime_rewards
from fake_sglang import Reply
from slime_policy import ANSWER, WRONG
from slime_stage import Stage, Start

from strands_rollout.errors import FailedGroupsError

pytestmark = pytest.mark.slime

FILTER = "strands_rollout.keep_informative_groups"
DEAD = "slime_rewards.dead"
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
BATCH = {"rollout_batch_size": 4, "over_sampling_batch_size": 6}


@pytest.fixture(autouse=True)
def _no_waits(retry_waits: list[float]) -> None:
    """Make retries wait no time, so that the patience with an engine is soon used up."""


@pytest.fixture(autouse=True)
def _leftovers_freed() -> Iterator[None]:
    """Free the connections that a run leaves open when it ends with an error; otherwise, a later test gets warnings."""
    yield
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


@pytest.fixture
async def fully_async() -> AsyncIterator[str]:
    """Yield the path of slime's fully-async rollout, and end its worker before its engine."""
    module = pytest.importorskip("slime.rollout.fully_async_rollout")
    yield FULLY_ASYNC
    await asyncio.to_thread(module._stop_global_worker)


async def steps(stage: Stage, count: int) -> None:
    for step in range(count):
        await stage.rollouts.train(step)


@pytest.mark.parametrize(
    ("fault", "more"),
    [
        (Reply.status(503), {"dynamic_sampling_filter_path": FILTER}),
        (Reply.reset(), {}),
        (Reply.reset(), {"partial_rollout": True, "dynamic_sampling_filter_path": FILTER}),
        (Reply.reset(), {"strands_rollout": {"max_failed_groups": 5, "fan_out": True}}),
        (Reply.reset(), {"strands_rollout": {"max_failed_groups": 5, "no_such_setting": 1}}),
    ],
    ids=["filter", "no filter", "partial", "fan-out", "setup"],
)
async def test_max_failed_groups_ends_run_without_engine(start: Start, fault: Reply, more: dict[str, Any]) -> None:
    given = {"strands_rollout": {"max_failed_groups": 5}, **BATCH, **more}
    stage = await start({"dies": [fault]}, ["dies"] * 6, **given)
    async with asyncio.timeout(60):
        with pytest.raises(FailedGroupsError, match="groups of training samples failed in a row"):
            await steps(stage, 20)
    # slime ignores what a surplus group raises
    assert 1 <= len(stage.rollouts.raised) <= 4
    assert len(stage.rollouts.calls) < 50


async def test_max_failed_groups_ends_fully_async_run_without_engine(start: Start, fully_async: str) -> None:
    hooks = {"custom_rollout_log_function_path": "strands_rollout.log_rollout", "sglang_server_concurrency": 6}
    settings = {"max_failed_groups": 5}
    given = {"rollout_function_path": fully_async, "strands_rollout": settings, **BATCH, **hooks}
    stage = await start({"dies": [Reply.reset()]}, ["dies"] * 6, **given)
    async with asyncio.timeout(60):
        with pytest.raises(FailedGroupsError):
            await steps(stage, 20)
    assert stage.rollouts.raised == []


async def test_outage_of_five_minutes_costs_no_step(start: Start, retry_waits: list[float]) -> None:
    away = 120  # attempts of an episode, with waits of up to 4 s
    plan = (lambda asked: Reply.status(503) if asked.attempt <= away else None, ANSWER)
    stage = await start({"returns": [plan]}, ["returns"] * 4, rollout_batch_size=4)
    async with asyncio.timeout(120):
        await stage.rollouts.train()
    assert {sample.status.value for sample in stage.rollouts.samples} == {"completed"}
    assert not any(sample.remove_sample for sample in stage.rollouts.samples)
    assert sum(retry_waits) / len(stage.rollouts.samples) > 300


@pytest.mark.parametrize("dead", [0, 2])
async def test_smoke_run_needs_trained_samples_but_no_spread(start: Start, dead: int) -> None:
    """All answers are right, so no group is informative, and the step ends with the groups that exist."""
    plans = {"answers": [ANSWER], "dies": [Reply.status(422, "no such field")]}
    rows = ["dies"] * dead + ["answers"] * (6 - dead)
    stage = await start(plans, rows, dynamic_sampling_filter_path=f"{FILTER}_with_fallback", **BATCH)
    async with asyncio.timeout(60):
        await stage.rollouts.train()
    assert len(stage.rollouts.groups) == 4
    assert dead or len(stage.rollouts.calls) == 12
    assert {sample.status.value for sample in stage.rollouts.samples} == {"completed"}


async def evaluated(start: Start, plans: dict[str, Any], tasks: list[str], **more: Any) -> Stage:
    hooks = {"custom_eval_rollout_log_function_path": "strands_rollout.log_eval"}
    stage = await start(plans, tasks, **{**hooks, **more})
    samples = stage.rollouts.args.n_samples_per_eval_prompt = 2
    prompts = stage.rollouts.args.prompt_data
    stage.rollouts.evaluate_on({"name": "demo", "path": prompts, "n_samples_per_eval_prompt": samples})
    return stage


@pytest.mark.parametrize("log_passrate", [False, True])
@pytest.mark.parametrize(
    ("tasks", "accuracy"), [(["errs", "answers", "answers", "dies"], "0.66"), (["dies"] * 4, None)]
)
async def test_eval_accuracy_leaves_out_missing_answers(start, caplog, tasks, accuracy, log_passrate):
    caplog.set_level("INFO")
    plans = {"answers": [ANSWER], "errs": [WRONG], "dies": [Reply.status(503)]}
    stage = await evaluated(start, plans, tasks, log_passrate=log_passrate)
    await stage.rollouts.evaluate()
    (own,) = (message for message in caplog.messages if message.startswith("eval 0"))
    assert (f"'eval/demo': {accuracy}" in own) if accuracy else ("eval/demo" not in own)
    assert ("event=evaluation_incomplete data_set=demo samples=8 missing=8" in caplog.text) == (accuracy is None)
    assert stage.rollouts.raised == []


@pytest.mark.parametrize("keys", [("score", "acc"), (None, None), ("score", None)])
@pytest.mark.parametrize(("reward", "accuracy"), [("slime_rewards.away_for_wrong_answers", "1.0"), (DEAD, None)])
async def test_eval_accuracy_leaves_out_ungraded_answers(start, caplog, reward, accuracy, keys):
    caplog.set_level("INFO")
    plans = {"answers": [ANSWER], "errs": [WRONG]}
    named = {"reward_key": keys[0], "eval_reward_key": keys[1], "strands_rollout": {"reward": reward}}
    stage = await evaluated(start, plans, ["errs", "answers", "answers"], **named)
    await stage.rollouts.evaluate()
    (own,) = (message for message in caplog.messages if message.startswith("eval 0"))
    assert (f"'eval/demo': {accuracy}" in own) if accuracy else ("eval/demo" not in own)
    missing = 2 if accuracy else 6
    assert f"event=evaluation_incomplete data_set=demo samples=6 missing={missing}" in caplog.text
    assert re.search(r"last_error=\w+: .*the judge is away", caplog.text)
    assert re.search(rf"eval/demo/agent/missing={missing}\b", caplog.text)


@pytest.mark.parametrize(
    ("reward_key", "eval_reward_key", "group_rm"),
    [(None, None, False), (None, "acc", True), ("score", None, True), ("score", "acc", False)],
)
async def test_reward_func_works_with_and_without_reward_keys(start, caplog, reward_key, eval_reward_key, group_rm):
    caplog.set_level("INFO")
    keys = {"reward_key": reward_key, "eval_reward_key": eval_reward_key}
    stage = await evaluated(start, {"answers": [ANSWER], "errs": [WRONG]}, ["answers", "errs"], **keys)
    stage.rollouts.args.group_rm = group_rm
    ranks = await stage.rollouts.train()
    assert sorted(reward for rank in ranks for reward in rank["raw_reward"][:4])[::4] == [-1.0, 1.0]
    stage.rollouts.args.group_rm = False
    result = (await stage.rollouts.evaluate())["demo"]
    wrong = -1.0 if (eval_reward_key or reward_key) != "acc" else 0.0
    assert sorted(result["rewards"]) == [wrong] * 2 + [1.0] * 2
    accuracies = [message for message in caplog.messages if "eval/demo/agent/accuracy=0.5" in message]
    assert len(accuracies) == 1


SLIMES_FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
WITH_REWARD = {"max_failed_groups": 5, "reward": DEAD}


@pytest.mark.parametrize(
    "more",
    [
        {"dynamic_sampling_filter_path": FILTER},
        {"dynamic_sampling_filter_path": f"{FILTER}_with_fallback"},
        {"dynamic_sampling_filter_path": SLIMES_FILTER},
        {"group_rm": True, "dynamic_sampling_filter_path": FILTER},
        {"strands_rollout": {**WITH_REWARD, "reward": "slime_rewards.broken"}},
        {"strands_rollout": {**WITH_REWARD, "fan_out": True}},
        {"partial_rollout": True, "dynamic_sampling_filter_path": FILTER},
        {"custom_rm_path": "slime_rewards.no_number", "reward_key": None, "dynamic_sampling_filter_path": FILTER},
    ],
    ids=["filter", "fallback", "slime's filter", "group", "no filter", "fan-out", "partial", "slime's reward"],
)
async def test_max_failed_groups_ends_run_without_reward(start: Start, more: dict[str, Any]) -> None:
    stage = await start({"answers": [ANSWER]}, ["answers"] * 6, **{**BATCH, "strands_rollout": WITH_REWARD, **more})
    async with asyncio.timeout(60):
        with pytest.raises(FailedGroupsError, match="groups of training samples failed in a row .*reward"):
            await steps(stage, 20)
    assert stage.rollouts.raised == []
    assert len(stage.rollouts.calls) < 50


async def test_max_failed_groups_ends_fully_async_run_without_reward(start: Start, fully_async: str) -> None:
    hooks = {"custom_rollout_log_function_path": "strands_rollout.log_rollout", "sglang_server_concurrency": 6}
    given = {"rollout_function_path": fully_async, "strands_rollout": WITH_REWARD, **BATCH, **hooks}
    stage = await start({"answers": [ANSWER]}, ["answers"] * 6, **given)
    async with asyncio.timeout(60):
        with pytest.raises(FailedGroupsError):
            await steps(stage, 20)


async def test_max_failed_groups_allows_returning_judge(start: Start) -> None:
    slime_rewards.begin()
    settings = {**WITH_REWARD, "max_failed_groups": 6, "reward": "slime_rewards.back_after_ten", "episode_workers": 0}
    given = {"dynamic_sampling_filter_path": FILTER, "strands_rollout": settings, **BATCH}
    stage = await start({"answers": [ANSWER]}, ["answers"] * 6, **given)
    async with asyncio.timeout(60):
        await steps(stage, 3)
    assert len(stage.rollouts.groups) == 4
    assert not any(sample.remove_sample for sample in stage.rollouts.samples)


async def test_max_failed_groups_ends_run_of_foreign_generate(start: Start) -> None:
    """`reward_func` alone, after slime's own `generate`."""
    own = {"custom_generate_function_path": None, "apply_chat_template": True}
    given = {**own, "dynamic_sampling_filter_path": FILTER}
    stage = await start({"answers": [ANSWER]}, ["answers"] * 6, **BATCH, **given, strands_rollout=WITH_REWARD)
    async with asyncio.timeout(60):
        with pytest.raises(FailedGroupsError, match="the judge is away"):
            await steps(stage, 20)
