"""The logprobs of an answer are looked at all at once, and what is wrong with one is still named."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_rollout.errors import EngineResponseError, TrajectoryError
from strands_rollout.generation import MAX_LOGPROB, Generation, load_json, read_generation
from strands_rollout.trajectory import Trajectory


def read(logprobs: list[Any]) -> Generation:
    entries = [[logprob, token, None] for token, logprob in enumerate(logprobs)]
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": entries}
    answer = {"output_ids": list(range(len(logprobs))), "meta_info": meta}
    return read_generation(answer, return_logprob=True, vocab_size=None, rid="r", latency_s=0.0, attempts=1)


def answer_with(entries: Any, place: str) -> dict[str, Any]:
    """Logprobs in one of the places where servers put them."""
    meta, top = {"finish_reason": {"type": "length"}}, {"output_ids": [5, 6]}
    name = place.removeprefix("meta_info.")
    (meta if place.startswith("meta_info.") else top)[name] = entries  # type: ignore[index]
    return {**top, "meta_info": meta}


PLACES = ["meta_info.output_token_logprobs", "output_token_logprobs", "meta_info.logprobs"]


@pytest.mark.parametrize("place", PLACES)
def test_logprobs_are_found_where_servers_put_them_and_their_ids_are_checked(place: str) -> None:
    facts = {"return_logprob": True, "vocab_size": None, "rid": "r", "latency_s": 0.0, "attempts": 1}
    right = answer_with([[-0.5, 5, "a"], [-0.25, 6, "b"]], place)
    assert read_generation(right, **facts).logprobs == [-0.5, -0.25]
    with pytest.raises(EngineResponseError, match="output id 6 at position 1 has the logprob of token 7 beside it"):
        read_generation(answer_with([[-0.5, 5, "a"], [-0.25, 7, "b"]], place), **facts)
    with pytest.raises(EngineResponseError, match="expected a list of"):
        read_generation(answer_with([-0.5, -0.25], place), **facts)


NUMBERS = st.floats() | st.floats(-5, 0) | st.integers(-5, 0) | st.booleans() | st.none() | st.just(-(10**400))


@given(st.lists(NUMBERS | st.floats(-5, 0), max_size=6))
def test_logprobs_are_accepted_if_each_of_them_is_a_finite_number_of_at_most_zero(logprobs: list[Any]) -> None:
    def is_right(logprob: Any) -> bool:
        if type(logprob) is int:
            return -(10**300) < logprob <= 0
        return type(logprob) is float and -math.inf < logprob <= MAX_LOGPROB

    wrong = [position for position, logprob in enumerate(logprobs) if not is_right(logprob)]
    if wrong:
        with pytest.raises(
            EngineResponseError, match=rf"the logprob of output id {wrong[0]} at position {wrong[0]} is"
        ):
            read(logprobs)
    else:
        found = read(logprobs).logprobs
        assert found == logprobs
        assert all(type(logprob) is float for logprob in found)


def test_finite_logprobs_whose_sum_is_not_are_accepted() -> None:
    assert read([-1e308, -1e308]).logprobs == [-1e308, -1e308]
    trajectory = Trajectory()
    facts = {"finish_reason": "stop", "rid": "r", "latency_s": 0.0}
    trajectory.append_turn([1], [2, 3], [-1e308, -1e308], **facts)
    assert trajectory.logprobs == [0.0, -1e308, -1e308]


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
def test_a_trajectory_takes_no_logprob_that_is_not_finite(logprob: float) -> None:
    trajectory = Trajectory()
    with pytest.raises(TrajectoryError, match="a logprob that is not finite"):
        trajectory.append_turn([1], [2, 3], [-0.5, logprob], finish_reason="stop", rid="r", latency_s=0.0)
    assert trajectory == Trajectory()


def test_a_number_beyond_all_floats_is_refused_in_words() -> None:
    number = f"-1{'0' * 400}"
    meta = f'{{"finish_reason":{{"type":"stop"}},"output_token_logprobs":[[{number},5]]}}'
    body = f'{{"output_ids":[5],"meta_info":{meta}}}'
    with pytest.raises(EngineResponseError, match="the logprob of output id 5 at position 0 is -"):
        read_generation(
            load_json(body.encode()), return_logprob=True, vocab_size=None, rid="r", latency_s=0.0, attempts=1
        )
