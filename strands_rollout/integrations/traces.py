"""Samples of a dump as traces, sent to an OpenTelemetry collector: the episode, its model turns and its tool calls.

Names and attributes are those of OpenTelemetry's conventions for generative AI (open-telemetry/semantic-conventions,
docs/gen-ai: gen-ai-spans.md, gen-ai-agent-spans.md and gen-ai-output-messages.json, 1.41), and under
`strands_rollout.` what they have no name for. What a record lacks is left out, never guessed.

The sender has a provider of its own, apart from the process's spans and their sampling. The collector, the headers and
the service may be given by the standard variables (OTEL_EXPORTER_OTLP_*, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES).
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
from strands_rollout.samples import FinishedSample, finite
from strands_rollout.secret_mask import find_secrets, mask_text, mask_values
from strands_rollout.slime_plugin.metrics import MAX_LABEL_CHARS, MAX_PROMPT_CHARS, MAX_RESPONSE_CHARS, bounded_text

Attribute = str | bool | int | float | list[str]

OWN: Final = "strands_rollout."
TIMES: Final = "as recorded"
LAID_OUT: Final = "seconds as recorded, without start times: turns and calls are laid out one after the other"
_PROVIDER: Final = "sglang"
_MOST_SECONDS: Final = 1e8
_REQUEST: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "sampling_seed": "seed",
}
_FINISH: Final = {"completed": "stop", "turn_length": "length"}  # other ends may come before a turn is asked for
_CALL_ID: Final = re.compile(r"call_(\d{1,9})_\d+")
_ERROR_TYPE: Final = re.compile(r"\w+(?=: |$)")

_OF_SAMPLE: Final = {
    "index": "index",
    "group": "group_index",
    "rollout_id": "rollout_id",
    "response_tokens": "response_length",
    "removed": "remove_sample",
}
_OF_EPISODE: Final = (
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
_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PATH: Final = "/v1/traces"
_BATCH: Final = 256


@dataclass(frozen=True, slots=True)
class DumpSpan:
    """One span; its times are seconds from the episode's start, its error one word."""

    name: str
    start_s: float
    end_s: float
    attributes: dict[str, Attribute]
    is_request: bool = False
    error: str | None = None


def episode_spans(
    record: DumpRecord, *, reward_key: str, with_contents: bool, secrets: Collection[str] = ()
) -> list[DumpSpan]:
    """The episode's span, then those of its turns, each followed by its calls.

    With contents texts come along, secrets masked and long ones cut in the middle: prompt, answer, label, error, and
    what each turn read and wrote, where the dump has the texts of its tokens.
    """
    sample = FinishedSample(SimpleNamespace(**record.values), record.facts)
    turns = _turns(sample)
    calls = _calls_by_turn(sample, turns.keys())
    steps = steps_of(sample.facts)
    spans: list[DumpSpan] = []
    before, last = 0, max(turns, default=None)
    for number, (bounds, seconds) in turns.items():
        called = calls.pop(number, [])
        ended = _FINISH.get(sample.facts.stop_reason or "") if number == last else None
        finish = "tool_call" if called else ended
        attributes = _turn_attributes(sample, number, bounds, finish)
        if with_contents and bounds is not None:
            attributes |= _turn_contents(record, before, *bounds, finish, secrets)
        before = bounds[1] if bounds is not None else before
        times = _times(_place_of_turn(steps, number), seconds, spans)
        spans.append(DumpSpan("chat", *times, _written(attributes), is_request=True))
        for call in called:
            spans.append(_call_span(call, spans, is_placed=bool(steps)))
    for call in calls.get(None, []):
        spans.append(_call_span(call, spans, is_placed=bool(steps)))
    attributes = _episode_attributes(record, sample, reward_key)
    attributes[f"{OWN}times"] = TIMES if steps else LAID_OUT
    if with_contents:
        attributes |= _episode_contents(record, secrets)
    end_s = max(_end_of(spans), _seconds(sample.facts.duration_s) or 0.0)
    return [DumpSpan("invoke_agent", 0.0, end_s, _written(attributes), error=_error(sample)), *spans]


