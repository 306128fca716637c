"""Samples of a dump as traces for an OpenTelemetry collector: spans of the episode, its model turns and its tool calls.

Names and attributes follow OpenTelemetry's conventions for generative AI (open-telemetry/semantic-conventions,
docs/gen-ai: gen-ai-spans.md, gen-ai-agent-spans.md and gen-ai-output-messages.json, 1.41). Facts that have no name
there get the prefix `strands_rollout.`. Attributes whose values are not in a dump record are left out.

The sender has a tracer provider of its own, independent of the process's other spans and their sampling. The standard
variables (OTEL_EXPORTER_OTLP_*, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) configure collector, headers and service.
"""

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, set_span_in_context

from strands_rollout.dump import DumpRecord, read_dump
from strands_rollout.dump.files import dump_files
from strands_rollout.dump.record import Step, steps_of
from strands_rollout.errors import ConfigError, ExportError
from strands_rollout.model.sampling import turn_params
from strands_rollout.samples import FinishedSample, finite_number
from strands_rollout.secret_mask import find_secrets, mask_text, mask_values
from strands_rollout.slime_plugin.metrics import MAX_LABEL_CHARS, MAX_PROMPT_CHARS, MAX_RESPONSE_CHARS, bounded_text

Attribute = str | bool | int | float | list[str]

PREFIX: Final = "strands_rollout."
RECORDED_TIMES: Final = "as recorded"
SEQUENTIAL_TIMES: Final = "seconds as recorded, without start times: turns and calls are laid out one after the other"
_PROVIDER: Final = "sglang"
_MAX_SECONDS: Final = 1e8
_REQUEST_PARAMS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "sampling_seed": "seed",
}
# the finish reason of the last turn, by the episode's stop reason; unknown for other stop reasons
_FINISH_REASONS: Final = {"completed": "stop", "turn_length": "length"}
_CALL_ID: Final = re.compile(r"call_(\d{1,9})_\d+")
_ERROR_TYPE: Final = re.compile(r"\w+(?=: |$)")

_SAMPLE_ATTRIBUTES: Final = {
    "index": "index",
    "group": "group_index",
    "rollout_id": "rollout_id",
    "response_tokens": "response_length",
    "removed": "remove_sample",
}
_EPISODE_FACTS: Final = (
    "stop_reason",
    "turns",
    "tool_calls",
    "tool_errors",
    "tool_timeouts",
    "parse_failures",
    "sampled_tokens",
    "duration_s",
    "generate_s",
    "tool_s",
)
_ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_TRACES_PATH: Final = "/v1/traces"
_BATCH_SPANS: Final = 256


@dataclass(frozen=True, slots=True)
class DumpSpan:
    """The span of an episode, or of a turn or a tool call in it.

    Attributes:
        start_s: The start of the span, in seconds since the start of the episode.
        end_s: The end of the span, in seconds since the start of the episode.
        is_request: True for a turn, which the engine sampled in one or more requests.
        error: For a failed episode, the class of its error, else its stop reason, else "failed"; for a call that did
            not succeed, its status; otherwise None.
    """

    name: str
    start_s: float
    end_s: float
    attributes: dict[str, Attribute]
    is_request: bool = False
    error: str | None = None


def episode_spans(
    record: DumpRecord, *, reward_key: str, with_contents: bool, secrets: Collection[str] = ()
) -> list[DumpSpan]:
    """Return the episode's span, then the spans of its turns, each followed by the spans of the turn's calls.

    Spans of calls whose turn is unknown come last.

    If `with_contents`, spans include prompt, answer, label and error and, if the dump has the texts of its tokens, each
    turn's context and output. Secrets are masked, and long texts are cut in the middle.
    """
    sample = FinishedSample(SimpleNamespace(**record.values), record.facts)
    turns = _turns_of(sample)
    calls = _calls_by_turn(sample, turns.keys())
    steps = steps_of(sample.facts)
    spans: list[DumpSpan] = []
    previous_end, last = 0, max(turns, default=None)
    for number, (bounds, seconds) in turns.items():
        turn_calls = calls.pop(number, [])
        last_reason = _FINISH_REASONS.get(sample.facts.stop_reason or "") if number == last else None
        finish = "tool_call" if turn_calls else last_reason
        attributes = _turn_attributes(sample, number, bounds, finish)
        if with_contents and bounds is not None:
            attributes |= _turn_contents(record, previous_end, *bounds, finish, secrets)
        previous_end = bounds[1] if bounds is not None else previous_end
        times = _span_times(_recorded_turn_times(steps, number), seconds, spans)
        spans.append(DumpSpan("chat", *times, _exportable_attributes(attributes), is_request=True))
        for call in turn_calls:
            spans.append(_call_span(call, spans, has_times=bool(steps)))
    for call in calls.get(None, []):
        spans.append(_call_span(call, spans, has_times=bool(steps)))
    attributes = _episode_attributes(record, sample, reward_key)
    attributes[f"{PREFIX}times"] = RECORDED_TIMES if steps else SEQUENTIAL_TIMES
    if with_contents:
        attributes |= _episode_contents(record, secrets)
    end_s = max(_last_end(spans), _valid_seconds(sample.facts.duration_s) or 0.0)
    return [DumpSpan("invoke_agent", 0.0, end_s, _exportable_attributes(attributes), error=_error_type(sample)), *spans]


