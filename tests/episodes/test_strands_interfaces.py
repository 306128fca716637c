"""Strands' interfaces: every row of the table in docs/multi-agent.md, played as an episode."""

import asyncio
import importlib
import inspect
import re
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import user_agents
from harness import ANSWER
from pydantic import BaseModel
from recording_policy import play_agent, tool_call
from strands import Agent, ToolContext, interventions, tool
from strands.agent.conversation_manager import SlidingWindowConversationManager as Sliding
from strands.agent.conversation_manager import SummarizingConversationManager as Summarizing
from strands.hooks import AfterModelCallEvent, AfterToolCallEvent
from strands.memory import MemoryEntry, MemoryManager
from strands.models import Model
from strands.multiagent import GraphBuilder, Swarm
from strands.sandbox.not_a_sandbox_local_environment import NotASandboxLocalEnvironment
from strands.session import FileSessionManager
from strands.vended_plugins.context_injector import ContextInjector
from strands.vended_plugins.steering import LLMSteeringHandler
from strands.vended_tools import shell

from strands_rollout import Sample, SGLangModel, sub_agent_model

PAGE = Path(__file__).parents[2] / "docs" / "multi-agent.md"
DONE_TURN = "Done.<|im_end|>"
DOUBLE_TURN = tool_call("double", number=17)
SET_EVENT = threading.Event()
SET_EVENT.set()


def agent(model: SGLangModel, **more: Any) -> Agent:
    return Agent(model=model, **{"tools": [user_agents.double], **more})


def call_once(text: str, _number: int) -> str:
    return ANSWER if "<tool_response>" in text else DOUBLE_TURN


def call_thrice(_text: str, number: int) -> str:
    return DOUBLE_TURN if number < 3 else ANSWER


def ask_other(text: str, _number: int, first: str) -> str:
    if "You are asked." in text:
        return DONE_TURN if "<tool_response>" in text else DOUBLE_TURN
    return ANSWER if "<tool_response>" in text else first


def agent_that_asks(model: SGLangModel, make: Callable[[SGLangModel], Any]) -> Agent:
    async def ask() -> str:
        """Ask."""
        return str(await make(model))

    return Agent(model=model, tools=[tool(ask)])


def other_agent(model: SGLangModel, **more: Any) -> Agent:
    return agent(model, name="other_agent", system_prompt="You are asked.", **more)


def add_text(event: AfterToolCallEvent) -> None:
    event.result["content"].append({"text": "more"})


def retry_once(event: AfterModelCallEvent) -> None:
    event.retry = not event.invocation_state.setdefault("again", [])
    event.invocation_state["again"].append(1)


class DenyTools(interventions.InterventionHandler):
    name = "denies"

    def before_tool_call(self, event: Any) -> Any:
        return interventions.Deny(reason="Not that.")


@tool(context=True)
def ask_a_person(tool_context: ToolContext) -> str:
    """Ask a person."""
    return str(tool_context.interrupt("approval", reason="?"))


@tool(context=True)
async def cancel(tool_context: ToolContext) -> str:
    """Cancel the agent."""
    tool_context.agent.cancel()
    return "cancelled"


class Fact(BaseModel):
    """A fact."""

    value: int


class Memory:
    name, description, writable, max_search_results, extraction = "store", "Facts.", False, 3, None

    async def search(self, *_args: Any, **_kwargs: Any) -> list[Any]:
        return [MemoryEntry(content="It is 34.")]


def _context_manager(model: SGLangModel) -> Agent:
    manager = importlib.import_module("strands.experimental.context_manager")
    summarize = importlib.import_module("strands._context_manager.strategies.offload").Offload.summarize("*")
    strategies = [summarize.when(utilization=0.01, preserve_recent=2)]
    return agent(model, context_manager=manager.ContextManager(strategies=strategies))


def _router(model: SGLangModel, *others: Any) -> Agent:
    return agent(importlib.import_module("strands.models").ModelRouter([model, *others]))


def _swarm(model: SGLangModel) -> Swarm:
    first = Agent(name="first", model=model)
    return Swarm([first, other_agent(model)], entry_point=first)


def _graph(model: SGLangModel) -> Any:
    builder = GraphBuilder().set_max_node_executions(10)
    builder.add_node(other_agent(model), "other_agent")
    builder.add_node(Agent(name="last", model=model), "last")
    builder.add_edge("other_agent", "last")
    return builder.build()


