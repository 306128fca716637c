"""A finished sample, checked, as every integration reads it: which samples may be handed on at all."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strands_rollout.errors import ExportError
from strands_rollout.samples import SampleLike, episode_facts
from strands_rollout.settings import REWARD_KEY
from strands_rollout.slime_plugin.sample_contract import export_violations


@dataclass(frozen=True, slots=True)
class FinishedEpisode:
    """What a trainer needs of one sample; the three response lists have one entry per response token, and are copies.

    Attributes:
        prompt_ids: At least one.
        response_ids: At least one; sampled tokens and context between them.
        loss_mask: 1 where the policy wrote the token and is trained on it; all 0 where the sample is not trained.
        logprobs: At the sampling temperature; 0.0 for context.
        status: "completed", "truncated" or "failed".
        facts: Of the episode; empty for a foreign sample.
    """

    sample: SampleLike
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    reward: float
    status: str
    facts: Mapping[str, Any]

    @property
    def is_trained(self) -> bool:
        """Whether its reward is compared with others': the infrastructure did not fail it, and it was not removed."""
        return self.status != "failed" and not self.sample.remove_sample


def finished_episodes(
    samples: Iterable[Any], *, reward_key: str = REWARD_KEY, may_lose_images: bool = False
) -> list[FinishedEpisode]:
    """The samples, slime's or ours, finished and rewarded, flat and in order; none is changed.

    `reward_key` is where the number is in a reward that is a dict. No form takes images along.

    Raises:
        ExportError: A sample is unfinished, has no such reward, has images, or its tokens, mask and logprobs disagree;
            the message says all that is wrong with the first such sample.
    """
    episodes = [_episode(sample, number, reward_key) for number, sample in enumerate(samples)]
    for number, episode in enumerate(episodes):
        if not may_lose_images and getattr(episode.sample, "multimodal_train_inputs", None) is not None:
            raise ExportError(
                f"{_where(episode.sample, number)} has images; expected text only: this form would hand on their "
                "tokens without them, and what is trained would not be what was sampled"
            )
    return episodes


def _episode(sample: SampleLike, number: int, reward_key: str) -> FinishedEpisode:
    where = _where(sample, number)
    if not hasattr(sample, "response_length"):
        hint = ": hand over the samples of a fan-out one by one" if isinstance(sample, list | tuple) else ""
        raise ExportError(f"{where} is a {type(sample).__name__}; expected slime's Sample or ours{hint}")
    found = export_violations(sample, reward_key=reward_key if isinstance(sample.reward, dict) else None)
    if found:
        raise ExportError(f"{where} can't be exported: {'; '.join(found)}; export samples after generate and reward")
    start, status = len(sample.tokens) - sample.response_length, str(sample.status.value)
    is_masked = status == "failed" or sample.remove_sample
    return FinishedEpisode(
        sample=sample,
        prompt_ids=list(sample.tokens[:start]),
        response_ids=list(sample.tokens[start:]),
        loss_mask=[0] * sample.response_length if is_masked else list(sample.loss_mask),
        logprobs=[float(logprob) for logprob in sample.rollout_log_probs],
        reward=float(sample.reward[reward_key] if isinstance(sample.reward, dict) else sample.reward),
        status=status,
        facts=episode_facts(sample),
    )


def _where(sample: object, number: int) -> str:
    return f"sample {number} (index={getattr(sample, 'index', None)})"


def compared_rewards(episodes: Sequence[FinishedEpisode]) -> list[float]:
    """The rewards, for a trainer that compares all samples of a prompt, whether they are trained or not.

    One that is not trained gets the mean of the trained ones of its `group_index`, so that their mean stays their own;
    0.0 where there is none.
    """
    trained: dict[Hashable, list[float]] = defaultdict(list)
    for episode in episodes:
        if episode.is_trained and episode.sample.group_index is not None:
            trained[episode.sample.group_index].append(episode.reward)
    means = {group: sum(rewards) / len(rewards) for group, rewards in trained.items()}
    return [
        episode.reward if episode.is_trained else means.get(episode.sample.group_index, 0.0) for episode in episodes
    ]
