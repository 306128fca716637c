"""`normalize_rewards` and `keep_informative_groups` in slime; without fan-out they match slime's own functions."""

import copy
import inspect
import itertools
import random
from collections import Counter
from typing import Any

import pytest
from fake_sglang import Reply
from grouped_samples import sample_of
from slime_policy import ANSWER, WRONG, call, turn
from slime_run import arguments
from slime_stage import Start

import strands_rollout
from strands_rollout.samples import rollout_id_field

pytestmark = pytest.mark.slime

HOOK = "strands_rollout.normalize_rewards"
FILTER = "strands_rollout.keep_informative_groups"


def manager(hook: str | None, **more: Any) -> Any:
    """Return slime's RolloutManager, reduced to what the conversion of samples reads."""
    from slime.ray.rollout import RolloutManager
    from slime.utils.misc import load_function

    made = object.__new__(getattr(getattr(RolloutManager, "__ray_metadata__", None), "modified_class", RolloutManager))
    made.args = arguments("", reward_key=None, **more)
    made.custom_reward_post_process_func = load_function(hook) if hook else None
    made.custom_convert_samples_to_train_data_func = None
    made.set_train_parallel_config({"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1})
    return made


def slimes_sample(reward: Any, **more: Any) -> Any:
    from slime.utils.types import Sample

    return sample_of(reward, sample_class=Sample, **more)


def full_batch(seed: int, groups: int, size: int) -> list[Any]:
    """Return `size` samples for each of `groups` prompts; some groups have equal rewards."""
    draw = random.Random(seed)
    kinds = [lambda: draw.uniform(-1, 1), lambda: float(draw.randint(0, 1)), lambda: 1.0]
    return [
        slimes_sample(kinds[group % 3](), group=group, index=group * size + number)
        for group in range(groups)
        for number in range(size)
    ]


def field_of_siblings() -> str:
    """Return the Sample field that siblings share; skip the test if slime is older than 0.3.0 and lacks it."""
    from slime.utils.types import Sample

    return rollout_id_field(Sample()) or pytest.skip("this slime knows no rollout of several samples")


@pytest.mark.parametrize(
    "estimator", ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "ppo"]
)
@pytest.mark.parametrize("more", [{}, {"grpo_std_normalization": False}, {"rewards_normalization": False}])
@pytest.mark.parametrize(("groups", "size"), [(6, 8), (4, 1)])
def test_normalize_rewards_matches_slime_for_plain_groups(estimator, more, groups, size) -> None:
    if estimator == "cispo" and "cispo" not in inspect.getsource(type(manager(None))._post_process_rewards):
        pytest.skip("this slime has no cispo")
    if size == 1:
        more = {**more, "grpo_std_normalization": False}  # as slime sets it: the deviation of one reward is NaN
    options = {"advantage_estimator": estimator, "rollout_batch_size": groups, "n_samples_per_prompt": size, **more}
    samples = full_batch(groups * size, groups, size)
    nameless = full_batch(groups * size, groups, size)
    for sample in nameless:
        sample.group_index = None
    for batch in (samples, nameless):
        raw, expected = manager(None, **options)._post_process_rewards(batch)
        assert manager(HOOK, **options)._post_process_rewards(batch) == (raw, pytest.approx(expected, abs=1e-6))


def in_turn(*replies: Any) -> Any:
    """Return a script that repeats these replies in turn."""
    replies_in_turn = itertools.cycle(replies)
    return lambda _asked: next(replies_in_turn)


async def test_keep_informative_groups_drops_groups_without_spread(start: Start) -> None:
    refused = Reply.status(422, "no such field")
    plans = {
        "same": [ANSWER],
        "outage": [in_turn(ANSWER, refused)],
        # this group ends later than "same" and "outage", so that they are judged before it ends the rollout
        "varied": [turn(call("wait", seconds=0.5)), in_turn(ANSWER, WRONG, refused, ANSWER)],
    }
    sizes = {"n_samples_per_prompt": 4, "rollout_batch_size": 1, "over_sampling_batch_size": 3, "global_batch_size": 4}
    stage = await start(plans, dynamic_sampling_filter_path=FILTER, **sizes)
    stage.rollouts.manager.custom_reward_post_process_func = strands_rollout.normalize_rewards
    metrics: dict[str, Any] = {}
    generate = stage.rollouts.manager.generate_rollout

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        metrics.update(output.metrics)
        return output

    stage.rollouts.manager.generate_rollout = watched
    ranks = await stage.rollouts.train()
    [group] = stage.rollouts.groups
    assert Counter(sample.status.value for sample in group) == {"completed": 3, "failed": 1}
    # (1, 1, -1) has the mean 1/3 and the deviation 2/3 * 3**0.5
    rewards = sorted(float(reward) for rank in ranks for reward in rank["rewards"])
    assert rewards == pytest.approx([-1.1547, 0.0, 0.57735, 0.57735], abs=1e-5)
    assert metrics == {"rollout/dynamic_filter/drop_zero_std_1.0": 2}


async def fan_out(args: Any, sample: Any, sampling_params: Any) -> list[Any]:
    """Play an episode as one to three samples; the text of the agents beside the main one is always wrong."""
    main = await strands_rollout.generate(args, sample, sampling_params)
    siblings = [main, *(copy.deepcopy(main) for _ in range(sample.index % 3))]
    for part, sibling in enumerate(siblings):
        setattr(sibling, field_of_siblings(), sample.index)
        facts = sibling.metadata["strands_rollout"]
        facts["fan_out"] = {"part": part, "of": len(siblings), "kind": "agent" if part else "main"}
        facts["final_text"] = "\\boxed{0}" if part else facts["final_text"]
    return siblings


async def test_fan_out_is_rewarded_filtered_and_trained(start: Start) -> None:
    stage = await start(
        {name: [in_turn(ANSWER, WRONG)] for name in ("one", "another")},
        n_samples_per_prompt=4,
        custom_generate_function_path="test_slime_group_rewards.fan_out",
        dynamic_sampling_filter_path=FILTER,
    )
    stage.rollouts.manager.custom_reward_post_process_func = strands_rollout.normalize_rewards
    ids = f"{field_of_siblings()}s"
    ranks = await stage.rollouts.train()
    rollouts = [siblings for group in stage.rollouts.groups for siblings in group]
    assert [len(siblings) for siblings in rollouts] == [1 + number % 3 for number in range(8)]
    scores = {siblings[0].index: siblings[0].reward["score"] for siblings in rollouts}
    assert Counter(scores.values()) == {1.0: 4, -1.0: 4}
    for siblings in rollouts:
        assert [sibling.reward for sibling in siblings] == [siblings[0].reward] * len(siblings)
    trained = [pair for rank in ranks for pair in zip(rank[ids], map(float, rank["rewards"]), strict=True)]
    assert len(trained) == sum(map(len, rollouts))
    for number in (0, 1):  # each rollout of a prompt counts once, however many samples it has
        rewards = dict(pair for pair in trained if pair[0] // 4 == number)
        assert sum(rewards.values()) == pytest.approx(0.0, abs=1e-6)
        assert all((rewards[rollout] > 0) == (scores[rollout] > 0) for rollout in rewards)
