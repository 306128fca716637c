"""The main agent of a swarm or graph is the one that gave its answer."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import user_agents
from recording_policy import RecordingPolicy, play_agent, tool_call
from strands import Agent
from strands.agent.agent_result import AgentResult
from strands.hooks import AfterModelCallEvent, HookProvider, HookRegistry
from strands.multiagent import GraphBuilder, Swarm
from strands.multiagent.base import MultiAgentBase, MultiAgentResult, NodeResult, Status
from strands.telemetry.metrics import EventLoopMetrics

from strands_rollout import Sample, SGLangModel, Task, reward_func, sub_agent_model

RIGHT = "It is \\boxed{34}.<|im_end|>"
WRONG = "It is \\boxed{35}.<|im_end|>"
SPECIALISTS = ("algebra", "geometry", "numbers")


def _agent(model: SGLangModel, name: str, **more: Any) -> Agent:
    return Agent(name=name, model=model, system_prompt=f"You are {name}.", callback_handler=None, **more)


def _says(said: dict[str, list[str]]) -> Callable[[str, int], str]:
    """Each agent's turns, found by its system prompt."""
    left = {name: list(turns) for name, turns in said.items()}

    def turn(text: str, _number: int) -> str:
        return left[next(name for name in left if f"You are {name}." in text)].pop(0)

    return turn


def _is_named(node: str, word: str) -> Callable[[Any], bool]:
    return lambda state: word in str(state.results[node].result)


def _routed(model: SGLangModel, _task: Task) -> Any:
    """A router names the specialist who answers."""
    builder = GraphBuilder().set_max_node_executions(10)
    builder.add_node(_agent(model, "router"), "router")
    for name in SPECIALISTS:
        builder.add_node(_agent(model, name, tools=[user_agents.double]), name)
        builder.add_edge("router", name, condition=_is_named("router", name))
    return builder.build()


async def _graded(tokenizer: Any, factory: Any, said: dict[str, list[str]], **settings: Any) -> list[Any]:
    """The samples of an episode, checked on the wire, and their rewards."""
    result, wire = await play_agent(tokenizer, factory, _says(said), **settings)
    samples = wire.check(result)
    args = type("Args", (), {"reward_key": "score", "eval_reward_key": None, "strands_rollout": {}})()
    for sample, reward in zip(samples, await reward_func(args, samples), strict=True):
        sample.reward = reward["score"]
    return samples


def _facts(samples: list[Any]) -> dict[str, Any]:
    return dict(samples[0].metadata["strands_rollout"])


@pytest.mark.parametrize("name", SPECIALISTS)
async def test_graph_main_agent_is_the_routed_specialist(shipped_tokenizer: Any, name: str) -> None:
    said = {"router": [f"Ask {name}.<|im_end|>"], name: [tool_call("double", number=17), RIGHT]}
    samples = await _graded(shipped_tokenizer, _routed, said)
    facts = _facts(samples)
    assert (facts["stop_reason"], facts["final_text"]) == ("completed", "It is \\boxed{34}.")
    assert f"You are {name}." in shipped_tokenizer.decode(samples[0].tokens)
    assert (facts["turns"], facts["tool_iterations"], facts["tool_calls"]) == (2, 1, 1)
    assert [sample.reward for sample in samples] == [1.0, 1.0]
    alone = await _graded(shipped_tokenizer, _routed, said, fan_out=False)
    assert (len(alone), alone[0].reward, sum(alone[0].loss_mask)) == (1, 1.0, sum(samples[0].loss_mask))


async def test_graph_limits_are_the_main_agents(shipped_tokenizer: Any) -> None:
    said = {"router": ["Ask geometry.<|im_end|>"], "geometry": [tool_call("double", number=17)] * 3}
    samples = await _graded(shipped_tokenizer, _routed, said, max_tool_iterations=2)
    assert (samples[0].status, _facts(samples)["stop_reason"]) == (Sample.Status.TRUNCATED, "max_tool_iterations")
    assert (_facts(samples)["tool_iterations"], _facts(samples)["budgets"]["tool_iterations"]) == (2, 1.0)


async def test_graph_stop_reason_of_a_cut_main_agent(shipped_tokenizer: Any) -> None:
    said = {"router": ["Ask geometry.<|im_end|>"], "geometry": [" word" * 30]}

    def cut(text: str, number: int) -> Any:
        return (says(text, number), "length") if "You are geometry." in text else says(text, number)

    says = _says(said)
    result, wire = await play_agent(shipped_tokenizer, _routed, cut, max_new_tokens=90)
    samples = wire.check(result)
    assert (_facts(samples)["stop_reason"], _facts(samples)["turns"]) == ("response_length", 1)


def _revised(model: SGLangModel, _task: Task) -> Any:
    """A critic sends the writer back until it is content."""
    builder = GraphBuilder().set_max_node_executions(10)
    for name in ("writer", "critic"):
        builder.add_node(_agent(model, name), name)
    builder.add_edge("writer", "critic", condition=lambda state: "boxed" not in str(state.results["writer"].result))
    builder.add_edge("critic", "writer")
    builder.set_entry_point("writer")
    return builder.build()


