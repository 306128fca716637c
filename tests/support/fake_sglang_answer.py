"""The body of a `/generate` answer, in the shapes of SGLang 0.5.x.

Knows a request's JSON and what was sampled for it; nothing of connections.
"""

import base64
from array import array
from collections.abc import Iterable, Mapping
from itertools import accumulate, groupby
from typing import Any

import orjson
from fake_sglang_reply import Reply
from fake_sglang_requests import Sampled


def answer_body(request: Mapping[str, Any], sampled: Sampled, *, weight_version: str, cached_tokens: int) -> bytes:
    """The JSON of a 200."""
    reply, ids = sampled.reply, list(sampled.reply.ids)
    meta: dict[str, Any] = {
        "id": request.get("rid"),
        "finish_reason": reply.finish,
        "prompt_tokens": len(request["input_ids"]),
        "completion_tokens": len(ids),
        "cached_tokens": cached_tokens,
        "weight_version": weight_version,
        "e2e_latency": 0.001,
    }
    if request.get("return_logprob"):
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [[p, i, None] for p, i in _logprobs(request, sampled)]
    if reply.facts is not None:
        meta |= _facts(request, sampled, reply.facts)
    meta = {key: value for key, value in {**meta, **reply.meta}.items() if value is not None}
    return orjson.dumps({"text": reply.text, "output_ids": ids, "meta_info": meta})


def _logprobs(request: Mapping[str, Any], sampled: Sampled) -> Iterable[tuple[float | None, int]]:
    reply: Reply = sampled.reply
    values = reply.logprobs
    if values is None and reply.facts is not None:
        first = len(request["input_ids"])
        values = tuple(reply.facts.logprob(first + n, version) for n, version in enumerate(sampled.versions))
    if values is None:
        values = (-0.5,) * len(reply.ids)
    return zip(values, reply.logprob_ids if reply.logprob_ids is not None else reply.ids, strict=False)


def _facts(request: Mapping[str, Any], sampled: Sampled, facts: Any) -> dict[str, Any]:
    """Weight versions, and the replay data that was asked for; a request that sampled nothing has none."""
    if not sampled.versions:
        return {}
    found: dict[str, Any] = {"weight_version": sampled.versions[-1], "weight_versions": _spans(sampled.versions)}
    if request.get("return_routed_experts"):
        found["routed_experts"] = _base64(_experts(request, sampled, facts))
    if (request.get("sampling_params", {}).get("custom_params") or {}).get("return_top_p_token_ids"):
        first = len(request["input_ids"])
        kept = [
            facts.kept(first + n, version, token)
            for n, (version, token) in enumerate(zip(sampled.versions, sampled.reply.ids, strict=True))
        ]
        found["top_p_token_ids"] = _base64(i for ids in kept for i in ids)
        found["top_p_token_offsets"] = _base64(accumulate(map(len, kept), initial=0))
    return found


def _spans(versions: Iterable[str]) -> list[dict[str, Any]]:
    spans, start = [], 0
    for version, group in groupby(versions):
        end = start + len(list(group))
        spans.append({"version": version, "start": start, "end": end})
        start = end
    return spans


def _experts(request: Mapping[str, Any], sampled: Sampled, facts: Any) -> Iterable[int]:
    """Rows of tokens from the start that was asked for to the last but one: a row belongs to the weights that read it.

    The token that is read at a position is the one that is sampled at the next.
    """
    first = len(request["input_ids"])
    for position in range(request.get("routed_experts_start_len") or 0, first + len(sampled.versions) - 1):
        version = sampled.prefilled_by if position < first - 1 else sampled.versions[position + 1 - first]
        yield from facts.experts(position, version)


def _base64(numbers: Iterable[int]) -> str:
    return base64.b64encode(array("i", numbers).tobytes()).decode()
