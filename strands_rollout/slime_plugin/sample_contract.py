"""Check finished samples: list the faults that make a sample unusable for slime's trainer, or for any trainer.

slime 0.3's requirements are in slime/rollout/sglang_rollout.py and slime/ray/rollout.py. This module checks the work of
the modules that fill samples, so it shares no code with them.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Final, cast

from strands_rollout.files.json_codec import Json
from strands_rollout.samples import SampleLike

METADATA_KEY: Final = "strands_rollout"
_TRACE_ATTRIBUTE: Final = "trace"  # slime's tracing adds it to a sample
_FINISHED_STATUSES: Final = ("completed", "truncated", "failed")


def contract_violations(
    sample: SampleLike,
    *,
    decode: Callable[[Sequence[int]], str] | None = None,
    reward_key: str | None = None,
    may_abort: bool = False,
) -> list[str]:
    """Return the faults of a sample after `generate` and the reward function; empty if slime can take it.

    Args:
        sample: slime's Sample, or this package's.
        decode: Decodes ids to text, control tokens included; None to leave the response's text unchecked.
        reward_key: slime's `--reward-key`; None if the reward must be a number.
        may_abort: True if ABORTED is a valid status, as during an abort of the rollout.
    """
    status = str(sample.status.value)
    violations = [*_bad_lengths(sample)]
    if not violations:
        violations += [*_bad_values(sample), *_bad_context(sample), *_bad_training(sample, status)]
        violations += [] if decode is None else _bad_text(sample, decode)
    violations += _bad_status(status, may_abort=may_abort)
    if status != "aborted":
        violations += _bad_reward(sample.reward, reward_key)
    return [*violations, *_bad_extras(sample)]


def export_violations(sample: SampleLike, *, reward_key: str | None) -> list[str]:
    """Return the faults that make a sample unusable for any trainer; empty for a usable sample.

    Such faults are an unfinished status, a missing or unusable reward, and tokens, mask or logprobs that are invalid or
    do not fit `response_length`. The rules hold for samples of any generate function; `contract_violations` checks
    more, such as this package's own facts.
    """
    status = str(sample.status.value)
    if status not in _FINISHED_STATUSES:
        return [*_bad_status(status, may_abort=False)]
    violations = [*_bad_lengths(sample)] or [*_bad_values(sample)]
    return [*violations, *_bad_reward(sample.reward, reward_key)]


def _bad_lengths(sample: SampleLike) -> Iterator[str]:
    tokens, length = sample.tokens, sample.response_length
    if not isinstance(tokens, list) or not _are_counts(tokens):
        yield f"tokens is {tokens!r:.80}; expected a list of ints of at least 0"
    elif not _is_count(length) or length < 1:
        yield f"response_length is {length!r}; expected an int of at least 1"
    elif len(tokens) <= length:
        yield f"{len(tokens)} tokens with response_length {length}; expected at least one prompt token too"
    for name in ("loss_mask", "rollout_log_probs"):
        values = getattr(sample, name)
        if not isinstance(values, list) or len(values) != length:
            got = f"{len(values)} values" if isinstance(values, list) else f"the value {values!r:.80}"
            yield f"{name} has {got}; expected a list of {length} values, as many as response_length"


def _bad_values(sample: SampleLike) -> Iterator[str]:
    # return early in the common case, which is found without a Python loop over the tokens
    has_floats = {float} >= set(map(type, sample.rollout_log_probs)) and all(
        map(math.isfinite, sample.rollout_log_probs)
    )
    if has_floats and _are_counts(sample.loss_mask) and max(sample.loss_mask, default=0) <= 1:
        return
    for position, (mask, logprob) in enumerate(zip(sample.loss_mask, sample.rollout_log_probs, strict=True)):
        if not _is_count(mask) or mask > 1:
            yield f"loss_mask[{position}] is {mask!r}; expected 0 or 1"
        elif not _is_finite_number(logprob):
            yield f"rollout_log_probs[{position}] is {logprob!r}; expected a finite float"


def _bad_context(sample: SampleLike) -> Iterator[str]:
    for position, (mask, logprob) in enumerate(zip(sample.loss_mask, sample.rollout_log_probs, strict=True)):
        if mask == 0 and logprob != 0.0 and _is_finite_number(logprob):
            yield f"rollout_log_probs[{position}] is {logprob!r} where loss_mask is 0; expected 0.0"


def _bad_training(sample: SampleLike, status: str) -> Iterator[str]:
    trained = any(sample.loss_mask)
    if not isinstance(sample.remove_sample, bool):
        yield f"remove_sample is {sample.remove_sample!r}; expected a bool"
    if status == "failed" and (trained or not sample.remove_sample):
        yield "a FAILED sample would be trained; expected an all-zero loss_mask and remove_sample=True"
    if status == "completed" and not trained:
        yield "no token of a COMPLETED sample would be trained; expected 1 in loss_mask for the policy's own tokens"
    if trained and not sample.loss_mask[-1]:
        yield "the response ends with context, which is not trained; expected it to end with a sampled token"


def _bad_text(sample: SampleLike, decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    # a sample without sampled tokens has a filler token and no text
    if not any(sample.loss_mask) and sample.remove_sample and sample.response == "":
        return
    text = decode(sample.tokens[len(sample.tokens) - sample.response_length :])
    if sample.response != text:
        yield f"response is {sample.response!r:.80}; expected the text of the response tokens, {text!r:.80}"


def _bad_status(status: str, *, may_abort: bool) -> Iterator[str]:
    allowed = (*_FINISHED_STATUSES, "aborted") if may_abort else _FINISHED_STATUSES
    if status not in allowed:
        yield f"status is {status}; expected one of {', '.join(allowed)}"


def _bad_reward(reward: Json, reward_key: str | None) -> Iterator[str]:
    if reward_key is None:
        if not _is_finite_number(reward):
            yield f"reward is {reward!r:.80}; expected a finite number"
    elif not isinstance(reward, dict) or not _is_finite_number(reward.get(reward_key)):
        yield f"reward is {reward!r:.80}; expected a dict with a finite number under {reward_key!r}"


def _bad_extras(sample: SampleLike) -> Iterator[str]:
    undeclared = sorted(vars(sample).keys() - {item.name for item in fields(cast("Any", sample))} - {_TRACE_ATTRIBUTE})
    if undeclared:
        yield (
            f"the sample has the undeclared attributes {', '.join(undeclared)}, which slime's buffers lose; expected "
            "only the fields of its class, and other values in metadata"
        )
    if not _is_finite_number(sample.non_generation_time) or sample.non_generation_time < 0:
        yield f"non_generation_time is {sample.non_generation_time!r}; expected a number of seconds, at least 0"
    if not isinstance(sample.metadata, dict) or not isinstance(sample.metadata.get(METADATA_KEY), dict):
        yield f"metadata[{METADATA_KEY!r}] is missing or not a dict; expected the facts of the episode"
        return
    status = str(sample.status.value)
    if sample.metadata[METADATA_KEY].get("stop_reason") == "aborted" and status in ("completed", "truncated"):
        yield f"status is {status}, but the episode was aborted; expected aborted or failed, which is not trained"
    try:
        json.dumps(sample.metadata, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        yield f"metadata can't be written as JSON: {e}; expected plain JSON values and finite numbers"


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _are_counts(values: list[Any]) -> bool:
    return {int} >= set(map(type, values)) and min(values, default=0) >= 0


def _is_finite_number(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int too large for a float
        return False
