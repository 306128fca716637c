"""The agent loop beside Strands' own: cycles run one after the other, at the cost of the new messages only.

Strands' own cycle streams each answer through a dozen generators, copies the history for it, and writes it into spans.
Where nobody could observe these, the policy's answer is taken, and its tool called, directly: hooks hear the same
events, which may do the same. Whatever else is to be heard (middleware, a callback handler, a span that records) is
left to Strands' cycle. An agent with a hook would take 2.4 times the CPU there at 20 tool turns; see
docs/performance.md.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final, cast

from opentelemetry import trace
from strands import Agent, hooks
from strands.agent import AgentResult
from strands.handlers.callback_handler import null_callback_handler
from strands.interrupt import Interrupt, InterruptException
from strands.telemetry.metrics import Trace
from strands.tools.executors import ConcurrentToolExecutor, SequentialToolExecutor
from strands.tools.executors._executor import ToolExecutor
from strands.types._events import ToolInterruptEvent, ToolResultEvent
from strands.types.content import Message, split_system_prompt
from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException
from strands.types.tools import AgentTool, ToolResult, ToolSpec, ToolUse

from strands_rollout.agent.strands_names import missing_of_loop, report_losses
from strands_rollout.agent.tool_call import BoundedTool
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.record.branch import Answer
from strands_rollout.template.messages import error_result, error_words

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
except ImportError as e:  # Strands before 1.62, or one that has renamed something: its own loop runs
    IMPORT_FAULT = str(e)
else:
    IMPORT_FAULT = ""
HAS_MIDDLEWARE: Final = not IMPORT_FAULT

logger = logging.getLogger(__name__)

Next = Callable[[Any], AsyncGenerator[Any, None]]

_OUT_OF_TURNS: Final = "limit_turns"


class FlatCycles(hooks.HookProvider):
    """One agent's cycles: `Agent(..., hooks=[*hooks, cycles])`, then `await cycles.run(agent, prompt)`.

    Args:
        listeners: The only hooks beside these cycles, none of which needs events that `OwnCycles` does not send to
            them; None where there are others.
    """

    def __init__(self, listeners: Sequence[hooks.HookProvider] | None = None) -> None:
        self._listeners = listeners
        self._limits: dict[str, int] = {}
        self._is_added = False

    def register_hooks(self, registry: hooks.HookRegistry, **kwargs: Any) -> None:  # noqa: ARG002, ANN401 - Strands' signature
        """Called by Strands."""
        if HAS_MIDDLEWARE:
            registry.add_callback(hooks.BeforeInvocationEvent, self._before_invocation, order=math.inf)

    async def run(self, agent: Agent, prompt: Any) -> AgentResult:  # noqa: ANN401 - whatever Strands takes
        """Invoke the agent once, until it stops of its own accord; return what Strands says of its end.

        Args:
            agent: Built with these cycles among its hooks, on an `SGLangModel`.
            prompt: As `Agent.invoke_async` takes it.
        """
        report_losses(IMPORT_FAULT)
        if IMPORT_FAULT or missing_of_loop(agent):
            return await agent.invoke_async(prompt)
        self._limits = {"turns": 1}
        return await agent.invoke_async(prompt, limits=cast("Any", self._limits))

    def _before_invocation(self, event: hooks.BeforeInvocationEvent) -> None:
        """Add the middleware after all others, hooks' too, so that they see what it gives."""
        if not self._is_added and not missing_of_loop(event.agent):
            self._is_added = True
            event.agent.add_middleware(AgentStreamStage, self._cycles)

    async def _cycles(self, context: Any, following: Next) -> AsyncGenerator[Any, None]:  # noqa: ANN401
        """Middleware around an invocation: own cycles as long as they serve, else Strands', one after the other."""
        agent, state = context.agent, context.invocation_state
        own = None if trace.get_current_span().is_recording() else self._own_cycles(agent, state)
        while True:
            if own is not None and is_served(agent):
                for message in context.messages:
                    await own.append(message)
                context = dataclasses.replace(context, messages=[])
                end = await own.run()
                if end is not None:
                    stop_reason, message, asking = end
                    metrics = agent.event_loop_metrics
                    yield AgentStreamStage.result_event(stop_reason, message, metrics, state["request_state"], asking)
                    return
            self._limits["turns"] = _cycles_so_far(agent) + 1
            goes_on = False
            async for event in following(context):
                if isinstance(event, AgentStreamStage.result_event) and event["stop"][0] == _OUT_OF_TURNS:
                    goes_on = True
                else:
                    yield event
            if not goes_on:
                return
            context = dataclasses.replace(context, messages=[])

    def _own_cycles(self, agent: Agent, state: dict[str, Any]) -> OwnCycles:
        return OwnCycles(agent, state, self._listeners if are_simple(agent) else None)


