"""Several agents on one `SGLangModel`: a conversation each, and every sampled token trained once or counted."""

import asyncio
import json
import logging
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import user_agents
from fake_sglang import FakeSGLang
from harness import ANSWER, args_for, ids_of
from recording_policy import RecordingPolicy, play_agent, tool_call
from strands import Agent, ToolContext, tool
from strands.agent.conversation_manager import SlidingWindowConversationManager
from strands.hooks import AfterModelCallEvent, BeforeModelCallEvent, HookProvider, HookRegistry
from strands.multiagent import GraphBuilder, Swarm
from strands.vended_plugins.context_injector import ContextInjector

from strands_rollout import Sample, SGLangModel, Task, generate, sub_agent_model
from strands_rollout.errors import PromptError, TrajectoryError
from strands_rollout.samples import finished_samples
from strands_rollout.slime_plugin.drift import DriftMeter, measure_some

REMINDER = "<reminder>Mind the time.</reminder>"
DONE_TURN = "Done.<|im_end|>"


def _graph(model: SGLangModel, _task: Task) -> Any:
    builder = GraphBuilder().set_max_node_executions(10)
    for name in ("left", "right", "last"):
        builder.add_node(Agent(name=name, model=model), name)
    builder.add_edge("left", "last")
    builder.add_edge("right", "last")
    return builder.build()


def _swarm(model: SGLangModel, _task: Task) -> Any:
    one, two = (Agent(name=name, model=model, system_prompt=f"You are {name}.") for name in ("one", "two"))
    return Swarm([one, two], entry_point=one)


def _agent_as_tool(model: SGLangModel, _task: Task) -> Agent:
    inner = Agent(name="expert", model=model, system_prompt="You are asked.", tools=[user_agents.double])
    return Agent(model=model, tools=[inner.as_tool()])


@tool(context=True)
async def ask_all(questions: list[str], tool_context: ToolContext) -> str:
    """Ask several agents concurrently."""
    model = tool_context.agent.model
    agents = [Agent(model=model, system_prompt="You are asked.", tools=[user_agents.double]) for _ in questions]
    return " ".join(map(str, await asyncio.gather(*(agent.invoke_async("Go on.") for agent in agents))))


def _concurrent_agents(model: SGLangModel, _task: Task) -> Agent:
    return Agent(model=model, tools=[ask_all])


def _team_turn(text: str, outer: str) -> str:
    """Return the next turn of an agent: `outer` or a tool call, and an answer once its tools are done."""
    if "You are asked." not in text:
        return outer if "Done." not in text else ANSWER
    return DONE_TURN if "<tool_response>" in text else tool_call("double", number=17)


TEAMS: dict[str, tuple[Any, Any, int]] = {
    "a graph with two parallel nodes": (_graph, lambda _text, number: ANSWER if number == 2 else DONE_TURN, 3),
    "a swarm": (
        _swarm,
        lambda text, _number: (
            ANSWER
            if "You are two." in text
            else "Gone.<|im_end|>"
            if "<tool_response>" in text
            else tool_call("handoff_to_agent", agent_name="two", message="You.")
        ),
        2,
    ),
    "an agent as a tool": (_agent_as_tool, lambda text, _number: _team_turn(text, tool_call("expert", input="?")), 2),
    "eight concurrent agents with the same prompt": (
        _concurrent_agents,
        lambda text, _number: _team_turn(text, tool_call("ask_all", questions=["?"] * 8)),
        9,
    ),
}


@pytest.mark.parametrize(("factory", "script", "count"), TEAMS.values(), ids=TEAMS)
async def test_generate_gives_each_agent_on_one_model_a_sample(shipped_tokenizer, capsys, factory, script, count):
    result, wire = await play_agent(shipped_tokenizer, factory, script)
    samples = wire.check(result)
    assert len(samples) == count
    assert {sample.metadata["strands_rollout"]["stop_reason"] for sample in samples} == {"completed"}
    assert samples[0].metadata["strands_rollout"].get("dropped_sampled_tokens") == 0
    sent = [request + answer for request, answer in wire.requests]
    for sample in samples:  # the sample's tokens equal one request and its answer
        assert sample.tokens in sent
    if factory is not _swarm:
        assert "34" in samples[0].response
    assert capsys.readouterr().out == ""
    single, wire = await play_agent(shipped_tokenizer, factory, script, fan_out=False)
    assert single.metadata["strands_rollout"]["dropped_sampled_tokens"] == len(wire.sampled) - sum(single.loss_mask)


