"""An agent's cycles run one after the other, as Strands' own loop would have run them."""

from __future__ import annotations

import copy
import traceback
from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, TOOL_CALL, ids_of
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolCallEvent,
    AfterToolsEvent,
    AgentInitializedEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    BeforeToolsEvent,
    HookProvider,
    HookRegistry,
    MessageAddedEvent,
)

from strands_rollout import SGLangModel
from strands_rollout.flat_cycles import HAS_MIDDLEWARE, FlatCycles, History
from strands_rollout.turn_tools import TurnTools

pytestmark = pytest.mark.skipif(not HAS_MIDDLEWARE, reason="Strands before 1.62 runs its own loop")
PROMPT = [{"text": "go"}]
EVENTS = [
    BeforeInvocationEvent,
    AfterInvocationEvent,
    MessageAddedEvent,
    BeforeModelCallEvent,
    AfterModelCallEvent,
    BeforeToolsEvent,
    AfterToolsEvent,
    BeforeToolCallEvent,
    AfterToolCallEvent,
]
BOTH = TOOL_CALL.format(name="look", arguments='{"at": "a"}').removesuffix("<|im_end|>") + TOOL_CALL.format(
    name="look", arguments='{"at": "b"}'
)
UNPARSED = "<tool_call>\n{]\n</tool_call><|im_end|>"
SCRIPT = [TOOL_CALL.format(name="look", arguments='{"at": "x"}'), BOTH, UNPARSED, ANSWER]


@tool
def look(at: str) -> str:
    """Look.

    Args:
        at: Where.
    """
    return f"saw {at}"


