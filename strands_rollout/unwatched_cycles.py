"""Cycles of an agent whom nobody watches: the policy answers, and the tool that it asked for runs.

Strands' own cycle does the same, and tells users' hooks and middleware of it, streams it, counts it and wraps it in
spans. Where an episode has none that could hear of it, that is half of what a turn costs. What is more than one call of
a simple function is left to Strands' cycle, which goes on from the agent's messages wherever this one stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from strands import Agent
from strands.hooks import (
    AfterToolsEvent,
    BaseHookEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    BeforeToolsEvent,
    HookProvider,
    HookRegistry,
)
from strands.types.content import Message, split_system_prompt
from strands.types.exceptions import MaxTokensReachedException
from strands.types.tools import ToolSpec, ToolUse

from strands_rollout.bounded_tool import BoundedTool
from strands_rollout.sglang_model import SGLangModel

TURN_CUT: Final = "the turn was cut at its limit of tokens"

End = tuple[str, Message]
"""Strands' stop reason, and the agent's last message."""


class UnwatchedCycles:
    """The cycles of one run of an agent.

    Args:
        agent: Built on an `SGLangModel`.
        listeners: The only hooks; told before a model call, a turn's tools and a call, and after a turn's tools.
    """

    def __init__(self, agent: Agent, listeners: Sequence[HookProvider]) -> None:
        self._agent = agent
        self._listeners = HookRegistry()
        for listener in listeners:
            self._listeners.add_hook(listener)
        # what Strands' executor hands to tools too
        self._state: dict[str, Any] = {"agent": agent, "request_state": {}}
        self._specs: list[ToolSpec] = agent.tool_registry.get_all_tool_specs()

    async def run(self) -> End | None:
        """Go on from the agent's messages until it has ended; None where the next step is one for Strands' cycle."""
        messages = self._agent.messages
        while not self._agent.cancel_signal.is_set():
            if not _calls(messages[-1]):
                stop_reason = await self._answer()
                if stop_reason != "tool_use":
                    return stop_reason, messages[-1]
            calls = _calls(messages[-1])
            if len(calls) != 1 or not self._is_simple(calls[0]["name"]):
                return None
            end = await self._run_tool(messages[-1], calls[0])
            if end is not None:
                return end
        return None

    async def _answer(self) -> str:
        """The policy's next turn, in the agent's messages."""
        agent = self._agent
        self._tell(BeforeModelCallEvent(agent=agent, invocation_state=self._state))
        text, blocks = split_system_prompt(agent.system_prompt_content)
        answer = await cast("SGLangModel", agent.model).answer(agent.messages, self._specs or None, text, blocks)
        answer.message["metadata"] = {"usage": answer.usage, "metrics": answer.metrics}
        agent.messages.append(cast("Message", answer.message))
        if answer.stop_reason == "max_tokens":
            raise MaxTokensReachedException(TURN_CUT)
        return answer.stop_reason

    async def _run_tool(self, message: Message, call: ToolUse) -> End | None:
        agent = self._agent
        before = BeforeToolsEvent(agent=agent, message=message, invocation_state=self._state)
        self._tell(before)
        if before.cancel:
            result: Any = _failed(call, before.cancel if isinstance(before.cancel, str) else "Tool cancelled by hook")
        else:
            result = await self._result(call)
            if "tool_interrupt_event" in result:
                return "interrupt", message
        results: Message = {"role": "user", "content": [{"toolResult": result}]}
        after = AfterToolsEvent(agent=agent, message=results, invocation_state=self._state)
        self._tell(after)
        agent.messages.append(results)
        if not after.end_turn:
            return None
        end: Message = {"role": "assistant", "content": [{"text": str(after.end_turn)}]}
        agent.messages.append(end)
        return "end_turn", end

    async def _result(self, call: ToolUse) -> Any:  # noqa: ANN401 - a ToolResult, or a ToolInterruptEvent
        tool = self._agent.tool_registry.registry[call["name"]]
        before = BeforeToolCallEvent(agent=self._agent, selected_tool=tool, tool_use=call, invocation_state=self._state)
        self._tell(before)
        if before.cancel_tool:
            return _failed(call, before.cancel_tool)
        last: Any = None
        try:
            async for event in tool.stream(call, self._state):
                last = event
        except Exception as e:  # whatever a tool raises is a result for the policy
            return _failed(call, f"Error: {e}")
        if last is None:
            return _failed(call, f"Tool '{call['name']}' did not return a result")
        return getattr(last, "tool_result", last)

    def _is_simple(self, name: str) -> bool:
        tool = self._agent.tool_registry.registry.get(name)
        return isinstance(tool, BoundedTool) and tool.is_simple

    def _tell(self, event: BaseHookEvent) -> None:
        for listen in self._listeners.get_callbacks_for(event):
            listen(event)


def are_simple(agent: Agent) -> bool:
    """Whether no tool of the agent sees more than its arguments."""
    return all(isinstance(tool, BoundedTool) and tool.is_simple for tool in agent.tool_registry.registry.values())


def _calls(message: Message) -> list[ToolUse]:
    return [block["toolUse"] for block in message["content"] if "toolUse" in block]


def _failed(call: ToolUse, text: object) -> dict[str, Any]:
    return {"toolUseId": call["toolUseId"], "status": "error", "content": [{"text": str(text)}]}
