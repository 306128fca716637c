"""Swarms and graphs: the main agent is the agent that gave the answer."""

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

RIGHT_TURN = "It is \\boxed{34}.<|im_end|>"
WRONG_TURN = "It is \\boxed{35}.<|im_end|>"
SPECIALISTS = ("algebra", "geometry", "numbers")


def _agent(model: SGLangModel, name: str, **more: Any) -> Agent:
    return Agent(name=name, model=model, system_prompt=f"You are {name}.", callback_handler=None, **more)


def _script(turns_of: dict[str, list[str]]) -> Callable[[str, int], str]:
    """Return a script that samples each agent's turns, recognized by its system prompt."""
    left = {name: list(turns) for name, turns in turns_of.items()}

    def turn(text: str, _number: int) -> str:
        return left[next(name for name in left if f"You are {name}." in text)].pop(0)

    return turn


def _result_names(node: str, word: str) -> Callable[[Any], bool]:
    return lambda state: word in str(state.results[node].result)


def _routing_graph(model: SGLangModel, _task: Task) -> Any:
    """Build a graph in which a router selects the specialist that answers."""
    builder = GraphBuilder().set_max_node_executions(10)
    builder.add_node(_agent(model, "router"), "router")
    for name in SPECIALISTS:
        builder.add_node(_agent(model, name, tools=[user_agents.double]), name)
        builder.add_edge("router", name, condition=_result_names("router", name))
    return builder.build()


async def _play_and_grade(tokenizer: Any, factory: Any, turns_of: dict[str, list[str]], **settings: Any) -> list[Any]:
    """Play an episode, check its samples against the wire, and return them with rewards."""
    result, wire = await play_agent(tokenizer, factory, _script(turns_of), **settings)
    samples = wire.check(result)
    args = type("Args", (), {"reward_key": "score", "eval_reward_key": None, "strands_rollout": {}})()
    for sample, reward in zip(samples, await reward_func(args, samples), strict=True):
        sample.reward = reward["score"]
    return samples


def _facts(samples: list[Any]) -> dict[str, Any]:
    return dict(samples[0].metadata["strands_rollout"])


@pytest.mark.parametrize("name", SPECIALISTS)
async def test_graph_main_agent_is_the_routed_specialist(shipped_tokenizer: Any, name: str) -> None:
    turns = {"router": [f"Ask {name}.<|im_end|>"], name: [tool_call("double", number=17), RIGHT_TURN]}
    samples = await _play_and_grade(shipped_tokenizer, _routing_graph, turns)
    facts = _facts(samples)
    assert (facts["stop_reason"], facts["final_text"]) == ("completed", "It is \\boxed{34}.")
    assert f"You are {name}." in shipped_tokenizer.decode(samples[0].tokens)
    assert (facts["turns"], facts["tool_iterations"], facts["tool_calls"]) == (2, 1, 1)
    assert [sample.reward for sample in samples] == [1.0, 1.0]
    alone = await _play_and_grade(shipped_tokenizer, _routing_graph, turns, fan_out=False)
    assert (len(alone), alone[0].reward, sum(alone[0].loss_mask)) == (1, 1.0, sum(samples[0].loss_mask))


async def test_graph_limits_are_the_main_agents(shipped_tokenizer: Any) -> None:
    turns = {"router": ["Ask geometry.<|im_end|>"], "geometry": [tool_call("double", number=17)] * 3}
    samples = await _play_and_grade(shipped_tokenizer, _routing_graph, turns, max_tool_iterations=2)
    assert (samples[0].status, _facts(samples)["stop_reason"]) == (Sample.Status.TRUNCATED, "max_tool_iterations")
    assert (_facts(samples)["tool_iterations"], _facts(samples)["budgets"]["tool_iterations"]) == (2, 1.0)


async def test_graph_stop_reason_of_a_cut_main_agent(shipped_tokenizer: Any) -> None:
    turns = {"router": ["Ask geometry.<|im_end|>"], "geometry": [" word" * 30]}

    def cut(text: str, number: int) -> Any:
        return (script(text, number), "length") if "You are geometry." in text else script(text, number)

    script = _script(turns)
    result, wire = await play_agent(shipped_tokenizer, _routing_graph, cut, max_new_tokens=90)
    samples = wire.check(result)
    assert (_facts(samples)["stop_reason"], _facts(samples)["turns"]) == ("response_length", 1)


def _writer_and_critic(model: SGLangModel, _task: Task) -> Any:
    """Build a graph in which a critic returns drafts to a writer until one has an answer."""
    builder = GraphBuilder().set_max_node_executions(10)
    for name in ("writer", "critic"):
        builder.add_node(_agent(model, name), name)
    builder.add_edge("writer", "critic", condition=lambda state: "boxed" not in str(state.results["writer"].result))
    builder.add_edge("critic", "writer")
    builder.set_entry_point("writer")
    return builder.build()


