"""A dump as OpenTelemetry traces, including what a collector receives over HTTP."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from typer.testing import CliRunner

from strands_rollout import Sample
from strands_rollout.cli.commands import app
from strands_rollout.dump import write_dump
from strands_rollout.errors import ConfigError, DumpError, ExportError
from strands_rollout.integrations.traces import RECORDED_TIMES, SEQUENTIAL_TIMES, otlp_exporter, send_dump

START_S = 1_700_000_000.0
TEXTS = {1: b"What?", 2: b"call ", 3: b"\xe2\x82", 4: b"\xac", 5: b"result", 6: b"done"}
SANDBOX = {"queued_s": 0.01, "run_s": 0.1, "exit_code": 0, "killed_by": None}
FACTS = {
    "stop_reason": "completed",
    "final_text": "It is done.",
    "turns": 2,
    "spans": [[0, 1, 3, "7"], [0, 3, 4, "8"], [1, 5, 6, "8"]],
    "turn_s": [0.5, 0.25],
    "duration_s": 2.0,
    "segments": 1,
    "sampled_tokens": 4,
    "sampling_params": {"temperature": 0.5, "top_k": -1, "max_new_tokens": 99, "stop": "END", "sampling_seed": 3},
    "calls": [
        {"id": "call_1_1", "tool": "search", "status": "timeout", "s": 0.25},
        {"id": "call_1_0", "tool": "execute_python_code", "status": "success", "s": 0.125, "sandbox": SANDBOX},
    ],
}
needs_otlp = pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry.exporter") is None, reason="needs the exporter for OTLP over HTTP"
)


def sample_of(facts: dict[str, Any] | None = None, **fields: Any) -> Sample:
    return Sample(
        **{
            "index": 4,
            "group_index": 1,
            "prompt": [{"role": "user", "content": "What?"}],
            "tokens": [1, 2, 3, 4, 5, 6],
            "response": "everything",
            "response_length": 5,
            "reward": {"score": 1.0},
            "label": "thirty-four",
            "status": Sample.Status.COMPLETED,
            "metadata": {"strands_rollout": FACTS if facts is None else facts},
            **fields,
        }
    )


def spans_of(folder: Path, *samples: Any, with_contents: bool = False) -> list[list[ReadableSpan]]:
    """Return each sample's trace: the episode's span first, then the other spans by start time."""
    path = folder / "samples.jsonl"
    write_dump(path, samples, TEXTS)
    exporter = InMemorySpanExporter()
    samples_sent, spans_sent = send_dump(
        path, exporter, start_s=START_S, reward_key="score", with_contents=with_contents
    )
    traces: dict[int, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        traces.setdefault(span.context.trace_id, []).append(span)
    assert samples_sent == len(samples) == len(traces)
    assert spans_sent == sum(map(len, traces.values()))
    return [sorted(trace, key=lambda span: (span.parent is not None, span.start_time)) for trace in traces.values()]


def seconds(span: ReadableSpan) -> tuple[float, float]:
    start_ns = int(START_S) * 10**9
    return (span.start_time - start_ns) / 1e9, (span.end_time - start_ns) / 1e9


def test_send_dump_makes_a_trace_of_episode_turns_and_calls(tmp_path: Path) -> None:
    (trace,) = spans_of(tmp_path, sample_of())
    root, *children = trace
    assert [(span.name, *seconds(span)) for span in trace] == [
        ("invoke_agent", 0.0, 2.0),
        ("chat", 0.0, 0.5),
        ("execute_tool search", 0.5, 0.75),
        ("execute_tool execute_python_code", 0.75, 0.875),
        ("chat", 0.875, 1.125),
    ]
    assert {span.parent.span_id for span in children} == {root.context.span_id}
    assert [span.kind for span in trace] == [
        SpanKind.INTERNAL,
        SpanKind.CLIENT,
        SpanKind.INTERNAL,
        SpanKind.INTERNAL,
        SpanKind.CLIENT,
    ]
    told = {name.removeprefix("strands_rollout."): value for name, value in root.attributes.items()}
    assert told.items() >= {"index": 4, "group": 1, "status": "completed", "stop_reason": "completed"}.items()
    assert (
        told.items() >= {"reward": 1.0, "turns": 2, "tokens": 6, "duration_s": 2.0, "times": SEQUENTIAL_TIMES}.items()
    )
    assert (told["where"], root.attributes["gen_ai.operation.name"]) == ("samples.jsonl:1", "invoke_agent")
    assert root.status.status_code is StatusCode.UNSET


def test_send_dump_uses_recorded_times(tmp_path: Path) -> None:
    begun = [{**call, "at_s": at_s} for call, at_s in zip(FACTS["calls"], (0.75, 0.875), strict=True)]
    requests = [[0, 0.125, 0.25], [0, 0.5, 0.125], [1, 1.5, 0.25]]  # the first turn was aborted and continued
    (trace,) = spans_of(tmp_path, sample_of({**FACTS, "calls": begun, "requests": requests}))
    assert [(span.name, *seconds(span)) for span in trace] == [
        ("invoke_agent", 0.0, 2.0),
        ("chat", 0.125, 0.625),
        ("execute_tool search", 0.75, 1.0),
        ("execute_tool execute_python_code", 0.875, 1.0),
        ("chat", 1.5, 1.75),
    ]
    assert trace[0].attributes["strands_rollout.times"] == RECORDED_TIMES


def test_send_dump_sends_texts_only_if_asked(tmp_path: Path) -> None:
    failed = sample_of({**FACTS, "error": "EngineError: secret words"}, status=Sample.Status.FAILED)
    for folder in ("without", "with"):
        (tmp_path / folder).mkdir()
    (bare,) = spans_of(tmp_path / "without", failed)
    assert bare[0].attributes["error.type"] == bare[0].status.description == "EngineError"
    everything = repr([dict(span.attributes) for span in bare])
    for text in ("What?", "It is done.", "everything", "thirty-four", "secret words", "call €", "result"):
        assert text not in everything
    ((root, first, *_, last),) = spans_of(tmp_path / "with", failed, with_contents=True)
    assert json.loads(root.attributes["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "What?"}]}
    ]
    assert root.attributes["strands_rollout.label"] == "thirty-four"
    assert root.attributes["strands_rollout.error"] == "EngineError: secret words"
    assert "It is done." in root.attributes["gen_ai.output.messages"]
    assert json.loads(first.attributes["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "call €"}], "finish_reason": "tool_call"}
    ]
    assert (first.attributes["strands_rollout.context"], last.attributes["strands_rollout.context"]) == (
        "What?",
        "result",
    )


@needs_otlp
@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"turn_s": [5.0, 1.0], "duration_s": 1.0, "sampling_params": {"stop": ["\ud800"]}},
        {"turn_s": [None, float("nan"), -1, 2**70], "calls": [None, {"id": None, "tool": 3, "s": "x"}]},
        {"spans": [[5, 1, 2, "1"]], "calls": [{"id": "call_9999999999_0", "status": "\ud800", "sandbox": []}]},
    ],
)
def test_send_dump_sends_samples_with_malformed_facts(collector, tmp_path, facts) -> None:
    sample = sample_of(facts, index=2**70, group_index="a\ud800", prompt=None, reward="much", label=None)
    (trace,) = spans_of(tmp_path, sample, with_contents=True)
    assert trace[0].attributes["strands_rollout.index"] == str(2**70)
    start_s, end_s = seconds(trace[0])
    exporter = otlp_exporter(collector.url)
    sent = send_dump(tmp_path / "samples.jsonl", exporter, start_s=START_S, reward_key="score", with_contents=True)
    assert sent == (1, len(trace))
    assert all(start_s <= seconds(span)[0] <= seconds(span)[1] <= end_s for span in trace)


class Collector(ThreadingHTTPServer):
    """HTTP server that records what it receives, and answers with `status`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.status = 200
        self.received: list[tuple[str, dict[str, str], Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, dict(self.headers), ExportTraceServiceRequest.FromString(body)))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def dump_of(folder: Path, count: int = 1) -> Path:
    path = folder / "samples.jsonl"
    write_dump(path, [sample_of()] * count)
    os.utime(path, (START_S, START_S))
    return path


