"""Costs of a turn: they do not grow with the number of earlier turns, and stay near the recorded counts, or below.

The costs are counts between two model calls, not times: function calls, bytes encoded, ids read.
"""

import asyncio
import copy
import sys
from importlib.metadata import version
from typing import Any

import pytest
from strands import Agent
from strands.hooks import BeforeModelCallEvent, HookProvider, HookRegistry
from turn_costs import AGENT, PROGRAM, TURNS_OF_PROGRAM, TurnCosts, growth, turn_costs

from strands_rollout import SGLangModel, Task
from strands_rollout.agent.loop import HAS_MIDDLEWARE

TURNS = TURNS_OF_PROGRAM
# Calls of a turn. A change that saves or adds calls changes these numbers; if it adds calls, its commit says what for.
OWN_CALLS = {"agent": 619, "hook": 770, "factory": 708, "gateway": 705}
if sys.version_info >= (3, 12):  # a tool that does not wait runs without a switch of tasks
    OWN_CALLS |= {"agent": 603, "hook": 750, "factory": 690}
CALLS = {"agent": 1305, "hook": 1829, "factory": 1739, "gateway": 1568}  # with Python 3.11; fewer with 3.12
COUNTED_WITH = {"strands-agents": "1.62.0", "aiohttp": "3.14.5"}
SLACK = 1.02
SLACK_FOR_OTHER_VERSIONS = 1.25
MAX_CALLS_TO_FIRST_TURN = 13_400  # the first turn renders the whole prompt and opens a connection
MAX_GROWTH = 20  # calls from an early to a late turn; if each turn added one call, the growth would be 30
MAX_BYTES_GROWTH = {"gateway": 8}  # its answers have the number of tokens, which gets more digits

needs_middleware = pytest.mark.skipif(not HAS_MIDDLEWARE, reason="this Strands' loop costs more with each turn")


class _BeforeModelCallHook(HookProvider):
    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(BeforeModelCallEvent, self.on_model_call)

    def on_model_call(self, event: BeforeModelCallEvent) -> None:
        raise NotImplementedError


class NoOpHook(_BeforeModelCallHook):
    """Do nothing; with a hook, Strands sends all events."""

    def on_model_call(self, event: BeforeModelCallEvent) -> None:
        pass


class HistoryCopyingHook(_BeforeModelCallHook):
    def on_model_call(self, event: BeforeModelCallEvent) -> None:
        copy.deepcopy(list(event.agent.messages))


def build_agent(model: SGLangModel, task: Task) -> Agent:
    return Agent(model=model, tools=list(task.tools))


SETTINGS = {
    "agent": AGENT,
    "hook": {**AGENT, "hooks": [f"{__name__}.{NoOpHook.__name__}"]},
    "factory": {**AGENT, "agent_factory": f"{__name__}.{build_agent.__name__}"},
    "gateway": PROGRAM,
}


@pytest.fixture(scope="module", params=SETTINGS)
def case(request: pytest.FixtureRequest) -> str:
    """Key of `SETTINGS`: the loop has a path with events and one without, and the gateway has its own."""
    return str(request.param)


@pytest.fixture(scope="module")
def costs(shipped_tokenizer: Any, case: str) -> TurnCosts:
    """Costs of a long episode, measured after an episode that fills the caches."""
    asyncio.run(turn_costs(shipped_tokenizer, TURNS if case == "gateway" else 1, SETTINGS[case]))
    return asyncio.run(turn_costs(shipped_tokenizer, TURNS, SETTINGS[case]))


def costs_with_hook(tokenizer: Any, hook: type[HookProvider]) -> TurnCosts:
    return asyncio.run(turn_costs(tokenizer, 24, {**AGENT, "hooks": [f"{__name__}.{hook.__name__}"]}))


@needs_middleware
def test_turn_costs_calls_do_not_grow(costs: TurnCosts) -> None:
    assert abs(growth(costs.calls)) <= MAX_GROWTH, costs.calls


@needs_middleware
def test_turn_costs_calls_of_this_package_are_as_counted(costs: TurnCosts, case: str) -> None:
    counted = min(costs.own_calls)  # the minimum ignores turns in which a timer ran
    assert counted == pytest.approx(OWN_CALLS[case], rel=SLACK - 1), f"set OWN_CALLS[{case!r}] to {counted}"


@needs_middleware
def test_turn_costs_all_calls_are_limited(costs: TurnCosts, case: str) -> None:
    is_same_version = all(version(name) == counted for name, counted in COUNTED_WITH.items())
    assert min(costs.calls) <= CALLS[case] * (SLACK if is_same_version else SLACK_FOR_OTHER_VERSIONS)


def test_turn_costs_calls_to_the_first_turn_are_limited(costs: TurnCosts) -> None:
    assert costs.calls_before + costs.calls[0] <= MAX_CALLS_TO_FIRST_TURN


def test_turn_costs_encoded_bytes_do_not_grow(costs: TurnCosts, case: str) -> None:
    assert abs(growth(costs.encoded_bytes)) <= MAX_BYTES_GROWTH.get(case, 0), costs.encoded_bytes


def test_turn_costs_ids_read_do_not_grow(costs: TurnCosts) -> None:
    assert growth(costs.ids_read) == 0, costs.ids_read


@needs_middleware
def test_turn_costs_detect_a_history_copied_each_turn(shipped_tokenizer: Any) -> None:
    assert growth(costs_with_hook(shipped_tokenizer, HistoryCopyingHook).calls) > 5 * MAX_GROWTH
