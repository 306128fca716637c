"""An invocation that a user's code may observe with hooks, plugins, or tools that receive the agent."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any, Final, cast

from opentelemetry import trace
from strands import Agent, hooks
from strands.event_loop._recover_message_on_max_tokens_reached import recover_message_on_max_tokens_reached
from strands.event_loop.event_loop import _estimate_input_tokens
from strands.interrupt import Interrupt, InterruptException
from strands.telemetry.metrics import Trace
from strands.tools.executors._executor import ToolExecutor
from strands.types._events import ToolInterruptEvent, ToolResultEvent
from strands.types.content import Message, _ensure_tracking_id
from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException
from strands.types.tools import AgentTool, ToolResult, ToolSpec, ToolUse

from strands_rollout.agent.invocation import (
    NO_USAGE,
    DirectInvocation,
    End,
    assistant_message,
    can_run_directly,
    cancel_text,
    cancelled_results,
    end_message,
    error_tool_result,
    tool_uses,
)
from strands_rollout.agent.limits import TURN_CUT_MESSAGE
from strands_rollout.record.record import Answer
from strands_rollout.template.messages import error_message

logger = logging.getLogger(__name__)

_MODULES_WITHOUT_TOKEN_READERS: Final = ("strands_rollout.agent.", "strands.agent.")


class ObservedInvocation(DirectInvocation):
    """An invocation with all events, metrics, traces and state of Strands' `event_loop_cycle` and tool executor.

    Hooks and tools have the same effects as in Strands' loop. Strands' spans are missing: `DirectLoop` uses this
    invocation only where no span is recorded.

    Args:
        agent: An agent on an `SGLangModel`.
        state: The invocation's state, which hooks and tools share.
    """

    _cycle_started: float
    _cycle_trace: Trace

    def __init__(self, agent: Agent, state: dict[str, Any]) -> None:
        super().__init__(agent, state, listeners=())
        self._given_specs: list[ToolSpec] = []

    async def append(self, message: Message) -> None:
        """Append a message to the agent's history, and call the hooks on `MessageAddedEvent`."""
        _ensure_tracking_id(message)
        self._agent.messages.append(message)
        await self._fire_hooks(hooks.MessageAddedEvent(agent=self._agent, message=message))

    async def run(self) -> End | None:
        """Run cycles until the invocation ends; see `DirectInvocation.run`."""
        agent, state = self._agent, self._state
        state["agent"] = agent
        while can_run_directly(agent):
            state.setdefault("request_state", {})
            self._begin_cycle()
            message = agent.messages[-1]
            try:
                if not tool_uses(message):
                    answer = await self._call_model_with_retry()
                    message = cast("Message", answer.message)
                    if answer.stop_reason == "max_tokens":
                        await self._add_answer(answer, recover_message_on_max_tokens_reached(message))
                        raise MaxTokensReachedException(TURN_CUT_MESSAGE)
                    await self._add_answer(answer, message)
                    if answer.stop_reason != "tool_use":
                        self._end_cycle()
                        return answer.stop_reason, message, None
                if (end := await self._run_tools(message)) is not None:
                    return end
            except ContextWindowOverflowException as e:
                agent.conversation_manager.reduce_context(agent, e=e)
        return None

    def _begin_cycle(self) -> None:
        cycle, metrics = uuid.uuid4(), self._agent.event_loop_metrics
        self._state["event_loop_cycle_id"] = cycle
        self._cycle_started, self._cycle_trace = metrics.start_cycle({"event_loop_cycle_id": str(cycle)})
        self._state |= {"event_loop_cycle_trace": self._cycle_trace, "event_loop_cycle_span": trace.INVALID_SPAN}

    def _end_cycle(self) -> None:
        self._agent.event_loop_metrics.end_cycle(self._cycle_started, self._cycle_trace)

    def _add_child_trace(self, name: str, started: float | None = None) -> Trace:
        child = Trace(name, parent_id=self._cycle_trace.id, start_time=started)
        self._cycle_trace.add_child(child)
        return child

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

    async def _call_model(self) -> tuple[Answer, bool]:
        """Return the answer of the policy or of a hook that cancels the call, and whether a hook requests a retry."""
        agent, state = self._agent, self._state
        tokens = await self._projected_tokens() if self._needs_token_estimate() else None
        before = hooks.BeforeModelCallEvent(agent=agent, invocation_state=state, projected_input_tokens=tokens)
        if interrupts := await self._fire_hooks(before):
            raise InterruptException(self._register_interrupts(interrupts)[0])
        if before.cancel:
            text = cancel_text(before.cancel, "model call denied by hook")
            answer = Answer(assistant_message(text), "end_turn", NO_USAGE, {"latencyMs": 0})
        else:
            answer = await self._sample(self._current_specs())
        response = hooks.AfterModelCallEvent.ModelStopResponse(
            cast("Any", answer.message), cast("Any", answer.stop_reason)
        )
        after = hooks.AfterModelCallEvent(agent=agent, invocation_state=state, stop_response=response)
        await self._fire_hooks(after)
        if answer.stop_reason == "cancelled" and agent._cancel_message is not None:
            answer = dataclasses.replace(answer, message=assistant_message(agent._cancel_message))
        return answer, after.retry

    def _needs_token_estimate(self) -> bool:
        """Return whether a hook may read the estimate.

        Strands' own hooks read it only if the conversation manager has a compression threshold.
        """
        agent = self._agent
        if getattr(agent.conversation_manager, "_compression_threshold", None) is not None:
            return True
        listening = agent.hooks.get_callbacks_for(hooks.BeforeModelCallEvent(agent=agent))
        return any(
            not getattr(listen, "__module__", "").startswith(_MODULES_WITHOUT_TOKEN_READERS) for listen in listening
        )

    async def _projected_tokens(self) -> int | None:
        try:
            return await _estimate_input_tokens(self._agent)
        except Exception as e:  # a user's model may raise anything; the estimate is optional for hooks
            logger.debug("could not estimate the input tokens of a model call: %r", e)
            return None

    async def _add_answer(self, answer: Answer, message: Message) -> None:
        metrics, child = self._agent.event_loop_metrics, self._cycle_trace.children[-1]
        child.add_message(message)
        child.end()
        await self.append(message)
        metrics.update_usage(cast("Any", answer.usage))
        metrics.update_metrics(cast("Any", answer.metrics))

    def _current_specs(self) -> list[ToolSpec]:
        """Return the specifications of the agent's tools, which hooks and tools may change between calls."""
        registry = self._agent.tool_registry
        given = [tool.tool_spec for tool in (*registry.registry.values(), *registry.dynamic_tools.values())]
        if given != self._given_specs:
            self._given_specs, self._specs = copy.deepcopy(given), registry.get_all_tool_specs()
        return self._specs

    async def _run_tools(self, message: Message) -> End | None:
        agent, state = self._agent, self._state
        before = hooks.BeforeToolsEvent(agent=agent, message=message, invocation_state=state)
        results: list[ToolResult] = []
        if interrupts := await self._fire_hooks(before):
            return self._interrupt(message, results, interrupts)
        try:
            if before.cancel or agent.cancel_signal.is_set():
                results += cancelled_results(message, before.cancel)
            else:
                interrupts = await self._run_any_calls(message, results, self._cycle_trace)
        finally:
            results_message: Message = {"role": "user", "content": [{"toolResult": result} for result in results]}
            after = hooks.AfterToolsEvent(agent=agent, message=results_message, invocation_state=state)
            await self._fire_hooks(after)
        state["event_loop_parent_cycle_id"] = state["event_loop_cycle_id"]
        if interrupts:
            return self._interrupt(message, results, interrupts)
        if not agent._observe_cancellation():
            agent._interrupt_state.end_tool_cycle()
        await self.append(results_message)
        self._end_cycle()
        return await self._end_after_tools(message, after)

    def _interrupt(self, message: Message, results: list[ToolResult], interrupts: list[Interrupt]) -> End:
        end = super()._interrupt(message, results, interrupts)
        self._end_cycle()
        return end

    async def _end_after_tools(self, message: Message, after: hooks.AfterToolsEvent) -> End | None:
        agent = self._agent
        if after.end_turn:
            last = end_message(after.end_turn)
            await self.append(last)
            return "end_turn", last, None
        if agent._deferred_cancel or agent._observe_cancellation():
            if agent._cancel_message is not None:
                message = cast("Message", assistant_message(agent._cancel_message))
                await self.append(message)
            return "cancelled", message, None
        # the older way for a tool to end the loop; the tool `stop` of strands-agents-tools uses it
        return ("tool_use", message, None) if self._state["request_state"].get("stop_event_loop") else None

    async def _run_call(self, tool: AgentTool, call: ToolUse, results: list[ToolResult]) -> list[Interrupt]:
        """Run a turn's only call as Strands' `ToolExecutor._stream` does."""
        name = call["name"]
        self._update_state()
        while True:
            outcome = await self._call_tool(tool, name, call)
            if isinstance(outcome, list):
                return outcome
            call = outcome.tool_use
            if outcome.cancel_message is not None or not ToolExecutor._should_retry(self._agent, outcome):
                results.append(outcome.result)
                return []

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

    async def _call_tool(self, tool: AgentTool, name: str, call: ToolUse) -> hooks.AfterToolCallEvent | list[Interrupt]:
        agent, state, last = self._agent, self._state, cast("Any", None)
        before = hooks.BeforeToolCallEvent(agent=agent, selected_tool=tool, tool_use=call, invocation_state=state)
        if interrupts := await self._fire_hooks(before):
            return interrupts
        if before.cancel_tool:
            text = cancel_text(before.cancel_tool, "tool cancelled by user")
            failed = error_tool_result(call, text)
            after = hooks.AfterToolCallEvent(agent, None, call, state, failed, cancel_message=text)
            await self._fire_hooks(after)
            return after
        is_renamed = before.selected_tool is tool and before.tool_use["name"] != name
        call, started = before.tool_use, time.monotonic()
        selected = self._find_tool(call["name"]) if is_renamed else before.selected_tool
        try:
            try:
                events = _run_unknown_tool(call) if selected is None else selected.stream(cast("Any", {**call}), state)
                async for event in events:
                    last = last if isinstance(last, ToolResultEvent | ToolInterruptEvent) else event
            finally:
                self._count_call(call, started, last)
            if isinstance(last, ToolInterruptEvent):
                return self._register_interrupts(last.interrupts)
            last = error_tool_result(call, f"Tool '{call['name']}' did not return a result") if last is None else last
            event = last if isinstance(last, ToolResultEvent) else ToolResultEvent(last)
            seconds, error = time.monotonic() - started, event.exception
            after = hooks.AfterToolCallEvent(agent, selected, call, state, event.tool_result, error, duration=seconds)
            await self._fire_hooks(after)
        except InterruptException as e:
            return self._register_interrupts([e.interrupt])
        except Exception as e:  # any exception of a tool, or of a hook after it, becomes a tool result for the policy
            result, seconds = error_tool_result(call, f"Error: {error_message(e)}"), time.monotonic() - started
            after = hooks.AfterToolCallEvent(agent, selected, call, state, result, e, duration=seconds)
            await self._fire_hooks(after)
        return after

    def _count_call(self, call: ToolUse, started: float, last: object) -> None:
        seconds, result = time.monotonic() - started, getattr(last, "tool_result", last)
        message = cast("Message", {"role": "user", "content": [{"toolResult": result}]})
        is_success = isinstance(result, dict) and result.get("status") == "success"
        child = self._add_child_trace(f"Tool: {call['name']}", time.time() - seconds)
        self._agent.event_loop_metrics.add_tool_usage(call, seconds, child, is_success, message)

    async def _fire_hooks(self, event: hooks.BaseHookEvent) -> list[Interrupt]:
        """Call the hooks of an event, as Strands' registry does; return the interrupts that they raise."""
        interrupts: dict[str, Interrupt] = {}
        for callback in self._agent.hooks.get_callbacks_for(event):
            try:
                returned = callback(event)
                if returned is not None and inspect.iscoroutinefunction(callback):
                    await returned
            except InterruptException as e:
                if e.interrupt.name in interrupts:
                    raise ValueError(f"got the interrupt {e.interrupt.name!r} twice; expected unique names") from e
                interrupts[e.interrupt.name] = e.interrupt
        return [*interrupts.values()]


async def _run_unknown_tool(call: ToolUse) -> AsyncGenerator[ToolResultEvent, None]:
    text = f"Unknown tool: {call['name']}"
    yield ToolResultEvent(error_tool_result(call, text), exception=Exception(text))