async def test_graph_with_a_loop_main_agent_is_the_last_node(shipped_tokenizer: Any) -> None:
    said = {"writer": ["A draft.<|im_end|>", RIGHT], "critic": ["Again.<|im_end|>"]}
    samples = await _graded(shipped_tokenizer, _revised, said)
    assert (_facts(samples)["stop_reason"], _facts(samples)["turns"]) == ("completed", 2)
    assert [sample.reward for sample in samples] == [1.0, 1.0]


def _nested(model: SGLangModel, _task: Task) -> Any:
    """A planner, then a graph of two, of whom the second answers, as a leaf."""
    inner = GraphBuilder().set_max_node_executions(10)
    for name in ("first", "second"):
        inner.add_node(_agent(model, name), name)
    inner.add_edge("first", "second")
    outer = GraphBuilder().set_max_node_executions(10)
    outer.add_node(_agent(model, "planner"), "planner")
    outer.add_node(inner.build(), "inner")
    outer.add_edge("planner", "inner")
    return outer.build()


async def test_graph_nested_main_agent_is_the_inner_leaf(shipped_tokenizer: Any) -> None:
    said = {"planner": ["Plan.<|im_end|>"], "first": [WRONG], "second": [RIGHT]}
    samples = await _graded(shipped_tokenizer, _nested, said)
    assert "You are second." in shipped_tokenizer.decode(samples[0].tokens)
    assert [sample.reward for sample in samples] == [1.0] * 3


class _Function(MultiAgentBase):
    """A node that is no agent, as in Strands' documentation."""

    id = "function"

    async def invoke_async(self, task: Any, invocation_state: Any = None, **kwargs: Any) -> MultiAgentResult:
        message: Any = {"role": "assistant", "content": [{"text": "Stored."}]}
        result = AgentResult("end_turn", message, EventLoopMetrics(), {})
        return MultiAgentResult(Status.COMPLETED, {"function": NodeResult(result)})


class _Foreign:
    """An agent of another vendor."""

    name = "foreign"

    async def invoke_async(self, prompt: Any = None, **kwargs: Any) -> AgentResult:
        return AgentResult("end_turn", {"role": "assistant", "content": [{"text": "Noted."}]}, EventLoopMetrics(), {})

    def __call__(self, prompt: Any = None, **kwargs: Any) -> AgentResult:
        raise NotImplementedError

    async def stream_async(self, prompt: Any = None, **kwargs: Any) -> AsyncIterator[Any]:
        yield {"result": await self.invoke_async(prompt)}


@pytest.mark.parametrize("leaf", [_Function, _Foreign])
async def test_graph_main_agent_precedes_a_leaf_without_policy(shipped_tokenizer: Any, leaf: Any) -> None:
    def factory(model: SGLangModel, task: Task) -> Any:
        builder = GraphBuilder().set_max_node_executions(10)
        builder.add_node(_agent(model, "first"), "first")
        builder.add_node(_agent(model, "second"), "second")
        builder.add_node(leaf(), "leaf")
        builder.add_edge("first", "second")
        builder.add_edge("second", "leaf")
        return builder.build()

    samples = await _graded(shipped_tokenizer, factory, {"first": [WRONG], "second": [RIGHT]})
    assert _facts(samples)["stop_reason"] == "completed"
    assert [sample.reward for sample in samples] == [1.0, 1.0]


@pytest.mark.parametrize("runs", [1, 2])
async def test_graph_at_its_own_limit_main_agent_is_the_last_node(shipped_tokenizer: Any, runs: int) -> None:
    def factory(model: SGLangModel, task: Task) -> Any:
        builder = GraphBuilder().set_max_node_executions(runs)
        for name in ("first", "second", "third"):
            builder.add_node(_agent(model, name), name)
        builder.add_edge("first", "second")
        builder.add_edge("second", "third")
        return builder.build()

    samples = await _graded(shipped_tokenizer, factory, {"first": [WRONG], "second": [RIGHT]})
    assert (samples[0].status, _facts(samples)["stop_reason"]) == (Sample.Status.TRUNCATED, "team_limit")
    assert f"You are {('first', 'second')[runs - 1]}." in shipped_tokenizer.decode(samples[0].tokens)
    assert len(samples) == runs
    assert not any(sample.remove_sample for sample in samples)


def _leaves(model: SGLangModel, _task: Task) -> Any:
    """Two leaves at once."""
    builder = GraphBuilder().set_max_node_executions(10)
    for name in ("root", "left", "right"):
        builder.add_node(_agent(model, name), name)
    builder.add_edge("root", "right")
    builder.add_edge("root", "left")
    return builder.build()


@pytest.mark.parametrize("slow", ["left", "right"])
async def test_graph_parallel_leaves_main_agent_is_the_first_added(shipped_tokenizer: Any, slow: str) -> None:
    others_done = asyncio.Event()

    class Slow(RecordingPolicy):
        async def __call__(self, body: dict[str, Any], number: int) -> Any:
            text = shipped_tokenizer.decode(body["input_ids"])
            if f"You are {slow}." in text:
                await others_done.wait()
            reply = await super().__call__(body, number)
            if "You are root." not in text:
                others_done.set()
            return reply

    said = {"root": ["Go.<|im_end|>"], "left": [RIGHT], "right": [WRONG]}
    result, wire = await play_agent(shipped_tokenizer, _leaves, _says(said), wire=Slow)
    samples = wire.check(result)
    assert "You are left." in shipped_tokenizer.decode(samples[0].tokens)


