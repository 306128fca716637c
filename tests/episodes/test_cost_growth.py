"""Costs of a turn: they do not grow with the number of earlier turns, and stay below fixed limits.

The costs are counts between two model calls, not times: function calls, bytes encoded, ids read.
"""

import asyncio
import copy
from typing import Any

import pytest
from strands.hooks import BeforeModelCallEvent, HookProvider, HookRegistry
from turn_costs import TurnCosts, growth, turn_costs

from strands_rollout.agent.loop import HAS_MIDDLEWARE

TURNS = 60
# measured with Python 3.11 to 3.13, plus a quarter for other library versions
MAX_CALLS = {"no hook": 1550, "a hook": 2400}
MAX_CALLS_TO_FIRST_TURN = 13_400  # to the end of the first turn: renders the whole prompt and opens a connection
MAX_GROWTH = 20  # more calls in a late turn than in an early turn: far less than one for each turn between them

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


HOOKS = {"no hook": [], "a hook": [f"{__name__}.{NoOpHook.__name__}"]}


@pytest.fixture(scope="module", params=HOOKS)
def hooks_case(request: pytest.FixtureRequest) -> str:
    """Key of `HOOKS`: the loop has a path with hooks and a path without hooks."""
    return str(request.param)


@pytest.fixture(scope="module")
def costs(shipped_tokenizer: Any, hooks_case: str) -> TurnCosts:
    """Costs of a long episode, measured after a short one that fills the caches."""
    asyncio.run(turn_costs(shipped_tokenizer, 1, HOOKS[hooks_case]))
    return asyncio.run(turn_costs(shipped_tokenizer, TURNS, HOOKS[hooks_case]))


def costs_with_hook(tokenizer: Any, hook: type[HookProvider]) -> TurnCosts:
    return asyncio.run(turn_costs(tokenizer, 24, [f"{__name__}.{hook.__name__}"]))


@needs_middleware
def test_turn_costs_calls_do_not_grow(costs: TurnCosts) -> None:
    assert abs(growth(costs.calls)) <= MAX_GROWTH, costs.calls


@needs_middleware
def test_turn_costs_calls_per_turn_are_limited(costs: TurnCosts, hooks_case: str) -> None:
    assert min(costs.calls) <= MAX_CALLS[hooks_case]  # the minimum leaves out turns with a timer


def test_turn_costs_calls_to_the_first_turn_are_limited(costs: TurnCosts) -> None:
    assert costs.calls_before + costs.calls[0] <= MAX_CALLS_TO_FIRST_TURN


def test_turn_costs_encoded_bytes_do_not_grow(costs: TurnCosts) -> None:
    assert growth(costs.encoded_bytes) == 0, costs.encoded_bytes


def test_turn_costs_ids_read_do_not_grow(costs: TurnCosts) -> None:
    assert growth(costs.ids_read) == 0, costs.ids_read


@needs_middleware
def test_turn_costs_detect_a_history_copied_each_turn(shipped_tokenizer: Any) -> None:
    assert growth(costs_with_hook(shipped_tokenizer, HistoryCopyingHook).calls) > 5 * MAX_GROWTH
