"""`steps_of` and `durations_of`: steps of an episode in order of their start; parallel time counts once."""

from strands_rollout.dump.record import Step, durations_of, steps_of
from strands_rollout.samples import EpisodeFacts

CALL = {"id": "call_1_0", "tool": "run", "s": 0.5}
FACTS = EpisodeFacts(
    requests=[[0, 0.1, 1.0], [0, 1.3, 0.2], [1, 2.5, 0.4]],
    calls=[{**CALL, "at_s": 1.6}, {**CALL, "at_s": 1.7}],
    code={"queued_s": 0.1},
    duration_s=3.0,
    generate_s=1.6,
    tool_s=1.0,
)


def test_steps_of_orders_steps_by_start() -> None:
    assert steps_of(FACTS) == [
        Step("generate", 0.1, 1.0, turn=0),
        Step("generate", 1.3, 0.2, turn=0),
        Step("tool", 1.6, 0.5, call=0),
        Step("tool", 1.7, 0.5, call=1),
        Step("generate", 2.5, 0.4, turn=1),
    ]


def test_durations_of_counts_parallel_time_once() -> None:
    assert durations_of(FACTS) == {"generate": 1.6, "tool": 0.5, "wait": 0.9, "all": 3.0}