class _Relay(MultiAgentBase):
    """A structure of a user's own, whose events say nothing of its nodes."""

    def __init__(self, agents: list[Agent]) -> None:
        super().__init__()
        self.id = "relay"
        self.nodes = {agent.name: SimpleNamespace(node_id=agent.name, executor=agent) for agent in agents}

    async def invoke_async(self, task: Any, invocation_state: Any = None, **kwargs: Any) -> MultiAgentResult:
        for node in reversed(self.nodes.values()):
            task = str(await node.executor.invoke_async(task))
        return MultiAgentResult(Status.COMPLETED)


@pytest.mark.parametrize("is_inner", [False, True])
async def test_multi_agent_base_main_agent_is_the_last_speaker(shipped_tokenizer: Any, is_inner: bool) -> None:
    def factory(model: SGLangModel, task: Task) -> Any:
        relay = _Relay([_agent(model, name) for name in ("second", "first")])
        if not is_inner:
            return relay
        builder = GraphBuilder().set_max_node_executions(10)
        builder.add_node(relay, "relay")
        return builder.build()

    samples = await _graded(shipped_tokenizer, factory, {"first": [WRONG], "second": [RIGHT]})
    assert "You are second." in shipped_tokenizer.decode(samples[0].tokens)


def _handed_over(model: SGLangModel, _task: Task) -> Any:
    return Swarm([_agent(model, name) for name in ("one", "two", "three")], max_handoffs=4)


HAND_OVERS = {
    "nobody": (["one"], "one"),
    "once": (["one", "two"], "two"),
    "twice": (["one", "three", "two"], "two"),
    "and back": (["one", "two", "one"], "one"),
}


@pytest.mark.parametrize(("order", "last"), HAND_OVERS.values(), ids=HAND_OVERS)
async def test_swarm_main_agent_is_the_last_handoff_target(shipped_tokenizer: Any, order: list[str], last: str) -> None:
    said: dict[str, list[str]] = {name: [] for name in order}
    for name, to in itertools.pairwise(order):
        said[name] += [tool_call("handoff_to_agent", agent_name=to, message="You."), WRONG]
    said[last].append(RIGHT)
    samples = await _graded(shipped_tokenizer, _handed_over, said)
    assert f"You are {last}." in shipped_tokenizer.decode(samples[0].tokens)
    assert _facts(samples)["final_text"] == "It is \\boxed{34}."
    assert {sample.reward for sample in samples} == {1.0}


async def test_graph_only_agent_on_the_policy_model_is_the_main_agent(shipped_tokenizer: Any) -> None:
    def factory(model: SGLangModel, task: Task) -> Any:
        builder = GraphBuilder().set_max_node_executions(10)
        builder.add_node(_agent(model, "first"), "first")
        builder.add_node(_agent(sub_agent_model(), "second"), "second")
        builder.add_edge("first", "second")
        return builder.build()

    samples = await _graded(shipped_tokenizer, factory, {"first": [RIGHT], "second": [WRONG]})
    assert "You are first." in shipped_tokenizer.decode(samples[0].tokens)
    assert [sample.reward for sample in samples] == [1.0, 1.0]


heard: list[str] = []


class Hears(HookProvider):
    """Notes whose model calls it hears of."""

    def register_hooks(self, registry: HookRegistry, **_more: Any) -> None:
        registry.add_callback(AfterModelCallEvent, lambda event: heard.append(event.agent.name))


async def test_graph_hooks_setting_applies_to_each_candidate(shipped_tokenizer: Any) -> None:
    heard.clear()
    said = {"router": ["Ask numbers.<|im_end|>"], "numbers": [RIGHT]}
    await _graded(shipped_tokenizer, _routed, said, hooks=["test_team_answers.Hears"])
    assert heard == ["router", "numbers"]


class Asks:
    """An environment that asks one more question."""

    def __init__(self) -> None:
        self.answers: list[str] = []

    async def answer(self, text: str) -> str | None:
        self.answers.append(text)
        return "And now?" if len(self.answers) == 1 else None

    async def score(self) -> dict[str, Any]:
        return {"score": float("34" in self.answers[-1]), "turns": len(self.answers)}


def asks(_task: Task) -> Asks:
    return Asks()


async def test_graph_environment_gets_the_main_agents_answers(shipped_tokenizer: Any) -> None:
    said = {
        "router": ["Ask algebra.<|im_end|>", "Ask geometry.<|im_end|>"],
        "algebra": [WRONG],
        "geometry": [RIGHT],
    }
    samples = await _graded(shipped_tokenizer, _routed, said, environment="test_team_answers.asks")
    assert "You are geometry." in shipped_tokenizer.decode(samples[0].tokens)
    assert [sample.reward for sample in samples] == [1.0] * 3
