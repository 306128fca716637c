"""A generation as SGLang's /generate reports it (0.5.23): text, output_ids and meta_info.

Knows the answer's shape, key by key. Knows no HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strands_rollout.engine.generation import GenerationOutput
    from strands_rollout.engine.text import TextCodec

_INCOMPLETE = "\ufffd"


def output_text(output: GenerationOutput, codec: TextCodec) -> str:
    """The text of what was generated.

    A finished generation's text lacks the stop token or string that ended it, unless no_stop_trim. An unfinished one's
    ends before a character whose bytes are not all there.
    """
    sampling, ids = output.request.sampling, output.output_ids
    matched = output.finish.get("matched") if output.finish else None
    if isinstance(matched, int) and not sampling.no_stop_trim:
        ids = ids[:-1]
    text = codec.decode(ids, skip_special_tokens=sampling.skip_special_tokens)
    if output.finish is None:
        return text.rstrip(_INCOMPLETE)
    if isinstance(matched, str) and matched in text:
        end = text.index(matched) + (len(matched) if sampling.no_stop_trim else 0)
        return text[:end]
    return text


def generate_response(
    output: GenerationOutput, codec: TextCodec, *, latency_s: float, now: float | None
) -> dict[str, Any]:
    """The JSON object for one generation, finished or, in a stream, not.

    Args:
        output: What to report.
        codec: The model's tokenizer.
        latency_s: Seconds since the request arrived.
        now: The time of the answer, seconds since the epoch; None for all events of a stream but the first.
    """
    meta_info: dict[str, Any] = {"id": output.request.rid, "finish_reason": output.finish}
    meta_info |= _queued_meta(output, codec) if output.ended_in_queue else _meta(output, codec)
    if output.finish is not None:
        meta_info["e2e_latency"] = latency_s
    if now is not None:
        meta_info["response_sent_to_client_ts"] = now
    return {"text": output_text(output, codec), "output_ids": output.output_ids, "meta_info": meta_info}


def weight_versions(output: GenerationOutput) -> dict[str, Any]:
    """The versions of the weights that the tokens were sampled under, as SGLang's answers name them."""
    named: dict[str, Any] = {"weight_version": output.weight_version}
    if output.finish is not None:
        spans = output.weight_spans
        named["weight_versions"] = [{"version": s.version, "start": s.start, "end": s.end} for s in spans]
    return named


def _meta(output: GenerationOutput, codec: TextCodec) -> dict[str, Any]:
    cached = output.cached_tokens
    return {
        "prompt_tokens": len(output.request.input_ids),
        "weight_version": output.weight_version,
        "num_retractions": output.retractions,
        **_logprobs(output, codec),
        "reasoning_tokens": 0,
        "completion_tokens": len(output.output_ids),
        "cached_tokens": cached,
        **weight_versions(output),
        "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
        "dp_rank": None,
    }


def _queued_meta(output: GenerationOutput, codec: TextCodec) -> dict[str, Any]:
    """What SGLang reports of a request aborted in its queue, retracted or not: nothing about the prompt."""
    return {**weight_versions(output), **_logprobs(output, codec), "completion_tokens": len(output.output_ids)}


def _logprobs(output: GenerationOutput, codec: TextCodec) -> dict[str, Any]:
    """The [logprob, id, text or null] triples, where the request asked for them."""
    if not output.request.return_logprob:
        return {}
    texts: list[str | None] = [None] * len(output.output_ids)
    if output.request.return_text_in_logprobs:
        texts = [codec.decode([token]) for token in output.output_ids]
    triples = list(zip(output.output_logprobs, output.output_ids, texts, strict=True))
    return {
        "input_token_logprobs": [],
        "output_token_logprobs": triples,
        "output_token_logprobs_length": len(triples),
    }
