"""`DirectLoop` against Strands' own loop: both give the same messages, requests, hook events and metrics."""

import copy
import json
import re
import traceback
from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, TOOL_CALL, ids_of
from packaging.version import Version
from strands import Agent, ToolContext, tool
from strands.agent import AgentResult
from strands.agent.conversation_manager import SlidingWindowConversationManager
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
from strands.interrupt import Interrupt, InterruptException
from strands.plugins import Plugin, hook
from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException

from strands_rollout import SGLangModel, ToolLimiter
from strands_rollout.agent.loop import DirectLoop
from strands_rollout.agent.strands_names import strands_version
from strands_rollout.agent.tool_call import BoundedTool, ToolStats, TurnToolExecutor

IS_OLD = Version(strands_version()) < Version("1.62")  # a newer version must fail, not skip
pytestmark = pytest.mark.skipif(IS_OLD, reason="Strands before 1.62 runs its own loop")
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
async def look(at: str) -> str:
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
    """Return a tool result that the tool builds itself."""
    return {"status": "error", "content": [{"text": "nothing"}]}


class CallOnEvents(HookProvider):
    """Hook that calls a function with each event of the given kinds."""

    def __init__(self, *kinds: Any, call: Any, order: int | None = None) -> None:
        self.kinds, self.call = kinds, call
        self.more = {} if order is None else {"order": order}

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        for kind in self.kinds:
            registry.add_callback(kind, self.call, **self.more)


def _reply(tokenizer: Any, turn: str | Reply) -> Reply:
    if turn == "cut":
        return Reply.tokens(ids_of(tokenizer, "I think that")[:3], "length")
    if turn == "cut after a call":
        return Reply.tokens(ids_of(tokenizer, LOOK.removesuffix("<|im_end|>")), "length")
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
    tools: Any = (look, fail, give_nothing),
    before: Any = (),
    plugins: Any = (),
    ends: Any = None,
) -> tuple[Agent, FakeSGLang]:
    """Play an episode, in `DirectLoop` if `flat`; append how it ended, exceptions included, to `ends` if it is given.

    Both loops call the hooks in `listeners`; `DirectLoop` also gets `listeners` as its argument.
    """
    hooks = [*hooks, *(listeners or ())]
    async with FakeSGLang([_reply(tokenizer, turn) for turn in script], context_length=100_000) as fake:
        cycles = DirectLoop(listeners)
        agent = Agent(
            model=SGLangModel(tokenizer=tokenizer, base_url=fake.base_url, on_rewritten_history="segment"),
            messages=list(before),
            tools=[BoundedTool(one, timeout_s=None, stats=ToolStats()) for one in tools],
            system_prompt="Be brief.",
            callback_handler=None,
            conversation_manager=SlidingWindowConversationManager(),
            retry_strategy=None,
            hooks=[*hooks, cycles] if flat else list(hooks),
            tool_executor=TurnToolExecutor() if flat else None,
            plugins=plugins,
        )
        try:
            result = await (cycles.run(agent, PROMPT) if flat else agent.invoke_async(PROMPT))
        except Exception as e:
            if ends is None:
                raise
            error = getattr(e, "original_exception", e)  # at one place, Strands wraps the error in its own
            ends.append(type(error) if isinstance(error, MaxTokensReachedException) else _plain(error))
        else:
            (ends if ends is not None else []).append(_plain(result))
        return agent, fake


@tool(context=True)
def see(tool_context: ToolContext, do: str = "") -> str:
    """See the call's context, and use it."""
    state, agent = tool_context.invocation_state, tool_context.agent
    if do == "ask":
        return str(tool_context.interrupt("may I?", reason="a rule"))
    if do == "stop":
        agent.cancel(message="stopped", after_current_tools=True)
    state["request_state"]["stop_event_loop"] = do == "flag"
    return f"{sorted(state)} {len(state['messages'])} {len(state['tool_config']['tools'])} {agent is state['agent']}"


@tool
def meet(agent: Agent) -> str:
    """Meet the agent."""
    return agent.name


