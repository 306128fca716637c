"""A faster agent loop: its cost per turn depends only on the new messages, unlike the cost of Strands' own loop.

Strands' cycle streams each answer through a dozen generators, copies the history and records tracing spans. This loop
calls the model and the tools directly, and fires the same hook events with the same effects. If the agent has a
feature that this loop lacks, such as middleware, a callback handler or a session manager (see `can_run_directly`), or a
span is recorded, Strands' own cycle runs. It takes 2.4 times the CPU for an agent with a hook and 20 tool turns;
docs/performance.md lists all cases.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Final, cast

from opentelemetry import trace
from strands import Agent, hooks
from strands.agent import AgentResult
from strands.handlers.callback_handler import null_callback_handler
from strands.interrupt import Interrupt, InterruptException
from strands.plugins import Plugin
from strands.telemetry.metrics import Trace
from strands.telemetry.tracer import Tracer
from strands.tools.executors import ConcurrentToolExecutor, SequentialToolExecutor
from strands.tools.executors._executor import ToolExecutor
from strands.types._events import ToolInterruptEvent, ToolResultEvent
from strands.types.content import Message, split_system_prompt
from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException
from strands.types.tools import AgentTool, ToolResult, ToolSpec, ToolUse

from strands_rollout.agent.strands_names import missing_loop_names, report_losses
from strands_rollout.agent.tool_call import BoundedTool
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.record.branch import Answer
from strands_rollout.template.messages import error_message, error_result

try:
    from strands.agent._agent_delegation import AgentDelegation
    from strands.event_loop._recover_message_on_max_tokens_reached import recover_message_on_max_tokens_reached
    from strands.event_loop.event_loop import _estimate_input_tokens
    from strands.interrupt import PendingToolExecution
    from strands.middleware import ExecuteToolStage, InvokeModelStage
    from strands.middleware._agent_stream import AgentStreamStage
    from strands.tools._validator import validate_and_prepare_tools
    from strands.tools.structured_output._structured_output_context import StructuredOutputContext
    from strands.types.content import _ensure_tracking_id
except ImportError as e:  # Strands before 1.62, or a version with other private names: Strands' own loop runs
    IMPORT_FAULT = str(e)
else:
    IMPORT_FAULT = ""
HAS_MIDDLEWARE: Final = not IMPORT_FAULT
SHARED_PLUGINS: Final[Sequence[Plugin]] = [] if IMPORT_FAULT else [AgentDelegation()]
"""Strands' default plugins without state, built once: building them for each agent takes 1% of the CPU of an episode of
5 tool turns."""

logger = logging.getLogger(__name__)


class _NoTracer(Tracer):
    """Tracer of an agent whose spans nobody records.

    Strands' own tracer describes the agent in each unrecorded span, which takes 1% of the CPU of an episode of 5 tool
    turns.
    """

    def start_agent_span(self, *_args: Any, **_kwargs: Any) -> trace.Span:  # noqa: ANN401 - Strands' signature
        return trace.INVALID_SPAN

    def end_agent_span(self, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401 - Strands' signature
        pass


_NO_TRACER: Final = _NoTracer()


def skip_unrecorded_span(agent: Agent) -> None:
    """Start no span for an agent's invocations, unless the process has set up OpenTelemetry."""
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        agent.tracer = _NO_TRACER


CallNext = Callable[[Any], AsyncGenerator[Any, None]]
"""Runs the rest of the middleware chain, as Strands passes it to middleware."""

_OUT_OF_TURNS: Final = "limit_turns"  # Strands' stop reason at its limit of turns


class DirectLoop(hooks.HookProvider):
    """The loop of one agent: `Agent(..., hooks=[*hooks, loop])`, then `await loop.run(agent, prompt)`.

    Args:
        listeners: All hooks of the agent except this loop, if they need only the events that `DirectInvocation` sends
            to its `listeners`; None if the agent may have other hooks.
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
            prompt: As `Agent.invoke_async` takes it.
        """
        report_losses(IMPORT_FAULT)
        if IMPORT_FAULT or missing_loop_names(agent):
            return await agent.invoke_async(prompt)
        self._limits = {"turns": 1}
        return await agent.invoke_async(prompt, limits=cast("Any", self._limits))

    def _before_invocation(self, event: hooks.BeforeInvocationEvent) -> None:
        """Add this loop's middleware once, unless this release of Strands lacks a name that the loop uses.

        It comes after the middleware that hooks add, so that all other middleware sees this loop's events.
        """
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
        return DirectInvocation(agent, state, self._listeners if has_only_simple_tools(agent) else None)


