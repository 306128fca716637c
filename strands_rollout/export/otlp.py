"""Dumps as traces, sent to an OpenTelemetry collector.

Knows OpenTelemetry's SDK, and of its exporters the one for OTLP over HTTP, which may be absent; what the spans say is
`dump_spans`' business. It has a provider of its own: neither the process's spans nor their sampling have to do with
it. Where to, with which headers and for which service, the standard variables say (OTEL_EXPORTER_OTLP_*,
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, set_span_in_context

from strands_rollout.dump import read_dump
from strands_rollout.dump.reader import dump_files
from strands_rollout.errors import ConfigError, ExportError
from strands_rollout.export.dump_spans import OWN, DumpSpan, episode_spans
from strands_rollout.secret_mask import secret_values

_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PATH: Final = "/v1/traces"
_BATCH: Final = 256


def otlp_exporter(endpoint: str | None) -> SpanExporter:
    """The exporter for OTLP over HTTP.

    Args:
        endpoint: A collector's URL, with or without /v1/traces; None: the standard variables name it.

    Raises:
        ConfigError: None is named, it is no URL, or the exporter is not installed.
    """
    if endpoint is None and not any(os.environ.get(name) for name in _VARIABLES):
        raise ConfigError(f"nobody to send spans to; give --endpoint, or set {_VARIABLES[1]}, to a collector's URL")
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"got --endpoint {endpoint}; expected a URL such as http://127.0.0.1:4318 (OTLP over HTTP)")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as e:
        raise ConfigError(f"--to otel needs OpenTelemetry's exporter: {e}; pip install 'strands-rollout[otel]'") from e
    if endpoint is None:
        return OTLPSpanExporter()
    return OTLPSpanExporter(endpoint=endpoint.rstrip("/").removesuffix(_PATH) + _PATH)


@dataclass(frozen=True, slots=True)
class Sent:
    """How much was sent."""

    samples: int
    spans: int


def send_dump(
    dump: Path, exporter: SpanExporter, *, start_s: float | None, reward_key: str, with_contents: bool
) -> Sent:
    """Send a trace for each sample of a dump; memory is a few episodes'.

    Args:
        dump: A file or a folder; see `read_dump`.
        exporter: Owned by its caller.
        start_s: When the episodes begin, in seconds since 1970; None: when their file was last written.
        reward_key: Where a reward that is a mapping has its number.
        with_contents: Whether texts come along; see `episode_spans`.

    Raises:
        DumpError: It can't be read.
        ExportError: The collector doesn't take what is sent.
    """
    sender, samples, secrets = SpanSender(exporter), 0, secret_values(os.environ)
    for file in dump_files(dump) or [dump]:  # a folder without any is refused by `read_dump`
        start_ns = _ns(file.stat().st_mtime if start_s is None else start_s)
        for record in read_dump(file):
            spans = episode_spans(record, reward_key=reward_key, with_contents=with_contents, secrets=secrets)
            sender.send(spans, start_ns)
            samples += 1
    sender.flush()
    return Sent(samples, sender.sent)


class SpanSender:
    """Makes a trace of each episode and sends it.

    Args:
        exporter: Owned by its caller.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        resource = Resource.create({"service.name": "strands-rollout"}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._ended = _Ended()
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("strands-rollout")
        self._exporter = exporter
        self._main_roots: dict[object, SpanContext] = {}
        self.sent = 0

    def send(self, spans: Sequence[DumpSpan], start_ns: int) -> None:
        """Send an episode now, or with the ones that follow.

        Args:
            spans: The episode's own first. A further part of a fan-out is linked to the main agent's trace, where that
                was sent before.
            start_ns: When it began, in nanoseconds since 1970.

        Raises:
            ExportError: The collector doesn't take what is sent.
        """
        root = self._begin(spans[0], start_ns, Context(), self._links(spans[0]))
        self._remember(spans[0], root)
        for span in spans[1:]:
            _end(self._begin(span, start_ns, set_span_in_context(root, Context()), []), span, start_ns)
        _end(root, spans[0], start_ns)
        if len(self._ended.spans) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Send what is not sent yet.

        Raises:
            ExportError: The collector doesn't take it.
        """
        while self._ended.spans:
            batch = self._ended.spans[:_BATCH]
            if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                raise ExportError(
                    f"the collector took {self.sent} spans and not the next {len(batch)}; see the message above, "
                    "mend that, and export again"
                )
            self.sent += len(batch)
            del self._ended.spans[: len(batch)]

    def _begin(self, span: DumpSpan, start_ns: int, context: Context, links: Sequence[Link]) -> Span:
        return self._tracer.start_span(
            span.name,
            context=context,
            kind=SpanKind.CLIENT if span.is_request else SpanKind.INTERNAL,
            attributes=span.attributes,
            links=links,
            start_time=start_ns + _ns(span.start_s),
        )

    def _links(self, root: DumpSpan) -> list[Link]:
        main = self._main_roots.get(root.attributes.get(f"{OWN}rollout_id"))
        is_further = root.attributes.get(f"{OWN}fan_out.part", 0) != 0
        return [Link(main)] if is_further and main is not None else []

    def _remember(self, root: DumpSpan, span: Span) -> None:
        if root.attributes.get(f"{OWN}fan_out.part") == 0:
            self._main_roots[root.attributes.get(f"{OWN}rollout_id")] = span.get_span_context()


class _Ended(SpanProcessor):
    """Keeps spans that have ended until they are sent: unlike the SDK's own processors it drops none."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        """Keep it."""
        self.spans.append(span)


def _end(made: Span, span: DumpSpan, start_ns: int) -> None:
    if span.error is not None:
        made.set_attribute("error.type", span.error)
        made.set_status(Status(StatusCode.ERROR, span.error))
    made.end(end_time=start_ns + _ns(span.end_s))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