class Helper(Plugin):
    name = "helper"

    def __init__(self) -> None:
        self.heard: list[str] = []
        super().__init__()

    @hook
    async def before(self, event: BeforeToolCallEvent) -> None:
        self.heard.append(event.tool_use["name"])

    @tool
    def help(self) -> str:
        """Help."""
        return f"heard {self.heard}"


class Listener(HookProvider):
    """Hook that records each event's facts and calls `do` at events of type `at`, the first time only or each time."""

    def __init__(self, at: Any = None, do: Any = None, once: bool = True) -> None:
        self.at, self.do, self.once = at, do, once
        self.seen: list[Any] = []
        self.depths: list[int] = []

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        for kind in EVENTS:
            registry.add_callback(kind, self._act)
            registry.add_callback(kind, self._hear, order=9)

    def _act(self, event: Any) -> None:
        self.depths.append(sum(1 for _ in traceback.walk_stack(None)))
        self.seen.append(_facts(event))
        if type(event) is self.at:
            self.at = None if self.once else self.at
            self.do(event)

    async def _hear(self, event: Any) -> None:
        self.seen.append(_facts(event))


def _facts(event: Any) -> Any:
    metrics = event.agent.event_loop_metrics
    tools = {name: (one.call_count, one.error_count) for name, one in metrics.tool_metrics.items()}
    counts = [sorted(getattr(event, "invocation_state", ())), metrics.accumulated_usage, metrics.cycle_count, tools]
    said = {name: _plain(value) for name, value in vars(event).items() if name not in ("duration", "agent")}
    return copy.deepcopy((type(event).__name__, said, counts, [_read(message) for message in event.agent.messages]))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if name not in VOLATILE}
    if isinstance(value, list):
        return [*map(_plain, value)]
    if isinstance(value, AfterModelCallEvent.ModelStopResponse | AgentResult):
        return value.stop_reason, _plain(value.message), [*map(str, getattr(value, "interrupts", None) or ())]
    if isinstance(value, Exception):  # the server's port differs between runs
        return type(value).__name__, re.sub(r":\d+/", "/", str(value))
    return getattr(value, "tool_name", value if isinstance(value, str | int | None) else repr(value))


VOLATILE = {"tracking_id", "metrics", "agent", "model", "messages", "tool_config", "event_loop_cycle_id"} | {
    "event_loop_parent_cycle_id",
    "event_loop_cycle_trace",
    "event_loop_cycle_span",
}


def fails(event: Any) -> None:
    raise ValueError("of a hook")


def sets(**values: Any) -> Any:
    """Return a hook that sets the given attributes of an event in turn."""
    return lambda event: [setattr(event, name, value) for name, value in values.items()]


def does(call: Any) -> Any:
    return lambda event: call(event.agent)


def use(name: str, **arguments: Any) -> str:
    return TOOL_CALL.format(name=name, arguments=json.dumps(arguments))


def overflows(event: Any) -> None:
    if len(event.agent.messages) > 6:
        raise ContextWindowOverflowException("too long")


