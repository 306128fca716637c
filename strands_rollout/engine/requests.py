"""Validation of the body of POST /generate, with SGLang's fields, defaults, limits and error messages (0.5.23).

Unknown top-level fields are ignored and unknown sampling parameters refused, as in SGLang. Known but unsupported
fields that would change the answer are refused.
"""

import math
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from strands_rollout.errors import RolloutError
from strands_rollout.files.json_codec import Json

Encode: TypeAlias = Callable[[str], list[int]]
TOP_K_ALL = 1 << 30  # SGLang's top_k without a limit
# Maximum generations of one call (prompts times n), since each takes memory, even in the queue.
MAX_GENERATIONS = 1024
# SGLang reserves two tokens of the context. A prompt must have fewer tokens than the context length minus
# _PROMPT_RESERVE.
_CONTEXT_RESERVE = 2
_PROMPT_RESERVE = 6
# Hardly any text has more characters per token. At first, only _CHARS_PER_TOKEN * context_length characters from the
# beginning of a text are encoded: a longer text probably exceeds the context.
_CHARS_PER_TOKEN = 32
_GREEDY_BELOW = 1e-6
_MAX_STOP_STRINGS = 32
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
# SGLang's sampling parameters, in the order of SGLang's error about an unknown name.
_KINDS = (
    {"max_new_tokens": "i64", "stop": "strings", "stop_token_ids": "ids", "stop_regex": "unsupported"}
    | {"temperature": "f64", "top_p": "f64", "top_k": "i64", "min_p": "f64"}
    | dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), "f64")
    | {"min_new_tokens": "i64", "n": "i64"}
    | dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), "unsupported")
    | dict.fromkeys(("ignore_eos", "skip_special_tokens"), "a boolean")
    | dict.fromkeys(("spaces_between_special_tokens", "no_stop_trim"), "a boolean")
    | {"stream_interval": "i64", "logit_bias": "unsupported", "sampling_seed": "i64", "custom_params": "ignored"}
    | dict.fromkeys(("beam_width", "watermark", "choice"), "unsupported")
)
_IGNORED = ("spaces_between_special_tokens", "stream_interval", "custom_params", "n")
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {"i64": (int,), "f64": (int, float), "a boolean": (bool,)}


class RequestRefusedError(RolloutError):
    """The request can't be served; the client gets the message with status 400, or in an event of its stream."""


class ContractError(RequestRefusedError):
    """A sampling parameter is unknown, or a field that SGLang's JSON schema doesn't check has the wrong type."""


class SchemaError(RequestRefusedError):
    """The body is not a JSON object, or a field that SGLang's JSON schema checks has the wrong type."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked sampling parameters of one generation.

    A generation is greedy if top_k is 1. As in SGLang, a temperature below 1e-6 is replaced by top_k 1 and temperature
    1.0, which then also applies to the logprobs. If max_new_tokens is None, only the context limits the output.
    """

    max_new_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None

    @property
    def has_penalties(self) -> bool:
        """True if a penalty or `min_new_tokens` may change the model's logits."""
        additive = self.frequency_penalty or self.presence_penalty
        return bool(additive) or self.repetition_penalty != 1.0 or self.min_new_tokens > 0


def read_sampling_params(raw: dict[str, Any]) -> SamplingParams:
    """Turn the JSON object `sampling_params` of a request into checked parameters.

    A null means the default. For `max_new_tokens`, a null means that only the context limits the output.

    Raises:
        ContractError: A name is unknown, or a type is wrong.
        RequestRefusedError: A value is out of range, there are too many stop strings, or the embedded engine does not
            support a parameter.
    """
    values = {name: _check_type(name, value) for name, value in raw.items()}
    values = {name: value for name, value in values.items() if value is not None and name not in _IGNORED}
    if "max_new_tokens" in raw and raw["max_new_tokens"] is None:
        values["max_new_tokens"] = None
    if 0 <= values.get("temperature", 1.0) < _GREEDY_BELOW:
        values |= {"temperature": 1.0, "top_k": 1}
    if values.get("top_k") == -1:
        values["top_k"] = TOP_K_ALL
    params = SamplingParams(**values)
    _check_ranges(params)
    return params


def _check_type(name: str, value: Json) -> Json:
    kind = _KINDS.get(name)
    if kind is None:
        names = ", ".join(f"`{known}`" for known in _KINDS)
        raise ContractError(f"unknown field `{name:.200}`, expected one of {names}")
    if value is None or kind == "ignored":
        return None
    if kind == "unsupported":
        raise RequestRefusedError(f"sampling parameter {name} is not supported by the embedded engine")
    if kind in ("strings", "ids"):
        return _stop_strings(value) if kind == "strings" else _stop_ids(value)
    if not isinstance(value, _PYTHON_TYPES[kind]) or (isinstance(value, bool) and kind != "a boolean"):
        raise _type_error(value, kind)
    return value