def _reminded_agent(model: SGLangModel, _task: Task) -> Agent:
    plugin = ContextInjector(lambda _context: REMINDER, name="reminder", trigger="everyTurn")
    return Agent(model=model, tools=[user_agents.double], plugins=[plugin])


def _double_twice(text: str, _number: int) -> str:
    return ANSWER if text.count("</tool_response>") == 2 else tool_call("double", number=17)


REMINDERS = {
    "segments, all trained": ({}, 3, 0),
    "segments, only the last trained": ({"fan_out": False}, 1, 2),
    "one sample": ({"fan_out": False, "transient_context": "keep"}, 1, 0),
}


@pytest.mark.parametrize(("settings", "count", "dropped"), REMINDERS.values(), ids=REMINDERS)
async def test_transient_context_tokens_are_trained_or_counted(
    shipped_tokenizer: Any, caplog: pytest.LogCaptureFixture, settings: Any, count: int, dropped: int
) -> None:
    result, wire = await play_agent(shipped_tokenizer, _reminded_agent, _double_twice, **settings)
    samples = wire.check(result)
    assert len(samples) == count
    facts = samples[0].metadata["strands_rollout"]
    drifts = measure_some(finished_samples(samples), DriftMeter(shipped_tokenizer))
    assert [drift.mismatches for drift in drifts] == [[]] * count
    assert facts["dropped_sampled_tokens"] == dropped * len(ids_of(shipped_tokenizer, tool_call("double", number=17)))
    warnings = [
        record.getMessage() for record in caplog.records if "event=sampled_tokens_dropped" in record.getMessage()
    ]
    assert len(warnings) == (dropped > 0)
    for message in warnings:
        assert f"message 0 had {REMINDER!r}" in message
        assert "fan_out: true, or transient_context: keep" in message
    if settings.get("transient_context"):
        # each reminder stays where the policy read it
        assert shipped_tokenizer.decode(samples[0].tokens).count(REMINDER) == 3
        for (before, answer), (after, _) in zip(wire.requests, wire.requests[1:], strict=False):
            assert after[: len(before) + len(answer)] == before + answer


class StandInAgent:
    """The attributes of an agent that a model reads."""

    def __init__(self, messages: list[Any]) -> None:
        self.messages = messages


def _user(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"text": text} for text in texts]}


REPEATED_TEXTS = {
    "shown again": ([_user("One", "R")], [_user("One", "R")], 1),
    "shown once": ([_user("One", "R")], [_user("One")], 1),
    "another text": ([_user("One", "R")], [_user("One", "S")], 2),
    "at the beginning": ([_user("R", "One")], [_user("One")], 1),
}


@pytest.mark.parametrize(("first", "second", "segments"), REPEATED_TEXTS.values(), ids=REPEATED_TEXTS)
async def test_transient_context_keep_segments_only_at_other_text(
    shipped_tokenizer: Any, first: Any, second: Any, segments: int
) -> None:
    wire = RecordingPolicy(shipped_tokenizer, lambda _text, _number: DONE_TURN)
    async with FakeSGLang(wire, context_length=4096) as fake:
        choices: Any = {"on_rewritten_history": "segment", "transient_context": "keep"}
        model = SGLangModel(shipped_tokenizer, fake.base_url, **choices)
        agent = StandInAgent([_user("One")])
        answer = (await model.answer(first, agent=agent)).message
        agent.messages = [_user("One"), answer, _user("Two")]
        await model.answer([*second, answer, _user("Two")], agent=agent)
        assert len(list(model.conversation)) == segments


