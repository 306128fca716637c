"""TorchRL: finished samples as one TensorDict that its LLM losses and its replay buffers take.

Needs the extra `torchrl`. Read in torchrl 0.14: torchrl/objectives/llm/grpo.py (what the losses and MCAdvantage read).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from strands_rollout.export.finished_episode import FinishedEpisode, compared_rewards, finished_episodes
from strands_rollout.export.torchrl_containers import TokenRow, containers_of
from strands_rollout.reward_settings import REWARD_KEY


def to_tensordict(
    samples: Iterable[Any],
    tokenizer: Any,  # noqa: ANN401 - any Hugging Face tokenizer
    *,
    padded: bool = False,
    reward_key: str = REWARD_KEY,
) -> TensorDictBase:
    """One row per sample, in order, of batch size [samples].

    Under TorchRL's default keys: `text`, `tokens`, `masks`, `log_probs`, `history` (see `torchrl_containers`), `query`
    (the prompt's text, by which MCAdvantage groups); under `next`: `reward` [samples, 1, 1], `done`, `terminated` and
    `truncated` [samples, 1].

    `masks.all_assistant_mask` is true where a token is trained, in every turn: give losses `masking_strategy="rlhf"`.
    `log_probs` are NaN elsewhere, which the losses leave out. Of a sample that is not trained it is true nowhere; its
    reward: see `compared_rewards`.

    Args:
        samples: slime's or ours, flat, with a reward.
        tokenizer: Of the policy.
        padded: Tensors of equal lengths in place of ragged ones, for which ask `get(key, as_nested_tensor=True)`,
            `as_list=True` or `as_padded_tensor=True`.
        reward_key: Where the number is in a reward that is a dict.

    Raises:
        ExportError: A sample is unfinished, has no reward, or its lengths disagree.
    """
    episodes = finished_episodes(samples, reward_key=reward_key)
    rows = [TokenRow(one.prompt_ids, one.response_ids, one.loss_mask, one.logprobs) for one in episodes]
    dicts = containers_of(rows, tokenizer, padded=padded)
    for one, episode, reward in zip(dicts, episodes, compared_rewards(episodes), strict=True):
        one["query"] = one["text"].prompt
        one["next"] = _outcome(episode, reward)
    return lazy_stack(dicts) if dicts else TensorDict(batch_size=[0])


def _outcome(episode: FinishedEpisode, reward: float) -> TensorDict:
    flags = {"done": True, "terminated": episode.status != "truncated", "truncated": episode.status == "truncated"}
    return TensorDict(
        {
            "reward": torch.tensor([[reward]], dtype=torch.float32),
            **{name: torch.tensor([flag]) for name, flag in flags.items()},
        }
    )
