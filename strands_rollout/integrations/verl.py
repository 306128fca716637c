"""verl: samples with the fields of its AgentLoopOutput, as plain dicts; verl is not imported.

Read in verl-project/verl: verl/experimental/agent_loop/agent_loop.py (the fields, what becomes of them),
verl/experimental/agent_loop/tool_agent_loop.py (what it counts as turns). An agent loop of verl's makes one of each:
`AgentLoopOutput(**to_agent_loop_outputs([sample])[0])`.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from strands_rollout.integrations.conversion import FinishedEpisode, compared_rewards, finished_episodes
from strands_rollout.samples import recorded_facts, reward_details
from strands_rollout.settings import REWARD_KEY


def to_agent_loop_outputs(samples: Iterable[Any], *, reward_key: str = REWARD_KEY) -> list[dict[str, Any]]:
    """The fields of verl's AgentLoopOutput for each sample, in order; nothing is padded or cut.

    A sample that is not trained has a mask of zeros; its reward: see `compared_rewards`. The episode's facts and status
    are in `extra_fields`, a reward's further entries in `extra_fields["reward_extra_info"]`. For what is refused see
    `finished_episodes`.
    """
    episodes = finished_episodes(samples, reward_key=reward_key)
    return [_output(episode, reward) for episode, reward in zip(episodes, compared_rewards(episodes), strict=True)]


def _output(episode: FinishedEpisode, reward: float) -> dict[str, Any]:
    facts = episode.facts
    turns = facts.turns
    if turns is None:
        turns = sum(is_sampled for is_sampled, _ in groupby(episode.sample.loss_mask))
    return {
        "prompt_ids": episode.prompt_ids,
        "response_ids": episode.response_ids,
        "response_mask": episode.loss_mask,
        "response_logprobs": episode.logprobs,
        "routed_experts": None,
        "multi_modal_data": {},
        "reward_score": reward,
        # as verl counts them: the prompt, each turn of the policy, and what it read between two of them
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