@pytest.mark.parametrize("choice", ["one", "many"])
async def test_sglang_model_conversations_one_or_many(shipped_tokenizer, choice):
    wire = RecordingPolicy(shipped_tokenizer, lambda _text, _number: DONE_TURN)
    async with FakeSGLang(wire, context_length=4096) as fake:
        model = SGLangModel(shipped_tokenizer, fake.base_url, conversations=choice)
        agents = [Agent(model=model, callback_handler=None) for _ in range(3)]
        results = await asyncio.gather(*(agent.invoke_async("One") for agent in agents), return_exceptions=True)
        if choice == "one":
            assert sum("got a second turn while one is running" in str(result) for result in results) == 2
            return
        await asyncio.gather(*(agent.invoke_async("Two") for agent in agents))
        assert [len(conversation.branch.trajectory.turns) for conversation in model.record] == [2, 2, 2]
        assert len({turn.parts[0].rid for entry in model.record for turn in entry.branch.trajectory.turns}) == 6
        # a request without an agent is recognized by its history
        answers = [await model.answer([_user("Three")]) for _ in range(2)]
        await model.answer([_user("Three"), answers[0].message, _user("Four")])
        assert [conversation.kind for conversation in model.record] == ["main", "agent", "agent", "aside", "aside"]
        with pytest.raises(TrajectoryError, match="does not extend"):
            await model.answer([_user("Five")], agent=agents[0])


@pytest.mark.parametrize("is_known", [True, False])
async def test_resume_gives_the_sampled_turn_to_the_first_caller(shipped_tokenizer, is_known):
    wire = RecordingPolicy(
        shipped_tokenizer, lambda _text, number: "<tool_call>\n{<|im_end|>" if number == 0 else DONE_TURN
    )
    async with FakeSGLang(wire, context_length=4096) as fake:
        first = SGLangModel(shipped_tokenizer, fake.base_url, conversations="many")
        agent = StandInAgent([_user("One")])
        caller = agent if is_known else None
        await first.answer(agent.messages, agent=agent)
        model = SGLangModel(shipped_tokenizer, fake.base_url, conversations="many")
        model.resume(first.trajectory, agent.messages, 1)
        answer = await model.answer(agent.messages, agent=caller)
        agent.messages += [answer.message, _user("Two")]
        await model.answer(agent.messages, agent=caller)
    assert len(wire.requests) == 2
    assert [[len(branch.trajectory.turns) for branch in conversation] for conversation in model.record] == [[2]]
    assert len(model.parse_failures) == 1


async def test_resume_keeps_the_sampled_turn_after_a_refused_request(shipped_tokenizer: Any) -> None:
    wire = RecordingPolicy(shipped_tokenizer, lambda _text, _number: DONE_TURN)
    async with FakeSGLang(wire, context_length=4096) as fake:
        first = SGLangModel(shipped_tokenizer, fake.base_url)
        answer = await first.answer([_user("One")])
        model = SGLangModel(shipped_tokenizer, fake.base_url)
        model.resume(first.trajectory, [_user("One")], 1)
        with pytest.raises(TrajectoryError, match="does not extend"):
            await model.answer([_user("Two")])
        assert (await model.answer([_user("One")])).message == answer.message
    assert len(wire.requests) == 1


async def test_answer_concurrent_requests_share_two_conversations(shipped_tokenizer: Any) -> None:
    wire = RecordingPolicy(shipped_tokenizer, lambda _text, _number: DONE_TURN)
    async with FakeSGLang(wire, context_length=4096) as fake:
        config: Any = {"conversations": "many", "on_rewritten_history": "segment"}
        model = SGLangModel(shipped_tokenizer, fake.base_url, **config)
        agent = StandInAgent([_user("One")])
        for _ in range(3):
            await asyncio.gather(*(model.answer(agent.messages, agent=agent) for _ in range(2)))
            await model.answer(agent.messages, agent=agent)
        assert [conversation.turn_count for conversation in model.record] == [6, 3]


