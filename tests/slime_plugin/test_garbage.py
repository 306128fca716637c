"""Garbage collection: `freeze_long_lived`, the setting `freeze_gc`, and samples that are freed without it."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from harness import ANSWER, TOOL_CALL, run
from strands import Agent
from strands.hooks import BeforeModelCallEvent, HookProvider, HookRegistry
from strands.models.openai import OpenAIModel
from user_agents import double

from strands_rollout import aio
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
        ((30_000, 20, 500), (30_000, 20, 500)),
        ((0, 10, 10), (0, 10, 10)),
    ],
    ids=["Python's own", "Python 3.14's", "already larger", "disabled"],
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


@pytest.mark.parametrize(
    ("settings", "turns"),
    [
        ({"tools": ["user_agents.double"]}, [CALL, ANSWER]),
        ({"tools": ["user_agents.double"], "hooks": [f"{__name__}.Listener"]}, [CALL, ANSWER]),
        ({"agent_factory": "user_agents.with_tools_of_the_task", "tools": ["user_agents.double"]}, [CALL, ANSWER]),
        ({"agent_factory": "user_agents.graph"}, [ANSWER] * 3),
        ({"agent_program": f"{__name__}.program"}, [CALL, ANSWER]),
    ],
    ids=["plain", "hook", "factory", "graph", "program"],
)
async def test_sample_is_freed_without_garbage_collection(
    shipped_tokenizer: Any, settings: dict[str, Any], turns: list[str]
) -> None:
    gc.disable()
    try:
        played = await run(shipped_tokenizer, turns, settings=settings)
        assert played.facts["stop_reason"] == "completed"
        sample = weakref.ref(played.sample)
        await asyncio.sleep(0)  # the last callbacks of finished tasks
        del played
        assert sample() is None
    finally:
        gc.enable()
