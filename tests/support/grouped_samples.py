"""Samples of a training step in groups (plain, fanned out, excluded from training), and slime's args for rewards."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from strands_rollout import Sample
from strands_rollout.samples import rollout_id_field


def arguments(**more: Any) -> SimpleNamespace:
    """Return slime's args that affect the rewards of groups: slime's defaults, and one group of four in a step."""
    values = {
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "reward_key": None,
        "n_samples_per_prompt": 4,
        "rollout_batch_size": 1,
    }
    return SimpleNamespace(**(values | more))


def sample_of(
    reward: Any,
    *,
    group: int | None = 0,
    index: int | None = None,
    rollout: int | None = None,
    part: int | None = None,
    status: str = "COMPLETED",
    removed: bool = False,
    sample_class: Callable[..., Any] = Sample,
) -> Any:
    """Return a sample of three tokens; if `part` is given, it is this part of a fan-out (0: the main agent's)."""
    facts = {} if part is None else {"strands_rollout": {"fan_out": {"part": part, "of": 3, "kind": "agent"}}}
    sample = sample_class(
        group_index=group,
        index=index,
        reward=reward,
        status=sample_class.Status[status],  # type: ignore[attr-defined]
        remove_sample=removed,
        metadata=facts,
        tokens=[1, 2, 3],
        response_length=2,
        loss_mask=[1, 1],
        rollout_log_probs=[-1.0, -1.0],
    )
    if rollout is not None:
        setattr(sample, str(rollout_id_field(sample)), rollout)
    return sample


def group_of(*rewards: Any, group: int = 0) -> list[Any]:
    """Return a group with one sample per reward, each with its own index."""
    return [sample_of(reward, group=group, index=100 * group + number) for number, reward in enumerate(rewards)]