def _place_of_turn(steps: Sequence[Step], number: int) -> tuple[float, float] | None:
    """From the beginning of a turn's first request to the end of its last one; a turn that is aborted has several."""
    own = [step for step in steps if step.kind == "generate" and step.turn == number]
    return (min(step.at_s for step in own), max(step.at_s + step.s for step in own)) if own else None


def _times(place: tuple[float, float] | None, seconds: float | None, before: Sequence[DumpSpan]) -> tuple[float, float]:
    """Start and end of the next span: its place, or else after the spans before it, without length if unknown."""
    start_s, end_s = place or (_end_of(before), _end_of(before) + (seconds or 0.0))
    return min(start_s, _MOST_SECONDS), min(end_s, _MOST_SECONDS)


def _end_of(spans: Sequence[DumpSpan]) -> float:
    return max((span.end_s for span in spans), default=0.0)


def _turns(sample: FinishedSample) -> dict[int, tuple[tuple[int, int] | None, float | None]]:
    """Where turns begin and end in the tokens, and their seconds, by their numbers from 0, in order."""
    bounds = sample.bounds_by_turn or {}
    seconds = dict(enumerate(sample.facts.turn_s or ()))
    numbers = sorted({*bounds, *seconds})
    return {number: (bounds.get(number), _seconds(seconds.get(number))) for number in numbers}


def _seconds(value: object) -> float | None:
    """A length that a span can have; its times are nanoseconds since 1970 in 64 bits."""
    number = finite(value)
    return number if number is not None and 0 <= number <= _MOST_SECONDS else None


def _turn_attributes(
    sample: FinishedSample, number: int, bounds: tuple[int, int] | None, finish: str | None
) -> dict[str, Any]:
    params = sample.facts.sampling_params
    asked = {} if params is None else turn_params(params, number)
    stop = asked.get("stop")
    start, end = bounds or (None, None)
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": _PROVIDER,
        # without max_new_tokens, which is the whole episode's
        **{f"gen_ai.request.{name}": asked.get(key) for key, name in _REQUEST.items()},
        "gen_ai.request.stop_sequences": [stop] if isinstance(stop, str) else stop,
        "gen_ai.usage.input_tokens": start,
        "gen_ai.usage.output_tokens": None if start is None or end is None else end - start,
        "gen_ai.response.finish_reasons": None if finish is None else [finish],
        f"{OWN}turn": number,
    }


def _calls_by_turn(sample: FinishedSample, turns: Collection[int]) -> dict[int | None, list[Mapping[str, Any]]]:
    """The calls by the number of the turn that made them, None where that is unknown.

    An id counts the turns of the whole episode from 1, those of a history that was rewritten included.
    """
    is_whole = sample.facts.segments in (None, 1)
    found: dict[int | None, list[Mapping[str, Any]]] = {}
    for call in sample.facts.calls or ():
        if isinstance(call, Mapping):
            named = _CALL_ID.fullmatch(str(call.get("id"))) if is_whole else None
            turn = int(named[1]) - 1 if named else None
            found.setdefault(turn if turn in turns else None, []).append(call)
    return found


def _call_span(call: Mapping[str, Any], before: Sequence[DumpSpan], *, is_placed: bool) -> DumpSpan:
    place = (call["at_s"], call["at_s"] + call["s"]) if is_placed else None
    sandbox, status = call.get("sandbox"), call.get("status")
    ran = sandbox if isinstance(sandbox, Mapping) else {}
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": call.get("tool"),
        "gen_ai.tool.call.id": call.get("id"),
        f"{OWN}tool.status": status,
        **{f"{OWN}sandbox.{name}": ran.get(name) for name in ("queued_s", "run_s", "exit_code", "killed_by")},
    }
    error = _clean(status) if isinstance(status, str) and status != "success" else None
    name = f"execute_tool {call['tool']}" if "tool" in call else "execute_tool"
    return DumpSpan(_clean(name), *_times(place, _seconds(call.get("s")), before), _written(attributes), error=error)


