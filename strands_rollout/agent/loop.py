"""A faster agent loop: the cost of a turn hardly grows with the number of earlier turns, unlike in Strands' own loop.

Strands' cycle streams each answer through a dozen generators, copies the history and records tracing spans. This loop
calls the model and the tools directly (`invocation`). For a user's hooks, plugins and tools, it fires the same events
with the same effects (`observed_invocation`).

While a span is recorded, Strands' own cycle runs. It also runs for an agent with a feature that this loop lacks, such
as middleware, a callback handler or a session manager; see `can_run_directly`. For an agent with a hook and 20 tool
turns, Strands' cycle takes 2.45 times the CPU of this loop; docs/performance.md lists all cases.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final, cast

from opentelemetry import trace
from strands import Agent, hooks
from strands.agent import AgentResult
from strands.plugins import Plugin
from strands.telemetry.tracer import Tracer, get_tracer

from strands_rollout.agent.strands_names import missing_loop_names, report_missing_names
from strands_rollout.agent.tool_call import BoundedTool

try:
    from strands.agent._agent_delegation import AgentDelegation
    from strands.middleware._agent_stream import AgentStreamStage

    from strands_rollout.agent.invocation import DirectInvocation, can_run_directly
    from strands_rollout.agent.observed_invocation import ObservedInvocation
except ImportError as e:  # Strands before 1.62, or a version with other private names: Strands' own loop runs
    IMPORT_FAULT = str(e)
else:
    IMPORT_FAULT = ""
HAS_MIDDLEWARE: Final = not IMPORT_FAULT
SHARED_PLUGINS: Final[Sequence[Plugin]] = [] if IMPORT_FAULT else [AgentDelegation()]
"""Strands' default plugins that have no state. All agents share them: building them for each agent would take 1% of the
CPU of an episode of 5 tool turns."""


class _NoTracer(Tracer):
    """Tracer that starts no spans, for agents without recorded spans.

    Strands' own tracer describes the agent in each unrecorded span, which takes 1% of the CPU of an episode of 5 tool
    turns.
    """

    def __init__(self) -> None:
        vars(self).update(vars(get_tracer()))  # a second initialization would log a warning

    def start_agent_span(self, *_args: Any, **_kwargs: Any) -> trace.Span:  # noqa: ANN401 - Strands' signature
        return trace.INVALID_SPAN

    def end_agent_span(self, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401 - Strands' signature
        pass


@functools.cache
def _no_tracer() -> _NoTracer:
    return _NoTracer()


def skip_unrecorded_span(agent: Agent) -> None:
    """Start no span for an agent's invocations, unless the process has set up OpenTelemetry."""
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        agent.tracer = _no_tracer()


CallNext = Callable[[Any], AsyncGenerator[Any, None]]
"""Function that Strands passes to a middleware; it runs the rest of the middleware chain."""

_OUT_OF_TURNS: Final = "limit_turns"  # Strands' stop reason at its limit of turns


class DirectLoop(hooks.HookProvider):
    """The loop of one agent: `Agent(..., hooks=[*hooks, loop])`, then `await loop.run(agent, prompt)`.

    Args:
        listeners: All hooks of the agent except this loop. These hooks must need only events that `DirectInvocation`
            sends to its `listeners`. None if the agent may have other hooks.
    """

    def __init__(self, listeners: Sequence[hooks.HookProvider] | None = None) -> None:
        self._listeners = listeners
        self._limits: dict[str, int] = {}
        self._is_middleware_added = False

    def register_hooks(self, registry: hooks.HookRegistry, **kwargs: Any) -> None:  # noqa: ARG002, ANN401 - Strands' signature
        """Called by Strands."""
        if HAS_MIDDLEWARE:
            registry.add_callback(hooks.BeforeInvocationEvent, self._before_invocation, order=math.inf)

    async def run(self, agent: Agent, prompt: Any) -> AgentResult:  # noqa: ANN401 - as Strands takes it
        """Invoke the agent once, and return Strands' result.

        Args:
            agent: An agent on an `SGLangModel`, with this loop among its hooks.
            prompt: The prompt, in a form that `Agent.invoke_async` accepts.
        """
        report_missing_names(IMPORT_FAULT)
        if IMPORT_FAULT or missing_loop_names(agent):
            return await agent.invoke_async(prompt)
        self._limits = {"turns": 1}
        return await agent.invoke_async(prompt, limits=cast("Any", self._limits))

    def _before_invocation(self, event: hooks.BeforeInvocationEvent) -> None:
        """Add this loop's middleware after the hooks' middleware, which then sees this loop's events."""
        if not self._is_middleware_added and not missing_loop_names(event.agent):
            self._is_middleware_added = True
            event.agent.add_middleware(AgentStreamStage, self._run_cycles)

    async def _run_cycles(self, context: Any, call_next: CallNext) -> AsyncGenerator[Any, None]:  # noqa: ANN401
        """Middleware around an invocation: run cycles directly where possible, else one cycle of Strands at a time."""
        agent, state = context.agent, context.invocation_state
        invocation = None if trace.get_current_span().is_recording() else self._new_invocation(agent, state)
        while True:
            if invocation is not None and can_run_directly(agent):
                for message in context.messages:
                    await invocation.append(message)
                context = dataclasses.replace(context, messages=[])
                end = await invocation.run()
                if end is not None:
                    stop_reason, message, interrupts = end
                    metrics = agent.event_loop_metrics
                    yield AgentStreamStage.result_event(
                        stop_reason, message, metrics, state["request_state"], interrupts
                    )
                    return
            self._limits["turns"] = _cycle_count(agent) + 1
            is_continued = False
            async for event in call_next(context):
                if isinstance(event, AgentStreamStage.result_event) and event["stop"][0] == _OUT_OF_TURNS:
                    is_continued = True
                else:
                    yield event
            if not is_continued:
                return
            context = dataclasses.replace(context, messages=[])

    def _new_invocation(self, agent: Agent, state: dict[str, Any]) -> DirectInvocation:
        if self._listeners is not None and _has_only_simple_tools(agent):
            return DirectInvocation(agent, state, self._listeners)
        return ObservedInvocation(agent, state)


def _has_only_simple_tools(agent: Agent) -> bool:
    return all(isinstance(tool, BoundedTool) and tool.is_simple for tool in agent.tool_registry.registry.values())


def _cycle_count(agent: Agent) -> int:
    invocation = agent.event_loop_metrics.latest_agent_invocation
    return 0 if invocation is None else len(invocation.cycles)
