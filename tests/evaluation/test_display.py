"""The table, the totals and the progress that a person reads."""

import io
from typing import Any

from rich.console import Console

from strands_rollout.evaluation.evaluate import Outcome, Summary
from strands_rollout.evaluation.run import accuracy_bar, print_outcomes, print_summary
from strands_rollout.samples import Sample


def outcome(
    *,
    right: bool = True,
    violations: tuple[str, ...] = (),
    status: Sample.Status = Sample.Status.COMPLETED,
    **facts: Any,
) -> Outcome:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    question = {"role": "user", "content": "What is [bold]17 * 2[/bold]?"}
    sample = Sample(prompt=[*chat, question], label="34", index=3)
    sample.status = status
    sample.response_length = 41
    sample.reward = {"score": 1.0 if right else -1.0, "acc": float(right), "pred": "34" if right else "35"}
    sample.metadata = {"strands_rollout": {"stop_reason": "completed", "turns": 2, "tool_calls": 1, **facts}}
    return Outcome(sample, list(violations), [])


def printed(call: Any, *args: Any, **kwargs: Any) -> str:
    out = io.StringIO()
    call(Console(file=out, width=140), *args, **kwargs)
    return out.getvalue()


def test_a_narrow_terminal_gets_the_table_without_the_questions() -> None:
    out = io.StringIO()
    print_outcomes(Console(file=out, width=80), [outcome(stop_reason="max_tool_iterations")])
    shown = " ".join(out.getvalue().splitlines()[-1].split())
    assert shown == "3 34 34 1 completed max_tool_iterations 2 1 41"


def test_the_summary_counts_stop_reasons_and_names_violations() -> None:
    outcomes = [
        outcome(violations=("loss_mask has None",)),
        outcome(right=False, stop_reason="turn_length", error="limit"),
        outcome(right=False, status=Sample.Status.FAILED, stop_reason="engine_error", error="EngineError: x"),
    ]
    text = printed(print_summary, outcomes, Summary.of(outcomes), seconds=1.5)
    assert "3 samples in 1.5 s: accuracy 33.3%, mean reward -0.333, 3 tool calls" in text
    assert "completed 1, turn_length 1, engine_error 1" in text
    assert "token exactness: every sample passed" in text
    assert "slime's contract: 1 violations\n  sample 3: loss_mask has None" in text
    assert "failed, 1 of 3: EngineError: x" in text
    assert "limit" not in text


def test_without_a_terminal_each_tenth_is_a_line_at_once() -> None:
    out = io.StringIO()
    with accuracy_bar(Console(file=out, width=80), 40, [True] * 20) as tell:
        for number in range(20):
            tell(None if number == 19 else number % 2 == 0)
            assert len(out.getvalue().splitlines()) == (number + 1) // 4
    shown = out.getvalue().splitlines()
    assert shown[0] == "episodes 24/40  accuracy 92%"
    assert shown[-1] == "episodes 40/40  accuracy 77%"
    with accuracy_bar(Console(file=out, width=80), 3) as tell:
        tell(None)
    assert out.getvalue().endswith("episodes 1/3\n")
