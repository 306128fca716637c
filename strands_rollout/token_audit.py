"""Whether a sample's tokens are those that crossed the wire: compares an episode's recorded exchanges with its sample.

Knows recorded token ids and a sample's token fields; nothing of models, templates or how either came about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from strands_rollout.wire_recorder import Exchange


def tito_violations(exchanges: Sequence[Exchange], sample: Any) -> list[str]:  # noqa: ANN401 - slime's Sample or ours
    """Every break of token-in/token-out in one episode, in words; empty if there is none.

    Each request must extend the last one's ids and its output; one that got no generation is sent again unchanged. A
    sample that trains anything must hold the last sequence, and train the ids that were sampled, all of them, at the
    logprobs that came with them. Of an episode with images, of which the engine makes tokens itself, only
    these are compared.

    Args:
        exchanges: The episode's, in order.
        sample: slime's Sample or ours, as `generate` returned it.
    """
    return [*_broken_extensions(exchanges), *_wrong_sample(exchanges, sample)]


def _broken_extensions(exchanges: Sequence[Exchange]) -> Iterator[str]:
    previous: Exchange | None = None
    for number, exchange in enumerate(exchanges):
        if previous is not None and previous.output_ids is None:
            if exchange.input_ids != previous.input_ids:
                yield f"request {number} repeats a failed one{_difference(exchange.input_ids, previous.input_ids)}"
        elif previous is not None:
            read = _sequence(previous)
            if exchange.input_ids[: len(read)] != read:
                difference = _difference(exchange.input_ids, read)
                yield f"request {number} does not extend the last one and its output{difference}"
        previous = exchange


def _wrong_sample(exchanges: Sequence[Exchange], sample: Any) -> Iterator[str]:  # noqa: ANN401
    if not any(sample.loss_mask or []):
        return
    answered = [exchange for exchange in exchanges if exchange.output_ids]
    if not answered:
        yield "the sample trains tokens, but the engine sampled none"
        return
    if any(exchange.has_images for exchange in answered):
        yield from _wrong_sampled(answered, sample)
        return
    sequence = _sequence(answered[-1])
    if sample.tokens != sequence:
        yield f"the sample's tokens are not the last request and its output{_difference(sample.tokens, sequence)}"
        return
    prompt_length = len(sample.tokens) - sample.response_length
    if prompt_length != len(answered[0].input_ids):
        yield f"the sample's prompt has {prompt_length} tokens; the first request had {len(answered[0].input_ids)}"
    else:
        yield from _wrong_training(answered, sample, prompt_length)


def _wrong_training(answered: Sequence[Exchange], sample: Any, prompt_length: int) -> Iterator[str]:  # noqa: ANN401
    mask, logprobs = [0] * len(sample.tokens), [0.0] * len(sample.tokens)
    for exchange in answered:
        start, output = len(exchange.input_ids), exchange.output_ids or []
        mask[start : start + len(output)] = [1] * len(output)
        logprobs[start : start + len(output)] = exchange.logprobs or [0.0] * len(output)
    for name, got, expected in (
        ("loss_mask", sample.loss_mask, mask[prompt_length:]),
        ("rollout_log_probs", sample.rollout_log_probs, logprobs[prompt_length:]),
    ):
        if got != expected:
            yield f"{name} is not what the engine sampled{_difference(got, expected)}"


def _wrong_sampled(answered: Sequence[Exchange], sample: Any) -> Iterator[str]:  # noqa: ANN401
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    kept = zip(response, sample.loss_mask, sample.rollout_log_probs, strict=True)
    trained = [(token, logprob) for token, mask, logprob in kept if mask]
    sampled = [
        (token, logprob)
        for exchange in answered
        for token, logprob in zip(exchange.output_ids or [], exchange.logprobs, strict=True)
    ]
    if trained != sampled:
        yield f"the trained tokens are not what the engine sampled{_difference(trained, sampled)}"


def _sequence(exchange: Exchange) -> list[int]:
    return [*exchange.input_ids, *(exchange.output_ids or [])]


def _difference(got: Sequence[Any], expected: Sequence[Any]) -> str:
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(got, expected, strict=False)))
    return f": got {len(got)} values, expected {len(expected)}; the first {same} agree"
