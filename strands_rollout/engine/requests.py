"""The body of POST /generate as checked values.

Knows SGLang's top-level fields and its length limits (0.5.23), and needs the tokenizer for text input. Unknown
top-level fields are ignored, as SGLang does; the known ones that would change an answer and are not supported here are
refused.
"""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strands_rollout.engine.request_errors import ContractError, RequestRefusedError, SchemaError
from strands_rollout.engine.sampling_params import SamplingParams, described, read_sampling_params

if TYPE_CHECKING:
    from collections.abc import Callable

# SGLang keeps one token of the context for itself and one more per request, and five more of a prompt.
CONTEXT_RESERVE = 2
PROMPT_RESERVE = 6
_UNSUPPORTED = (
    "input_embeds",
    "image_data",
    "audio_data",
    "video_data",
    "lora_path",
    "session_params",
    "custom_logit_processor",
    "return_hidden_states",
    "top_logprobs_num",
    "token_ids_logprob",
)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What bounds a request: the served context length in tokens and the vocabulary size."""

    context_length: int
    vocab_size: int

    @property
    def max_prompt_tokens(self) -> int:
        """Prompts must be shorter than this (SGLang's max_req_input_len)."""
        return self.context_length - PROMPT_RESERVE


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation to make.

    Attributes:
        rid: The id by which the generation can be aborted; unique among those in flight.
        input_ids: The prompt, at least one token, every id inside the vocabulary.
        max_new_tokens: The most tokens to generate, bounded by the context.
    """

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    stream: bool = False


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One HTTP call: several requests when the input is a batch or n > 1, and then answered by a list."""

    requests: tuple[GenerateRequest, ...]
    is_list: bool
    stream: bool


def read_generate_call(body: object, limits: RequestLimits, encode: Callable[[str], list[int]]) -> GenerateCall:
    """Turn the JSON body of a /generate call into requests.

    Raises:
        SchemaError: A top-level field has the wrong type.
        ContractError: So has one that SGLang checks by other means.
        RequestRefusedError: The input is missing, empty or too long, or a parameter is refused.
    """
    if not isinstance(body, dict):
        raise SchemaError(f"1 validation error: the body must be a JSON object, got {type(body).__name__}")
    for name in _UNSUPPORTED:
        if body.get(name):
            raise RequestRefusedError(f"{name} is not supported by the embedded engine")
    if _typed(body, "logprob_start_len", int, -1) not in (-1, None):
        raise RequestRefusedError("logprob_start_len is not supported by the embedded engine: output logprobs only")
    prompts, is_batch = _prompts(body, encode)
    raw_params = _per_prompt(body, "sampling_params", dict, len(prompts), {})
    copies = _copies(raw_params)
    rids = _rids(body, len(prompts), copies, is_batch=is_batch)
    stream = bool(_typed(body, "stream", bool, default=False))
    requests = []
    for index, rid in enumerate(rids):
        prompt, raw = prompts[index // copies], raw_params[index // copies]
        sampling, max_new_tokens = check_generation(prompt, raw, limits)
        requests.append(
            GenerateRequest(
                rid=rid,
                input_ids=tuple(prompt),
                sampling=sampling,
                max_new_tokens=max_new_tokens,
                return_logprob=bool(_typed(body, "return_logprob", bool, default=False)),
                return_text_in_logprobs=bool(_typed(body, "return_text_in_logprobs", bool, default=False)),
                stream=stream,
            )
        )
    is_list = is_batch or copies > 1
    if stream and is_list:
        raise RequestRefusedError("stream with several inputs is not supported by the embedded engine")
    return GenerateCall(tuple(requests), is_list, stream)


def check_generation(
    prompt: list[int], raw_params: dict[str, Any], limits: RequestLimits
) -> tuple[SamplingParams, int]:
    """Check a prompt and its parameters against the limits, in SGLang's order.

    Returns:
        The parameters and the number of tokens to generate at most.

    Raises:
        RequestRefusedError: The prompt is empty or too long, has an id outside the vocabulary, or a parameter is wrong.
    """
    count, context_length = len(prompt), limits.context_length
    if not count:
        raise RequestRefusedError("input_ids cannot be empty.")
    outside = next((token for token in prompt if not 0 <= token < limits.vocab_size), None)
    if outside is not None:
        # The real server's scheduler dies of such an id; a clear refusal is the one place where this engine differs.
        raise RequestRefusedError(
            f"input_ids contains out-of-vocabulary token id {outside}; valid range is [0, {limits.vocab_size})."
        )
    if count >= context_length:
        raise RequestRefusedError(
            f"The input ({count} tokens) is longer than the model's context length ({context_length} tokens)."
        )
    sampling = read_sampling_params(raw_params)
    new = sampling.max_new_tokens
    if new is not None and count + new > context_length:
        raise RequestRefusedError(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens. You "
            f"requested a total of {count + new} tokens: {count} tokens from the input messages and {new} tokens for "
            "the completion. Please reduce the number of tokens in the input messages or the completion to fit within "
            "the limit."
        )
    if count >= limits.max_prompt_tokens:
        raise RequestRefusedError(
            f"Input length ({count} tokens) exceeds the maximum allowed length ({limits.max_prompt_tokens} tokens). "
            "Use a shorter input."
        )
    room = context_length - CONTEXT_RESERVE - count
    return sampling, room if new is None else min(new, room)


def _prompts(body: dict[str, Any], encode: Callable[[str], list[int]]) -> tuple[list[list[int]], bool]:
    """The prompts as ids, and whether they came as a batch."""
    ids, text = body.get("input_ids"), body.get("text")
    if ids is not None:
        return _id_prompts(ids)
    if text is None:
        raise RequestRefusedError("Either text, input_ids or input_embeds should be provided.")
    texts = text if isinstance(text, list) else [text]
    if not all(isinstance(item, str) for item in texts):
        raise SchemaError("1 validation error: text must be a string or a list of strings")
    return [encode(item) for item in texts], isinstance(text, list)


def _id_prompts(ids: object) -> tuple[list[list[int]], bool]:
    if not isinstance(ids, list):
        raise SchemaError(f"1 validation error: input_ids must be a list, got {type(ids).__name__}")
    if not ids:
        raise RequestRefusedError("input_ids cannot be empty.")
    is_batch = isinstance(ids[0], list)
    prompts = ids if is_batch else [ids]
    for prompt in prompts:
        if not isinstance(prompt, list):
            raise SchemaError("1 validation error: input_ids must hold ids or lists of ids, not both")
        wrong = next((item for item in prompt if type(item) is not int), None)
        if isinstance(wrong, bool):
            raise ContractError(f"invalid type: {described(wrong)}, expected a sequence")
        if wrong is not None:
            raise SchemaError(f"1 validation error: elements must be int or list; got {type(wrong).__name__}")
    return prompts, is_batch


def _per_prompt(body: dict[str, Any], name: str, kind: type, count: int, default: object) -> list[Any]:
    """The value of field `name` for each of `count` prompts; one value stands for all."""
    value = body.get(name)
    if isinstance(value, list):
        if len(value) != count or not all(isinstance(item, kind) for item in value):
            raise SchemaError(f"1 validation error: {name} must hold one {kind.__name__} for each of {count} inputs")
        return value
    return [_typed(body, name, kind, default)] * count


def _copies(raw_params: list[dict[str, Any]]) -> int:
    """How many answers each prompt gets; an `n` that is no number is for the sampling parameters to refuse."""
    counts = {raw["n"] if type(raw.get("n")) is int else 1 for raw in raw_params}
    if len(counts) > 1:
        raise RequestRefusedError("The parallel_sample_num should be the same for all samples in sample params.")
    return max(counts.pop(), 1)


def _rids(body: dict[str, Any], prompts: int, copies: int, *, is_batch: bool) -> list[str]:
    """An id for each generation: the request's own, numbered for several prompts, fresh for several copies."""
    rid = body.get("rid")
    rids: list[Any] = rid if isinstance(rid, list) else [rid] * prompts
    if not all(isinstance(item, str | None) for item in rids):
        raise SchemaError("1 validation error: rid must be a string or a list of strings")
    if isinstance(rid, list):
        _check_list_of_rids(rids, prompts)
    elif is_batch and rid:
        rids = [f"{rid}_{index}" for index in range(prompts)]
    if copies > 1:
        rids = [None] * (prompts * copies)
    return [item or uuid.uuid4().hex for item in rids]


def _check_list_of_rids(rids: list[str], prompts: int) -> None:
    duplicates = [rid for rid, count in Counter(rids).items() if count > 1]
    if duplicates:
        raise RequestRefusedError(f"Duplicate request IDs detected within the request: {duplicates}")
    if len(rids) != prompts:
        raise RequestRefusedError("The specified rids length mismatch with the batch_size for batch processing.")


def _typed(body: dict[str, Any], name: str, kind: type, default: object) -> Any:  # noqa: ANN401 - the caller names the type
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    if kind is dict:
        raise SchemaError(f"1 validation error: {name} must be a dict, got {type(value).__name__}")
    expected = "a boolean" if kind is bool else "an integer"
    raise ContractError(f"invalid type: {described(value)}, expected {expected}")