def _episode_attributes(record: DumpRecord, sample: FinishedSample, reward_key: str) -> dict[str, Any]:
    values, facts = record.values, record.facts
    part, tokens = facts.fan_out or {}, values.get("tokens")
    return {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.max_tokens": (facts.sampling_params or {}).get("max_new_tokens"),
        **{f"{OWN}{name}": values.get(key) for name, key in _OF_SAMPLE.items()},
        **{f"{OWN}{name}": getattr(facts, name) for name in _OF_EPISODE},
        f"{OWN}status": sample.status,
        f"{OWN}reward": sample.reward(reward_key),
        f"{OWN}tokens": len(tokens) if isinstance(tokens, Sized) else None,
        f"{OWN}weight_versions": sample.weight_versions or None,
        **{f"{OWN}fan_out.{name}": part.get(name) for name in ("part", "of", "kind")},
        f"{OWN}where": Path(record.where).name,
    }


def _error(sample: FinishedSample) -> str | None:
    """The error's class, or else the stop reason, of a failed sample."""
    if sample.status != "failed":
        return None
    named = _ERROR_TYPE.match(sample.facts.error or "")
    return named[0] if named else _clean(sample.facts.stop_reason or "failed")


def _written(attributes: Mapping[str, object]) -> dict[str, Attribute]:
    """What an exporter can write; what is None or of another kind is left out."""
    written = {name: _plain(value) for name, value in attributes.items()}
    return {name: value for name, value in written.items() if value is not None}


def _plain(value: object) -> Attribute | None:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if value.bit_length() < 64 else str(value)  # the protocol's integers have 64 bits
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value if isinstance(item, str)]
    return finite(value)


def _clean(text: str) -> str:
    """Without lone surrogates, which no file takes."""
    return text.encode("utf-8", "replace").decode()


def _episode_contents(record: DumpRecord, secrets: Collection[str]) -> dict[str, Any]:
    """Prompt, last answer, label and error of a sample, with these texts masked."""
    values, facts = record.values, record.facts
    prompt = values.get("prompt")
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    asked = [
        _message(str(message.get("role")), message.get("content"), MAX_PROMPT_CHARS, secrets)
        for message in messages
        if isinstance(message, Mapping)
    ]
    answer = facts.final_text or values.get("response") or ""
    return {
        "gen_ai.input.messages": _json(asked),
        "gen_ai.output.messages": _json([_message("assistant", answer, MAX_RESPONSE_CHARS, secrets)]),
        "strands_rollout.label": bounded_text(values.get("label"), MAX_LABEL_CHARS, secrets),
        # the error of a file that is not our dump may hold the password of a URL
        "strands_rollout.error": mask_values(mask_text(facts.error), secrets) if facts.error is not None else None,
    }


def _turn_contents(
    record: DumpRecord, before: int, start: int, end: int, finish: str | None, secrets: Collection[str]
) -> dict[str, Any]:
    """What a turn from `start` to `end` wrote, and what the policy had read since the turn that ended at `before`."""
    tokens = record.values["tokens"]
    read, wrote = (_text(record, tokens[first:last]) for first, last in ((before, start), (start, end)))
    written = None
    if wrote is not None:
        ended = {} if finish is None else {"finish_reason": finish}
        written = _json([{**_message("assistant", wrote, MAX_RESPONSE_CHARS, secrets), **ended}])
    return {
        "gen_ai.output.messages": written,
        "strands_rollout.context": bounded_text(read, MAX_RESPONSE_CHARS, secrets),
    }


def _text(record: DumpRecord, ids: Sequence[int]) -> str | None:
    """None where the dump lacks the text of one of them."""
    texts = [record.token_texts.get(token) for token in ids]
    return b"".join(text for text in texts if text is not None).decode(errors="replace") if None not in texts else None


def _message(role: str, content: object, max_chars: int, secrets: Collection[str]) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": bounded_text(content, max_chars, secrets) or ""}]}