LOOK = SCRIPT[0]
FEW = [LOOK, ANSWER]
WATCHED: dict[str, tuple[Any, ...]] = {
    "an answer": ([ANSWER],),
    "all kinds of turns": (SCRIPT,),
    "tools that fail": ([use("fail"), use("give_nothing"), use("look", where="x"), ANSWER],),
    "unknown tools": ([use("rm"), use("r m"), ANSWER],),
    "tools that receive the agent": ([use("see"), use("meet"), use("see"), ANSWER],),
    "a tool of a plugin": ([use("help"), LOOK, ANSWER],),
    "an agent stopped by a tool": ([use("see", do="stop")],),
    "a loop stopped by a tool": ([use("see", do="flag")],),
    "a tool that asks a person": ([use("see", do="ask")],),
    "a turn cut by length": ([LOOK, "cut"],),
    "a lost engine": ([LOOK, Reply.status(400, "no")],),
    "a denied model call": (FEW, BeforeModelCallEvent, sets(cancel=True)),
    "a denied model call with a reason": ([LOOK], BeforeModelCallEvent, sets(cancel="no"), False),
    "a retried model call": ([*FEW, ANSWER], AfterModelCallEvent, sets(retry=True)),
    "a retried failure": ([Reply.status(400, "no"), ANSWER], AfterModelCallEvent, sets(retry=True)),
    "a shortened history": ([*[LOOK] * 5, ANSWER], BeforeModelCallEvent, overflows, False),
    "denied tools": (FEW, BeforeToolsEvent, sets(cancel=True)),
    "denied tools with a reason": ([BOTH, ANSWER], BeforeToolsEvent, sets(cancel="no")),
    "a denied call": (FEW, BeforeToolCallEvent, sets(cancel_tool=True)),
    "a denied call with a reason": (FEW, BeforeToolCallEvent, sets(cancel_tool="no")),
    "another tool": (FEW, BeforeToolCallEvent, lambda event: setattr(event, "selected_tool", meet)),
    "no tool": (FEW, BeforeToolCallEvent, sets(selected_tool=None)),
    "a call of another name": (FEW, BeforeToolCallEvent, lambda event: event.tool_use.update(name="meet", input={})),
    "a replaced call": (
        FEW,
        BeforeToolCallEvent,
        lambda event: setattr(event, "tool_use", {**event.tool_use, "name": "nobody"}),
    ),
    "other arguments": (FEW, BeforeToolCallEvent, lambda event: event.tool_use["input"].update(at="y")),
    "another result": (FEW, AfterToolCallEvent, lambda event: event.result["content"].append({"text": "more"})),
    "a retried call": (FEW, AfterToolCallEvent, sets(retry=True)),
    "an end after tools": ([LOOK], AfterToolsEvent, sets(end_turn=True)),
    "an end after tools with text": ([LOOK], AfterToolsEvent, sets(end_turn="done")),
    "an end after tools in blocks": ([BOTH], AfterToolsEvent, sets(end_turn=[{"text": "a"}, {"text": "b"}])),
    "another invocation": ([*FEW, ANSWER], AfterInvocationEvent, sets(resume="go on")),
    **{
        f"a hook that fails: {kind.__name__}, {once=}": ([*FEW, ANSWER], kind, fails, once)
        for kind in EVENTS
        for once in (True, False)
    },
    **{
        f"cancelled by a hook: {kind.__name__}": (FEW, kind, does(lambda agent: agent.cancel(message="bye")))
        for kind in EVENTS[3:]
    },
    **{
        f"a hook that asks a person: {kind.__name__}": (FEW, kind, lambda event: event.interrupt("may I?"))
        for kind in (BeforeToolsEvent, BeforeToolCallEvent)
    },
}