class Witness(HookProvider):
    """Writes down what hooks see: the event, the whole history, what is expected of the next prompt."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.depths: list[int] = []

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        for kind in EVENTS:
            registry.add_callback(kind, self._note)

    def _note(self, event: Any) -> None:
        tokens = getattr(event, "projected_input_tokens", None)
        self.seen.append((type(event).__name__, copy.deepcopy([_read(m) for m in event.agent.messages]), tokens))
        self.depths.append(sum(1 for _ in traceback.walk_stack(None)))


def _read(message: Any) -> Any:
    return message["role"], message["content"]


async def play(tokenizer: Any, script: list[str], *, flat: bool, hooks: Any = ()) -> tuple[Agent, FakeSGLang]:
    async with FakeSGLang([Reply.tokens(ids_of(tokenizer, turn)) for turn in script], context_length=100_000) as fake:
        cycles = FlatCycles()
        agent = Agent(
            model=SGLangModel(tokenizer=tokenizer, base_url=fake.base_url),
            messages=History() if flat else [],
            tools=[look],
            system_prompt="Be brief.",
            callback_handler=None,
            conversation_manager=NullConversationManager(),
            retry_strategy=None,
            hooks=[*hooks, cycles] if flat else list(hooks),
            tool_executor=TurnTools() if flat else None,
        )
        if flat:
            await cycles.run(agent, PROMPT)
        else:
            await agent.invoke_async(PROMPT)
        return agent, fake


async def test_hooks_see_the_same_events_and_history_as_in_strands_own_loop(shipped_tokenizer: Any) -> None:
    flat, own = Witness(), Witness()
    flat_agent, flat_fake = await play(shipped_tokenizer, SCRIPT, flat=True, hooks=[flat])
    own_agent, own_fake = await play(shipped_tokenizer, SCRIPT, flat=False, hooks=[own])
    # two calls of one turn may end in any order
    assert _sorted_calls(flat.seen) == _sorted_calls(own.seen)
    assert [_read(message) for message in flat_agent.messages] == [_read(message) for message in own_agent.messages]
    assert [r.input_ids for r in flat_fake.requests] == [r.input_ids for r in own_fake.requests]
    usage = flat_agent.event_loop_metrics.accumulated_usage
    assert usage == own_agent.event_loop_metrics.accumulated_usage
    assert flat_agent.event_loop_metrics.cycle_count == own_agent.event_loop_metrics.cycle_count


def _sorted_calls(seen: list[Any]) -> list[Any]:
    names = [name for name, *_ in seen]
    start = [n for n, name in enumerate(names) if name == "BeforeToolsEvent"][1] + 1
    end = [n for n, name in enumerate(names) if name == "AfterToolsEvent"][1]
    return [*seen[:start], *sorted(seen[start:end], key=repr), *seen[end:]]


async def test_the_stack_is_as_deep_in_the_last_turn_as_in_the_second(shipped_tokenizer: Any) -> None:
    witness = Witness()
    await play(shipped_tokenizer, [SCRIPT[0]] * 12 + [ANSWER], flat=True, hooks=[witness])
    calls = [
        depth for (name, *_), depth in zip(witness.seen, witness.depths, strict=True) if name == "BeforeModelCallEvent"
    ]
    assert len(calls) == 13
    assert len(set(calls[1:])) == 1


async def test_the_messages_are_the_same_objects_in_the_same_list_throughout(shipped_tokenizer: Any) -> None:
    lists = set()

    class Lists(HookProvider):
        def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
            for kind in EVENTS:
                registry.add_callback(kind, lambda event: lists.add(id(event.agent.messages)))

    agent, _ = await play(shipped_tokenizer, SCRIPT, flat=True, hooks=[Lists()])
    assert lists == {id(agent.messages)}


async def test_a_copy_that_a_hook_makes_is_a_deep_one(shipped_tokenizer: Any) -> None:
    copies = []

    class Copies(HookProvider):
        def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
            for kind in EVENTS:
                registry.add_callback(kind, lambda event: copies.append(copy.deepcopy(event.agent.messages)))

    agent, _ = await play(shipped_tokenizer, SCRIPT, flat=True, hooks=[Copies()])
    own = {id(message) for message in agent.messages}
    assert copies
    assert not any(id(message) in own for history in copies for message in history)


class Denying(HookProvider):
    """Cancels the third model call, and keeps the copy made after that."""

    def __init__(self) -> None:
        self.calls = 0

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(BeforeModelCallEvent, self._before)

    def _before(self, event: BeforeModelCallEvent) -> None:
        self.calls += 1
        if self.calls == 3:
            event.cancel = "enough"


async def test_a_hook_can_cancel_a_model_call(shipped_tokenizer: Any) -> None:
    agent, fake = await play(shipped_tokenizer, SCRIPT, flat=True, hooks=[Denying()])
    assert _read(agent.messages[-1]) == ("assistant", [{"text": "enough"}])
    assert len(fake.requests) == 2
    assert not agent.messages.is_lent


class Failing(HookProvider):
    """Fails while the second model call is prepared."""

    def __init__(self) -> None:
        self.calls = 0

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(BeforeModelCallEvent, self._before, order=-1000)

    def _before(self, event: BeforeModelCallEvent) -> None:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("a bug")


async def test_an_agent_whose_hook_fails_has_its_whole_history(shipped_tokenizer: Any) -> None:
    agents = []

    class Keeping(HookProvider):
        def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
            registry.add_callback(AgentInitializedEvent, lambda event: agents.append(event.agent))

    with pytest.raises(ValueError, match="a bug"):
        await play(shipped_tokenizer, SCRIPT, flat=True, hooks=[Keeping(), Failing()])
    assert [message["role"] for message in agents[0].messages] == ["user", "assistant", "user"]


async def test_middleware_of_a_users_own_sees_each_model_call_and_may_answer_it(shipped_tokenizer: Any) -> None:
    from strands.middleware import InvokeModelStage, ModelStopReason

    asked: list[int] = []

    async def answer_third(context: Any, following: Any) -> Any:
        asked.append(len(context.messages))
        if len(asked) < 3:
            async for event in following(context):
                yield event
            return
        message = {"role": "assistant", "content": [{"text": "mine"}]}
        usage = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}
        yield ModelStopReason(stop_reason="end_turn", message=message, usage=usage, metrics={"latencyMs": 0})

    class Adding(HookProvider):
        def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
            registry.add_callback(
                AgentInitializedEvent, lambda event: event.agent.add_middleware(InvokeModelStage, answer_third)
            )

    agent, fake = await play(shipped_tokenizer, SCRIPT, flat=True, hooks=[Adding()])
    assert asked == [1, 3, 5]
    assert _read(agent.messages[-1]) == ("assistant", [{"text": "mine"}])
    assert len(fake.requests) == 2


async def test_a_cancelled_agent_asks_the_model_no_more(shipped_tokenizer: Any) -> None:
    class Cancelling(HookProvider):
        def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
            registry.add_callback(AfterToolsEvent, lambda event: event.agent.cancel())

    agent, fake = await play(shipped_tokenizer, SCRIPT, flat=True, hooks=[Cancelling()])
    assert len(fake.requests) == 1
    assert agent.messages[-1]["role"] == "user"


async def test_a_hook_can_have_the_agent_invoked_once_more(shipped_tokenizer: Any) -> None:
    class Asking(HookProvider):
        asked = False

        def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
            registry.add_callback(AfterInvocationEvent, self._after)

        def _after(self, event: AfterInvocationEvent) -> None:
            if not self.asked:
                self.asked, event.resume = True, "and now?"

    agent, fake = await play(shipped_tokenizer, [*SCRIPT, SCRIPT[0], ANSWER], flat=True, hooks=[Asking()])
    assert len(fake.requests) == 6
    assert ("user", [{"text": "and now?"}]) in [_read(message) for message in agent.messages]
