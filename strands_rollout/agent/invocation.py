"""One invocation of an agent: call the model, run the tools, append their results, until the policy answers.

This module and `observed_invocation` need private names of Strands. If the installed Strands lacks one of these names,
`loop` uses neither of the two modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final, cast

from opentelemetry import trace
from strands import Agent, hooks
from strands.agent._agent_delegation import AgentDelegation
from strands.handlers.callback_handler import null_callback_handler
from strands.interrupt import Interrupt, PendingToolExecution
from strands.middleware import ExecuteToolStage, InvokeModelStage
from strands.middleware._agent_stream import AgentStreamStage
from strands.telemetry.metrics import Trace
from strands.tools._validator import validate_and_prepare_tools
from strands.tools.executors import SequentialToolExecutor
from strands.tools.structured_output._structured_output_context import StructuredOutputContext
from strands.types._events import ToolInterruptEvent, ToolResultEvent
from strands.types.content import Message, split_system_prompt
from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException
from strands.types.tools import AgentTool, ToolResult, ToolSpec, ToolUse

from strands_rollout.agent.limits import TURN_CUT_MESSAGE
from strands_rollout.agent.tool_call import BoundedTool, TurnToolExecutor
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.record.record import Answer
from strands_rollout.template.messages import error_message, error_result

End = tuple[str, Message, list[Interrupt] | None]
"""Strands' stop reason, the agent's last message, and the interrupts of tools and hooks (None if none)."""

NO_USAGE: Final = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}
_CANCELLED_TEXT: Final = "Cancelled by user"
_ENDED_BY_HOOK_TEXT: Final = "Turn ended early by hook after tool execution"


class DirectInvocation:
    """An invocation that only this package's own hooks observe; `ObservedInvocation` is for all other invocations.

    It does not record Strands' cycles, metrics and traces, since nobody would read them.

    Args:
        agent: An agent on an `SGLangModel`, with simple tools only (`BoundedTool.is_simple`).
        state: The invocation's state, which hooks and tools share.
        listeners: All hooks of the agent except the loop. They get the events before a model call, before and after
            a turn's tools, before a tool call, and after a call of an unknown tool. They may miss all other events.
            They may raise exceptions, cancel tool calls, and set `end_turn` after a turn's tools. Other changes to an
            event may have no effect.
    """

    def __init__(self, agent: Agent, state: dict[str, Any], listeners: Sequence[hooks.HookProvider]) -> None:
        self._agent = agent
        self._state = state
        self._listeners = listeners
        self._callbacks: dict[type, list[Any]] = {}
        self._tools = agent.tool_registry.registry
        self._specs: list[ToolSpec] = agent.tool_registry.get_all_tool_specs()
        self._only_grew = False

    async def append(self, message: Message) -> None:
        """Append a message to the agent's history."""
        self._agent.messages.append(message)

    async def run(self) -> End | None:
        """Call the model and run its tool calls until the invocation ends.

        Returns:
            The invocation's end; None if `DirectLoop` must run Strands' own cycle for the next step.

        Raises:
            MaxTokensReachedException: A turn was cut at its limit of tokens.
            Exception: An exception of the model, the conversation manager or a listener.
        """
        agent, state = self._agent, self._state
        state["agent"] = agent
        while not agent.cancel_signal.is_set():
            state.setdefault("request_state", {})
            message = agent.messages[-1]
            try:
                # after a resume, the history may end with calls: they are run before the model is called
                if not tool_uses(message):
                    await self._notify(hooks.BeforeModelCallEvent(agent=agent, invocation_state=state))
                    # `_only_grew`: only this loop changed the messages since the previous answer. The record then skips
                    # the comparison of the messages: about 3% of the CPU at 20 turns, and 7% at 80
                    answer = await self._sample(self._specs, only_grew=self._only_grew)
                    self._only_grew = True
                    message = cast("Message", answer.message)
                    agent.messages.append(message)
                    if answer.stop_reason == "max_tokens":  # a cut turn has no calls
                        raise MaxTokensReachedException(TURN_CUT_MESSAGE)
                    if answer.stop_reason != "tool_use":
                        return answer.stop_reason, message, None
                if (end := await self._run_tools(message)) is not None:
                    return end
            except ContextWindowOverflowException as e:
                agent.conversation_manager.reduce_context(agent, e=e)
                self._only_grew = False  # the manager may have changed the history
        return None

    async def _sample(self, specs: list[ToolSpec], *, only_grew: bool = False) -> Answer:
        agent = self._agent
        text, blocks = split_system_prompt(agent.system_prompt_content)
        model = cast("SGLangModel", agent.model)
        answer = await model.answer(agent.messages, specs or None, text, blocks, agent, only_grew=only_grew)
        if agent.cancel_signal.is_set():
            metrics = {"latencyMs": 0, "timeToFirstByteMs": 0}
            answer = Answer(assistant_message(_CANCELLED_TEXT), "cancelled", {**NO_USAGE}, metrics)
        answer.message["metadata"] = {"usage": answer.usage, "metrics": answer.metrics}
        return answer

    async def _run_tools(self, message: Message) -> End | None:
        """Run a turn's tools and append their results; return the end if a listener or a tool ends the invocation."""
        agent, state = self._agent, self._state
        before = hooks.BeforeToolsEvent(agent=agent, message=message, invocation_state=state)
        await self._notify(before)
        results, interrupts = list[ToolResult](), list[Interrupt]()
        if before.cancel or agent.cancel_signal.is_set():
            results += cancelled_results(message, before.cancel)
        else:
            interrupts = await self._run_calls(message, results)
        results_message: Message = {"role": "user", "content": [{"toolResult": result} for result in results]}
        after = hooks.AfterToolsEvent(agent=agent, message=results_message, invocation_state=state)
        await self._notify(after)
        if interrupts:
            return self._interrupt(message, results, interrupts)
        agent.messages.append(results_message)
        if not after.end_turn:
            return None
        last = end_message(after.end_turn)
        agent.messages.append(last)
        return "end_turn", last, None

    async def _run_calls(self, message: Message, results: list[ToolResult]) -> list[Interrupt]:
        """Add the results of a turn's calls to `results`; return the interrupts that tools raised."""
        calls = tool_uses(message)
        if len(calls) == 1 and (tool := self._tools.get(calls[0]["name"])) is not None:
            return await self._run_call(tool, calls[0], results)
        return await self._run_any_calls(message, results, None)

    async def _run_call(self, tool: AgentTool, call: ToolUse, results: list[ToolResult]) -> list[Interrupt]:
        agent, state, last = self._agent, self._state, cast("Any", None)
        before = hooks.BeforeToolCallEvent(agent=agent, selected_tool=tool, tool_use=call, invocation_state=state)
        await self._notify(before)
        if before.cancel_tool:
            results.append(error_tool_result(call, cancel_text(before.cancel_tool, "tool cancelled by user")))
            return []
        try:
            async for event in tool.stream(call, state):  # the last event is a result or an interrupt
                last = event
        except Exception as e:  # any exception of a tool becomes a tool result for the policy
            last = error_tool_result(call, f"Error: {error_message(e)}")
        if isinstance(last, ToolInterruptEvent):
            return self._register_interrupts(last.interrupts)
        results.append(last.tool_result if isinstance(last, ToolResultEvent) else last)
        return []

    async def _run_any_calls(
        self, message: Message, results: list[ToolResult], cycle_trace: Trace | None
    ) -> list[Interrupt]:
        """Do the same as `_run_calls` for any turn, also with several calls, unknown tools or invalid names."""
        agent, calls, invalid = self._agent, list[ToolUse](), list[str]()
        validate_and_prepare_tools(message, calls, results, invalid)
        calls = [call for call in calls if call["toolUseId"] not in invalid]
        if len(calls) == 1 and (tool := self._find_directly_callable(calls[0]["name"])) is not None:
            return await self._run_call(tool, calls[0], results)
        interrupts: list[Interrupt] = []
        arguments = cast("Any", cycle_trace), trace.INVALID_SPAN, self._state, StructuredOutputContext()
        async for event in agent.tool_executor._execute(agent, calls, results, *arguments):
            if isinstance(event, ToolInterruptEvent):
                interrupts += event.interrupts
        return interrupts

    def _find_directly_callable(self, name: str) -> AgentTool | None:
        """Return the tool if `_run_call` can run its call with the same effects as Strands' executor; else None."""
        agent, tool = self._agent, self._find_tool(name)
        middleware = agent._middleware_registry._handlers.get(ExecuteToolStage, ())
        # AgentDelegation is Strands' own middleware, which affects only agents used as tools
        is_direct = (
            isinstance(tool, BoundedTool)
            and type(agent.tool_executor) in (TurnToolExecutor, SequentialToolExecutor)
            and all(isinstance(getattr(entry.handler, "__self__", None), AgentDelegation) for entry in middleware)
        )
        return tool if is_direct else None

    def _find_tool(self, name: str) -> AgentTool | None:
        registry = self._agent.tool_registry
        return registry.dynamic_tools.get(name) or registry.registry.get(name)

    def _register_interrupts(self, interrupts: list[Interrupt]) -> list[Interrupt]:
        for interrupt in interrupts:
            self._agent._interrupt_state.interrupts.setdefault(interrupt.id, interrupt)
        return interrupts

    def _interrupt(self, message: Message, results: list[ToolResult], interrupts: list[Interrupt]) -> End:
        state = self._agent._interrupt_state
        state.pending_tool_execution = PendingToolExecution(message, results)
        state.activate()
        return "interrupt", message, interrupts

    async def _notify(self, event: hooks.BaseHookEvent) -> None:
        callbacks = self._callbacks.get(type(event))
        if callbacks is None:  # found once, because the callbacks of the listeners don't change
            registered = self._agent.hooks.get_callbacks_for(event)
            # a listener's callbacks are its methods
            callbacks = [one for one in registered if getattr(one, "__self__", None) in self._listeners]
            self._callbacks[type(event)] = callbacks
        for callback in callbacks:
            returned = callback(event)
            if returned is not None and inspect.iscoroutinefunction(callback):
                await returned


