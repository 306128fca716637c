"""A finished sample as a text pipeline hands it on: its tokens decoded, and the text encoded again as one string.

What such a pipeline loses is what it is for: sampled tokens become others where the policy spelled a word in its own
way, control tokens that were spelled become real ones, tokens merge across the ends of turns, and nobody knows at which
logprobs the new tokens would have been sampled. Knows samples and a tokenizer; nothing of torch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any, TypeAlias

from strands_rollout.drift import encoded_again, first_difference, placed_again, placed_tokens, token_bytes
from strands_rollout.errors import TrajectoryError

Place: TypeAlias = tuple[int, int]
"""Where a token begins: characters before it, and bytes of an unfinished one."""


@dataclass(frozen=True, slots=True)
class Retokenised:
    """The tokens that a trainer gets who is handed text.

    Attributes:
        tokens: Prompt and response.
        prompt_length: Tokens that begin before the response does; at least 1, and one less than all at most.
        loss_mask: For each token of the response, 1 where its first byte lies in text that was trained before, else 0.
        aligned_log_probs: For each token of the response, the rollout's logprob where the same token was sampled at the
            same place of the text, else None. To measure with: a text endpoint has no logprobs to train with.
        sampled_tokens: Trained tokens of the sample as it was.
        drifted_tokens: Of these, how many are not among the new tokens, at their place of the text.
        lost_context: Positions of the other tokens of the sample that are not among them.
        first_difference: The first position at which the token sequences differ; None where they are equal.
    """

    tokens: list[int]
    prompt_length: int
    loss_mask: list[int]
    aligned_log_probs: list[float | None]
    sampled_tokens: int
    drifted_tokens: int
    lost_context: list[int]
    first_difference: int | None


def retokenise(sample: Any, tokenizer: Any) -> Retokenised:  # noqa: ANN401 - slime's Sample or ours; any fast tokenizer
    """Decode a sample's whole token sequence and encode the text again.

    Args:
        sample: Filled by `generate`; not changed.
        tokenizer: The policy's, a Hugging Face fast tokenizer.

    Raises:
        TrajectoryError: The text encodes to fewer than two tokens: none is left for the prompt or for the response.
    """
    tokens, prompt_length = sample.tokens, len(sample.tokens) - sample.response_length
    bytes_of = token_bytes(tokenizer)
    old = [(place[:2], place[3]) for place in placed_tokens(tokens, bytes_of)]
    again = encoded_again(tokens, tokenizer)
    new = [(place[:2], place[3]) for place in placed_again(tokens, again, tokenizer, bytes_of)]
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
        first_difference=first_difference(tokens, again),
    )
