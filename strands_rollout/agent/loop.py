"""The agent loop beside Strands' own: cycles run one after the other, at the cost of the new messages only.

Strands' own cycle also tells users' hooks and middleware of each step, streams it, counts it and wraps it in spans.
Where an episode has nothing that could observe these, they are half of what a turn costs: then the policy's answer is
taken, and its tool called, directly. Whatever is more than one call of a simple function is left to Strands' cycle,
which continues from the agent's messages wherever this one stops.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final, cast

from opentelemetry import trace
from strands import Agent, hooks
from strands.agent import AgentResult
from strands.handlers.callback_handler import null_callback_handler
from strands.tools.executors import ConcurrentToolExecutor, SequentialToolExecutor
from strands.types.content import Message, Messages, split_system_prompt
from strands.types.exceptions import MaxTokensReachedException
from strands.types.tools import ToolSpec, ToolUse

from strands_rollout.agent.tool_call import BoundedTool
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.template.messages import error_result, error_words

try:
    from strands.middleware import InvokeModelStage, ModelStopReason
    from strands.middleware._agent_stream import AgentStreamStage
except ImportError:  # Strands before 1.62: its own loop runs
    HAS_MIDDLEWARE = False
else:
    HAS_MIDDLEWARE = True

Next = Callable[[Any], AsyncGenerator[Any, None]]

_OUT_OF_TURNS: Final = "limit_turns"


class FlatCycles(hooks.HookProvider):
    """One agent's cycles: `Agent(..., hooks=[*hooks, cycles])`, then `await cycles.run(agent, prompt)`.

    While a span records the invocation, for OpenTelemetry, spans hold what Strands puts in them, at Strands' price.

    Args:
        listeners: The only hooks beside these cycles, none of which needs events that `UnwatchedCycles` does not
            send; None where there are others.
    """

    def __init__(self, listeners: Sequence[hooks.HookProvider] | None = None) -> None:
        self._listeners = listeners
        self._limits: dict[str, int] = {}
        self._is_added = False
        self._whole: Messages | None = None

    def register_hooks(self, registry: hooks.HookRegistry, **kwargs: Any) -> None:  # noqa: ARG002, ANN401 - Strands' signature
        """Called by Strands."""
        if not HAS_MIDDLEWARE:
            return
        # before and after any order of a user's: no hook may see the history put aside, or copy one that is lent
        registry.add_callback(hooks.BeforeInvocationEvent, self._before_invocation, order=math.inf)
        registry.add_callback(hooks.BeforeModelCallEvent, self._bring_history_back, order=-math.inf)
        registry.add_callback(hooks.BeforeToolsEvent, self._bring_history_back, order=-math.inf)
        registry.add_callback(hooks.BeforeModelCallEvent, self._last_before_model_call, order=math.inf)

    async def run(self, agent: Agent, prompt: Any) -> AgentResult:  # noqa: ANN401 - whatever Strands takes
        """Invoke the agent once, until it stops of its own accord; what Strands says of its end.

        Args:
            agent: Built with these cycles among its hooks and a `History` as messages, on an `SGLangModel`.
            prompt: As `Agent.invoke_async` takes it.
        """
        if not HAS_MIDDLEWARE:
            return await agent.invoke_async(prompt)
        self._limits = {"turns": 1}
        return await agent.invoke_async(prompt, limits=cast("Any", self._limits))

    async def _cycles(self, context: Any, following: Next) -> AsyncGenerator[Any, None]:  # noqa: ANN401
        """Middleware around an invocation: as many of one cycle each as it takes."""
        agent = context.agent
        unwatched = self._unwatched(agent)
        try:
            while True:
                if unwatched is not None:
                    agent.messages += context.messages
                    context = dataclasses.replace(context, messages=[])
                    end = await unwatched.run()
                    if end is not None:
                        yield AgentStreamStage.result_event(*end, agent.event_loop_metrics, {})
                        return
                self._limits["turns"] = _cycles_so_far(agent) + 1
                goes_on = False
                async for event in following(context):
                    if isinstance(event, AgentStreamStage.result_event) and event["stop"][0] == _OUT_OF_TURNS:
                        goes_on = True
                        continue
                    yield event
                    if "start_event_loop" in event:
                        self._put_aside(agent)
                if not goes_on:
                    return
                context = dataclasses.replace(context, messages=[])
        finally:
            self._bring_back(agent)

    def _unwatched(self, agent: Agent) -> UnwatchedCycles | None:
        if self._listeners is None or not are_simple(agent) or trace.get_current_span().is_recording():
            return None
        return UnwatchedCycles(agent, self._listeners)

    def _put_aside(self, agent: Agent) -> None:
        """Let the span that Strands begins now read the new messages only; nothing else reads them before a hook."""
        if not trace.get_current_span().is_recording():
            self._whole = agent.messages
            agent.messages = _since_last_answer(agent.messages)

    def _bring_back(self, agent: Agent) -> None:
        if self._whole is not None:
            agent.messages, self._whole = self._whole, None

    def _before_invocation(self, event: hooks.BeforeInvocationEvent) -> None:
        """Add the middleware after all others, hooks' too, so that they see what it gives."""
        if not self._is_added:
            self._is_added = True
            event.agent.add_middleware(AgentStreamStage, self._cycles)
            event.agent.add_middleware(InvokeModelStage, _answered)

    def _bring_history_back(self, event: hooks.BeforeModelCallEvent | hooks.BeforeToolsEvent) -> None:
        self._bring_back(event.agent)

    def _last_before_model_call(self, event: hooks.BeforeModelCallEvent) -> None:
        history = event.agent.messages
        if isinstance(history, History):
            history.is_lent = not event.cancel and _is_unseen(event.agent)