def can_run_directly(agent: Agent) -> bool:
    """Return True if an invocation of this package can do the agent's next step; check this before each step."""
    features = (agent._session_manager, agent._background_tasks, agent._checkpointing, agent._interrupt_state.activated)
    return (
        isinstance(agent.model, SGLangModel)
        and not agent.cancel_signal.is_set()
        and agent._default_structured_output_model is None
        and not any(features)
        and _has_no_observers(agent)
    )


def _has_no_observers(agent: Agent) -> bool:
    """Return True if nothing observes model calls or the invocation; middleware of tool calls is allowed."""
    handlers = agent._middleware_registry._handlers  # Strands has no public accessor
    has_only_own_middleware = len(handlers.get(AgentStreamStage, ())) == 1 and not handlers.get(InvokeModelStage)
    return has_only_own_middleware and agent.callback_handler is null_callback_handler


def tool_uses(message: Message) -> list[ToolUse]:
    """Return the calls of a turn."""
    return [block["toolUse"] for block in message["content"] if "toolUse" in block]


def cancelled_results(message: Message, cancel: bool | str) -> list[ToolResult]:  # noqa: FBT001 - Strands' value
    """Return an error result for each call of a turn whose tools are not run.

    If a hook cancelled the calls, `cancel` is the hook's text or True. If the agent was cancelled, it is False.
    """
    text = cancel_text(cancel, "Tool cancelled by hook" if cancel else "Tool execution cancelled")
    return [error_tool_result(call, text) for call in tool_uses(message)]


def cancel_text(cancel: bool | str, default: str) -> str:  # noqa: FBT001 - Strands' value
    """Return the text that a hook set when it cancelled a step; `default` if it set none."""
    return cancel if isinstance(cancel, str) else default


def end_message(end_turn: Any) -> Message:  # noqa: ANN401 - a hook's value
    """Return the agent's last message after a hook ended the turn; `end_turn` is the hook's text, blocks or True."""
    if isinstance(end_turn, list):
        return {"role": "assistant", "content": [*end_turn]}
    return cast("Message", assistant_message(end_turn if isinstance(end_turn, str) else _ENDED_BY_HOOK_TEXT))


def assistant_message(text: str) -> dict[str, Any]:
    """Return an assistant message with `text`."""
    return {"role": "assistant", "content": [{"text": text}]}


def error_tool_result(call: ToolUse, text: str) -> ToolResult:
    """Return an error result with this text for a call."""
    return cast("ToolResult", error_result(str(call.get("toolUseId")), text))