async def test_graph_with_a_loop_main_agent_is_the_last_node(shipped_tokenizer: Any) -> None:
    turns = {"writer": ["A draft.<|im_end|>", RIGHT_TURN], "critic": ["Again.<|im_end|>"]}
    samples = await _play_and_grade(shipped_tokenizer, _writer_and_critic, turns)
    assert (_facts(samples)["stop_reason"], _facts(samples)["turns"]) == ("completed", 2)
    assert [sample.reward for sample in samples] == [1.0, 1.0]


def _nested_graph(model: SGLangModel, _task: Task) -> Any:
    """Build a graph whose leaf is another graph of two agents."""
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
    turns = {"planner": ["Plan.<|im_end|>"], "first": [WRONG_TURN], "second": [RIGHT_TURN]}
    samples = await _play_and_grade(shipped_tokenizer, _nested_graph, turns)
    assert "You are second." in shipped_tokenizer.decode(samples[0].tokens)
    assert [sample.reward for sample in samples] == [1.0] * 3


class _FunctionNode(MultiAgentBase):
    """A node without an agent, as in Strands' documentation."""

    id = "function"

    async def invoke_async(self, task: Any, invocation_state: Any = None, **kwargs: Any) -> MultiAgentResult:
        message: Any = {"role": "assistant", "content": [{"text": "Stored."}]}
        result = AgentResult("end_turn", message, EventLoopMetrics(), {})
        return MultiAgentResult(Status.COMPLETED, {"function": NodeResult(result)})


class _ForeignAgent:
    """An agent of another library."""

    name = "foreign"

    async def invoke_async(self, prompt: Any = None, **kwargs: Any) -> AgentResult:
        return AgentResult("end_turn", {"role": "assistant", "content": [{"text": "Noted."}]}, EventLoopMetrics(), {})

    def __call__(self, prompt: Any = None, **kwargs: Any) -> AgentResult:
        raise NotImplementedError

    async def stream_async(self, prompt: Any = None, **kwargs: Any) -> AsyncIterator[Any]:
        yield {"result": await self.invoke_async(prompt)}


@pytest.mark.parametrize("leaf", [_FunctionNode, _ForeignAgent])
async def test_graph_main_agent_precedes_a_leaf_without_policy(shipped_tokenizer: Any, leaf: Any) -> None:
    def factory(model: SGLangModel, task: Task) -> Any:
        builder = GraphBuilder().set_max_node_executions(10)
        builder.add_node(_agent(model, "first"), "first")
        builder.add_node(_agent(model, "second"), "second")
        builder.add_node(leaf(), "leaf")
        builder.add_edge("first", "second")
        builder.add_edge("second", "leaf")
        return builder.build()

    samples = await _play_and_grade(shipped_tokenizer, factory, {"first": [WRONG_TURN], "second": [RIGHT_TURN]})
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

    samples = await _play_and_grade(shipped_tokenizer, factory, {"first": [WRONG_TURN], "second": [RIGHT_TURN]})
    assert (samples[0].status, _facts(samples)["stop_reason"]) == (Sample.Status.TRUNCATED, "team_limit")
    assert f"You are {('first', 'second')[runs - 1]}." in shipped_tokenizer.decode(samples[0].tokens)
    assert len(samples) == runs
    assert not any(sample.remove_sample for sample in samples)


def _parallel_leaves(model: SGLangModel, _task: Task) -> Any:
    """Build a graph with two parallel leaves."""
    builder = GraphBuilder().set_max_node_executions(10)
    for name in ("root", "left", "right"):
        builder.add_node(_agent(model, name), name)
    builder.add_edge("root", "right")
    builder.add_edge("root", "left")
    return builder.build()


@pytest.mark.parametrize("slow", ["left", "right"])
async def test_graph_parallel_leaves_main_agent_is_the_first_added(shipped_tokenizer: Any, slow: str) -> None:
    others_done = asyncio.Event()

    class SlowLeaf(RecordingPolicy):
        async def __call__(self, body: dict[str, Any], number: int) -> Any:
            text = shipped_tokenizer.decode(body["input_ids"])
            if f"You are {slow}." in text:
                await others_done.wait()
            reply = await super().__call__(body, number)
            if "You are root." not in text:
                others_done.set()
            return reply

    turns = {"root": ["Go.<|im_end|>"], "left": [RIGHT_TURN], "right": [WRONG_TURN]}
    result, wire = await play_agent(shipped_tokenizer, _parallel_leaves, _script(turns), policy=SlowLeaf)
    samples = wire.check(result)
    assert "You are left." in shipped_tokenizer.decode(samples[0].tokens)


class _CustomTeam(MultiAgentBase):
    """A user's own multi-agent class, which sends no events about its nodes."""

    def __init__(self, agents: list[Agent]) -> None:
        super().__init__()
        self.id = "team"
        self.nodes = {agent.name: SimpleNamespace(node_id=agent.name, executor=agent) for agent in agents}

    async def invoke_async(self, task: Any, invocation_state: Any = None, **kwargs: Any) -> MultiAgentResult:
        for node in reversed(self.nodes.values()):
            task = str(await node.executor.invoke_async(task))
        return MultiAgentResult(Status.COMPLETED)