class History(list[Message]):
    """An agent's messages, which the copy made for the next model call shares instead of copying them too.

    Strands copies them so that middleware can't change them, and so that it may clean them itself. Where the model is
    asked directly, it cleans nothing.

    Attributes:
        is_lent: Whether the next copy is that one.
    """

    is_lent = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Messages:
        if self.is_lent:
            self.is_lent = False
            return list(self)
        return copy.deepcopy(list(self), memo)


async def _answered(context: Any, following: Next) -> AsyncGenerator[Any, None]:  # noqa: ANN401
    """Middleware around a model call: asks our model for the whole answer instead of for a stream of it."""
    if not _is_plain_call(context):
        async for event in following(dataclasses.replace(context, messages=copy.deepcopy(context.messages))):
            yield event
        return
    text, blocks = split_system_prompt(context.system_prompt)
    answer = await context.model.answer(context.messages, context.tool_specs or None, text, blocks, context.agent)
    yield ModelStopReason(
        stop_reason=answer.stop_reason, message=answer.message, usage=answer.usage, metrics=answer.metrics
    )


def _is_plain_call(context: Any) -> bool:  # noqa: ANN401
    """Whether Strands would do nothing with our model's stream but put it together again."""
    return (
        isinstance(context.model, SGLangModel)
        and _is_unseen(context.agent)
        and not context.agent.cancel_signal.is_set()
        and context.structured_output_model is None
        and not trace.get_current_span().is_recording()
    )


def _is_unseen(agent: Agent) -> bool:
    """Whether no other middleware and no callback handler hears a model call: its copy of the messages, its stream."""
    handlers = getattr(getattr(agent, "_middleware_registry", None), "_handlers", {})  # there is no public way to ask
    is_ours_alone = all(len(handlers.get(stage, ())) == 1 for stage in (AgentStreamStage, InvokeModelStage))
    return is_ours_alone and agent.callback_handler is null_callback_handler


def _cycles_so_far(agent: Agent) -> int:
    invocation = agent.event_loop_metrics.latest_agent_invocation
    return 0 if invocation is None else len(invocation.cycles)


def _since_last_answer(messages: Messages) -> Messages:
    """What came after the last message whose tokens were counted, and of that its counts; all where none were."""
    counted = (n for n in range(len(messages) - 1, -1, -1) if _is_counted(messages[n]))
    last = next(counted, -1)
    new = messages[last + 1 :]
    if last < 0:
        return messages
    return [{**messages[last], "content": []}, *new] if new else messages[last:]


def _is_counted(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("metadata", {}).get("usage"))


