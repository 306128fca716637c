"""Faults put into finished samples on purpose, to see which the checks catch and what the others do to training.

Each is a fault that rollout systems have had. Knows slime's Sample; nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strands_rollout.evaluate import Player
from strands_rollout.reward_settings import REWARD_KEY
from strands_rollout.sample_type import Sample
from strands_rollout.train.train_options import Ablation


@dataclass(frozen=True, slots=True)
class Ablations:
    """Applies one of them.

    Attributes:
        kind: Which.
        player: Grades samples, and knows the tokenizer.
    """

    kind: Ablation
    player: Player

    async def apply(self, samples: Sequence[Sample]) -> None:
        """Change finished samples in place."""
        for sample in samples:
            if self.kind == "train-tool-tokens":
                train_tool_tokens(sample)
            elif self.kind == "shifted-logprobs":
                shift_log_probs(sample)
            elif self.kind == "tool-output-rewarded":
                self._reward_tool_output(sample)
            elif self.kind == "aborted-as-completed" and sample.status is Sample.Status.ABORTED:
                sample.status = Sample.Status.COMPLETED
                await self.player.grade(sample)

    def _reward_tool_output(self, sample: Sample) -> None:
        """Reward an episode in which a tool has printed the right answer, whatever the policy then says."""
        printed = self.player.decode(context_tokens(sample)).split()
        if str(sample.label) in printed and isinstance(sample.reward, dict):
            sample.reward = {**sample.reward, REWARD_KEY: 1.0}


def train_tool_tokens(sample: Sample) -> None:
    """Train every token of the response, tool results included, as where a sample has no loss mask."""
    sample.loss_mask = [1] * sample.response_length


def shift_log_probs(sample: Sample) -> None:
    """Give each sampled token the logprob of the one before it: an alignment that is off by one."""
    log_probs, mask = sample.rollout_log_probs or [], sample.loss_mask or []
    trained = [at for at, is_trained in enumerate(mask) if is_trained]
    shifted = list(log_probs)
    for at, before in zip(trained, [*trained[:1], *trained], strict=False):
        shifted[at] = log_probs[before]
    sample.rollout_log_probs = shifted


def context_tokens(sample: Sample) -> list[int]:
    """The tokens of the response that the policy did not sample: tool results and what stands around them."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return [token for token, is_trained in zip(response, sample.loss_mask or [], strict=True) if not is_trained]
