"""Steps are where they were, what ran side by side counts once, and facts without start times still give sums."""

from typing import Any

import pytest

from strands_rollout.dump.times import Step, steps_of, sums_of

CALL = {"id": "call_1_0", "tool": "run", "s": 0.5}
FACTS: dict[str, Any] = {
    "requests": [[0, 0.1, 1.0], [0, 1.3, 0.2], [1, 2.5, 0.4]],
    "calls": [{**CALL, "at_s": 1.6}, {**CALL, "at_s": 1.7}],
    "code": {"queued_s": 0.1},
    "duration_s": 3.0,
    "generate_s": 1.6,
    "tool_s": 1.0,
}


def test_steps_come_in_the_order_of_their_beginnings() -> None:
    assert steps_of(FACTS) == [
        Step("generate", 0.1, 1.0, turn=0),
        Step("generate", 1.3, 0.2, turn=0),
        Step("tool", 1.6, 0.5, call=0),
        Step("tool", 1.7, 0.5, call=1),
        Step("generate", 2.5, 0.4, turn=1),
    ]


def test_what_ran_side_by_side_counts_once() -> None:
    assert sums_of(FACTS) == {"generate": 1.6, "tool": 0.5, "wait": 0.9, "all": 3.0}


def test_a_dump_of_before_there_were_start_times_gives_sums() -> None:
    old = {**FACTS, "requests": None, "calls": [CALL]}
    assert steps_of(old) == []
    assert sums_of(old) == {"generate": 1.6, "tool": 0.9, "wait": 0.5, "all": 3.0}


@pytest.mark.parametrize("request_", [None, 3, ["x"], [0, None, 1.0], [0, -1.0, 1.0], [0, 1.0, float("nan")]])
def test_odd_requests_are_no_steps(request_: object) -> None:
    assert steps_of({"requests": [request_]}) == steps_of({"requests": request_}) == []


def test_an_episode_without_a_length_has_no_sums() -> None:
    assert sums_of({"requests": [[0, 0.0, 1.0]]}) is None