def _json(messages: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(messages, ensure_ascii=False)


def otlp_exporter(endpoint: str | None) -> SpanExporter:
    """The exporter for OTLP over HTTP to a collector's URL, with or without /v1/traces; None: the environment's.

    Raises:
        ConfigError: None is named, it is no URL, or the exporter is not installed.
    """
    if endpoint is None and not any(os.environ.get(name) for name in _VARIABLES):
        raise ConfigError(f"no collector to send spans to; give --endpoint, or set {_VARIABLES[1]}, to its URL")
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"got --endpoint {endpoint}; expected a URL such as http://127.0.0.1:4318 (OTLP over HTTP)")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as e:
        raise ConfigError(f"--to otel needs OpenTelemetry's exporter: {e}; pip install 'strands-rollout[otel]'") from e
    if endpoint is None:
        return OTLPSpanExporter()
    return OTLPSpanExporter(endpoint=endpoint.rstrip("/").removesuffix(_PATH) + _PATH)


def send_dump(
    dump: Path, exporter: SpanExporter, *, start_s: float | None, reward_key: str, with_contents: bool
) -> tuple[int, int]:
    """Send a trace for each sample of a dump, and tell how many samples and spans; memory is a few episodes'.

    Episodes begin at `start_s`, in seconds since 1970, or when their file was last written. The exporter is its
    caller's.

    Raises:
        DumpError: It can't be read.
        ExportError: The collector doesn't take what is sent.
    """
    sender, samples, secrets = _Sender(exporter), 0, find_secrets(os.environ)
    for file in dump_files(dump) or [dump]:  # a folder without any is refused by `read_dump`
        start_ns = _ns(file.stat().st_mtime if start_s is None else start_s)
        for record in read_dump(file):
            spans = episode_spans(record, reward_key=reward_key, with_contents=with_contents, secrets=secrets)
            sender.send(spans, start_ns)
            samples += 1
    sender.flush()
    return samples, sender.sent


class _Sender:
    """Makes a trace of each episode and sends it in batches.

    Spans are kept until then in the SDK's memory, since its own batches drop spans of a collector that is slow.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        resource = Resource.create({"service.name": "strands-rollout"}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._unsent = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._unsent))
        self._tracer = provider.get_tracer("strands-rollout")
        self._exporter = exporter
        self._main_roots: dict[object, SpanContext] = {}
        self.sent = 0

    def send(self, spans: Sequence[DumpSpan], start_ns: int) -> None:
        """Send an episode, its own span first, now or with the ones that follow.

        A further part of a fan-out is linked to the main agent's trace, where that was sent before.

        Raises:
            ExportError: The collector doesn't take what is sent.
        """
        attributes = spans[0].attributes
        rollout, part = attributes.get(f"{OWN}rollout_id"), attributes.get(f"{OWN}fan_out.part")
        main = self._main_roots.get(rollout) if part else None
        root = self._record(spans[0], start_ns, Context(), [] if main is None else [Link(main)])
        if part == 0:
            self._main_roots[rollout] = root.get_span_context()
        for span in spans[1:]:
            self._record(span, start_ns, set_span_in_context(root, Context()))
        if len(self._unsent.get_finished_spans()) >= _BATCH:
            self.flush()

    def _record(self, span: DumpSpan, start_ns: int, context: Context, links: Sequence[Link] = ()) -> Span:
        recorded = self._tracer.start_span(
            span.name,
            context=context,
            kind=SpanKind.CLIENT if span.is_request else SpanKind.INTERNAL,
            attributes=span.attributes,
            links=links,
            start_time=start_ns + _ns(span.start_s),
        )
        if span.error is not None:
            recorded.set_attribute("error.type", span.error)
            recorded.set_status(Status(StatusCode.ERROR, span.error))
        recorded.end(end_time=start_ns + _ns(span.end_s))
        return recorded

    def flush(self) -> None:
        """Send what is not sent yet.

        Raises:
            ExportError: The collector doesn't take it.
        """
        spans = self._unsent.get_finished_spans()
        self._unsent.clear()
        for batch in (spans[start : start + _BATCH] for start in range(0, len(spans), _BATCH)):
            if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                raise ExportError(
                    f"the collector took {self.sent} spans and not the next {len(batch)}; see the message above, "
                    "mend that, and export again"
                )
            self.sent += len(batch)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
