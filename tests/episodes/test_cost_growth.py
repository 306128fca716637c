"""A turn of an episode costs what the turns before it did, and no more than it did when this was written.

Counts, not times: calls of functions, bytes encoded, ids read, each between two model calls of one episode.
"""

import asyncio
import copy
from typing import Any

import pytest
from strands.hooks import BeforeModelCallEvent, HookProvider, HookRegistry
from turn_costs import TurnCosts, growth, turn_costs

from strands_rollout.agent.loop import HAS_MIDDLEWARE

TURNS = 60
# measured with Python 3.11 to 3.13; a quarter more is room for other versions of the libraries
MOST_CALLS = {"nobody": 1550, "a hook": 2400}
MOST_CALLS_TO_BEGIN = 13_400  # an episode with its first turn, whose prompt is rendered whole, on a new connection
MOST_GROWTH = 20  # calls in half an episode: far less than one for each earlier turn

needs_flat_cycles = pytest.mark.skipif(not HAS_MIDDLEWARE, reason="the loop of this Strands costs more with each turn")


class _AtEachModelCall(HookProvider):
    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(BeforeModelCallEvent, self.work)

    def work(self, event: BeforeModelCallEvent) -> None:
        raise NotImplementedError


class DoesNothing(_AtEachModelCall):
    """Watches, so that all events are sent."""

    def work(self, event: BeforeModelCallEvent) -> None:
        pass


class CopiesTheHistory(_AtEachModelCall):
    def work(self, event: BeforeModelCallEvent) -> None:
        copy.deepcopy(list(event.agent.messages))


WATCHERS = {"nobody": [], "a hook": [f"{__name__}.{DoesNothing.__name__}"]}


@pytest.fixture(scope="module", params=WATCHERS)
def watcher(request: pytest.FixtureRequest) -> str:
    """Who watches the episode: two ways through the loop."""
    return str(request.param)


@pytest.fixture(scope="module")
def costs(shipped_tokenizer: Any, watcher: str) -> TurnCosts:
    """Of one long episode, after another: what is made at first use is no episode's cost."""
    asyncio.run(turn_costs(shipped_tokenizer, 1, WATCHERS[watcher]))
    return asyncio.run(turn_costs(shipped_tokenizer, TURNS, WATCHERS[watcher]))


def planted(tokenizer: Any, hook: type[HookProvider]) -> TurnCosts:
    return asyncio.run(turn_costs(tokenizer, 24, [f"{__name__}.{hook.__name__}"]))


@needs_flat_cycles
def test_turn_costs_calls_do_not_grow(costs: TurnCosts) -> None:
    assert abs(growth(costs.calls)) <= MOST_GROWTH, costs.calls


@needs_flat_cycles
def test_turn_costs_calls_per_turn_are_limited(costs: TurnCosts, watcher: str) -> None:
    assert min(costs.calls) <= MOST_CALLS[watcher]  # a timer makes single turns dearer only


def test_turn_costs_calls_to_the_first_turn_are_limited(costs: TurnCosts) -> None:
    assert costs.calls_before + costs.calls[0] <= MOST_CALLS_TO_BEGIN


def test_turn_costs_encoded_bytes_do_not_grow(costs: TurnCosts) -> None:
    assert growth(costs.encoded_bytes) == 0, costs.encoded_bytes


def test_turn_costs_ids_read_do_not_grow(costs: TurnCosts) -> None:
    assert growth(costs.ids_read) == 0, costs.ids_read


@needs_flat_cycles
def test_turn_costs_detect_a_history_copied_each_turn(shipped_tokenizer: Any) -> None:
    assert growth(planted(shipped_tokenizer, CopiesTheHistory).calls) > 5 * MOST_GROWTH