TURN_CUT: Final = "the turn was cut at its limit of tokens"

End = tuple[str, Message]
"""Strands' stop reason, and the agent's last message."""


class UnwatchedCycles:
    """The cycles of one run of an agent.

    Args:
        agent: Built on an `SGLangModel`.
        listeners: The only hooks; called before a model call, a turn's tools and a call, and after a turn's tools.
    """

    def __init__(self, agent: Agent, listeners: Sequence[hooks.HookProvider]) -> None:
        self._agent = agent
        self._listeners = hooks.HookRegistry()
        for listener in listeners:
            self._listeners.add_hook(listener)
        # what Strands' executor hands to tools too
        self._state: dict[str, Any] = {"agent": agent, "request_state": {}}
        self._specs: list[ToolSpec] = agent.tool_registry.get_all_tool_specs()
        self._simple = {name for name, tool in agent.tool_registry.registry.items() if _is_simple(tool)}

    async def run(self) -> End | None:
        """Continue from the agent's messages until it has ended; None where the next step is one for Strands' cycle."""
        messages = self._agent.messages
        while not self._agent.cancel_signal.is_set():
            if not _calls(messages[-1]):
                stop_reason = await self._answer()
                if stop_reason != "tool_use":
                    return stop_reason, messages[-1]
            calls = _calls(messages[-1])
            if len(calls) != 1 or calls[0]["name"] not in self._simple:
                return None
            end = await self._run_tool(messages[-1], calls[0])
            if end is not None:
                return end
        return None

    async def _answer(self) -> str:
        """The policy's next turn, in the agent's messages."""
        agent = self._agent
        self._tell(hooks.BeforeModelCallEvent(agent=agent, invocation_state=self._state))
        text, blocks = split_system_prompt(agent.system_prompt_content)
        model = cast("SGLangModel", agent.model)
        answer = await model.answer(agent.messages, self._specs or None, text, blocks, agent)
        answer.message["metadata"] = {"usage": answer.usage, "metrics": answer.metrics}
        agent.messages.append(cast("Message", answer.message))
        if answer.stop_reason == "max_tokens":
            raise MaxTokensReachedException(TURN_CUT)
        return answer.stop_reason

    async def _run_tool(self, message: Message, call: ToolUse) -> End | None:
        agent = self._agent
        before = hooks.BeforeToolsEvent(agent=agent, message=message, invocation_state=self._state)
        self._tell(before)
        if before.cancel:
            words = before.cancel if isinstance(before.cancel, str) else "Tool cancelled by hook"
            result: Any = error_result(call["toolUseId"], words)
        else:
            result = await self._result(call)
            if "tool_interrupt_event" in result:
                return "interrupt", message
        results: Message = {"role": "user", "content": [{"toolResult": result}]}
        after = hooks.AfterToolsEvent(agent=agent, message=results, invocation_state=self._state)
        self._tell(after)
        agent.messages.append(results)
        if not after.end_turn:
            return None
        end: Message = {"role": "assistant", "content": [{"text": str(after.end_turn)}]}
        agent.messages.append(end)
        return "end_turn", end

    async def _result(self, call: ToolUse) -> Any:  # noqa: ANN401 - a ToolResult, or a ToolInterruptEvent
        tool = self._agent.tool_registry.registry[call["name"]]
        before = hooks.BeforeToolCallEvent(
            agent=self._agent, selected_tool=tool, tool_use=call, invocation_state=self._state
        )
        self._tell(before)
        if before.cancel_tool:
            return error_result(call["toolUseId"], str(before.cancel_tool))
        last: Any = None
        try:
            async for event in tool.stream(call, self._state):
                last = event
        except Exception as e:  # whatever a tool raises is a result for the policy
            return error_result(call["toolUseId"], f"Error: {error_words(e)}")
        if last is None:
            return error_result(call["toolUseId"], f"Tool '{call['name']}' did not return a result")
        return getattr(last, "tool_result", last)

    def _tell(self, event: hooks.BaseHookEvent) -> None:
        for listen in self._listeners.get_callbacks_for(event):
            listen(event)


def are_simple(agent: Agent) -> bool:
    """Whether no tool of the agent sees more than its arguments."""
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