def _has_no_observers(agent: Agent) -> bool:
    """Return True if no callback handler and no other middleware observes model calls or the invocation."""
    handlers = agent._middleware_registry._handlers  # Strands has no public accessor
    has_only_own_middleware = len(handlers.get(AgentStreamStage, ())) == 1 and not handlers.get(InvokeModelStage)
    return has_only_own_middleware and agent.callback_handler is null_callback_handler


def _cycle_count(agent: Agent) -> int:
    invocation = agent.event_loop_metrics.latest_agent_invocation
    return 0 if invocation is None else len(invocation.cycles)


TURN_CUT_MESSAGE: Final = "the turn was cut at its limit of tokens"
_MODULES_WITHOUT_TOKEN_READERS: Final = ("strands_rollout.agent.", "strands.agent.")
_CANCELLED_TEXT: Final = "Cancelled by user"
_ENDED_BY_HOOK_TEXT: Final = "Turn ended early by hook after tool execution"
_NO_USAGE: Final = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}

End = tuple[str, Message, list[Interrupt] | None]
"""Strands' stop reason, the agent's last message, and the interrupts of tools and hooks."""


class DirectInvocation:
    """One invocation of an agent: does the work of Strands' `event_loop_cycle` and tool executor without spans.

    Args:
        agent: An agent on an `SGLangModel`.
        state: The invocation's state, which hooks and tools share.
        listeners: All hooks that observe the agent. They receive the events before a model call, before a turn's tools,
            before a tool call, after a tool call that was cancelled or raised an exception, and after a turn's tools.
            None if anything may observe the agent; all of Strands' events, metrics and state are produced then.
    """

    def __init__(self, agent: Agent, state: dict[str, Any], listeners: Sequence[hooks.HookProvider] | None) -> None:
        self._agent = agent
        self._state = state
        self._is_observed = listeners is None
        self._listeners = listeners
        self._callbacks: dict[type, list[Any]] = {}  # callbacks of the listeners, by class of event
        self._specs: list[ToolSpec] = agent.tool_registry.get_all_tool_specs()
        self._given_specs: list[ToolSpec] = []
        self._simple_tools = {} if listeners is None else agent.tool_registry.registry
        self._started = 0.0
        self._trace: Trace | None = None
        self._has_answer = False

    async def run(self) -> End | None:
        """Run cycles until the invocation ends, and return its `End`; None if Strands' cycle must do the next step.

        Raises:
            MaxTokensReachedException: A turn was cut at its limit of tokens.
        """
        agent = self._agent
        self._state["agent"] = agent
        while can_run_directly(agent) if self._is_observed else not agent.cancel_signal.is_set():
            self._state.setdefault("request_state", {})
            if self._is_observed:
                self._begin_cycle()
            message, stop_reason = agent.messages[-1], "tool_use"
            try:
                if not any("toolUse" in block for block in message["content"]):
                    answer = await self._call_model_with_retry() if self._is_observed else (await self._call_model())[0]
                    message, stop_reason = cast("Message", answer.message), answer.stop_reason
                    if stop_reason == "max_tokens":
                        message = recover_message_on_max_tokens_reached(message)
                    if self._is_observed:
                        await self._add_answer(answer, message)
                    else:
                        agent.messages.append(message)
                if stop_reason == "max_tokens":
                    raise MaxTokensReachedException(TURN_CUT_MESSAGE)
                if stop_reason != "tool_use":
                    self._end_cycle()
                    return stop_reason, message, None
                if (end := await self._run_tools(message)) is not None:
                    return end
            except ContextWindowOverflowException as e:
                agent.conversation_manager.reduce_context(agent, e=e)
                self._has_answer = False  # the manager may have changed the history
        return None

    def _begin_cycle(self) -> None:
        cycle = self._state["event_loop_cycle_id"] = uuid.uuid4()
        self._started, self._trace = self._agent.event_loop_metrics.start_cycle({"event_loop_cycle_id": str(cycle)})
        self._state |= {"event_loop_cycle_trace": self._trace, "event_loop_cycle_span": trace.INVALID_SPAN}

    def _end_cycle(self) -> None:
        if self._trace is not None:
            self._agent.event_loop_metrics.end_cycle(self._started, self._trace)

    async def _call_model_with_retry(self) -> Answer:
        """Return an answer; hooks see answers and failures, and may request a retry after either."""
        self._add_child_trace("stream_messages")
        while True:
            try:
                answer, is_retried = await self._call_model()
                if not is_retried:
                    return answer
                self._agent.event_loop_metrics.update_usage(cast("Any", answer.usage))
            except InterruptException:
                raise
            except Exception as e:  # hooks see any exception of a model call
                failed = hooks.AfterModelCallEvent(agent=self._agent, invocation_state=self._state, exception=e)
                await self._fire_hooks(failed)
                if not failed.retry:
                    raise

    async def _add_answer(self, answer: Answer, message: Message) -> None:
        metrics, child = self._agent.event_loop_metrics, cast("Trace", self._trace).children[-1]
        child.add_message(message)
        child.end()
        await self.append(message)
        metrics.update_usage(cast("Any", answer.usage))
        metrics.update_metrics(cast("Any", answer.metrics))

    async def _call_model(self) -> tuple[Answer, bool]:
        """Return the answer of the policy, or of a hook that cancels the call; and True if a hook requests a retry."""
        agent, state = self._agent, self._state
        tokens = await self._projected_tokens() if self._is_observed and self._needs_token_estimate() else None
        before = hooks.BeforeModelCallEvent(agent=agent, invocation_state=state, projected_input_tokens=tokens)
        if interrupts := await self._fire_hooks(before):
            raise InterruptException(self._register_interrupts(interrupts)[0])
        if before.cancel:
            cancel_text = before.cancel if isinstance(before.cancel, str) else "model call denied by hook"
            answer = Answer(_assistant_message(cancel_text), "end_turn", _NO_USAGE, {"latencyMs": 0})
        else:
            text, blocks = split_system_prompt(agent.system_prompt_content)
            specs = self._current_specs() if self._is_observed else self._specs
            model = cast("SGLangModel", agent.model)
            # only this loop has changed the messages since the last answer, so the record need not compare them: the
            # comparison would take about 3% of the CPU at 20 turns and 7% at 80
            only_grew = self._has_answer and not self._is_observed
            answer = await model.answer(agent.messages, specs or None, text, blocks, agent, only_grew=only_grew)
            self._has_answer = True
            if agent.cancel_signal.is_set():
                answer = Answer(
                    _assistant_message(_CANCELLED_TEXT),
                    "cancelled",
                    {**_NO_USAGE},
                    {"latencyMs": 0, "timeToFirstByteMs": 0},
                )
            answer.message["metadata"] = {"usage": answer.usage, "metrics": answer.metrics}
        if not self._is_observed:
            return answer, False
        response = hooks.AfterModelCallEvent.ModelStopResponse(
            cast("Any", answer.message), cast("Any", answer.stop_reason)
        )
        after = hooks.AfterModelCallEvent(agent=agent, invocation_state=state, stop_response=response)
        await self._fire_hooks(after)
        if answer.stop_reason == "cancelled" and agent._cancel_message is not None:
            answer = dataclasses.replace(answer, message=_assistant_message(agent._cancel_message))
        return answer, after.retry

    def _needs_token_estimate(self) -> bool:
        """Return True if a hook may read a model call's projected tokens; Strands' own hooks usually don't."""
        if getattr(self._agent.conversation_manager, "_compression_threshold", None) is not None:
            return True
        listening = self._callbacks_for(hooks.BeforeModelCallEvent(agent=self._agent))
        return any(
            not getattr(listen, "__module__", "").startswith(_MODULES_WITHOUT_TOKEN_READERS) for listen in listening
        )

    async def _projected_tokens(self) -> int | None:
        try:
            return await _estimate_input_tokens(self._agent)
        except Exception as e:  # a user's model may raise anything; the estimate is optional for hooks
            logger.debug("could not estimate the tokens of a model call error=%r", e)
            return None

    async def _run_tools(self, message: Message) -> End | None:
        agent, state = self._agent, self._state
        before = hooks.BeforeToolsEvent(agent=agent, message=message, invocation_state=state)
        results: list[ToolResult] = []
        if interrupts := await self._fire_hooks(before):
            return self._end_with_interrupts(message, results, interrupts)
        try:
            interrupts = await self._run_calls(message, before, results)
        finally:
            results_message: Message = {"role": "user", "content": [{"toolResult": result} for result in results]}
            after = hooks.AfterToolsEvent(agent=agent, message=results_message, invocation_state=state)
            await self._fire_hooks(after)
        if self._is_observed:
            state["event_loop_parent_cycle_id"] = state["event_loop_cycle_id"]
        if interrupts:
            return self._end_with_interrupts(message, results, interrupts)
        if self._is_observed or after.end_turn:
            return await self._finish_tools(message, results_message, after)
        agent.messages.append(results_message)
        return None

    def _end_with_interrupts(self, message: Message, results: list[ToolResult], interrupts: list[Interrupt]) -> End:
        state = self._agent._interrupt_state
        state.pending_tool_execution = PendingToolExecution(message, results)
        state.activate()
        self._end_cycle()
        return "interrupt", message, interrupts

    async def _finish_tools(
        self, message: Message, results_message: Message, after: hooks.AfterToolsEvent
    ) -> End | None:
        """Append a turn's tool results; return the end if a hook, a tool or a cancellation ends the loop."""
        agent, end = self._agent, after.end_turn
        if not agent._observe_cancellation():
            agent._interrupt_state.end_tool_cycle()
        await self.append(results_message)
        self._end_cycle()
        if end:
            content = end if isinstance(end, list) else [{"text": end if isinstance(end, str) else _ENDED_BY_HOOK_TEXT}]
            last: Message = {"role": "assistant", "content": [*content]}
            await self.append(last)
            return "end_turn", last, None
        if agent._deferred_cancel or agent._observe_cancellation():
            if agent._cancel_message is not None:
                message = cast("Message", _assistant_message(agent._cancel_message))
                await self.append(message)
            return "cancelled", message, None
        # the older way for a tool to end the loop; the tool `stop` of strands-agents-tools uses it
        return ("tool_use", message, None) if self._state["request_state"].get("stop_event_loop") else None

    async def _run_calls(
        self, message: Message, before: hooks.BeforeToolsEvent, results: list[ToolResult]
    ) -> list[Interrupt]:
        """Add the results of a turn's calls to `results`; return the interrupts that tools and hooks raised."""
        agent, cancel = self._agent, before.cancel
        if cancel or agent.cancel_signal.is_set():
            default_text = "Tool cancelled by hook" if cancel else "Tool execution cancelled"
            cancel_text = cancel if isinstance(cancel, str) else default_text
            results += [_error_tool_result(call, cancel_text) for call in _tool_uses(message)]
            return []
        calls = _tool_uses(message)
        if len(calls) == 1 and (simple_tool := self._simple_tools.get(calls[0]["name"])) is not None:
            return await self._run_call(simple_tool, calls[0], results)
        calls, invalid = [], list[str]()
        validate_and_prepare_tools(message, calls, results, invalid)
        calls = [call for call in calls if call["toolUseId"] not in invalid]
        if len(calls) == 1:
            tool = self._find_tool(calls[0]["name"])
            if self._can_call_directly(tool):
                return await self._run_call(tool, calls[0], results)
        interrupts: list[Interrupt] = []
        events = agent.tool_executor._execute(
            agent, calls, results, cast("Any", self._trace), trace.INVALID_SPAN, self._state, StructuredOutputContext()
        )
        async for event in events:
            if isinstance(event, ToolInterruptEvent):
                interrupts += event.interrupts
        return interrupts

    def _can_call_directly(self, tool: AgentTool | None) -> bool:
        """Return True if `_run_call` does everything that Strands' executor would do for a turn's only call."""
        agent = self._agent
        middleware = agent._middleware_registry._handlers.get(ExecuteToolStage, ())
        # AgentDelegation is Strands' own middleware, which affects only agents used as tools
        return (
            isinstance(tool, BoundedTool)
            and type(agent.tool_executor) in (TurnToolExecutor, SequentialToolExecutor)
            and all(isinstance(getattr(entry.handler, "__self__", None), AgentDelegation) for entry in middleware)
        )

    def _find_tool(self, name: str) -> AgentTool | None:
        registry = self._agent.tool_registry
        return registry.dynamic_tools.get(name) or registry.registry.get(name)

    async def _run_call(self, tool: AgentTool | None, call: ToolUse, results: list[ToolResult]) -> list[Interrupt]:
        """Add the result of a turn's only call to `results`, as `ToolExecutor._stream` does; return any interrupts."""
        name = call["name"]
        if self._is_observed:
            self._update_state()
        while True:
            outcome = await self._call_tool(tool, name, call)
            if isinstance(outcome, list):
                return outcome
            if isinstance(outcome, dict):
                results.append(outcome)
                return []
            call = outcome.tool_use
            is_final = outcome.cancel_message is not None or not self._is_observed
            if is_final or not ToolExecutor._should_retry(self._agent, outcome):
                results.append(outcome.result)
                return []

    async def _call_tool(
        self, tool: AgentTool | None, name: str, call: ToolUse
    ) -> hooks.AfterToolCallEvent | ToolResult | list[Interrupt]:
        """Call the tool once.

        Returns:
            The event after the call, which the hooks have received; the bare result of a finished call if no hook
            needs that event; or the interrupts that a hook or the tool raised.
        """
        agent, state, last = self._agent, self._state, cast("Any", None)
        before = hooks.BeforeToolCallEvent(agent=agent, selected_tool=tool, tool_use=call, invocation_state=state)
        if interrupts := await self._fire_hooks(before):
            return interrupts
        if before.cancel_tool:
            cancel_text = before.cancel_tool if isinstance(before.cancel_tool, str) else "tool cancelled by user"
            failed = _error_tool_result(call, cancel_text)
            after = hooks.AfterToolCallEvent(agent, None, call, state, failed, cancel_message=cancel_text)
            await self._fire_hooks(after)
            return after
        is_renamed = before.selected_tool is tool and before.tool_use["name"] != name
        call, started = before.tool_use, time.monotonic()
        tool = self._find_tool(call["name"]) if is_renamed else before.selected_tool
        try:
            try:
                events = _run_unknown_tool(call) if tool is None else tool.stream(cast("Any", {**call}), state)
                async for event in events:
                    last = last if isinstance(last, ToolResultEvent | ToolInterruptEvent) else event
            finally:
                if self._trace is not None:
                    self._count_call(call, started, last)
            if isinstance(last, ToolInterruptEvent):
                return self._register_interrupts(last.interrupts)
            last = _error_tool_result(call, f"Tool '{call['name']}' did not return a result") if last is None else last
            event = last if isinstance(last, ToolResultEvent) else ToolResultEvent(last)
            if not self._is_observed:
                return event.tool_result
            seconds, error = time.monotonic() - started, event.exception
            after = hooks.AfterToolCallEvent(agent, tool, call, state, event.tool_result, error, duration=seconds)
            await self._fire_hooks(after)
        except InterruptException as e:
            return self._register_interrupts([e.interrupt])
        except Exception as e:  # any exception of a tool, or of a hook after it, is a tool result for the policy
            result, seconds = _error_tool_result(call, f"Error: {error_message(e)}"), time.monotonic() - started
            after = hooks.AfterToolCallEvent(agent, tool, call, state, result, e, duration=seconds)
            await self._fire_hooks(after)
        return after

    def _count_call(self, call: ToolUse, started: float, last: object) -> None:
        seconds, result = time.monotonic() - started, getattr(last, "tool_result", last)
        message = cast("Message", {"role": "user", "content": [{"toolResult": result}]})
        is_success = isinstance(result, dict) and result.get("status") == "success"
        child = self._add_child_trace(f"Tool: {call['name']}", time.time() - seconds)
        self._agent.event_loop_metrics.add_tool_usage(call, seconds, child, is_success, message)

    def _add_child_trace(self, name: str, started: float | None = None) -> Trace:
        """Add a child to the trace of this cycle in Strands' metrics, and return it."""
        cycle = cast("Trace", self._trace)
        cycle.add_child(Trace(name, parent_id=cycle.id, start_time=started))
        return cycle.children[-1]

    def _current_specs(self) -> list[ToolSpec]:
        """Return the specifications of the agent's tools, which hooks and tools may change between calls."""
        registry = self._agent.tool_registry
        given = [tool.tool_spec for tool in (*registry.registry.values(), *registry.dynamic_tools.values())]
        if given != self._given_specs:
            self._given_specs, self._specs = copy.deepcopy(given), registry.get_all_tool_specs()
        return self._specs

    def _update_state(self) -> None:
        """Set the keys of the invocation state that Strands' executor passes to tools."""
        agent = self._agent
        specs = [{"toolSpec": {**spec}} for spec in self._current_specs()]
        self._state |= {
            "agent": agent,
            "model": agent.model,
            "messages": agent.messages,
            "system_prompt": agent.system_prompt,
            "tool_config": {"tools": specs, "toolChoice": {"auto": {}}},
        }

    def _register_interrupts(self, interrupts: list[Interrupt]) -> list[Interrupt]:
        for interrupt in interrupts:
            self._agent._interrupt_state.interrupts.setdefault(interrupt.id, interrupt)
        return interrupts

    async def append(self, message: Message) -> None:
        """Append a message to the agent's history."""
        if self._is_observed:
            _ensure_tracking_id(message)
        self._agent.messages.append(message)
        if self._is_observed:
            await self._fire_hooks(hooks.MessageAddedEvent(agent=self._agent, message=message))

    async def _fire_hooks(self, event: hooks.BaseHookEvent) -> list[Interrupt]:
        """Call the hooks of an event, as Strands' registry does; return the interrupts that they raise."""
        interrupts: dict[str, Interrupt] = {}
        for callback in self._callbacks_for(event):
            try:
                returned = callback(event)
                if returned is not None and inspect.iscoroutinefunction(callback):
                    await returned
            except InterruptException as e:
                if e.interrupt.name in interrupts:
                    raise ValueError(f"got the interrupt {e.interrupt.name!r} twice; expected unique names") from e
                interrupts[e.interrupt.name] = e.interrupt
        return [*interrupts.values()]

    def _callbacks_for(self, event: hooks.BaseHookEvent) -> Iterable[Any]:
        """Return the callbacks of an event in their order. Callbacks of listeners don't change, and are cached."""
        found = self._callbacks.get(type(event))
        if found is not None:
            return found
        registered, listeners = self._agent.hooks.get_callbacks_for(event), self._listeners
        if listeners is None:
            return registered
        # a listener's callbacks are its methods
        found = [callback for callback in registered if getattr(callback, "__self__", None) in listeners]
        self._callbacks[type(event)] = found
        return found