async def test_answer_after_a_failed_request_and_a_promotion(shipped_tokenizer: Any) -> None:
    wire = RecordingPolicy(shipped_tokenizer, lambda _text, _number: DONE_TURN)
    failing, other = StandInAgent([_user("One")]), StandInAgent([_user("Two")])
    async with FakeSGLang(wire, context_length=4096) as fake:
        model = SGLangModel(shipped_tokenizer, fake.base_url, conversations="many")
        with pytest.raises(PromptError):
            await model.answer([{"role": "user", "content": [{"video": {}}]}], agent=failing)
        await model.answer(other.messages, agent=other)
        model.record.promote(list(model.record)[1])
        await model.answer(failing.messages, agent=failing)
    assert [conversation.turn_count for conversation in model.record] == [1, 1]


async def test_answer_refuses_a_refused_agent_again(shipped_tokenizer: Any) -> None:
    wire = RecordingPolicy(shipped_tokenizer, lambda _text, _number: DONE_TURN)
    async with FakeSGLang(wire, context_length=4096) as fake:
        model = SGLangModel(shipped_tokenizer, fake.base_url, conversations="many")
        answer = await model.answer([_user("One")])
        agent = StandInAgent([_user("One"), answer.message, _user("Two")])
        with pytest.raises(TrajectoryError, match="changes the system prompt"):
            await model.answer(agent.messages, system_prompt="Be long.", agent=agent)
        with pytest.raises(TrajectoryError, match="does not extend"):
            await model.answer([_user("Three")], agent=agent)


async def test_answer_ignores_messages_added_during_the_request(shipped_tokenizer: Any) -> None:
    """The agent's own list of messages is passed, and grows while the request is in flight."""
    wire = RecordingPolicy(shipped_tokenizer, lambda _text, _number: DONE_TURN)
    async with FakeSGLang(wire, context_length=4096) as fake:
        model = SGLangModel(shipped_tokenizer, fake.base_url, conversations="many")
        agent = StandInAgent([_user("One")])
        asking = asyncio.create_task(model.answer(agent.messages, agent=agent))
        await fake.arrived()
        agent.messages.append(_user("Two"))
        answer = await asking
        agent.messages[1:] = [answer.message, _user("Two")]
        await model.answer(agent.messages, agent=agent)
        assert [len(branch.trajectory.turns) for branch in model.conversation] == [2]


async def test_answer_conversations_have_distinct_ids_and_seeds(shipped_tokenizer: Any) -> None:
    wire = RecordingPolicy(shipped_tokenizer, lambda _text, _number: tool_call("double", number=1))
    async with FakeSGLang(wire, context_length=4096) as fake:
        params = {"sampling_seed": 7}
        model = SGLangModel(shipped_tokenizer, fake.base_url, conversations="many", sampling_params=params)
        answers = [await model.answer([_user("One")], agent=StandInAgent([])) for _ in range(3)]
        ids = [answer.message["content"][-1]["toolUse"]["toolUseId"] for answer in answers]
        seeds = [request.body["sampling_params"]["sampling_seed"] for request in fake.requests]
    assert len(set(ids)) == len(set(seeds)) == 3