def _session(model: SGLangModel, folder: str, *, is_new: bool) -> Agent:
    managers = [FileSessionManager("one", storage_dir=folder) for _ in range(2)]
    if not is_new:
        agent(model, messages=[{"role": "user", "content": [{"text": "Before."}]}], session_manager=managers[0])
    return agent(model, session_manager=managers[1])


def _invoked(**more: Any) -> Callable[[SGLangModel], Agent]:
    return partial(agent_that_asks, make=lambda model: other_agent(model).invoke_async("Go on.", **more))


async def _remote(model: SGLangModel) -> Any:
    """Ask an agent behind A2A, served in this process, with a model of its own."""
    uvicorn, server = importlib.import_module("uvicorn"), importlib.import_module("strands.multiagent.a2a")
    client = importlib.import_module("strands.agent.a2a_agent")
    listener = socket.create_server(("127.0.0.1", 0))
    port, remote_agent = (
        listener.getsockname()[1],
        Agent(name="remote", description="Remote.", model=FixedModel(), callback_handler=None),
    )
    app = server.A2AServer(remote_agent, port=port, enable_a2a_compliant_streaming=True).to_starlette_app()
    serving = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none"))
    task = asyncio.create_task(serving.serve(sockets=[listener]))
    try:
        return await client.A2AAgent(f"http://127.0.0.1:{port}").invoke_async("How much?")
    finally:
        serving.should_exit = True
        await task


class FixedModel(Model):
    get_config = update_config = structured_output = lambda *_args, **_kwargs: {}

    async def stream(self, *_args: Any, **_kwargs: Any) -> Any:
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockDelta": {"delta": {"text": "Thirty-four."}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn"}}


class Row(NamedTuple):
    make: Callable[..., Any]
    script: Callable[[str, int], str] = call_once
    needs: str | None = None  # module, or argument of `Agent`; if it is missing, the row is skipped
    text: str = ""  # in the error if the row is refused, else in a sample


def _with(**more: Any) -> Callable[[SGLangModel], Agent]:
    return lambda model: agent(model, **{name: make() for name, make in more.items()})


ROUTING, CONTEXT = "strands.models.routing", "strands.experimental.context_manager"
ASK = partial(ask_other, first=tool_call("ask"))
ROWS: dict[str, Row] = {
    "`context_manager=`": Row(
        _context_manager,
        lambda text, number: DONE_TURN if "summarization" in text else call_thrice(text, number - 1),
        CONTEXT,
    ),
    "`conversation_manager=`": Row(_with(conversation_manager=partial(Sliding, 3, per_turn=True)), call_thrice),
    "`SummarizingConversationManager`": Row(_with(conversation_manager=Summarizing), text="blocks the event loop"),
    "`LLMSteeringHandler`": Row(
        lambda model: agent(model, plugins=[LLMSteeringHandler("Be strict.")]),
        lambda text, number: (
            tool_call("_LLMSteering", decision="guide", reason="Not that.")
            if "_LLMSteering" in text
            else ask_other(text, number, first=DOUBLE_TURN)
        ),
        text="Not that.",
    ),
    "`plugins=`": Row(_with(plugins=lambda: [ContextInjector(lambda _: "R", name="r", trigger="everyTurn")])),
    "`hooks=`": Row(partial(agent, hooks=[add_text]), text="more"),
    "`AfterModelCallEvent.retry`": Row(partial(agent, hooks=[retry_once])),
    "`interventions=`": Row(_with(interventions=lambda: [DenyTools()]), text="Not that."),
    "`sandbox=`": Row(
        partial(agent, tools=[shell], sandbox=NotASandboxLocalEnvironment()),
        lambda text, _number: (
            ANSWER if "<tool_response>" in text else tool_call("shell", command="echo 17 17 | tr 7 8")
        ),
        text="18 18",
    ),
    "`limits=`": Row(_invoked(limits={"turns": 1}), ASK),
    "`checkpointing=True`": Row(partial(agent, checkpointing=True), text="made the agent .* with checkpointing=True"),
    "`session_manager=`": Row(partial(_session, is_new=True)),
    "a session of another episode": Row(partial(_session, is_new=False), text="session_id of its own"),
    "`memory_manager=`": Row(_with(memory_manager=lambda: MemoryManager(stores=[Memory()], injection=True))),
    "`background_tasks=`": Row(
        partial(agent, background_tasks={"always": ["double"]}),
        lambda text, _number: (
            ANSWER if text.count("<tool_response>") == 2 else DONE_TURN if "queued" in text else DOUBLE_TURN
        ),
        "background_tasks",
        text="dispatched",
    ),
    "`structured_output_model=`": Row(
        partial(agent, structured_output_model=Fact), lambda *_: tool_call("Fact", value=34)
    ),
    "`ModelRouter` of one model": Row(_router, needs=ROUTING),
    "`ModelRouter` of several models": Row(
        lambda model: _router(model, sub_agent_model()), needs=ROUTING, text="ModelRouter with other models"
    ),
    "`callback_handler=`": Row(_with(callback_handler=lambda: lambda **_event: None)),
    "`agent.cancel()`": Row(partial(agent, tools=[cancel]), lambda _text, _number: tool_call("cancel")),
    "`cancel_signal=`": Row(_invoked(cancel_signal=SET_EVENT), ASK, "background_tasks"),
    "interrupts": Row(
        partial(agent, tools=[ask_a_person]),
        lambda *_: tool_call("ask_a_person"),
        text="raised the interrupt 'approval'",
    ),
    "`Swarm`": Row(
        _swarm,
        partial(ask_other, first=tool_call("handoff_to_agent", agent_name="other_agent", message="You.")),
        text="handoff",
    ),
    "`Graph`": Row(_graph, lambda text, _number: ANSWER if "Done." in text else ask_other(text, 0, "")),
    "`A2AAgent`": Row(partial(agent_that_asks, make=_remote), ASK, "a2a", text="Thirty-four"),
    "`as_tool()`": Row(
        lambda model: Agent(model=model, tools=[other_agent(model).as_tool()]),
        partial(ask_other, first=tool_call("other_agent", input="?")),
    ),
}
KINDS = {
    "one sample": {"main"},
    "segments": {"main", "segment"},
    "segments, and one for each summary": {"main", "segment", "aside"},
    "one for each agent": {"main", "agent"},
}