def _stop_strings(value: Json) -> tuple[str, ...]:
    strings: list[str] = value if isinstance(value, list) else [value]
    for item in strings:
        if not isinstance(item, str):
            raise _type_error(item, "a string")
    if len(strings) > _MAX_STOP_STRINGS:
        raise RequestRefusedError(f"at most {_MAX_STOP_STRINGS} stop strings are allowed, got {len(strings)}")
    return tuple(item for item in strings if item)


def _stop_ids(value: object) -> frozenset[int]:
    if not isinstance(value, list):
        raise _type_error(value, "a sequence")
    ids = [item for item in value if item is not None]
    for item in ids:
        if type(item) is not int:
            raise _type_error(item, "i64")
    return frozenset(ids)


def _type_error(value: object, expected: str) -> ContractError:
    """Return the error for a value of the wrong type, in the words of SGLang's JSON decoder."""
    if isinstance(value, bool):
        got = f"boolean `{str(value).lower()}`"
    elif isinstance(value, str):
        got = f'string "{value:.200}"'
    elif isinstance(value, int | float):
        got = f"{'integer' if isinstance(value, int) else 'floating point'} `{value}`"
    else:
        got = "sequence" if isinstance(value, list) else "map"
    return ContractError(f"invalid type: {got}, expected {expected}")