class _RandomTrouble(HookProvider):
    """Retry an answer, or replace the history by a summary from the policy, at random."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def register_hooks(self, registry: HookRegistry, **_more: Any) -> None:
        registry.add_callback(AfterModelCallEvent, self._retry)
        registry.add_callback(BeforeModelCallEvent, self._summarize)

    def _retry(self, event: AfterModelCallEvent) -> None:
        event.retry = event.exception is None and self._chance.random() < 0.05

    async def _summarize(self, event: BeforeModelCallEvent) -> None:
        messages = event.agent.messages
        if len(messages) > 4 and self._chance.random() < 0.2:
            request: Any = [_user("Sum up.", json.dumps(messages, default=str)[:200])]
            async for _ in event.agent.model.stream(request):
                pass
            messages[:] = [_user("It was summed up. Go on.")]


def _random_agent_factory(chance: random.Random) -> Any:
    """Return a factory of agents with random plugins, conversation managers, hooks, sub-agents and tools."""

    def agent(model: Any, depth: int) -> Agent:
        @tool
        async def delegate(count: int) -> str:
            """Delegate."""
            models = [model if chance.random() < 0.7 else sub_agent_model() for _ in range(max(1, min(count, 3)))]
            agents = [agent(one, depth + 1) for one in models]
            return " ".join(map(str, await asyncio.gather(*(one.invoke_async("Go on.") for one in agents))))

        @tool(context=True)
        async def wait_for(tool_context: ToolContext) -> str:
            """Ask a person."""
            return str(tool_context.interrupt("person", reason="?")) if chance.random() < 0.3 else "yes"

        trigger = chance.choice(["userTurn", "everyTurn"])
        injects = chance.random() < 0.4
        plugins = (
            [ContextInjector(lambda _context: f"R{chance.random()}", name="r", trigger=trigger)] if injects else []
        )
        manager = SlidingWindowConversationManager(window_size=chance.choice([3, 5, 40]), per_turn=True)
        tools = [user_agents.double, wait_for, *([delegate] if depth < 2 else [])]
        hooks = [_RandomTrouble(chance)] if chance.random() < 0.4 else []
        return Agent(
            model=model, tools=tools, plugins=plugins, conversation_manager=manager, hooks=hooks, callback_handler=None
        )

    return lambda model, _task: agent(model, 0)


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 540), marks=pytest.mark.slow)], ids=["40", "500"])
async def test_generate_random_agents_train_each_token_at_most_once(shipped_tokenizer, seeds, caplog):
    caplog.set_level(logging.CRITICAL)
    stop_reasons: Counter[str] = Counter()
    for seed in seeds:
        chance, state = random.Random(seed), SimpleNamespace(aborting=False)

        def script(_text: str, _number: int, chance: random.Random = chance, state: Any = state) -> Any:
            state.aborting = state.aborting or chance.random() < 0.01
            turns = [
                tool_call("double", number=1),
                tool_call("delegate", count=2),
                tool_call("wait_for"),
                "<tool_call>\n{",
                ANSWER,
            ]
            text = chance.choices(turns, [4, 2, 1, 1, 3])[0]
            return (text[: len(text) // 2], "abort") if chance.random() < 0.05 else text

        settings = {
            "fan_out": chance.random() < 0.7,
            "transient_context": chance.choice(["segment", "keep"]),
            "on_engine_abort": chance.choice(["continue", "continue", "return"]),
            "max_tool_iterations": 6,
            "should_abort": lambda state=state: state.aborting,
        }
        result, wire = await play_agent(shipped_tokenizer, _random_agent_factory(chance), script, **settings)
        stop_reasons[wire.check(result)[0].metadata["strands_rollout"]["stop_reason"]] += 1
    assert {"completed", "aborted", "setup_error"} <= stop_reasons.keys()
    assert "internal_error" not in stop_reasons, stop_reasons


@pytest.mark.parametrize("fan_out", [True, False])
async def test_generate_resumes_a_turn_with_transient_context(shipped_tokenizer, fan_out) -> None:
    state = SimpleNamespace(aborting=False)

    def script(text: str, number: int) -> Any:
        state.aborting = number == 0
        turn = tool_call("double", number=17)
        return (turn[:12], "abort") if number == 0 else turn[12:] if number == 1 else _double_twice(text, number)

    user_agents.factories_of_the_test[:] = [_reminded_agent]
    wire = RecordingPolicy(shipped_tokenizer, script)
    async with FakeSGLang(wire, context_length=16384) as fake:
        settings = {
            "agent_factory": "user_agents.build_for_test",
            "tools": [],
            "should_abort": lambda: state.aborting,
        }
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=settings)
        params = {"temperature": 1.0, "max_new_tokens": 8192}
        sample = await generate(args, Sample(prompt="What is 17 * 2?", label="34", index=0), params)
        assert sample.status is Sample.Status.ABORTED
        state.aborting, args.strands_rollout = False, settings | {"fan_out": fan_out}
        sample.loss_mask[0] = 0  # as slime masks tokens that older weights sampled
        result = await generate(args, sample, params)
    samples = wire.check(result, masked=1) if fan_out else [result]
    assert (sample.status, sample.tokens) == (Sample.Status.COMPLETED, [*wire.requests[-1][0], *wire.requests[-1][1]])
    assert len(samples) == (2 if fan_out else 1)