def read_table() -> dict[str, tuple[str, str]]:
    """Return the page's table as name -> (samples, other columns)."""
    section = PAGE.read_text(encoding="utf-8").partition("## Strands' interfaces\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (.+?) \| (.+?) \| (.*?) ?\|$", section, re.MULTILINE)
    return {name: (samples, more) for name, samples, more in lines[1:]}


def test_strands_interfaces_table_matches_the_rows() -> None:
    rows = read_table()
    assert rows.keys() == ROWS.keys()
    newer = {name for name, (_, more) in rows.items() if "1.56" in more or "a2a" in more}
    assert newer == {name for name, row in ROWS.items() if row.needs}


@pytest.mark.filterwarnings("ignore:.*(deprecated|experimental|A2A)", "ignore::ResourceWarning")
@pytest.mark.parametrize("name", ROWS)
async def test_strands_interface_plays_as_documented(shipped_tokenizer, name, tmp_path, capsys) -> None:
    row, (claim, _) = ROWS[name], read_table()[name]
    if row.needs is not None and row.needs not in inspect.signature(Agent).parameters:
        pytest.importorskip(row.needs)
    arguments = [str(tmp_path)] if "session" in name else []
    result, wire = await play_agent(shipped_tokenizer, lambda model, _task: row.make(model, *arguments), row.script)
    samples = wire.check(result)
    facts = [sample.metadata["strands_rollout"] for sample in samples]
    if claim == "refused":
        assert (samples[0].status, facts[0]["stop_reason"]) == (Sample.Status.FAILED, "setup_error")
        assert re.search(row.text, facts[0]["error"])
        return
    assert (samples[0].status, facts[0]["stop_reason"]) == (Sample.Status.COMPLETED, "completed")
    assert {fact["fan_out"]["kind"] for fact in facts} == KINDS[claim]
    assert (len(samples) == 1, facts[0]["dropped_sampled_tokens"]) == (claim == "one sample", 0)
    sent = [request + answer for request, answer in wire.requests]
    assert all(sample.tokens in sent for sample in samples)
    assert row.text in "".join(shipped_tokenizer.decode(sample.tokens) for sample in samples)
    assert capsys.readouterr().out == ""
