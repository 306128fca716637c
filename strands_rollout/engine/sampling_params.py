"""The sampling parameters of one request: SGLang's names, defaults, limits and error messages (0.5.23).

Knows no tokenizer and no model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from strands_rollout.engine.request_errors import ContractError, RequestRefusedError

TOP_K_ALL = 1 << 30
_GREEDY_BELOW = 1e-6
_MAX_STOP_STRINGS = 32
_SEED_LIMIT = 2**63

# SGLang's names in SGLang's order, which its message about an unknown name repeats.
_KINDS = {
    "max_new_tokens": "i64",
    "stop": "strings",
    "stop_token_ids": "ids",
    "stop_regex": "unsupported",
    "temperature": "f64",
    "top_p": "f64",
    "top_k": "i64",
    "min_p": "f64",
    "frequency_penalty": "f64",
    "presence_penalty": "f64",
    "repetition_penalty": "f64",
    "min_new_tokens": "i64",
    "n": "i64",
    "json_schema": "unsupported",
    "regex": "unsupported",
    "ebnf": "unsupported",
    "structural_tag": "unsupported",
    "ignore_eos": "a boolean",
    "skip_special_tokens": "a boolean",
    "spaces_between_special_tokens": "a boolean",
    "no_stop_trim": "a boolean",
    "stream_interval": "i64",
    "logit_bias": "unsupported",
    "sampling_seed": "i64",
    "custom_params": "ignored",
    "beam_width": "unsupported",
    "watermark": "unsupported",
    "choice": "unsupported",
}
_IGNORED = ("spaces_between_special_tokens", "stream_interval", "custom_params", "n")
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {"i64": (int,), "f64": (int, float), "a boolean": (bool,)}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one generation, checked.

    Attributes:
        max_new_tokens: The most tokens to generate; None: up to the context length.
        temperature: 1.0 for a greedy request, as in SGLang, so that its logprobs are taken at 1.0.
        top_k: 1 for a greedy request.
        stop: Strings that end the generation once the text holds one of them.
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
        """Whether logits change with what was generated."""
        additive = self.frequency_penalty or self.presence_penalty
        return bool(additive) or self.repetition_penalty != 1.0 or self.min_new_tokens > 0


def read_sampling_params(raw: dict[str, Any]) -> SamplingParams:
    """Turn the JSON object `sampling_params` of a request into checked parameters.

    Raises:
        ContractError: A name is unknown, or a value is of the wrong type.
        RequestRefusedError: A value is out of range or not supported here.
    """
    values: dict[str, Any] = {}
    for name, value in raw.items():
        checked = _checked_type(name, value)
        if checked is not None and name not in _IGNORED:
            values[name] = checked
    if "max_new_tokens" in raw and raw["max_new_tokens"] is None:
        values["max_new_tokens"] = None
    temperature = values.get("temperature", 1.0)
    if 0 <= temperature < _GREEDY_BELOW:
        values |= {"temperature": 1.0, "top_k": 1}
    if values.get("top_k") == -1:
        values["top_k"] = TOP_K_ALL
    params = SamplingParams(**values)
    _check_ranges(params)
    return params


def _checked_type(name: str, value: object) -> object:
    """`value` as `SamplingParams` holds it; None for null, which means the default."""
    kind = _KINDS.get(name)
    if kind is None:
        names = ", ".join(f"`{known}`" for known in _KINDS)
        raise ContractError(f"unknown field `{name}`, expected one of {names}")
    if value is None or kind == "ignored":
        return None
    if kind == "unsupported":
        raise RequestRefusedError(f"sampling parameter {name} is not supported by the embedded engine")
    if kind == "strings":
        return _strings(value)
    if kind == "ids":
        return _ids(value)
    if not isinstance(value, _PYTHON_TYPES[kind]) or (isinstance(value, bool) and kind != "a boolean"):
        raise ContractError(f"invalid type: {described(value)}, expected {kind}")
    return value


def _strings(value: object) -> tuple[str, ...]:
    strings: list[str] = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, str):
            raise ContractError(f"invalid type: {described(item)}, expected a string")
        strings.append(item)
    if len(strings) > _MAX_STOP_STRINGS:
        raise RequestRefusedError(f"at most {_MAX_STOP_STRINGS} stop strings are allowed, got {len(strings)}")
    return tuple(item for item in strings if item)


def _ids(value: object) -> frozenset[int]:
    if not isinstance(value, list):
        raise ContractError(f"invalid type: {described(value)}, expected a sequence")
    ids = [item for item in value if item is not None]
    for item in ids:
        if type(item) is not int:
            raise ContractError(f"invalid type: {described(item)}, expected i64")
    return frozenset(ids)


def described(value: object) -> str:
    """A value as SGLang's JSON decoder names it."""
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, str):
        return f'string "{value}"'
    if isinstance(value, float):
        return f"floating point `{value}`"
    if isinstance(value, int):
        return f"integer `{value}`"
    return "sequence" if isinstance(value, list) else "map"


def _check_ranges(p: SamplingParams) -> None:
    limits = [
        (
            math.isfinite(p.temperature) and p.temperature >= 0,
            f"temperature must be a non-negative finite number, got {p.temperature}.",
        ),
        (0 < p.top_p <= 1, f"top_p must be in (0, 1], got {p.top_p}."),
        (0 <= p.min_p <= 1, f"min_p must be in [0, 1], got {p.min_p}."),
        (p.top_k >= 1, f"top_k must be -1 (disable) or at least 1, got {p.top_k}."),
        (-2 <= p.frequency_penalty <= 2, f"frequency_penalty must be in [-2, 2], got {p.frequency_penalty}."),
        (-2 <= p.presence_penalty <= 2, f"presence_penalty must be in [-2, 2], got {p.presence_penalty}."),
        (
            0 < p.repetition_penalty <= 2,
            f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {p.repetition_penalty}.",
        ),
        (p.min_new_tokens >= 0, f"min_new_tokens must be in [0, max_new_tokens], got {p.min_new_tokens}."),
        (
            p.max_new_tokens is None or p.max_new_tokens >= 0,
            f"max_new_tokens must be at least 0, got {p.max_new_tokens}.",
        ),
        (
            p.max_new_tokens is None or p.min_new_tokens <= p.max_new_tokens,
            f"min_new_tokens must be in [0, max_new_tokens({p.max_new_tokens})], got {p.min_new_tokens}.",
        ),
        (
            p.sampling_seed is None or -_SEED_LIMIT <= p.sampling_seed < _SEED_LIMIT,
            f"sampling_seed must be in [-2**63, 2**63 - 1], got {p.sampling_seed}.",
        ),
    ]
    for holds, message in limits:
        if not holds:
            raise RequestRefusedError(message)