def _check_ranges(p: SamplingParams) -> None:
    new, least, penalty, seed = p.max_new_tokens, p.min_new_tokens, p.repetition_penalty, p.sampling_seed or 0
    limits = {
        f"temperature must be a non-negative finite number, got {p.temperature}.": 0 <= p.temperature < math.inf,
        f"top_p must be in (0, 1], got {p.top_p}.": 0 < p.top_p <= 1,
        f"min_p must be in [0, 1], got {p.min_p}.": 0 <= p.min_p <= 1,
        f"top_k must be -1 (disable) or at least 1, got {p.top_k}.": p.top_k >= 1,
        f"frequency_penalty must be in [-2, 2], got {p.frequency_penalty}.": -2 <= p.frequency_penalty <= 2,
        f"presence_penalty must be in [-2, 2], got {p.presence_penalty}.": -2 <= p.presence_penalty <= 2,
        f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {p.repetition_penalty}.": 0 < penalty <= 2,
        f"min_new_tokens must be in [0, max_new_tokens], got {least}.": least >= 0,
        f"max_new_tokens must be at least 0, got {new}.": new is None or new >= 0,
        f"min_new_tokens must be in [0, max_new_tokens({new})], got {least}.": new is None or least <= new,
        f"sampling_seed must be in [-2**63, 2**63 - 1], got {p.sampling_seed}.": -(2**63) <= seed < 2**63,
    }
    for message, holds in limits.items():
        if not holds:
            raise RequestRefusedError(message)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of a request: the served context length in tokens and the vocabulary size."""

    context_length: int
    vocab_size: int

    @property
    def max_prompt_tokens(self) -> int:
        """A prompt must have fewer tokens than this number (SGLang's max_req_input_len)."""
        return self.context_length - _PROMPT_RESERVE


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A checked request for one generation.

    It has at least one input id, all ids are in the vocabulary, and `max_new_tokens` fits the context. The rid selects
    the request for an abort; it is unique among the requests in flight.
    """

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    stream: bool = False


def read_generate_call(body: dict[str, Any], limits: RequestLimits, encode: Encode) -> tuple[list[EngineRequest], bool]:
    """Turn the JSON body of a /generate call into requests, `n` requests for each prompt.

    Returns:
        The requests, and True if the response is a list.

    Raises:
        SchemaError: A field that SGLang's JSON schema checks has the wrong type.
        ContractError: A sampling parameter is unknown, or a field that SGLang's JSON schema doesn't check has the wrong
            type.
        RequestRefusedError: The input is missing, empty or too long; a parameter or another field is refused; or the
            call asks for too many generations.
    """
    for name in _UNSUPPORTED:
        if body.get(name):
            raise RequestRefusedError(f"{name} is not supported by the embedded engine")
    if _read_field(body, "logprob_start_len", int) not in (-1, None):
        raise RequestRefusedError("logprob_start_len is not supported by the embedded engine: no input logprobs")
    inputs, is_batch = _read_prompts(body)
    raw_params = _sampling_params(body, len(inputs))
    copies = _samples_per_prompt(raw_params)
    if len(inputs) * copies > MAX_GENERATIONS:
        raise RequestRefusedError(
            f"at most {MAX_GENERATIONS} generations per request are allowed, got {len(inputs)} inputs with n={copies}"
        )
    rids = _request_ids(body, len(inputs), copies, is_batch=is_batch)
    names = ("stream", "return_logprob", "return_text_in_logprobs")
    flags = {name: bool(_read_field(body, name, bool)) for name in names}
    requests: list[EngineRequest] = []
    for text_or_ids, raw in zip(inputs, raw_params, strict=True):
        prompt = encode_within_limits(text_or_ids, limits, encode) if isinstance(text_or_ids, str) else text_or_ids
        sampling, max_new_tokens = check_generation(prompt, raw, limits)
        input_ids = tuple(prompt)
        own_rids = rids[len(requests) : len(requests) + copies]
        requests += (EngineRequest(rid, input_ids, sampling, max_new_tokens, **flags) for rid in own_rids)
    is_list = is_batch or copies > 1
    if flags["stream"] and is_list:
        raise RequestRefusedError("stream with a batch or n > 1 is not supported by the embedded engine")
    return requests, is_list


def encode_within_limits(text: str, limits: RequestLimits, encode: Encode) -> list[int]:
    """Return the ids of a text; refuse a far too long text early, since encoding it takes seconds and gigabytes.

    Raises:
        RequestRefusedError: The beginning of the text has at least twice as many tokens as the context.
    """
    head = text[: limits.context_length * _CHARS_PER_TOKEN]
    ids = encode(head)
    # As a part of the whole text, the head may end with other tokens, but at least half of its tokens stay the same.
    if len(head) < len(text) and len(ids) >= 2 * limits.context_length:
        raise _too_long(f"more than {len(ids)}", limits)
    return ids if len(head) == len(text) else encode(text)


def check_generation(
    prompt: list[int], raw_params: dict[str, Any], limits: RequestLimits
) -> tuple[SamplingParams, int]:
    """Check a prompt and its parameters against the limits, in SGLang's order.

    Returns the parameters and the maximum number of new tokens.

    Raises:
        RequestRefusedError: The prompt is empty or too long or has an unknown id, or a parameter is refused.
    """
    count, context_length = len(prompt), limits.context_length
    if not count:
        raise RequestRefusedError("input_ids cannot be empty.")
    outside = next((token for token in prompt if not 0 <= token < limits.vocab_size), None)
    if outside is not None:
        # SGLang's scheduler crashes on such an id; this refusal is a deliberate difference.
        raise RequestRefusedError(
            f"input_ids contains out-of-vocabulary token id {outside}; valid range is [0, {limits.vocab_size})."
        )
    if count >= context_length:
        raise _too_long(count, limits)
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
    remaining = context_length - _CONTEXT_RESERVE - count
    return sampling, remaining if new is None else min(new, remaining)


def _too_long(count: int | str, limits: RequestLimits) -> RequestRefusedError:
    return RequestRefusedError(
        f"The input ({count} tokens) is longer than the model's context length ({limits.context_length} tokens)."
    )


def _read_prompts(body: dict[str, Any]) -> tuple[Sequence[list[int] | str], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if ids is not None:
        return _read_id_prompts(ids)
    if text is None:
        raise RequestRefusedError("Either text, input_ids or input_embeds should be provided.")
    texts = text if isinstance(text, list) else [text]
    if not texts:
        raise RequestRefusedError("text cannot be empty.")
    if not all(isinstance(item, str) for item in texts):
        raise SchemaError("1 validation error: text must be a string or a list of strings")
    return texts, isinstance(text, list)


def _read_id_prompts(ids: object) -> tuple[list[list[int]], bool]:
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
            raise _type_error(wrong, "a sequence")
        if wrong is not None:
            raise SchemaError(f"1 validation error: elements must be int or list; got {type(wrong).__name__}")
    return prompts, is_batch


def _sampling_params(body: dict[str, Any], count: int) -> list[dict[str, Any]]:
    value = body.get("sampling_params")
    if not isinstance(value, list):
        return [_read_field(body, "sampling_params", dict) or {}] * count
    if len(value) != count or not all(isinstance(item, dict) for item in value):
        raise SchemaError(f"1 validation error: sampling_params must hold one dict for each of {count} inputs")
    return value


def _samples_per_prompt(raw_params: list[dict[str, Any]]) -> int:
    """Return the number of answers per prompt; `read_sampling_params` refuses an `n` that is not an integer."""
    counts = {raw["n"] if type(raw.get("n")) is int else 1 for raw in raw_params}
    if len(counts) > 1:
        raise RequestRefusedError("The parallel_sample_num should be the same for all samples in sample params.")
    return max(counts.pop(), 1)


def _request_ids(body: dict[str, Any], prompts: int, copies: int, *, is_batch: bool) -> list[str]:
    rid = body.get("rid")
    rids: list[Any] = rid if isinstance(rid, list) else [rid] * prompts
    if not all(isinstance(item, str | None) for item in rids):
        raise SchemaError("1 validation error: rid must be a string or a list of strings")
    if isinstance(rid, list):
        duplicates = [item for item, count in Counter(rids).items() if count > 1]
        if duplicates:
            raise RequestRefusedError(f"Duplicate request IDs detected within the request: {duplicates}")
        if len(rids) != prompts:
            raise RequestRefusedError("The specified rids length mismatch with the batch_size for batch processing.")
    elif is_batch and rid:
        rids = [f"{rid}_{index}" for index in range(prompts)]
    if copies > 1:
        rids = [None] * (prompts * copies)
    return [item or uuid.uuid4().hex for item in rids]


def _read_field(body: dict[str, Any], name: str, kind: type) -> Json:
    value = body.get(name)
    if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
        return value
    if kind is dict:
        raise SchemaError(f"1 validation error: {name} must be a dict, got {type(value).__name__}")
    raise _type_error(value, "a boolean" if kind is bool else "an integer")
