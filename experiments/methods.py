"""Alternatives to training on sampled tokens: text pipelines, and faults injected into finished samples.

They show which faults the trainer's checks catch, and how the others affect training. Rollout systems have had each of
these faults.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from strands_rollout.errors import ConfigError, TrajectoryError
from strands_rollout.play.options import TrainOptions
from strands_rollout.play.player import Player
from strands_rollout.samples import Sample, recorded_facts
from strands_rollout.settings import REWARD_KEY, RolloutSettings
from strands_rollout.template.tokens import (
    Drift,
    place_reencoded,
    place_tokens,
    reencode,
    shared_length,
    token_bytes,
)
from strands_rollout.tool_parsers import AUTO
from strands_rollout.train.rollouts import (
    StepBatch,
    TrainedSample,
    TrainingMethod,
    TrainingSequence,
    sequences_as_sampled,
    trained_samples,
    trained_tokens_by_rollout,
)

RolloutKind: TypeAlias = Literal["tito", "retokenised", "openai"]
Ablation: TypeAlias = Literal[
    "none", "train-tool-tokens", "shifted-logprobs", "aborted-as-completed", "tool-output-rewarded"
]


class Experiment(TrainingMethod):
    """Training with another kind of rollouts, or with an injected fault.

    Args:
        rollout: Tokens to train on: the sampled tokens; the same episodes' text encoded again; or the encoded messages
            of Strands' OpenAI model on the engine's chat endpoint.
        ablation: The fault to inject.

    Raises:
        ConfigError: `rollout` and `ablation` can't be combined, or a package is missing.
    """

    def __init__(self, rollout: RolloutKind, ablation: Ablation) -> None:
        if ablation == "shifted-logprobs" and rollout != "tito":
            raise ConfigError("--ablation shifted-logprobs needs --rollout tito: text has no logprobs to shift")
        self.rollout, self.ablation = rollout, ablation
        self.is_exact = rollout == "tito"
        self.follows_contract = rollout != "openai"
        self.trains_aborted = ablation == "aborted-as-completed"
        if rollout == "openai":
            try:
                from experiments.openai_generate import generate
            except ModuleNotFoundError as e:
                raise ConfigError(f"--rollout openai needs {e.name}; run: pip install 'strands-rollout[openai]'") from e
            self.generate = generate

    def check(self, options: TrainOptions, settings: RolloutSettings) -> None:
        if self.trains_aborted and not options.extra_prompts:
            raise ConfigError("--ablation aborted-as-completed needs --extra-prompts; without it, nothing is aborted")
        if self.rollout == "openai" and settings.fan_out:
            raise ConfigError(
                f"{options.config} has fan_out, but --rollout openai plays one agent with one history; "
                "leave out one of them"
            )

    async def prepare(self, samples: Sequence[Sample], player: Player) -> None:
        for sample in samples:
            if self.ablation == "train-tool-tokens":
                train_tool_tokens(sample)
            elif self.ablation == "shifted-logprobs":
                shift_log_probs(sample)
            elif self.ablation == "tool-output-rewarded":
                reward_tool_output(sample, player)
            elif self.ablation == "aborted-as-completed" and sample.status is Sample.Status.ABORTED:
                sample.status = Sample.Status.COMPLETED
                await player.grade(sample)

    def batch(
        self,
        groups: Sequence[Sequence[Sample]],
        tokenizer: Any,
        *,
        tool_parser: str = AUTO,
        checks_context: bool = True,
    ) -> StepBatch:
        if self.rollout == "retokenised":
            return retokenised_batch(groups, tokenizer)
        if self.rollout == "openai":
            return text_endpoint_batch(groups)
        return super().batch(groups, tokenizer, tool_parser=tool_parser, checks_context=checks_context)


def reward_tool_output(sample: Sample, player: Player) -> None:
    """Reward an episode in which a tool has printed the right answer, regardless of the policy's answer."""
    printed = player.decode(context_tokens(sample)).split()
    if str(sample.label) in printed and isinstance(sample.reward, dict):
        sample.reward = {**sample.reward, REWARD_KEY: 1.0}


def train_tool_tokens(sample: Sample) -> None:
    """Train every token of the response, tool results included, as if the sample had no loss mask."""
    sample.loss_mask = [1] * sample.response_length


def shift_log_probs(sample: Sample) -> None:
    """Give each sampled token the logprob of the token before it: an off-by-one alignment."""
    log_probs, mask = sample.rollout_log_probs or [], sample.loss_mask or []
    trained = [at for at, is_trained in enumerate(mask) if is_trained]
    shifted = list(log_probs)
    for at, before in zip(trained, [*trained[:1], *trained], strict=False):
        shifted[at] = log_probs[before]
    sample.rollout_log_probs = shifted