@pytest.mark.parametrize("is_inner", [False, True])
async def test_multi_agent_base_main_agent_is_the_last_speaker(shipped_tokenizer: Any, is_inner: bool) -> None:
    def factory(model: SGLangModel, task: Task) -> Any:
        team = _CustomTeam([_agent(model, name) for name in ("second", "first")])
        if not is_inner:
            return team
        builder = GraphBuilder().set_max_node_executions(10)
        builder.add_node(team, "team")
        return builder.build()

    samples = await _play_and_grade(shipped_tokenizer, factory, {"first": [WRONG_TURN], "second": [RIGHT_TURN]})
    assert "You are second." in shipped_tokenizer.decode(samples[0].tokens)


def _swarm(model: SGLangModel, _task: Task) -> Any:
    return Swarm([_agent(model, name) for name in ("one", "two", "three")], max_handoffs=4)


HANDOFFS = {
    "none": (["one"], "one"),
    "once": (["one", "two"], "two"),
    "twice": (["one", "three", "two"], "two"),
    "and back": (["one", "two", "one"], "one"),
}


@pytest.mark.parametrize(("order", "last"), HANDOFFS.values(), ids=HANDOFFS)
async def test_swarm_main_agent_is_the_last_handoff_target(shipped_tokenizer: Any, order: list[str], last: str) -> None:
    turns: dict[str, list[str]] = {name: [] for name in order}
    for name, to in itertools.pairwise(order):
        turns[name] += [tool_call("handoff_to_agent", agent_name=to, message="You."), WRONG_TURN]
    turns[last].append(RIGHT_TURN)
    samples = await _play_and_grade(shipped_tokenizer, _swarm, turns)
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

    samples = await _play_and_grade(shipped_tokenizer, factory, {"first": [RIGHT_TURN], "second": [WRONG_TURN]})
    assert "You are first." in shipped_tokenizer.decode(samples[0].tokens)
    assert [sample.reward for sample in samples] == [1.0, 1.0]


called_agents: list[str] = []


class ModelCallHook(HookProvider):
    """Record the names of the agents whose model calls reach the hook."""

    def register_hooks(self, registry: HookRegistry, **_more: Any) -> None:
        registry.add_callback(AfterModelCallEvent, lambda event: called_agents.append(event.agent.name))


async def test_graph_hooks_setting_applies_to_each_candidate(shipped_tokenizer: Any) -> None:
    called_agents.clear()
    turns = {"router": ["Ask numbers.<|im_end|>"], "numbers": [RIGHT_TURN]}
    await _play_and_grade(shipped_tokenizer, _routing_graph, turns, hooks=["test_team_answers.ModelCallHook"])
    assert called_agents == ["router", "numbers"]


class OneMoreQuestion:
    """Environment that asks one more question."""

    def __init__(self) -> None:
        self.answers: list[str] = []

    async def answer(self, text: str) -> str | None:
        self.answers.append(text)
        return "And now?" if len(self.answers) == 1 else None

    async def score(self) -> dict[str, Any]:
        return {"score": float("34" in self.answers[-1]), "turns": len(self.answers)}


def make_environment(_task: Task) -> OneMoreQuestion:
    return OneMoreQuestion()


async def test_graph_environment_gets_the_main_agents_answers(shipped_tokenizer: Any) -> None:
    turns = {
        "router": ["Ask algebra.<|im_end|>", "Ask geometry.<|im_end|>"],
        "algebra": [WRONG_TURN],
        "geometry": [RIGHT_TURN],
    }
    samples = await _play_and_grade(
        shipped_tokenizer, _routing_graph, turns, environment="test_team_answers.make_environment"
    )
    assert "You are geometry." in shipped_tokenizer.decode(samples[0].tokens)
    assert [sample.reward for sample in samples] == [1.0] * 3


async def test_sandbox_fault_in_a_graph_counts_before_a_later_cut_turn(shipped_tokenizer: Any) -> None:
    """The infrastructure failed, so nothing is trained."""

    def graph(model: SGLangModel, _task: Task) -> Any:
        builder = GraphBuilder().set_max_node_executions(10)
        builder.add_node(_agent(model, "router", tools=[user_agents.raise_sandbox_error]), "router")
        builder.add_node(_agent(model, "numbers"), "numbers")
        builder.add_edge("router", "numbers")
        return builder.build()

    turns = {"router": [tool_call("raise_sandbox_error"), "I can't.<|im_end|>"], "numbers": [("It is", "length")]}
    [sample] = await _play_and_grade(shipped_tokenizer, graph, turns, fan_out=False)
    assert (sample.status, _facts([sample])["stop_reason"]) == (Sample.Status.FAILED, "sandbox_error")
    assert not any(sample.loss_mask)