@pytest.mark.filterwarnings("ignore:request_state:DeprecationWarning")
@pytest.mark.parametrize("case", WATCHED.values(), ids=WATCHED)
async def test_direct_loop_hooks_match_strands_own_loop(
    shipped_tokenizer: Any, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, *hears = case
    found: list[list[Any]] = [[], []]
    for flat, ends in enumerate(found):
        if flat:  # only Strands' own loop calls this function
            monkeypatch.setattr("strands.agent.agent.event_loop_cycle", None)
        listener = Listener(*hears)
        agent, fake = await play(
            shipped_tokenizer,
            copy.deepcopy(script),
            flat=bool(flat),
            hooks=[listener],
            tools=[look, fail, give_nothing, see, meet],
            plugins=[Helper()],
            ends=ends,
        )
        traces = [[child.name for child in one.children] for one in agent.event_loop_metrics.traces]
        ends += [listener.seen, _plain(agent.messages), [request.input_ids for request in fake.requests]]
        ends += [[name for name in names if name != "Recursive call"] for names in traces]
    assert found[1] == found[0]


async def test_direct_loop_keeps_the_stack_depth_constant(shipped_tokenizer: Any) -> None:
    recorder = Listener()
    await play(shipped_tokenizer, [SCRIPT[0]] * 12 + [ANSWER], flat=True, hooks=[recorder])
    calls = [
        depth
        for (name, *_), depth in zip(recorder.seen[::2], recorder.depths, strict=True)
        if name == "BeforeModelCallEvent"
    ]
    assert len(calls) == 13
    assert len(set(calls[1:])) == 1


async def test_direct_loop_runs_a_users_model_middleware(shipped_tokenizer: Any) -> None:
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

    adding = CallOnEvents(
        AgentInitializedEvent, call=lambda event: event.agent.add_middleware(InvokeModelStage, answer_third)
    )
    agent, fake = await play(shipped_tokenizer, SCRIPT, flat=True, hooks=[adding])
    assert asked == [1, 3, 5]
    assert _read(agent.messages[-1]) == ("assistant", [{"text": "mine"}])
    assert len(fake.requests) == 2


@tool
async def ask() -> str:
    """Ask a person, without the tool context."""
    raise InterruptException(Interrupt("an id", "may I?"))


UNWATCHED: dict[str, tuple[Any, ...]] = {
    "all kinds of turns": (SCRIPT,),
    "an answer": ([ANSWER],),
    "tools that fail": ([use("fail"), use("give_nothing"), use("look", where="x"), ANSWER],),
    "an unknown tool": ([use("rm"), LOOK, ANSWER],),
    "more tools than allowed": ([LOOK] * 4,),
    "more calls than allowed": ([LOOK, BOTH, LOOK],),
    "a tool that asks a person": ([LOOK, use("ask")],),
    "two tools, of which one asks a person": ([LOOK.removesuffix("<|im_end|>") + use("ask")],),
    "a turn cut by length": ([LOOK, "cut"],),
    "a turn cut after a call": ([LOOK, "cut after a call"],),
    "a lost engine": ([LOOK, Reply.status(400, "no")],),
    "a denied call": (FEW, BeforeToolCallEvent, sets(cancel_tool=True)),
    "a denied call with a reason": (FEW, BeforeToolCallEvent, sets(cancel_tool="no")),
    "denied tools": (FEW, BeforeToolsEvent, sets(cancel=True)),
    "an end after tools": ([LOOK], AfterToolsEvent, sets(end_turn=True)),
    "an end after tools in blocks": ([BOTH], AfterToolsEvent, sets(end_turn=[{"text": "a"}, {"text": "b"}])),
    "a shortened history": ([*[LOOK] * 3, ANSWER], BeforeModelCallEvent, overflows, False),
    **{
        f"a hook that fails: {kind.__name__}": (FEW, kind, fails)
        for kind in (BeforeModelCallEvent, BeforeToolsEvent, BeforeToolCallEvent, AfterToolsEvent)
    },
}


@pytest.mark.parametrize("case", UNWATCHED.values(), ids=UNWATCHED)
async def test_direct_loop_without_hooks_matches_strands_own_loop(
    shipped_tokenizer: Any, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, *hears = case
    monkeypatch.setattr("strands_rollout.agent.loop.ObservedInvocation", None)
    found: list[list[Any]] = [[], []]
    for flat, ends in enumerate(found):
        limiter = ToolLimiter(max_iterations=3, max_calls=3)
        agent, fake = await play(
            shipped_tokenizer,
            copy.deepcopy(script),
            flat=bool(flat),
            listeners=[limiter, Listener(*hears)],
            tools=[look, fail, give_nothing, ask],
            ends=ends,
        )
        ends += [[_read(message) for message in agent.messages], [request.input_ids for request in fake.requests]]
        ends += [limiter.tripped, limiter.calls, limiter.before_turn, _plain(agent._interrupt_state.to_dict())]
    assert found[1] == found[0]


@pytest.mark.parametrize("content", [[{"text": " "}], [], [{"text": ""}, {"text": "x"}]], ids=["blank", "none", "both"])
async def test_direct_loop_sends_blank_history_as_strands_does(shipped_tokenizer: Any, content: Any) -> None:
    before = [{"role": "user", "content": [{"text": "hi"}]}, {"role": "assistant", "content": content}]
    for listeners in (None, []):
        fakes = [
            (await play(shipped_tokenizer, [ANSWER], flat=flat, before=copy.deepcopy(before), listeners=listeners))[1]
            for flat in (True, False)
        ]
        assert fakes[0].requests[0].input_ids == fakes[1].requests[0].input_ids