@needs_otlp
def test_export_to_otel_sends_all_spans_over_http(collector: Collector, tmp_path: Path) -> None:
    dump = dump_of(tmp_path, 60)
    result = CliRunner().invoke(app, ["export", str(dump), "--to", "otel", "--endpoint", collector.url])
    assert (result.exit_code, result.stdout) == (0, "60 samples, 300 spans\n"), result.output
    assert {where for where, _, _ in collector.received} == {"/v1/traces"}
    resources = [resource for _, _, request in collector.received for resource in request.resource_spans]
    spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    assert (len(spans), len({span.trace_id for span in spans})) == (300, 60)
    assert {span.start_time_unix_nano for span in spans if not span.parent_span_id} == {int(START_S * 1e9)}


@needs_otlp
def test_export_to_otel_reads_the_standard_variables(collector, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "wandb-api-key=mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "wandb.entity=me,wandb.project=agents")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "nightly")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    given = ["export", str(dump_of(tmp_path)), "--to", "otel", "--start", "2026-01-02T03:04:05"]
    assert CliRunner().invoke(app, given).exit_code == 0
    ((_, headers, request),) = collector.received
    assert headers["wandb-api-key"] == "mine"
    (resource,) = request.resource_spans
    attributes = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert attributes.items() >= {"wandb.entity": "me", "wandb.project": "agents", "service.name": "nightly"}.items()
    assert resource.scope_spans[0].spans[0].start_time_unix_nano == 1767323045 * 10**9


@needs_otlp
def test_send_dump_raises_when_the_collector_refuses(collector: Collector, tmp_path: Path) -> None:
    collector.status = 401
    exporter = otlp_exporter(collector.url)
    with pytest.raises(ExportError, match=r"accepted 0 spans, and the next 5 could not be sent; fix the error"):
        send_dump(dump_of(tmp_path), exporter, start_s=None, reward_key="score", with_contents=False)


def test_otlp_exporter_and_send_dump_errors_name_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=r"with --endpoint, or set OTEL_EXPORTER_OTLP_ENDPOINT"):
        otlp_exporter(None)
    with pytest.raises(ConfigError, match=r"got --endpoint localhost:4318; expected a URL"):
        otlp_exporter("localhost:4318")
    with pytest.raises(DumpError, match=r"holds no dump"):
        send_dump(tmp_path, InMemorySpanExporter(), start_s=None, reward_key="score", with_contents=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    given = ["export", str(dump_of(tmp_path)), "--to", "otel", "--endpoint", "http://127.0.0.1:9"]
    assert "pip install 'strands-rollout[otel]'" in str(CliRunner().invoke(app, given).exception)


@pytest.mark.parametrize(
    "options", [["--to", "otel", "--project", "p"], ["--to", "wandb", "--endpoint", "http://h"], ["--to", "weave"], []]
)
def test_export_refuses_options_of_the_other_target(tmp_path: Path, options: list[str]) -> None:
    assert CliRunner().invoke(app, ["export", str(dump_of(tmp_path)), *options]).exit_code == 2


def test_send_dump_links_fan_out_parts_to_the_main_trace(tmp_path: Path) -> None:
    parts = [
        sample_of({**FACTS, "fan_out": {"part": part, "of": 2, "kind": kind}}, rollout_id=rollout)
        for rollout in (7, 8)
        for part, kind in enumerate(("main", "agent"))
    ]
    traces = spans_of(tmp_path, *parts, sample_of(rollout_id=7))
    roots = [trace[0] for trace in traces]
    linked = [[link.context.trace_id for link in root.links] for root in roots]
    ids = [root.context.trace_id for root in roots]
    assert linked == [[], [ids[0]], [], [ids[2]], []]
    assert roots[1].attributes["strands_rollout.rollout_id"] == 7
    assert roots[1].attributes["strands_rollout.fan_out.kind"] == "agent"