def context_tokens(sample: Sample) -> list[int]:
    """Return the tokens of the response that the policy did not sample: tool results and the template around them."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return [token for token, is_trained in zip(response, sample.loss_mask or [], strict=True) if not is_trained]


Place: TypeAlias = tuple[int, int]
"""Position of a token: the number of characters before it, then the number of bytes before it in its character."""


@dataclass(frozen=True, slots=True)
class Retokenised:
    """A sample as it reaches a trainer that receives only text and encodes it.

    Attributes:
        tokens: Prompt and response.
        prompt_length: Number of tokens that begin before the response, limited so that prompt and response each have a
            token.
        loss_mask: For each token of the response, 1 if its first byte lies in text of trained tokens, else 0.
        aligned_log_probs: For each token of the response, the rollout's logprob if the same token was sampled at the
            same place of the text, else None. Only for measurements: a text endpoint has no logprobs to train with.
        sampled_tokens: Number of trained tokens of the original sample.
        drifted_tokens: Number of trained tokens of the original sample for which the new tokens have no equal token at
            the same place of the text.
        lost_context: Positions of the original sample's other tokens for which that holds.
        first_difference: First position at which the token sequences differ; None if they are equal.
    """

    tokens: list[int]
    prompt_length: int
    loss_mask: list[int]
    aligned_log_probs: list[float | None]
    sampled_tokens: int
    drifted_tokens: int
    lost_context: list[int]
    first_difference: int | None


def retokenise(sample: Any, tokenizer: Any) -> Retokenised:
    """Decode a sample's whole token sequence and encode the text again.

    Args:
        sample: Filled by `generate`; not changed.
        tokenizer: The policy's, a Hugging Face fast tokenizer.

    Raises:
        TrajectoryError: The text encodes to fewer than two tokens: none is left for the prompt or for the response.
    """
    tokens, prompt_length = sample.tokens, len(sample.tokens) - sample.response_length
    bytes_of = token_bytes(tokenizer)
    old = [(place[:2], place[3]) for place in place_tokens(tokens, bytes_of)]
    again = reencode(tokens, tokenizer)
    new = [(place[:2], place[3]) for place in place_reencoded(tokens, again, tokenizer, bytes_of)]
    if len(new) < 2:
        raise TrajectoryError(
            f"got a sample whose text encodes to {len(new)} tokens; expected one of the prompt and one of the response"
        )
    starts = [place for place, _ in old]
    response_start = bisect_left([place for place, _ in new], starts[prompt_length])
    boundary = min(max(response_start, 1), len(new) - 1)
    mask = [0] * prompt_length + list(sample.loss_mask)
    log_probs = [0.0] * prompt_length + list(sample.rollout_log_probs or [0.0] * sample.response_length)
    trained = {old[at]: log_probs[at] for at in range(len(old)) if mask[at]}
    found = set(new)
    lost = [at for at, token in enumerate(old) if token not in found]
    return Retokenised(
        tokens=again,
        prompt_length=boundary,
        loss_mask=[mask[bisect_right(starts, place) - 1] for place, _ in new[boundary:]],
        aligned_log_probs=[trained.get(token) for token in new[boundary:]],
        sampled_tokens=sum(mask),
        drifted_tokens=sum(mask[at] for at in lost),
        lost_context=[at for at in lost if not mask[at]],
        first_difference=None if tokens == again else shared_length(tokens, again),
    )


def retokenised_batch(groups: Sequence[Sequence[Sample]], tokenizer: Any) -> StepBatch:
    """Return the batch of a trainer that receives text; see `retokenise`."""
    trained, dropped = trained_samples(groups)
    again = [retokenise(one.sample, tokenizer) for one in trained]
    tokens_of = trained_tokens_by_rollout(trained, [one.loss_mask for one in again])
    sequences = [_from_text(text, one, tokens_of[one.rollout]) for text, one in zip(again, trained, strict=True)]
    drifts = [Drift(one.sampled_tokens, one.drifted_tokens) for one in again]
    return StepBatch.from_groups(groups, sequences, drifts, dropped)


def _from_text(one: Retokenised, trained: TrainedSample, denominator: int) -> TrainingSequence:
    return TrainingSequence(
        tokens=one.tokens,
        prompt_length=one.prompt_length,
        loss_mask=one.loss_mask,
        log_probs=None,
        sampled_log_probs=one.aligned_log_probs,
        version=trained.version,
        advantage=trained.advantage,
        rollout=trained.rollout,
        denominator=max(denominator, 1),
    )


def text_endpoint_batch(groups: Sequence[Sequence[Sample]]) -> StepBatch:
    """Return the batch of samples of a text endpoint, with the drift of each sample."""
    trained, dropped = trained_samples(groups)
    known = [recorded_facts(one.sample.metadata) for one in trained]
    lost = [(facts["sampled_tokens"], facts["text_endpoint"]["unmatched_sampled"]) for facts in known]
    drifts = [Drift(sampled, unmatched) for sampled, unmatched in lost if unmatched is not None]
    figures = _endpoint_figures(sample for group in groups for sample in group)
    return StepBatch.from_groups(groups, sequences_as_sampled(trained), drifts, dropped, extra_metrics=figures)


def _endpoint_figures(samples: Iterable[Sample]) -> dict[str, float]:
    """Return the changes that the text endpoint caused; empty if no sample with trained tokens comes from one.

    `reread_turns` is the share of turns that were sampled after a prompt other than the tokens before them in training;
    `unsampled_tokens` is the share of trained tokens that were not sampled.
    """
    found = [facts for sample in samples if (facts := recorded_facts(sample.metadata)).get("text_endpoint")]
    turns = sum(facts["turns"] for facts in found)
    trained = sum(facts["text_endpoint"]["trained_tokens"] for facts in found)
    if not turns or not trained:
        return {}
    reread = sum(facts["text_endpoint"]["reread_turns"] for facts in found)
    unsampled = sum(facts["text_endpoint"]["unmatched_trained"] or 0 for facts in found)
    return {"reread_turns": reread / turns, "unsampled_tokens": unsampled / trained}
