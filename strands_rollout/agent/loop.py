"""Runs a Strands agent's cycles one after the other, each at the cost of its own messages.

Strands' own loop starts each cycle inside the one before, copies the whole history before each model call, and writes
all of it into two spans per cycle, whether anything records them or not: its cost grows with the square of the turns,
and the 320th meets Python's recursion limit (Strands 1.62). What is used here is what Strands offers for such purposes:
limits, hooks with an order, an agent's `messages`, and middleware, whose stage around an invocation it has not made
public yet. Knows Strands' loop and our model; nothing of samples.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final, cast

from opentelemetry import trace
from strands import Agent
from strands.agent import AgentResult
from strands.handlers.callback_handler import null_callback_handler
from strands.hooks import (
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolsEvent,
    HookProvider,
    HookRegistry,
)
from strands.types.content import Message, Messages, split_system_prompt

from strands_rollout.sglang_model import SGLangModel
from strands_rollout.unwatched_cycles import UnwatchedCycles, are_simple

try:
    from strands.middleware import InvokeModelStage, ModelStopReason
    from strands.middleware._agent_stream import AgentStreamStage
except ImportError:  # Strands before 1.62: its own loop runs
    HAS_MIDDLEWARE = False
else:
    HAS_MIDDLEWARE = True

Next = Callable[[Any], AsyncGenerator[Any, None]]

_OUT_OF_TURNS: Final = "limit_turns"


class FlatCycles(HookProvider):
    """One agent's cycles: `Agent(..., hooks=[*hooks, cycles])`, then `await cycles.run(agent, prompt)`.

    While a span records the invocation, for OpenTelemetry, spans hold what Strands puts in them, at Strands' price.

    Args:
        listeners: The only hooks beside these cycles, none of which counts on events that `UnwatchedCycles` does not
            tell of; None where there are others.
    """

    def __init__(self, listeners: Sequence[HookProvider] | None = None) -> None:
        self._listeners = listeners
        self._limits: dict[str, int] = {}
        self._is_added = False
        self._whole: Messages | None = None

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:  # noqa: ARG002, ANN401 - Strands' signature
        """Called by Strands."""
        if not HAS_MIDDLEWARE:
            return
        # users may take any order; nobody may see the history put aside, or copy one that is lent
        registry.add_callback(BeforeInvocationEvent, self._before_invocation, order=math.inf)
        registry.add_callback(BeforeModelCallEvent, self._before_model_call, order=-math.inf)
        registry.add_callback(BeforeToolsEvent, self._before_tools, order=-math.inf)
        registry.add_callback(BeforeModelCallEvent, self._last_before_model_call, order=math.inf)

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

    def _before_invocation(self, event: BeforeInvocationEvent) -> None:
        """Add the middleware after all others, hooks' too, so that they see what it gives."""
        if not self._is_added:
            self._is_added = True
            event.agent.add_middleware(AgentStreamStage, self._cycles)
            event.agent.add_middleware(InvokeModelStage, _answered)

    def _before_model_call(self, event: BeforeModelCallEvent) -> None:
        self._bring_back(event.agent)

    def _before_tools(self, event: BeforeToolsEvent) -> None:
        self._bring_back(event.agent)

    def _last_before_model_call(self, event: BeforeModelCallEvent) -> None:
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
    answer = await context.model.answer(context.messages, context.tool_specs or None, text, blocks)
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