def _recorded_turn_times(steps: Sequence[Step], number: int) -> tuple[float, float] | None:
    """Return the start of a turn's first request and the end of its last; None if no request is recorded.

    A turn that was aborted and resumed has several requests.
    """
    requests = [step for step in steps if step.kind == "generate" and step.turn == number]
    if not requests:
        return None
    return min(step.at_s for step in requests), max(step.at_s + step.s for step in requests)


def _span_times(
    recorded: tuple[float, float] | None, seconds: float | None, before: Sequence[DumpSpan]
) -> tuple[float, float]:
    """Return a span's start and end; without `recorded`, it takes `seconds` (None: 0) from the last end in `before`."""
    start_s, end_s = recorded or (_last_end(before), _last_end(before) + (seconds or 0.0))
    return min(start_s, _MAX_SECONDS), min(end_s, _MAX_SECONDS)


def _last_end(spans: Sequence[DumpSpan]) -> float:
    return max((span.end_s for span in spans), default=0.0)


def _turns_of(sample: FinishedSample) -> dict[int, tuple[tuple[int, int] | None, float | None]]:
    """Return the token bounds and seconds of each turn (None if unknown), by turn number from 0, in ascending order."""
    bounds = sample.bounds_by_turn or {}
    seconds = dict(enumerate(sample.facts.turn_s or ()))
    numbers = sorted({*bounds, *seconds})
    return {number: (bounds.get(number), _valid_seconds(seconds.get(number))) for number in numbers}


def _valid_seconds(value: object) -> float | None:
    """Return a duration if a span can have it (span times are 64-bit nanoseconds since 1970), else None."""
    number = finite_number(value)
    return number if number is not None and 0 <= number <= _MAX_SECONDS else None


def _turn_attributes(
    sample: FinishedSample, number: int, bounds: tuple[int, int] | None, finish: str | None
) -> dict[str, Any]:
    episode_params = sample.facts.sampling_params
    params = {} if episode_params is None else turn_params(episode_params, number)
    stop = params.get("stop")
    start, end = bounds or (None, None)
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": _PROVIDER,
        # leave out max_new_tokens, which applies to the whole episode
        **{f"gen_ai.request.{name}": params.get(key) for key, name in _REQUEST_PARAMS.items()},
        "gen_ai.request.stop_sequences": [stop] if isinstance(stop, str) else stop,
        "gen_ai.usage.input_tokens": start,
        "gen_ai.usage.output_tokens": None if start is None or end is None else end - start,
        "gen_ai.response.finish_reasons": None if finish is None else [finish],
        f"{PREFIX}turn": number,
    }


def _calls_by_turn(sample: FinishedSample, turns: Collection[int]) -> dict[int | None, list[Mapping[str, Any]]]:
    """Return the calls by the index of their turn in the sample; calls of an unknown turn have the key None.

    A call's id contains the number of its turn in the whole episode. If the episode has several segments, this number
    does not identify the call's turn in the sample.
    """
    is_whole = sample.facts.segments in (None, 1)
    by_turn: dict[int | None, list[Mapping[str, Any]]] = {}
    for call in sample.facts.calls or ():
        if isinstance(call, Mapping):
            match = _CALL_ID.fullmatch(str(call.get("id"))) if is_whole else None
            turn = int(match[1]) - 1 if match else None
            by_turn.setdefault(turn if turn in turns else None, []).append(call)
    return by_turn


