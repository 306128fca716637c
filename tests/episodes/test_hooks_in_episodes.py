"""Strands' hooks and OpenTelemetry spans in episodes of `generate`."""

import subprocess
import sys
from typing import Any

import pytest
from harness import ANSWER, TOOL_CALL, call_text, run
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from strands import tool
from strands.hooks import AfterToolCallEvent, HookProvider, HookRegistry
from strands.telemetry.tracer import Tracer, get_tracer

CALL = TOOL_CALL.format(name="work_at_the_third_try", arguments="{}")
tries: list[str] = []


@tool
async def work_at_the_third_try() -> str:
    """Work at the third try."""
    tries.append("try")
    if len(tries) < 3:
        raise RuntimeError("not now")
    return "done"


class RetryingHook(HookProvider):
    """Retry failed tool calls, at most four times."""

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(AfterToolCallEvent, self._retry_failed)
        self._retries_left = 5

    def _retry_failed(self, event: AfterToolCallEvent) -> None:
        self._retries_left -= 1
        event.retry = event.result["status"] == "error" and self._retries_left > 0


@pytest.fixture(autouse=True)
def _clear_tries() -> None:
    tries.clear()


async def test_hook_can_retry_a_tool_call(shipped_tokenizer: Any) -> None:
    settings = {"tools": [f"{__name__}.work_at_the_third_try"], "hooks": [f"{__name__}.RetryingHook"]}
    played = await run(shipped_tokenizer, [CALL, ANSWER], settings=settings)
    assert len(tries) == 3
    assert "<tool_response>\ndone\n</tool_response>" in played.context_after(0)
    assert (played.facts["tool_calls"], played.facts["tool_errors"]) == (1, 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nobody", "has no attribute 'Nobody'"),
        ("CALL", "is a str; expected a class or function that makes a hook provider"),
        ("make_nothing", "made a NoneType; expected a Strands HookProvider, with a method register_hooks"),
    ],
)
async def test_hooks_refuse_objects_other_than_hook_providers(shipped_tokenizer: Any, name: str, message: str) -> None:
    played = await run(shipped_tokenizer, [ANSWER], settings={"hooks": [f"{__name__}.{name}"]})
    assert (played.sample.status, played.facts["stop_reason"]) == (type(played.sample).Status.FAILED, "setup_error")
    assert message in played.facts["error"]


def make_nothing() -> None:
    """Make nothing."""


async def test_generate_describes_no_unrecorded_span(shipped_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[Any] = []
    monkeypatch.setattr(Tracer, "start_agent_span", lambda *args, **_kwargs: described.append(args))
    played = await run(shipped_tokenizer, [ANSWER])
    assert (played.facts["stop_reason"], described) == ("completed", [])


def test_skip_unrecorded_span_logs_no_warning() -> None:
    """Strands' tracer instruments threads, and OpenTelemetry allows that only once."""
    code = (
        "import logging; logging.basicConfig()\n"
        "from types import SimpleNamespace\n"
        "from strands.telemetry.tracer import get_tracer\n"
        "from strands_rollout.agent.loop import skip_unrecorded_span\n"
        "get_tracer()\n"
        "skip_unrecorded_span(SimpleNamespace())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "instrument" not in ended.stderr


async def test_generate_exports_strands_spans(shipped_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    get_tracer()  # if the test ended without a tracer, Strands would make one in another test, with a warning
    # a process can set a provider only once, and Strands reads it only once
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", provider)
    monkeypatch.setattr("strands.telemetry.tracer._tracer_instance", None)
    played = await run(shipped_tokenizer, [call_text(), ANSWER], settings={"executor": "turn_costs.InstantExecutor"})
    assert played.facts["stop_reason"] == "completed"
    spans = exporter.get_finished_spans()
    assert {span.name for span in spans} >= {"invoke_agent Strands Agents", "chat", "execute_tool execute_python_code"}
    last_cycle = [span for span in spans if span.name == "execute_event_loop_cycle"][-1]
    history = ["gen_ai.user.message", "gen_ai.assistant.message", "gen_ai.tool.message"]
    assert [event.name for event in last_cycle.events][:3] == history, "a recorded span has the whole history"
