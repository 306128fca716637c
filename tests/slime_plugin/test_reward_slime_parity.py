"""The style "slime_strands_example" gives exactly the score of slime's example, wherever that gives one."""

import ast
import importlib.util
import itertools
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strands_rollout.slime_plugin.reward import reward_func

ARGS = SimpleNamespace(strands_rollout={"reward": {"style": "slime_strands_example"}})


def sample(response: str, label: object = "42", tool_iterations: int = 0) -> Any:
    slimes = {"tool_iters": tool_iterations, "tool_calls": 0, "tokens": [], "response_length": 0}
    status, metadata = SimpleNamespace(name="COMPLETED"), {"strands_rollout": {"tool_iterations": tool_iterations}}
    return SimpleNamespace(response=response, label=label, metadata=metadata, status=status, **slimes)


async def score_of(response: str, label: object = "42", tool_iterations: int = 2) -> dict[str, Any]:
    result = await reward_func(ARGS, sample(response, label, tool_iterations))
    assert isinstance(result, dict)
    return result


# What math_dapo gives for each text: the rows of the table in slime's own terms.
RIGHT = [
    *("Answer: 42", "Answer: $42$", "Answer: x = 42", r"Answer: \boxed{42}", r"\boxed{42}"),
    "<tool_response>\nAnswer: 42\n</tool_response>",  # it reads tool output
    "Answer: 41\nAnswer: 42",
]
WRONG = [
    *(
        "Answer: 42.",
        "Answer: 41 and then Answer: 42",
        "Answer: 42.0",
        "**Answer:** 42",
        r"\boxed{042}",
        r"\boxed{ 42 }",
    ),
    r"\boxed{42}" + " " * 100,  # a box is looked for in the last 100 characters only
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
async def test_what_slime_scores_is_the_score(response: str, label: object, score: float) -> None:
    result = await score_of(response, label)
    assert (result["score"], result["acc"], result["error"]) == (score, max(score, 0.0), "")


@pytest.mark.parametrize("label", ["", None, "1/2", "inf"])
async def test_where_slime_raises_the_answer_is_wrong_and_the_reason_given(label: object) -> None:
    result = await score_of("Answer: 1/2", label)
    assert (result["score"], result["acc"], "Error" in result["error"]) == (-1.0, 0.0, True)


@pytest.mark.parametrize(
    ("tool_iterations", "score"), [(0, -1.1), (1, -1.05), (2, -1.0), (5, -0.85), (10, -0.6), (30, -0.6)]
)
async def test_a_failure_is_shaped_by_the_tool_iterations(tool_iterations: int, score: float) -> None:
    assert (await score_of("Answer: 41", "42", tool_iterations))["score"] == pytest.approx(score)
    assert (await score_of("Answer: 42", "42", tool_iterations))["score"] == 1.0
    # slime's own generate sets an attribute
    foreign = SimpleNamespace(response="Answer: 41", label="42", metadata={}, tool_iters=tool_iterations)
    assert (await reward_func(ARGS, foreign))["score"] == pytest.approx(score)


def slime_package() -> Path:
    """The folder of THUDM/slime's package, found without importing it (it needs torch and ray)."""
    roots = [os.environ.get("SLIME_PATH"), *sys.path]
    packages = [Path(root) / "slime" for root in roots if root]
    for package in packages:
        if (package / "rollout" / "rm_hub" / "math_dapo_utils.py").is_file():
            return package
    pytest.skip("needs THUDM/slime: set SLIME_PATH to a checkout of it")


def slime_example_reward() -> Callable[..., Awaitable[float]]:
    """The reward function of slime's strands example, out of its own file, over slime's own compute_score."""
    package = slime_package()
    spec = importlib.util.spec_from_file_location("math_dapo", package / "rollout" / "rm_hub" / "math_dapo_utils.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    example = package.parent / "examples" / "strands_sglang" / "generate_with_strands.py"
    wanted = [
        node
        for node in ast.parse(example.read_text()).body
        if isinstance(node, ast.AsyncFunctionDef) and node.name == "reward_func"
    ]
    namespace: dict[str, Any] = {"math_dapo_compute_score": module.compute_score, "logger": logging.getLogger("slime")}
    exec(compile("from __future__ import annotations", "slime", "exec"), namespace)
    exec(compile(ast.Module(wanted, []), str(example), "exec", dont_inherit=True, flags=annotations_flag()), namespace)
    return namespace["reward_func"]


def annotations_flag() -> int:
    import __future__

    return __future__.annotations.compiler_flag


BEFORE = ["", "Let x = 42.\n", "Answer: 41\n", r"\boxed{41} ", "<tool_response>Answer: 42</tool_response>\n", "x" * 290]
ANSWERS = [
    *("42", "42.", "42.0", " 42 ", "042", "-42", "1,234", "1234", "x = 42", "$42$", "$$42$$", r"\$42", "42 dollars"),
    *("42 cm", r"42\text{ cm}", r"\text{42}", r"\textbf{42}", r"\frac12", r"\frac{84}{2}", r"\sqrt2", r"42^\circ"),
    *("42 square units", "an integer 42", "**42**", "[INVALID]", "{42}", "4{,}2", "$41$ or $42$", "42 meters", "=42"),
    *(r"\mathrm{th}42", "42<|im_end|>", r"\overline{42}", r"\boxed{42}", "", "5 ways", r"42\%", "4 2", "forty"),
]
FORMS = [
    "Answer: {}",
    "answer :{}\n",
    r"\boxed{{{}}}",
    r"$\boxed{{{}}}$.",
    r"Answer: \boxed{{{}}}",
    "{}",
    "**Answer:** {}",
]
LABELS = ["42", "1234", "42.0", " 42", "-42", 42, 42.7, "4.2e1", "5", "$42$", "42 cm"]


@pytest.mark.slime
async def test_every_score_equals_that_of_slimes_own_functions() -> None:
    theirs = slime_example_reward()
    compared = 0
    for before, answer, form, label in itertools.product(BEFORE, ANSWERS, FORMS, LABELS):
        one = sample(before + form.format(answer), label, compared % 7)
        try:
            expected = await theirs(None, one)
        except (ValueError, OverflowError, TypeError):
            continue
        compared += 1
        assert (await reward_func(ARGS, one))["score"] == expected, (one.response, label)
    assert compared > 10_000