def _is_unseen(agent: Agent) -> bool:
    """Return True if no other middleware and no callback handler hears a model call or the whole."""
    handlers = agent._middleware_registry._handlers  # there is no public way to ask
    is_ours_alone = len(handlers.get(AgentStreamStage, ())) == 1 and not handlers.get(InvokeModelStage)
    return is_ours_alone and agent.callback_handler is null_callback_handler


def _cycles_so_far(agent: Agent) -> int:
    invocation = agent.event_loop_metrics.latest_agent_invocation
    return 0 if invocation is None else len(invocation.cycles)


TURN_CUT: Final = "the turn was cut at its limit of tokens"
_INDIFFERENT: Final = ("strands_rollout.agent.", "strands.agent.")
_CANCELLED: Final = "Cancelled by user"
_ENDED_BY_HOOK: Final = "Turn ended early by hook after tool execution"
_NO_USAGE: Final = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}

End = tuple[str, Message, list[Interrupt] | None]
"""Strands' stop reason, the agent's last message, and what a tool or hook would have a person answer."""


class OwnCycles:
    """The cycles of one invocation of an agent: what Strands' `event_loop_cycle` and tool executor do, told to no span.

    Args:
        agent: Built on an `SGLangModel`.
        state: The invocation's state, which hooks and tools share.
        listeners: The only ones who see the agent: hooks of events before a model call, a turn's tools and a call, and
            after a turn's tools. None where anybody may, who is then shown all that Strands shows.
    """

    def __init__(self, agent: Agent, state: dict[str, Any], listeners: Sequence[hooks.HookProvider] | None) -> None:
        self._agent = agent
        self._state = state
        self._is_watched = listeners is None
        self._hooks = agent.hooks if listeners is None else hooks.HookRegistry()
        for listener in listeners or ():
            self._hooks.add_hook(listener)
        self._specs: list[ToolSpec] = agent.tool_registry.get_all_tool_specs()
        self._given_specs: list[ToolSpec] = []
        self._simple = {} if listeners is None else agent.tool_registry.registry
        self._started = 0.0
        self._trace: Trace | None = None
        self._has_answer = False

    async def run(self) -> End | None:
        """Continue from the agent's messages to an end; return None where the next step is one for Strands' cycle."""
        agent = self._agent
        self._state["agent"] = agent
        while is_served(agent) if self._is_watched else not agent.cancel_signal.is_set():
            self._state.setdefault("request_state", {})
            if self._is_watched:
                self._begin()
            message, stop_reason = agent.messages[-1], "tool_use"
            try:
                if not any("toolUse" in block for block in message["content"]):
                    answer = await self._call_model_with_retry() if self._is_watched else (await self._call_model())[0]
                    message, stop_reason = cast("Message", answer.message), answer.stop_reason
                    if stop_reason == "max_tokens":
                        message = recover_message_on_max_tokens_reached(message)
                    if self._is_watched:
                        await self._take(answer, message)
                    else:
                        agent.messages.append(message)
                if stop_reason == "max_tokens":
                    raise MaxTokensReachedException(TURN_CUT)
                if stop_reason != "tool_use":
                    self._end()
                    return stop_reason, message, None
                if (end := await self._run_tools(message)) is not None:
                    return end
            except ContextWindowOverflowException as e:
                agent.conversation_manager.reduce_context(agent, e=e)
        return None

    def _begin(self) -> None:
        cycle = self._state["event_loop_cycle_id"] = uuid.uuid4()
        self._started, self._trace = self._agent.event_loop_metrics.start_cycle({"event_loop_cycle_id": str(cycle)})
        self._state |= {"event_loop_cycle_trace": self._trace, "event_loop_cycle_span": trace.INVALID_SPAN}

    def _end(self) -> None:
        if self._trace is not None:
            self._agent.event_loop_metrics.end_cycle(self._started, self._trace)

    async def _call_model_with_retry(self) -> Answer:
        """Return an answer that every hook takes; hooks hear of failures too, and may ask for another try."""
        self._child("stream_messages")
        while True:
            try:
                answer, is_wanted_again = await self._call_model()
                if not is_wanted_again:
                    return answer
                self._agent.event_loop_metrics.update_usage(cast("Any", answer.usage))
            except InterruptException:
                raise
            except Exception as e:  # hooks hear of whatever a model call raises
                failed = hooks.AfterModelCallEvent(agent=self._agent, invocation_state=self._state, exception=e)
                await self._fire_hooks(failed)
                if not failed.retry:
                    raise

    async def _take(self, answer: Answer, message: Message) -> None:
        metrics, child = self._agent.event_loop_metrics, cast("Trace", self._trace).children[-1]
        child.add_message(message)
        child.end()
        await self.append(message)
        metrics.update_usage(cast("Any", answer.usage))
        metrics.update_metrics(cast("Any", answer.metrics))

    async def _call_model(self) -> tuple[Answer, bool]:
        """Return an answer of the policy, or of a hook in its place, and True if a hook wants another."""
        agent, state = self._agent, self._state
        tokens = await self._projected_tokens() if self._is_watched and self._reads_tokens() else None
        before = hooks.BeforeModelCallEvent(agent=agent, invocation_state=state, projected_input_tokens=tokens)
        if asking := await self._fire_hooks(before):
            raise InterruptException(self._kept(asking)[0])
        if before.cancel:
            words = before.cancel if isinstance(before.cancel, str) else "model call denied by hook"
            answer = Answer(_said(words), "end_turn", _NO_USAGE, {"latencyMs": 0})
        else:
            text, blocks = split_system_prompt(agent.system_prompt_content)
            specs = self._shown_specs() if self._is_watched else self._specs
            model = cast("SGLangModel", agent.model)
            # nobody but this loop has written to the messages since the last answer: they need not be compared with
            # what the policy has read, which takes about 3% of the CPU at 20 turns and 7% at 80
            only_grew = self._has_answer and not self._is_watched
            answer = await model.answer(agent.messages, specs or None, text, blocks, agent, only_grew=only_grew)
            self._has_answer = True
            if agent.cancel_signal.is_set():
                answer = Answer(_said(_CANCELLED), "cancelled", {**_NO_USAGE}, {"latencyMs": 0, "timeToFirstByteMs": 0})
            answer.message["metadata"] = {"usage": answer.usage, "metrics": answer.metrics}
        if not self._is_watched:
            return answer, False
        response = hooks.AfterModelCallEvent.ModelStopResponse(
            cast("Any", answer.message), cast("Any", answer.stop_reason)
        )
        after = hooks.AfterModelCallEvent(agent=agent, invocation_state=state, stop_response=response)
        await self._fire_hooks(after)
        if answer.stop_reason == "cancelled" and agent._cancel_message is not None:
            answer = dataclasses.replace(answer, message=_said(agent._cancel_message))
        return answer, after.retry

    def _reads_tokens(self) -> bool:
        """Return True if a hook of a model call may read how many tokens it will have; most agents' own do not."""
        if getattr(self._agent.conversation_manager, "_compression_threshold", None) is not None:
            return True
        listening = self._hooks.get_callbacks_for(hooks.BeforeModelCallEvent(agent=self._agent))
        return any(not getattr(listen, "__module__", "").startswith(_INDIFFERENT) for listen in listening)

    async def _projected_tokens(self) -> int | None:
        try:
            return await _estimate_input_tokens(self._agent)
        except Exception as e:  # an estimate, which may fail in a user's model; hooks can do without
            logger.debug("the tokens of a model call could not be estimated error=%r", e)
            return None

    async def _run_tools(self, message: Message) -> End | None:
        agent, state = self._agent, self._state
        before = hooks.BeforeToolsEvent(agent=agent, message=message, invocation_state=state)
        results: list[ToolResult] = []
        if asking := await self._fire_hooks(before):
            return self._interrupted(message, results, asking)
        try:
            asking = await self._run_calls(message, before, results)
        finally:
            answered: Message = {"role": "user", "content": [{"toolResult": result} for result in results]}
            after = hooks.AfterToolsEvent(agent=agent, message=answered, invocation_state=state)
            await self._fire_hooks(after)
        if self._is_watched:
            state["event_loop_parent_cycle_id"] = state["event_loop_cycle_id"]
        if asking:
            return self._interrupted(message, results, asking)
        if self._is_watched or after.end_turn:
            return await self._end_after(message, answered, after)
        agent.messages.append(answered)
        return None

    def _interrupted(self, message: Message, results: list[ToolResult], asking: list[Interrupt]) -> End:
        state = self._agent._interrupt_state
        state.pending_tool_execution = PendingToolExecution(message, results)
        state.activate()
        self._end()
        return "interrupt", message, asking

    async def _end_after(self, message: Message, answered: Message, after: hooks.AfterToolsEvent) -> End | None:
        """Take a turn's results; return the end, where a hook, a tool or a cancellation wants it."""
        agent, end = self._agent, after.end_turn
        if not agent._observe_cancellation():
            agent._interrupt_state.end_tool_cycle()
        await self.append(answered)
        self._end()
        if end:
            content = end if isinstance(end, list) else [{"text": end if isinstance(end, str) else _ENDED_BY_HOOK}]
            last: Message = {"role": "assistant", "content": [*content]}
            await self.append(last)
            return "end_turn", last, None
        if agent._deferred_cancel or agent._observe_cancellation():
            if agent._cancel_message is not None:
                message = cast("Message", _said(agent._cancel_message))
                await self.append(message)
            return "cancelled", message, None
        # as older tools stop a loop, such as that of strands-agents-tools
        return ("tool_use", message, None) if self._state["request_state"].get("stop_event_loop") else None

    async def _run_calls(
        self, message: Message, before: hooks.BeforeToolsEvent, results: list[ToolResult]
    ) -> list[Interrupt]:
        """Add the results of a turn's calls; return what is asked of a person instead."""
        agent, words = self._agent, before.cancel
        if words or agent.cancel_signal.is_set():
            told = (
                words if isinstance(words, str) else "Tool cancelled by hook" if words else "Tool execution cancelled"
            )
            results += [_failed(call, told) for call in _calls(message)]
            return []
        calls: list[ToolUse] = []
        invalid: list[str] = []
        validate_and_prepare_tools(message, calls, results, invalid)
        calls = [call for call in calls if call["toolUseId"] not in invalid]
        if len(calls) == 1:
            tool = self._simple.get(calls[0]["name"]) or self._tool(calls[0]["name"])
            if calls[0]["name"] in self._simple or self._is_direct(tool):
                return await self._run_call(tool, calls[0], results)
        asking: list[Interrupt] = []
        events = agent.tool_executor._execute(
            agent, calls, results, cast("Any", self._trace), trace.INVALID_SPAN, self._state, StructuredOutputContext()
        )
        async for event in events:
            if isinstance(event, ToolInterruptEvent):
                asking += event.interrupts
        return asking

    def _is_direct(self, tool: AgentTool | None) -> bool:
        """Return True if only hooks hear of a call alone, so that Strands would do no more with it than this class."""
        agent = self._agent
        around = agent._middleware_registry._handlers.get(ExecuteToolStage, ())  # Strands' own waits for bare agents
        return (
            isinstance(tool, BoundedTool)
            and type(agent.tool_executor) in (TurnTools, SequentialToolExecutor)
            and all(isinstance(getattr(one.handler, "__self__", None), AgentDelegation) for one in around)
        )

    def _tool(self, name: str) -> AgentTool | None:
        registry = self._agent.tool_registry
        return registry.dynamic_tools.get(name) or registry.registry.get(name)

    async def _run_call(self, tool: AgentTool | None, call: ToolUse, results: list[ToolResult]) -> list[Interrupt]:
        """Add the result of a call that is alone in its turn, as `ToolExecutor._stream` does."""
        name = call["name"]
        if self._is_watched:
            self._show_agent()
        while True:
            done = await self._tried(tool, name, call)
            if isinstance(done, list):
                return done
            if isinstance(done, dict):
                results.append(done)
                return []
            call = done.tool_use
            is_final = done.cancel_message is not None or not self._is_watched
            if is_final or not ToolExecutor._should_retry(self._agent, done):
                results.append(done.result)
                return []

    async def _tried(
        self, tool: AgentTool | None, name: str, call: ToolUse
    ) -> hooks.AfterToolCallEvent | ToolResult | list[Interrupt]:
        """Make one call of the tool of this name.

        Returns:
            The event that the hooks have heard, the result if none is to hear of it, or what is asked of a person
            instead.
        """
        agent, state, last = self._agent, self._state, cast("Any", None)
        before = hooks.BeforeToolCallEvent(agent=agent, selected_tool=tool, tool_use=call, invocation_state=state)
        if asking := await self._fire_hooks(before):
            return asking
        if before.cancel_tool:
            words = before.cancel_tool if isinstance(before.cancel_tool, str) else "tool cancelled by user"
            after = hooks.AfterToolCallEvent(agent, None, call, state, _failed(call, words), cancel_message=words)
            await self._fire_hooks(after)
            return after
        is_renamed = before.selected_tool is tool and before.tool_use["name"] != name
        call, started = before.tool_use, time.monotonic()
        tool = self._tool(call["name"]) if is_renamed else before.selected_tool
        try:
            try:
                async for event in _unknown(call) if tool is None else tool.stream(cast("Any", {**call}), state):
                    last = last if isinstance(last, ToolResultEvent | ToolInterruptEvent) else event
            finally:
                if self._trace is not None:
                    self._count(call, started, last)
            if isinstance(last, ToolInterruptEvent):
                return self._kept(last.interrupts)
            last = _failed(call, f"Tool '{call['name']}' did not return a result") if last is None else last
            event = last if isinstance(last, ToolResultEvent) else ToolResultEvent(last)
            if not self._is_watched:
                return event.tool_result
            seconds, error = time.monotonic() - started, event.exception
            after = hooks.AfterToolCallEvent(agent, tool, call, state, event.tool_result, error, duration=seconds)
            await self._fire_hooks(after)
        except InterruptException as e:
            return self._kept([e.interrupt])
        except Exception as e:  # whatever a tool raises, or a hook that heard of it, is a result for the policy
            result, seconds = _failed(call, f"Error: {error_words(e)}"), time.monotonic() - started
            after = hooks.AfterToolCallEvent(agent, tool, call, state, result, e, duration=seconds)
            await self._fire_hooks(after)
        return after

    def _count(self, call: ToolUse, started: float, last: object) -> None:
        seconds, result = time.monotonic() - started, getattr(last, "tool_result", last)
        message = cast("Message", {"role": "user", "content": [{"toolResult": result}]})
        is_success = isinstance(result, dict) and result.get("status") == "success"
        child = self._child(f"Tool: {call['name']}", time.time() - seconds)
        self._agent.event_loop_metrics.add_tool_usage(call, seconds, child, is_success, message)

    def _child(self, name: str, started: float | None = None) -> Trace:
        """Add a step to the metrics' trace of this cycle."""
        cycle = cast("Trace", self._trace)
        cycle.add_child(Trace(name, parent_id=cycle.id, start_time=started))
        return cycle.children[-1]

    def _shown_specs(self) -> list[ToolSpec]:
        """Return the specifications of the agent's tools, which anybody may change; Strands checks them each time."""
        registry = self._agent.tool_registry
        given = [tool.tool_spec for tool in (*registry.registry.values(), *registry.dynamic_tools.values())]
        if given != self._given_specs:
            self._given_specs, self._specs = copy.deepcopy(given), registry.get_all_tool_specs()
        return self._specs

    def _show_agent(self) -> None:
        """Put into the state what Strands' executor hands to tools too."""
        agent = self._agent
        specs = [{"toolSpec": {**spec}} for spec in self._shown_specs()]
        self._state |= {
            "agent": agent,
            "model": agent.model,
            "messages": agent.messages,
            "system_prompt": agent.system_prompt,
            "tool_config": {"tools": specs, "toolChoice": {"auto": {}}},
        }

    def _kept(self, asking: list[Interrupt]) -> list[Interrupt]:
        for one in asking:
            self._agent._interrupt_state.interrupts.setdefault(one.id, one)
        return asking

    async def append(self, message: Message) -> None:
        """Add a message to the agent's."""
        if self._is_watched:
            _ensure_tracking_id(message)
        self._agent.messages.append(message)
        if self._is_watched:
            await self._fire_hooks(hooks.MessageAddedEvent(agent=self._agent, message=message))

    async def _fire_hooks(self, event: hooks.BaseHookEvent) -> list[Interrupt]:
        """Call the hooks of an event, as Strands' registry does; return what they ask of a person."""
        asking: dict[str, Interrupt] = {}
        for listen in self._hooks.get_callbacks_for(event):
            try:
                said = listen(event)
                if said is not None and inspect.iscoroutinefunction(listen):
                    await said
            except InterruptException as e:
                if e.interrupt.name in asking:
                    raise ValueError(f"got the interrupt {e.interrupt.name!r} twice; expected one of a name") from e
                asking[e.interrupt.name] = e.interrupt
        return [*asking.values()]


