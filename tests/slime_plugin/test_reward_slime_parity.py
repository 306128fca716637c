"""The reward style "slime_strands_example" gives the scores of slime's Strands example."""

from types import SimpleNamespace
from typing import Any

import pytest

from strands_rollout.slime_plugin.reward import reward_func

ARGS = SimpleNamespace(strands_rollout={"reward": {"style": "slime_strands_example"}})


def sample(response: str, label: object = "42", tool_iterations: int = 0) -> Any:
    slime_fields = {"tool_iters": tool_iterations, "tool_calls": 0, "tokens": [], "response_length": 0}
    status, metadata = SimpleNamespace(name="COMPLETED"), {"strands_rollout": {"tool_iterations": tool_iterations}}
    return SimpleNamespace(response=response, label=label, metadata=metadata, status=status, **slime_fields)


async def score_of(response: str, label: object = "42", tool_iterations: int = 2) -> dict[str, Any]:
    result = await reward_func(ARGS, sample(response, label, tool_iterations))
    assert isinstance(result, dict)
    return result


# Texts that slime's math_dapo grades as right and as wrong.
RIGHT = [
    *("Answer: 42", "Answer: $42$", "Answer: x = 42", r"Answer: \boxed{42}", r"\boxed{42}"),
    "<tool_response>\nAnswer: 42\n</tool_response>",  # math_dapo reads tool output
    "Answer: 41\nAnswer: 42",
]
WRONG = [
    *("Answer: 42.", "Answer: 41 and then Answer: 42", "**Answer:** 42", r"\boxed{042}"),
    r"\boxed{42}" + " " * 100,  # math_dapo looks for a box only in the last 100 characters
    *("Answer: 42" + " " * 300, "42", ""),
]


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        *((response, "42", 1.0) for response in RIGHT),
        *((response, "42", -1.0) for response in WRONG),
        *(("Answer: 1,234", "1234", 1.0), ("Answer: 42", 42, 1.0), (r"\boxed{42}", 42, -1.0)),
    ],
)
async def test_slime_strands_example_style_matches_math_dapo(response: str, label: object, score: float) -> None:
    result = await score_of(response, label)
    assert (result["score"], result["acc"], result["error"]) == (score, max(score, 0.0), "")


@pytest.mark.parametrize("label", ["", None, "1/2", "inf"])
async def test_slime_strands_example_style_reports_bad_labels(label: object) -> None:
    result = await score_of("Answer: 1/2", label)
    assert (result["score"], result["acc"], "Error" in result["error"]) == (-1.0, 0.0, True)


@pytest.mark.parametrize(
    ("tool_iterations", "score"), [(0, -1.1), (1, -1.05), (2, -1.0), (5, -0.85), (10, -0.6), (30, -0.6)]
)
async def test_slime_strands_example_style_shapes_by_tool_iterations(tool_iterations: int, score: float) -> None:
    assert (await score_of("Answer: 41", "42", tool_iterations))["score"] == pytest.approx(score)
    assert (await score_of("Answer: 42", "42", tool_iterations))["score"] == 1.0
    # a sample of the example's own `generate` has the attribute `tool_iters` instead of facts
    foreign = SimpleNamespace(response="Answer: 41", label="42", metadata={}, tool_iters=tool_iterations)
    assert (await reward_func(ARGS, foreign))["score"] == pytest.approx(score)