def can_run_directly(agent: Agent) -> bool:
    """Return True if `DirectInvocation` can do the agent's next step; check again after each hook and tool."""
    features = (agent._session_manager, agent._background_tasks, agent._checkpointing, agent._interrupt_state.activated)
    return (
        isinstance(agent.model, SGLangModel)
        and not agent.cancel_signal.is_set()
        and agent._default_structured_output_model is None
        and not any(features)
        and _has_no_observers(agent)
    )


def _assistant_message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"text": text}]}


def _error_tool_result(call: ToolUse, text: str) -> ToolResult:
    return cast("ToolResult", error_result(str(call.get("toolUseId")), text))


async def _run_unknown_tool(call: ToolUse) -> AsyncGenerator[ToolResultEvent, None]:
    text = f"Unknown tool: {call['name']}"
    yield ToolResultEvent(_error_tool_result(call, text), exception=Exception(text))


def has_only_simple_tools(agent: Agent) -> bool:
    """Return True if each tool of the agent receives only its arguments."""
    return all(map(_is_simple_tool, agent.tool_registry.registry.values()))


def _is_simple_tool(tool: object) -> bool:
    return isinstance(tool, BoundedTool) and tool.is_simple


def _tool_uses(message: Message) -> list[ToolUse]:
    return [block["toolUse"] for block in message["content"] if "toolUse" in block]


class TurnToolExecutor(ConcurrentToolExecutor):
    """Strands tool executor that runs a turn's only call in place, and several calls concurrently."""

    def __init__(self) -> None:
        self._in_place = SequentialToolExecutor()

    async def _execute(self, agent: Agent, tool_uses: list[ToolUse], *rest: Any) -> AsyncGenerator[Any, None]:  # noqa: ANN401 - Strands' arguments
        execute = self._in_place._execute if len(tool_uses) == 1 else super()._execute
        async for event in execute(agent, tool_uses, *rest):
            yield event
