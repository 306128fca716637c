"""An agent's cycles run one after the other, watched or not, as Strands' own loop would have run them."""

import copy
import itertools
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

from strands_rollout import SGLangModel, ToolLimiter
from strands_rollout.agent.loop import HAS_MIDDLEWARE, FlatCycles, TurnTools
from strands_rollout.agent.tool_call import BoundedTool, ToolStats

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


@tool
async def fail() -> str:
    """Fail."""
    raise KeyError("gone")


@tool
async def give_nothing() -> Any:
    """Give a result of the tool's own making."""
    return {"status": "error", "content": [{"text": "nothing"}]}


class EventRecorder(HookProvider):
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


class At(HookProvider):
    """Calls a function with each event of these kinds."""

    def __init__(self, *kinds: Any, call: Any, order: int | None = None) -> None:
        self.kinds, self.call = kinds, call
        self.more = {} if order is None else {"order": order}

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        for kind in self.kinds:
            registry.add_callback(kind, self.call, **self.more)


def _reply(tokenizer: Any, turn: str | Reply) -> Reply:
    return turn if isinstance(turn, Reply) else Reply.tokens(ids_of(tokenizer, turn))


def _read(message: Any) -> Any:
    return message["role"], message["content"]


async def play(
    tokenizer: Any,
    script: list[Any],
    *,
    flat: bool,
    hooks: Any = (),
    listeners: Any = None,
    tools: Any = (),
    before: Any = (),
) -> tuple[Agent, FakeSGLang]:
    """Play an episode; `listeners` are hooks of an agent whom nobody else watches."""
    hooks = [*hooks, *(listeners or ())]
    async with FakeSGLang([_reply(tokenizer, turn) for turn in script], context_length=100_000) as fake:
        cycles = FlatCycles(listeners)
        agent = Agent(
            model=SGLangModel(tokenizer=tokenizer, base_url=fake.base_url),
            messages=list(before),
            tools=list(tools)
            or [BoundedTool(one, timeout_s=None, stats=ToolStats()) for one in (look, fail, give_nothing)],
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
    flat, own = EventRecorder(), EventRecorder()
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
    recorder = EventRecorder()
    await play(shipped_tokenizer, [SCRIPT[0]] * 12 + [ANSWER], flat=True, hooks=[recorder])
    calls = [
        depth
        for (name, *_), depth in zip(recorder.seen, recorder.depths, strict=True)
        if name == "BeforeModelCallEvent"
    ]
    assert len(calls) == 13
    assert len(set(calls[1:])) == 1


async def test_a_hook_can_cancel_a_model_call(shipped_tokenizer: Any) -> None:
    calls = itertools.count(1)

    def cancel_third(event: BeforeModelCallEvent) -> None:
        if next(calls) == 3:
            event.cancel = "enough"

    denying = At(BeforeModelCallEvent, call=cancel_third)
    agent, fake = await play(shipped_tokenizer, SCRIPT, flat=True, hooks=[denying])
    assert _read(agent.messages[-1]) == ("assistant", [{"text": "enough"}])
    assert len(fake.requests) == 2


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

    adding = At(AgentInitializedEvent, call=lambda event: event.agent.add_middleware(InvokeModelStage, answer_third))
    agent, fake = await play(shipped_tokenizer, SCRIPT, flat=True, hooks=[adding])
    assert asked == [1, 3, 5]
    assert _read(agent.messages[-1]) == ("assistant", [{"text": "mine"}])
    assert len(fake.requests) == 2


async def test_a_cancelled_agent_asks_the_model_no_more(shipped_tokenizer: Any) -> None:
    cancelling = At(AfterToolsEvent, call=lambda event: event.agent.cancel())
    agent, fake = await play(shipped_tokenizer, SCRIPT, flat=True, hooks=[cancelling])
    assert len(fake.requests) == 1
    assert agent.messages[-1]["role"] == "user"


UNWATCHED = {
    "all kinds of turns": SCRIPT,
    "an answer": [ANSWER],
    "tools that fail": [
        TOOL_CALL.format(name="fail", arguments="{}"),
        TOOL_CALL.format(name="give_nothing", arguments="{}"),
        TOOL_CALL.format(name="look", arguments='{"where": "x"}'),
        ANSWER,
    ],
    "a tool that is not there": [TOOL_CALL.format(name="rm", arguments="{}"), SCRIPT[0], ANSWER],
    "more tools than allowed": [SCRIPT[0]] * 4,
    "more calls than allowed": [SCRIPT[0], BOTH, SCRIPT[0]],
}


@pytest.mark.parametrize("script", UNWATCHED.values(), ids=UNWATCHED)
async def test_an_agent_whom_nobody_watches_does_what_strands_has_it_do(shipped_tokenizer: Any, script: Any) -> None:
    limiter, own_limiter = (ToolLimiter(max_iterations=3, max_calls=3) for _ in range(2))
    agent, fake = await play(shipped_tokenizer, script, flat=True, listeners=[limiter])
    own, own_fake = await play(shipped_tokenizer, script, flat=False, hooks=[own_limiter])
    assert [_read(message) for message in agent.messages] == [_read(message) for message in own.messages]
    assert [request.input_ids for request in fake.requests] == [request.input_ids for request in own_fake.requests]
    assert (limiter.tripped, limiter.calls, limiter.before_turn) == (
        own_limiter.tripped,
        own_limiter.calls,
        own_limiter.before_turn,
    )


@pytest.mark.parametrize("content", [[{"text": " "}], [], [{"text": ""}, {"text": "x"}]], ids=["blank", "none", "both"])
async def test_blank_words_of_the_past_read_as_strands_streams_them(shipped_tokenizer: Any, content: Any) -> None:
    before = [{"role": "user", "content": [{"text": "hi"}]}, {"role": "assistant", "content": content}]
    for listeners in (None, []):
        fakes = [
            (await play(shipped_tokenizer, [ANSWER], flat=flat, before=copy.deepcopy(before), listeners=listeners))[1]
            for flat in (True, False)
        ]
        assert fakes[0].requests[0].input_ids == fakes[1].requests[0].input_ids
