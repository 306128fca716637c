"""Replay data for a trainer that repeats the engine's choices: routed experts, and the ids kept by top-p.

A complete answer without the requested replay data is an error. If an aborted answer lacks these data, its tokens are
dropped. slime's Sample decodes replay data; for slime before 0.3.1, `joined_experts` decodes experts.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from strands_rollout.errors import EngineResponseError

RETURN_EXPERTS: Final = "return_routed_experts"
EXPERTS: Final = "routed_experts"
EXPERTS_START: Final = "routed_experts_start_len"
_RETURN_TOP_P: Final = "return_top_p_token_ids"
# slime 0.3 looks for the kept ids in these fields of an answer
_TOP_P_KEYS: Final = ("top_p_token_ids", "top_p_kept_token_ids")
_INT32_BYTES: Final = 4


def request_fields(extra: Mapping[str, Any], *, known_tokens: int) -> dict[str, Any]:
    """Return a request's extra fields; limit requested routed experts to tokens that have none yet.

    SGLang answers with one row of experts per token, from the token at index `routed_experts_start_len` to the
    second-to-last. Without a start, each answer would contain the rows of the whole conversation again, and replace
    the rows of tokens that older weights sampled.

    Args:
        extra: The configured fields.
        known_tokens: Number of tokens of the trajectory so far; every token except the last already has its row.
    """
    if not extra.get(RETURN_EXPERTS) or not known_tokens:
        return dict(extra)
    return {**extra, EXPERTS_START: known_tokens - 1}


def missing_replay_data(
    extra: Mapping[str, Any], sampling_params: Mapping[str, Any], meta_info: Mapping[str, Any]
) -> str | None:
    """Return a text that names the missing replay data of an answer and the remedy; None if nothing is missing."""
    if extra.get(RETURN_EXPERTS) and meta_info.get(EXPERTS) is None:
        return (
            "lacks the routed experts that the request asked for; start SGLang with --enable-return-routed-experts, "
            "and use a router that passes return_routed_experts on (sglang-router 0.3 drops it)"
        )
    custom = sampling_params.get("custom_params")
    if isinstance(custom, Mapping) and custom.get(_RETURN_TOP_P) and not any(key in meta_info for key in _TOP_P_KEYS):
        return (
            "lacks the ids kept by top-p, which the request asked for (custom_params); serve with slime's SGLang, and "
            "use a router that passes custom_params on, or set --rollout-top-p 1"
        )
    return None


def located_experts(meta_info: Mapping[str, Any], *, start: int, total: int, layers: int, top_k: int) -> dict[str, Any]:
    """Return `meta_info` with the index of the first token that has routed experts.

    SGLang's answer does not repeat the requested start, and some versions of SGLang ignore the start. Therefore the
    index is derived from the number of rows.

    Args:
        meta_info: The answer's `meta_info`. If it has no routed experts, the result has no index.
        start: Index of the first token whose row was requested.
        total: Number of input and output tokens.
        layers: Number of the model's layers.
        top_k: Experts per token.

    Raises:
        EngineResponseError: The experts are not text, or their number fits neither the requested rows nor the whole
            sequence.
    """
    located = {key: value for key, value in meta_info.items() if key != EXPERTS_START}
    payload = located.get(EXPERTS)
    if payload is None:
        return located
    numbers = _int32_count(payload)
    row = layers * top_k
    if numbers == (total - 1 - start) * row:
        return {**located, EXPERTS_START: start}
    if numbers == (total - 1) * row:
        return {**located, EXPERTS_START: 0}
    raise EngineResponseError(
        f"got {numbers} numbers of routed experts; expected {(total - 1 - start) * row}, for tokens {start} to "
        f"{total - 2} in {layers} layers with {top_k} experts each. Check that --num-layers and --moe-router-topk fit "
        "the served model"
    )


def joined_experts(meta_info: Mapping[str, Any], known: Any, *, layers: int, top_k: int) -> Any:  # noqa: ANN401 - arrays
    """Join the routed experts of all answers, for slime before 0.3.1; since 0.3.1, slime's Sample joins them itself.

    Args:
        meta_info: The last answer's `meta_info`, as `located_experts` returns it.
        known: The experts of the earlier answers, as an int32 array of shape (rows, layers, top_k); None if there are
            none.
        layers: Number of the model's layers.
        top_k: Experts per token.

    Returns:
        The experts of the whole sequence, in the form of `known`; `known` itself if the answer has no experts.
    """
    if meta_info.get(EXPERTS) is None:
        return known
    rows = np.frombuffer(base64.b64decode(meta_info[EXPERTS]), dtype=np.int32).reshape(-1, layers, top_k)
    start = meta_info.get(EXPERTS_START, 0)
    return np.concatenate([known[:start], rows]) if start else rows


def _int32_count(payload: object) -> int:
    if not isinstance(payload, str):
        raise EngineResponseError(f"routed_experts is a {type(payload).__name__}; expected base64 text of int32")
    return len(payload.rstrip("=")) * 3 // 4 // _INT32_BYTES