def _call_span(call: Mapping[str, Any], before: Sequence[DumpSpan], *, has_times: bool) -> DumpSpan:
    recorded = (call["at_s"], call["at_s"] + call["s"]) if has_times else None
    sandbox, status = call.get("sandbox"), call.get("status")
    run = sandbox if isinstance(sandbox, Mapping) else {}
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": call.get("tool"),
        "gen_ai.tool.call.id": call.get("id"),
        f"{PREFIX}tool.status": status,
        **{f"{PREFIX}sandbox.{name}": run.get(name) for name in ("queued_s", "run_s", "exit_code", "killed_by")},
    }
    error = _replace_surrogates(status) if isinstance(status, str) and status != "success" else None
    name = f"execute_tool {call['tool']}" if "tool" in call else "execute_tool"
    return DumpSpan(
        _replace_surrogates(name),
        *_span_times(recorded, _valid_seconds(call.get("s")), before),
        _exportable_attributes(attributes),
        error=error,
    )


def _episode_attributes(record: DumpRecord, sample: FinishedSample, reward_key: str) -> dict[str, Any]:
    values, facts = record.values, record.facts
    fan_out, tokens = facts.fan_out or {}, values.get("tokens")
    return {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.max_tokens": (facts.sampling_params or {}).get("max_new_tokens"),
        **{f"{PREFIX}{name}": values.get(key) for name, key in _SAMPLE_ATTRIBUTES.items()},
        **{f"{PREFIX}{name}": getattr(facts, name) for name in _EPISODE_FACTS},
        f"{PREFIX}status": sample.status,
        f"{PREFIX}reward": sample.reward(reward_key),
        f"{PREFIX}tokens": len(tokens) if isinstance(tokens, Sized) else None,
        f"{PREFIX}weight_versions": sample.weight_versions or None,
        **{f"{PREFIX}fan_out.{name}": fan_out.get(name) for name in ("part", "of", "kind")},
        f"{PREFIX}where": Path(record.where).name,
    }


def _error_type(sample: FinishedSample) -> str | None:
    if sample.status != "failed":
        return None
    match = _ERROR_TYPE.match(sample.facts.error or "")
    return match[0] if match else _replace_surrogates(sample.facts.stop_reason or "failed")


def _exportable_attributes(attributes: Mapping[str, object]) -> dict[str, Attribute]:
    values = {name: _attribute_value(value) for name, value in attributes.items()}
    return {name: value for name, value in values.items() if value is not None}


def _attribute_value(value: object) -> Attribute | None:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if value.bit_length() < 64 else str(value)  # OTLP integers have 64 bits
    if isinstance(value, str):
        return _replace_surrogates(value)
    if isinstance(value, list | tuple):
        return [_replace_surrogates(item) for item in value if isinstance(item, str)]
    return finite_number(value)


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which can't be encoded as UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _episode_contents(record: DumpRecord, secrets: Collection[str]) -> dict[str, Any]:
    values, facts = record.values, record.facts
    prompt = values.get("prompt")
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    input_messages = [
        _message(str(message.get("role")), message.get("content"), MAX_PROMPT_CHARS, secrets)
        for message in messages
        if isinstance(message, Mapping)
    ]
    answer = facts.final_text or values.get("response") or ""
    return {
        "gen_ai.input.messages": _to_json_text(input_messages),
        "gen_ai.output.messages": _to_json_text([_message("assistant", answer, MAX_RESPONSE_CHARS, secrets)]),
        "strands_rollout.label": bounded_text(values.get("label"), MAX_LABEL_CHARS, secrets),
        # an error written by another program may contain a URL with a password
        "strands_rollout.error": mask_values(mask_text(facts.error), secrets) if facts.error is not None else None,
    }


def _turn_contents(
    record: DumpRecord, previous_end: int, start: int, end: int, finish: str | None, secrets: Collection[str]
) -> dict[str, Any]:
    """Return attributes of a turn's output (tokens `start` to `end` - 1) and of the context before it."""
    tokens = record.values["tokens"]
    context, output = _text(record, tokens[previous_end:start]), _text(record, tokens[start:end])
    output_messages = None
    if output is not None:
        reason = {} if finish is None else {"finish_reason": finish}
        output_messages = _to_json_text([{**_message("assistant", output, MAX_RESPONSE_CHARS, secrets), **reason}])
    return {
        "gen_ai.output.messages": output_messages,
        "strands_rollout.context": bounded_text(context, MAX_RESPONSE_CHARS, secrets),
    }


def _text(record: DumpRecord, ids: Sequence[int]) -> str | None:
    """Return the text of token ids; None if the dump lacks the text of an id."""
    texts = [record.token_texts.get(token) for token in ids]
    known = [text for text in texts if text is not None]
    return b"".join(known).decode(errors="replace") if len(known) == len(texts) else None


def _message(role: str, content: object, max_chars: int, secrets: Collection[str]) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": bounded_text(content, max_chars, secrets) or ""}]}


