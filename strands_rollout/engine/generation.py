"""A generation: what was asked, what came out so far, why it ended, and how SGLang's /generate reports it (0.5.23)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from strands_rollout.engine.requests import GenerateRequest
from strands_rollout.engine.text import TextCodec

ABORTED_IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}
"""The finish reason of a generation that was aborted while it waited, or between two chunks of its prompt."""
# SGLang's front end gets so many tokens at a time of a request that does not stream (SGLANG_FORCE_STREAM_INTERVAL).
_SENT_TOKENS = 50


class WeightSpan(NamedTuple):
    """Output tokens start..end-1 were sampled under this version of the weights."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """What a generation has come to at one moment.

    Attributes:
        output_logprobs: As many as output_ids.
        cached_tokens: Prompt tokens found in the prefix cache; 0 if it never ran.
        weight_version: The version that the last token was sampled under.
        weight_spans: All output tokens by version; complete once finished.
        finish: SGLang's finish_reason object; None while unfinished.
    """

    request: GenerateRequest
    output_ids: list[int]
    output_logprobs: list[float]
    cached_tokens: int
    retractions: int
    weight_version: str
    weight_spans: tuple[WeightSpan, ...]
    finish: dict[str, Any] | None

    @property
    def ended_in_queue(self) -> bool:
        """Whether it was aborted while it waited for the model, the first time or again."""
        return self.finish == ABORTED_IN_QUEUE


@dataclass(slots=True, eq=False)
class Generation:
    """A request on its way, equal to itself only; changed by the worker's thread alone.

    Attributes:
        notify: Called from the worker's thread when the generation finishes and, for a stream, after each token.
        seed: Of its sampling; 64 bits, set when it is queued.
        output_ids: Sampled ids. While it decodes they are here only for streams and stop strings; at the end, always.
        output_logprobs: Never fewer than output_ids.
        cached_tokens: Prompt tokens found in the prefix cache; None until its first prefill begins.
        finish: Set last, when all else is complete.
        crashed: The engine failed, and there will be no `finish`.
    """

    request: GenerateRequest
    notify: Callable[[], object]
    seed: int = 0
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    cached_tokens: int | None = None
    retractions: int = 0
    weight_spans: list[WeightSpan] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    crashed: bool = False

    def close_span(self, version: str, output_count: int) -> None:
        """Note that everything up to `output_count` not yet in a span was sampled under `version`."""
        last = self.weight_spans[-1] if self.weight_spans else None
        if last is None:
            self.weight_spans.append(WeightSpan(version, 0, output_count))
        elif last.version == version:
            self.weight_spans[-1] = WeightSpan(version, last.start, output_count)
        elif output_count > last.end:
            self.weight_spans.append(WeightSpan(version, last.end, output_count))

    def drop_unsent(self) -> None:
        """Forget what SGLang's front end would not have yet: all that a request gets that is aborted in its queue."""
        if self.request.stream:
            return
        kept = len(self.output_ids) // _SENT_TOKENS * _SENT_TOKENS
        del self.output_ids[kept:], self.output_logprobs[kept:]
        spans = [span for span in self.weight_spans if span.start < kept or span.start == 0]
        self.weight_spans = [WeightSpan(span.version, span.start, min(span.end, kept)) for span in spans]

    def output(self, current_version: str) -> GenerationOutput:
        """What there is now, safe to call from another thread while this grows; unfinished, of `current_version`."""
        # `finish` first: if it is set, the rest is complete. Ids before logprobs: there are never fewer of those.
        finish, ids = self.finish, list(self.output_ids)
        return GenerationOutput(
            request=self.request,
            output_ids=ids,
            output_logprobs=self.output_logprobs[: len(ids)],
            cached_tokens=self.cached_tokens or 0,
            retractions=self.retractions,
            weight_version=self.weight_spans[-1].version if finish else current_version,
            weight_spans=tuple(self.weight_spans),
            finish=finish,
        )


def out_of_length(length: int) -> dict[str, Any]:
    """The finish reason of a generation that used up its tokens."""
    return {"type": "length", "length": length}


def aborted() -> dict[str, Any]:
    """The finish reason of a generation that was aborted while it ran."""
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


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
        return text.rstrip("\ufffd")
    if isinstance(matched, str) and matched in text:
        end = text.index(matched) + (len(matched) if sampling.no_stop_trim else 0)
        return text[:end]
    return text


def generate_response(
    output: GenerationOutput, codec: TextCodec, *, latency_s: float, now: float | None
) -> dict[str, Any]:
    """The JSON object for one generation, finished or, in a stream, not.

    `latency_s` counts from the request's arrival. `now` is the time of the answer, seconds since the epoch; None for
    all events of a stream but the first.
    """
    request, cached = output.request, output.cached_tokens
    meta_info: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": output.finish,
        **weight_versions(output),
        **_logprobs(output, codec),
        "completion_tokens": len(output.output_ids),
    }
    if not output.ended_in_queue:  # otherwise, retracted or not: nothing about the prompt
        meta_info |= {
            "prompt_tokens": len(request.input_ids),
            "num_retractions": output.retractions,
            "reasoning_tokens": 0,
            "cached_tokens": cached,
            "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
            "dp_rank": None,
        }
    if output.finish is not None:
        meta_info["e2e_latency"] = latency_s
    if now is not None:
        meta_info["response_sent_to_client_ts"] = now
    return {"text": output_text(output, codec), "output_ids": output.output_ids, "meta_info": meta_info}


def weight_versions(output: GenerationOutput) -> dict[str, Any]:
    """The versions of the weights that the tokens were sampled under, as SGLang's answers name them."""
    named: dict[str, Any] = {"weight_version": output.weight_version}
    if output.finish is not None:
        named["weight_versions"] = [span._asdict() for span in output.weight_spans]
    return named


def _logprobs(output: GenerationOutput, codec: TextCodec) -> dict[str, Any]:
    """The [logprob, id, text or null] triples, where the request asked for them."""
    if not output.request.return_logprob:
        return {}
    with_text = output.request.return_text_in_logprobs
    texts = [codec.decode([token]) if with_text else None for token in output.output_ids]
    triples = list(zip(output.output_logprobs, output.output_ids, texts, strict=True))
    return {
        "input_token_logprobs": [],
        "output_token_logprobs": triples,
        "output_token_logprobs_length": len(triples),
    }
