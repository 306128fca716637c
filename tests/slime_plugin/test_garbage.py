"""Garbage collection: `freeze_long_lived`, the setting `freeze_gc`, and episodes that are freed without it."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from harness import ANSWER, TOOL_CALL, run
from processes import wait_until
from strands import Agent
from strands.hooks import BeforeModelCallEvent, HookProvider, HookRegistry
from strands.models.openai import OpenAIModel
from user_agents import double

from strands_rollout import SGLangModel, Task, aio
from strands_rollout.agent.episode import _JournalHook
from strands_rollout.agent.limits import StopReason
from strands_rollout.agent.run import PlayedEpisode, drop_traceback
from strands_rollout.agent.tool_call import ToolStats
from strands_rollout.errors import EngineAbortedError
from strands_rollout.record.record import Record
from strands_rollout.settings import ENVIRONMENT_LIBRARIES
from strands_rollout.slime_plugin.garbage import freeze_long_lived

CALL = TOOL_CALL.format(name="double", arguments='{"number": 17}')


@pytest.fixture
def _unfrozen() -> Iterator[None]:
    """Unfreeze all objects, and restore the collector afterwards."""
    thresholds = gc.get_threshold()
    gc.unfreeze()
    freeze_long_lived.cache_clear()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.node = self


@pytest.mark.usefixtures("_unfrozen")
def test_freeze_long_lived_freezes_once() -> None:
    before = weakref.ref(Node())
    freeze_long_lived()
    assert before() is None, "garbage was frozen"
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    later = weakref.ref(Node())
    gc.collect()
    assert later() is None, "new cycles are not collected"
    new_objects = [object(), [None]]
    freeze_long_lived()
    assert gc.get_freeze_count() <= frozen, f"{new_objects} were frozen too"


@pytest.mark.usefixtures("_unfrozen")
@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        ((700, 10, 10), (25_000, 100, 10)),
        ((2000, 10, 0), (25_000, 100, 10)),
        ((10_000, 50, 1_000), (25_000, 100, 1_000)),
        ((30_000, 20, 500), (30_000, 20, 500)),
        ((0, 10, 10), (0, 10, 10)),
    ],
    ids=["Python's own", "the third is 0", "larger for full collections", "already larger", "disabled"],
)
def test_freeze_long_lived_raises_default_gc_thresholds(threshold: Any, expected: Any) -> None:
    gc.set_threshold(*threshold)
    freeze_long_lived()
    assert gc.get_threshold() == expected


@pytest.mark.usefixtures("_unfrozen")
@pytest.mark.parametrize("freeze_gc", [True, False])
async def test_generate_freezes_gc_by_setting(
    shipped_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, freeze_gc: bool
) -> None:
    monkeypatch.setattr(aio, "_FINISHED_KEYS", set())
    played = await run(shipped_tokenizer, [ANSWER], settings={"freeze_gc": freeze_gc})
    assert played.facts["stop_reason"] == "completed"
    assert (gc.get_freeze_count() > 1000) == freeze_gc


class Listener(HookProvider):
    """A hook on every model call."""

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(BeforeModelCallEvent, self.on_call)

    def on_call(self, event: BeforeModelCallEvent) -> None:
        """Do nothing."""


async def program(task: Any, endpoint: Any) -> str:
    client = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
    agent = Agent(OpenAIModel(client_args=client, model_id=endpoint.model), tools=[double], callback_handler=None)
    return str(await agent.invoke_async(task.text))


class Player:
    """Environment of a library, which plays with an agent of its own."""

    tools = ()
    agents: ClassVar[list[Agent] | None] = None

    def __init__(self, task: Task, factory: str, config: object) -> None:
        self.text = task.text

    async def play(self, model: SGLangModel, hooks: list[HookProvider]) -> PlayedEpisode:
        agent = Agent(model, tools=[double], hooks=hooks, callback_handler=None)
        if self.agents is not None:
            self.agents.append(agent)
        await agent.invoke_async(self.text)
        return PlayedEpisode(StopReason.COMPLETED)


TOOL = {"tools": ["user_agents.double"]}
FACTORY = {"agent_factory": "user_agents.with_tools_of_the_task", **TOOL}
PROGRAM = {"agent_program": f"{__name__}.program"}
SLEEP = TOOL_CALL.format(name="sleep", arguments="{}")
FAULT = TOOL_CALL.format(name="raise_sandbox_error", arguments="{}")


@pytest.mark.parametrize(
    ("settings", "turns", "stop_reason"),
    [
        (TOOL, [CALL, ANSWER], "completed"),
        ({**TOOL, "hooks": [f"{__name__}.Listener"]}, [CALL, ANSWER], "completed"),
        (FACTORY, [CALL, ANSWER], "completed"),
        ({"agent_factory": "user_agents.graph"}, [ANSWER] * 3, "completed"),
        (PROGRAM, [CALL, ANSWER], "completed"),
        ({"environment": "player", "environment_factory": "a.factory"}, [CALL, ANSWER], "completed"),
        ({**TOOL, "journal_dir": "."}, [CALL, ANSWER], "completed"),
        ({**FACTORY, "journal_dir": "."}, [CALL, ANSWER], "completed"),
        ({**TOOL, "max_tool_iterations": 1}, [CALL, CALL], "max_tool_iterations"),
        ({**PROGRAM, "max_tool_iterations": 1}, [CALL, CALL], "max_tool_iterations"),
        ({"tools": ["user_agents.sleep"], "episode_timeout_s": 1}, [SLEEP], "episode_timeout"),
        ({"tools": ["user_agents.raise_sandbox_error"]}, [FAULT], "sandbox_error"),
    ],
    ids=[
        *("plain", "hook", "factory", "graph", "program", "environment", "journal", "factory-journal"),
        *("limit", "program-limit", "timeout", "fault"),
    ],
)
async def test_episode_is_freed_without_garbage_collection(
    shipped_tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    turns: list[str],
    stop_reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(ENVIRONMENT_LIBRARIES, "player", f"{__name__}.Player")
    gc.collect()
    before = count_records()
    gc.disable()
    try:
        played = await run(shipped_tokenizer, turns, settings=settings)
        assert played.facts["stop_reason"] == stop_reason
        sample = weakref.ref(played.sample)
        del played
        # the last callbacks of finished tasks may still run
        await wait_until(lambda: sample() is None and count_records() == before)
    finally:
        gc.enable()


def count_records() -> int:
    return sum(isinstance(found, Record) for found in gc.get_objects())


def test_drop_traceback_of_an_exception_that_refuses_attributes() -> None:
    @dataclass(frozen=True)
    class FrozenError(Exception):
        reason: str

    def fail() -> None:
        raise FrozenError("no")

    with pytest.raises(FrozenError) as raised:
        fail()
    assert raised.value.__traceback__ is not None
    drop_traceback(raised.value)
    assert raised.value.__traceback__ is None


def test_journal_hook_ignores_calls_after_its_run() -> None:
    class Run:
        stats = ToolStats()

    run: Any = Run()
    journal: Any = None  # must not be used
    _JournalHook(run, journal)
    del run
    assert Run.stats.on_call_end is not None
    Run.stats.on_call_end()


async def test_agent_of_an_environment_outlives_its_episode(
    shipped_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT_LIBRARIES, "player", f"{__name__}.Player")
    kept: list[Agent] = []
    monkeypatch.setattr(Player, "agents", kept)
    settings = {"environment": "player", "environment_factory": "a.factory"}
    played = await run(shipped_tokenizer, [CALL, ANSWER], settings=settings)
    [agent] = kept
    messages = len(agent.messages)
    with pytest.raises(EngineAbortedError, match="the episode ended before a request"):
        await agent.invoke_async("Once more.")
    assert (played.facts["stop_reason"], len(agent.messages)) == ("completed", messages + 1)