def _to_json_text(messages: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(messages, ensure_ascii=False)


def otlp_exporter(endpoint: str | None) -> SpanExporter:
    """Return an exporter for OTLP over HTTP to a collector.

    Args:
        endpoint: The collector's URL, with or without /v1/traces; None to read it from environment variables.

    Raises:
        ConfigError: No collector is named, `endpoint` is not an HTTP URL, or the exporter is not installed.
    """
    if endpoint is None and not any(os.environ.get(name) for name in _ENDPOINT_VARIABLES):
        raise ConfigError(
            "no collector is named for the spans; pass the collector's URL with --endpoint, or set "
            f"{_ENDPOINT_VARIABLES[1]}"
        )
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"got --endpoint {endpoint}; expected a URL such as http://127.0.0.1:4318 (OTLP over HTTP)")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as e:
        raise ConfigError(
            f"--to otel needs OpenTelemetry's exporter: {e}; run: pip install 'strands-rollout[otel]'"
        ) from e
    if endpoint is None:
        return OTLPSpanExporter()
    return OTLPSpanExporter(endpoint=endpoint.rstrip("/").removesuffix(_TRACES_PATH) + _TRACES_PATH)


def send_dump(
    dump: Path, exporter: SpanExporter, *, start_s: float | None, reward_key: str, with_contents: bool
) -> tuple[int, int]:
    """Send a trace for each sample of a dump; return the numbers of samples and spans.

    Only a few episodes are in memory at a time. The traces begin at `start_s`, in seconds since 1970. If `start_s` is
    None, they begin at the modification time of their file. The caller shuts down the exporter.

    Raises:
        DumpError: The dump can't be read.
        ExportError: Spans can't be sent to the collector.
    """
    sender, samples, secrets = _Sender(exporter), 0, find_secrets(os.environ)
    for file in dump_files(dump) or [dump]:  # `read_dump` refuses an empty folder
        start_ns = _nanoseconds(file.stat().st_mtime if start_s is None else start_s)
        for record in read_dump(file):
            spans = episode_spans(record, reward_key=reward_key, with_contents=with_contents, secrets=secrets)
            sender.send(spans, start_ns)
            samples += 1
    sender.flush()
    return samples, sender.sent


class _Sender:
    """Recorder of the spans of episodes, which sends them in batches.

    The SDK's batch processor is not used: it would drop spans when the collector is slow.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        resource = Resource.create({"service.name": "strands-rollout"}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._unsent = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._unsent))
        self._tracer = provider.get_tracer("strands-rollout")
        self._exporter = exporter
        self._main_roots: dict[object, SpanContext] = {}  # the main agents' episode spans, by rollout id
        self.sent = 0  # number of spans

    def send(self, spans: Sequence[DumpSpan], start_ns: int) -> None:
        """Record the spans of an episode, root span first; send all recorded spans once they fill a batch.

        A sibling of a fan-out is linked to the main agent's trace, if the main agent's episode was recorded before.
        """
        attributes = spans[0].attributes
        rollout, part = attributes.get(f"{PREFIX}rollout_id"), attributes.get(f"{PREFIX}fan_out.part")
        main = self._main_roots.get(rollout) if part else None
        root = self._record(spans[0], start_ns, Context(), [] if main is None else [Link(main)])
        if part == 0:
            self._main_roots[rollout] = root.get_span_context()
        for span in spans[1:]:
            self._record(span, start_ns, set_span_in_context(root, Context()))
        if len(self._unsent.get_finished_spans()) >= _BATCH_SPANS:
            self.flush()

    def _record(self, span: DumpSpan, start_ns: int, context: Context, links: Sequence[Link] = ()) -> Span:
        recorded = self._tracer.start_span(
            span.name,
            context=context,
            kind=SpanKind.CLIENT if span.is_request else SpanKind.INTERNAL,
            attributes=span.attributes,
            links=links,
            start_time=start_ns + _nanoseconds(span.start_s),
        )
        if span.error is not None:
            recorded.set_attribute("error.type", span.error)
            recorded.set_status(Status(StatusCode.ERROR, span.error))
        recorded.end(end_time=start_ns + _nanoseconds(span.end_s))
        return recorded

    def flush(self) -> None:
        spans = self._unsent.get_finished_spans()
        self._unsent.clear()
        for batch in (spans[start : start + _BATCH_SPANS] for start in range(0, len(spans), _BATCH_SPANS)):
            if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                raise ExportError(
                    f"the collector accepted {self.sent} spans, and the next {len(batch)} could not be sent; fix the "
                    "error in the message above, and export again"
                )
            self.sent += len(batch)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
