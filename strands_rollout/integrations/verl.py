"""verl: convert samples to plain dicts with the fields of its AgentLoopOutput; verl is not imported.

In an agent loop of verl: `AgentLoopOutput(**to_agent_loop_outputs([sample])[0])`. Sources in verl-project/verl:
verl/experimental/agent_loop/agent_loop.py (the fields and their use) and
verl/experimental/agent_loop/tool_agent_loop.py (how verl counts turns).
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from strands_rollout.integrations.conversion import FinishedEpisode, compared_rewards, finished_episodes
from strands_rollout.samples import recorded_facts, reward_details
from strands_rollout.settings import REWARD_KEY


def to_agent_loop_outputs(samples: Iterable[Any], *, reward_key: str = REWARD_KEY) -> list[dict[str, Any]]:
    """Return the fields of verl's AgentLoopOutput for each sample, in the samples' order; nothing is padded or cut.

    A sample that is not trained has a response mask of zeros, and the reward of `compared_rewards`. The episode's facts
    and status are in `extra_fields`; the entries of a reward that is a dict are in `extra_fields["reward_extra_info"]`.

    Raises:
        ExportError: See `finished_episodes`.
    """
    episodes = finished_episodes(samples, reward_key=reward_key)
    return [_output(episode, reward) for episode, reward in zip(episodes, compared_rewards(episodes), strict=True)]


def _output(episode: FinishedEpisode, reward: float) -> dict[str, Any]:
    facts = episode.facts
    turns = facts.turns
    if turns is None:  # other programs don't record turns: count the stretches of consecutive trained tokens
        turns = sum(is_sampled for is_sampled, _ in groupby(episode.sample.loss_mask))
    return {
        "prompt_ids": episode.prompt_ids,
        "response_ids": episode.response_ids,
        "response_mask": episode.loss_mask,
        "response_logprobs": episode.logprobs,
        "routed_experts": None,
        "multi_modal_data": {},
        "reward_score": reward,
        # verl counts the prompt, each turn of the policy, and the context between two turns
        "num_turns": 1 + max(0, 2 * turns - 1),
        "metrics": {
            "generate_sequences": facts.generate_s or 0.0,
            "tool_calls": facts.tool_s or 0.0,
            "num_preempted": -1,
        },
        "extra_fields": {
            "turn_scores": [],
            "tool_rewards": [],
            "reward_extra_info": dict(reward_details(episode.sample)),
            "status": episode.status,
            "strands_rollout": dict(recorded_facts(episode.sample.metadata)),
        },
    }
