"""The rows that the package ships: their format, their labels, and that the held-out ones were never trained on."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
DATA = REPOSITORY / "strands_rollout/data"
TRAINING = REPOSITORY / "strands_rollout/engine/checkpoint/training.json"

# Written from the questions alone, without a look at the templates.
SOLUTIONS: list[tuple[str, Callable[..., int]]] = [
    (r"What is the remainder when (\d+) is divided by (\d+)\?", lambda a, b: a - b * int(a / b)),
    (r"What is the remainder when (\d+) to the power (\d+) is divided by (\d+)\?", lambda a, b, m: a**b % m),
    (r"What is the sum of all integers from (\d+) to (\d+)\?", lambda a, b: (a + b) * (b - a + 1) // 2),
    (r"What is the greatest common divisor of (\d+) and (\d+)\?", math.gcd),
    (r"What is the least common multiple of (\d+) and (\d+)\?", lambda a, b: a * b // math.gcd(a, b)),
    (r"What is the perimeter of a rectangle with sides (\d+) and (\d+)\?", lambda a, b: a + b + a + b),
    (r"How many multiples of (\d+) are there from (\d+) to (\d+)\?", lambda k, a, b: b // k - (a - 1) // k),
    (r"What is (\d+) percent of (\d+)\?", lambda p, n: round(n * p / 100)),
    (r"A bus holds (\d+) people. How many buses are needed for (\d+) people\?", lambda b, n: math.ceil(n / b)),
    (r"A train travels (\d+) kilometers an hour for (\d+) hours\..*", lambda v, t: v * t),
    (r"\w+ is (\d+) years old. \w+ is (\d+) years older. What is the sum of their ages\?", lambda a, b: 2 * a + b),
    (
        r"A bike costs (\d+) dollars. It is sold with a discount of (\d+) percent\..*",
        lambda a, p: round(a - a * p / 100),
    ),
    (
        r"A tank gains (\d+) liters a minute and loses (\d+) liters a minute. It holds (\d+) liters now. "
        r"How many liters does it hold after (\d+) minutes\?",
        lambda gain, loss, start, minutes: start + gain * minutes - loss * minutes,
    ),
    (
        r"A theater has (\d+) rows. The first row has (\d+) seats and each next row has (\d+) more\..*",
        lambda rows, first, more: rows * first + more * rows * (rows - 1) // 2,
    ),
]


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def questions(name: str) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows(name)]


@pytest.mark.parametrize("name", ["train.jsonl", "demo.jsonl"])
def test_rows_are_a_user_message_and_an_integer_label(name: str) -> None:
    for row in rows(name):
        assert list(row) == ["prompt", "label"]
        (message,) = row["prompt"]
        assert list(message) == ["role", "content"]
        assert message["role"] == "user"
        assert message["content"].strip() == message["content"] != ""
        assert row["label"] == str(int(row["label"]))


def test_the_files_have_the_promised_sizes() -> None:
    assert len(rows("demo.jsonl")) == 256
    assert len(rows("train.jsonl")) >= 2000
    assert (DATA / "train.jsonl").stat().st_size < 1_000_000


def test_no_question_is_asked_twice() -> None:
    everything = questions("train.jsonl") + questions("demo.jsonl")
    assert len(set(everything)) == len(everything)


def test_held_out_problems_share_no_numbers_with_any_problem_trained_on(shipped_model: Any) -> None:
    plan = json.loads(TRAINING.read_text())["plan"]
    sizes = [plan[key] for key in ("held_out_rows", "validation_rows", "problems")]
    split = shipped_model("problems").split_problems(plan["seed"], *sizes)
    assert [problem.question for problem in split.held_out] == questions("demo.jsonl")
    assert [problem.question for problem in split.training[: plan["training_rows"]]] == questions("train.jsonl")
    keys = [{problem.key for problem in part} for part in (split.held_out, split.validation, split.training)]
    assert not keys[0] & (keys[1] | keys[2])
    assert not keys[1] & keys[2]


def test_labels_equal_an_independent_solution() -> None:
    checked = dict.fromkeys(range(len(SOLUTIONS)), 0)
    for row in rows("train.jsonl") + rows("demo.jsonl"):
        for kind, (pattern, solve) in enumerate(SOLUTIONS):
            match = re.fullmatch(pattern, row["prompt"][0]["content"])
            if match:
                assert str(solve(*map(int, match.groups()))) == row["label"], row
                checked[kind] += 1
    assert all(count > 10 for count in checked.values()), checked


def test_held_out_rows_ask_every_kind_of_problem(shipped_model: Any) -> None:
    plan = json.loads(TRAINING.read_text())["plan"]
    split = shipped_model("problems").split_problems(plan["seed"], plan["held_out_rows"], 0, 0)
    asked = {problem.key[0] for problem in split.held_out}
    assert asked == {template.name for template in shipped_model("templates").TEMPLATES}


def test_solving_in_two_parts_gives_the_same_answer(shipped_model: Any) -> None:
    problems = shipped_model("problems")
    for template in shipped_model("templates").TEMPLATES:
        problem = problems.draw_problem(template, Random(1))
        if problem.first:
            rest = problem.rest.format(first=eval(problem.first))
            assert eval(rest) == eval(problem.expression), template.name
            assert rest != problem.expression


def test_the_package_data_is_written_by_this_seed_alone(shipped_model: Any, tmp_path: Path) -> None:
    plan = json.loads(TRAINING.read_text())["plan"]
    split = shipped_model("problems").split_problems(plan["seed"], plan["held_out_rows"], 0, 0)
    rows_of = shipped_model("word_problems").WORD_PROBLEMS.rows_of
    shipped_model("task").write_rows(rows_of(split.held_out), tmp_path / "demo.jsonl")
    assert (tmp_path / "demo.jsonl").read_bytes() == (DATA / "demo.jsonl").read_bytes()
