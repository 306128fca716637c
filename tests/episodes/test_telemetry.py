"""Without slime, Strands' own OpenTelemetry spans go where the process sends them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import pytest

SUPPORT = Path(harness.__file__).parent
# a tracer provider can be set once in a process
EPISODE = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from harness import ANSWER, call_text, run
from transformers import AutoTokenizer

exporter = InMemorySpanExporter()
if sys.argv[3] == "sent":
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
done = asyncio.run(run(tokenizer, [call_text(), ANSWER], settings={"executor": "subprocess"}))
assert done.sample.status.value == "completed"
print(json.dumps([[span.name, [event.name for event in span.events]] for span in exporter.get_finished_spans()]))
"""


@pytest.mark.parametrize("where", ["sent", "nowhere"])
def test_strands_spans_go_where_the_process_sends_them(shipped_tokenizer: Any, where: str) -> None:
    command = [sys.executable, "-c", EPISODE, str(SUPPORT), shipped_tokenizer.name_or_path, where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    spans = json.loads(done.stdout.splitlines()[-1])
    names = [name for name, _ in spans]
    expected = {"chat", "execute_tool execute_python_code"} if where == "sent" else set()
    assert set(names) >= expected
    assert bool(names) == bool(expected)
    if where == "sent":
        last_cycle = [events for name, events in spans if name == "execute_event_loop_cycle"][-1]
        history = ["gen_ai.user.message", "gen_ai.assistant.message", "gen_ai.tool.message"]
        assert last_cycle[:3] == history, "a span that is recorded holds the whole history"