def is_served(agent: Agent) -> bool:
    """Return True if `OwnCycles` does the agent's next step as Strands would; hooks and tools may change that."""
    kept = (agent._session_manager, agent._background_tasks, agent._checkpointing, agent._interrupt_state.activated)
    return (
        isinstance(agent.model, SGLangModel)
        and not agent.cancel_signal.is_set()
        and agent._default_structured_output_model is None
        and not any(kept)
        and _is_unseen(agent)
    )


def _said(words: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"text": words}]}


def _failed(call: ToolUse, words: str) -> ToolResult:
    return cast("ToolResult", error_result(str(call.get("toolUseId")), words))


async def _unknown(call: ToolUse) -> AsyncGenerator[ToolResultEvent, None]:
    words = f"Unknown tool: {call['name']}"
    yield ToolResultEvent(_failed(call, words), exception=Exception(words))


def are_simple(agent: Agent) -> bool:
    """Return True if no tool of the agent sees more than its arguments."""
    return all(map(_is_simple, agent.tool_registry.registry.values()))


def _is_simple(tool: object) -> bool:
    return isinstance(tool, BoundedTool) and tool.is_simple


def _calls(message: Message) -> list[ToolUse]:
    return [block["toolUse"] for block in message["content"] if "toolUse" in block]


class TurnTools(ConcurrentToolExecutor):
    """A tool executor for `Agent(tool_executor=...)`."""

    def __init__(self) -> None:
        self._in_place = SequentialToolExecutor()

    async def _execute(self, agent: Agent, tool_uses: list[ToolUse], *rest: Any) -> AsyncGenerator[Any, None]:  # noqa: ANN401 - what Strands hands on
        is_alone = len(tool_uses) == 1
        execute = self._in_place._execute if is_alone else super()._execute
        async for event in execute(agent, tool_uses, *rest):
            yield event
