"""One generation in the engine: what was asked, what came out so far, and why it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from strands_rollout.engine.generate_request import GenerateRequest


# SGLang's front end gets so many tokens at a time of a request that does not stream (SGLANG_FORCE_STREAM_INTERVAL).
_SENT_TOKENS = 50


@dataclass(frozen=True, slots=True)
class WeightSpan:
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
        return self.finish == aborted_in_queue()


@dataclass(slots=True, eq=False)
class Generation:
    """A request on its way, equal to itself only; changed by the worker's thread alone.

    Attributes:
        notify: Called from the worker's thread when the generation finishes and, for a stream, after each token.
        seed: Seeds the random numbers of its sampling; 64 bits, set when it is queued.
        output_ids: Sampled ids. While it decodes they are here only for streams and stop strings; at the end, always.
        output_logprobs: Never fewer than output_ids.
        cached_tokens: Prompt tokens found in the prefix cache; None until its first prefill begins.
        weight_spans: Spans of weight versions that have passed.
        finish: Set last, when all else is complete.
        crashed: The engine failed, and there will be no `finish`.
    """

    request: GenerateRequest
    notify: Callable[[], None]
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
        """What there is now; safe to call from another thread while this one grows.

        Args:
            current_version: The weight version to report while it is unfinished.
        """
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


def stopped(matched: int | str) -> dict[str, Any]:
    """The finish reason of a generation that met a stop token or string."""
    return {"type": "stop", "matched": matched}


def out_of_length(length: int) -> dict[str, Any]:
    """The finish reason of a generation that used up its tokens."""
    return {"type": "length", "length": length}


def aborted() -> dict[str, Any]:
    """The finish reason of a generation that was aborted while it ran."""
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def aborted_in_queue() -> dict[str, Any]:
    """The finish reason of a generation that was aborted while it waited, or between two chunks of its prompt."""
    return {"type": "abort", "message": "Abort in waiting queue"}
