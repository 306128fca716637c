"""Draws questions about what things cost in a shop, and splits them into training and held-out ones that share nothing.

Knows the shop's prices. Must not know prompts, tokens or models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from shipped_model.problems import NAMES
from shipped_model.split import Split, split
from strands_rollout.shop import PRICES, calculate

COUNTS: Final = range(2, 31)
MONEY: Final = (4, 120)
PARTS: Final = (2, 9)


@dataclass(frozen=True, slots=True)
class ShopTemplate:
    """One kind of question. Wordings and expression are format strings.

    Attributes:
        name: Unique; a problem's identity is its template's name, its items and its numbers.
        wordings: The question: {a} {x}, {b} {y}, which are items, {m} dollars, {n} boxes, days or parts, {name}.
        plan: The reasoning before the calculation, in one sentence.
        expression: What to calculate: {p} is the price of {x}, {q} that of {y}.
    """

    name: str
    wordings: tuple[str, ...]
    plan: str
    expression: str


TEMPLATES: Final = (
    ShopTemplate(
        "cost",
        (
            "What do {a} {x} cost?",
            "{name} buys {a} {x}. How many dollars does {name} spend?",
        ),
        "Multiply the price by the count.",
        "{a} * {p}",
    ),
    ShopTemplate(
        "cost of two",
        (
            "What do {a} {x} and {b} {y} cost?",
            "{name} buys {a} {x} and {b} {y}. How many dollars does {name} spend?",
        ),
        "Multiply each price by its count and add.",
        "{a} * {p} + {b} * {q}",
    ),
    ShopTemplate(
        "change",
        (
            "{name} buys {a} {x} and pays with {m} dollars. How much change does {name} get?",
            "{name} has {m} dollars and buys {a} {x}. How many dollars are left?",
        ),
        "The change is the money minus the cost.",
        "{m} - {a} * {p}",
    ),
    ShopTemplate(
        "change of two",
        (
            "How much change from {m} dollars does {name} get for {a} {x} and {b} {y}?",
            "{name} has {m} dollars and buys {a} {x} and {b} {y}. How many dollars are left?",
        ),
        "The change is the money minus both costs.",
        "{m} - {a} * {p} - {b} * {q}",
    ),
    ShopTemplate(
        "difference",
        (
            "How many dollars more do {a} {x} cost than {b} {y}?",
            "{name} needs {a} {x} or {b} {y}. How many dollars cheaper is the second?",
        ),
        "Subtract one cost from the other.",
        "{a} * {p} - {b} * {q}",
    ),
    ShopTemplate(
        "boxes",
        (
            "A box holds {a} {x} and {b} {y}. What do {n} boxes cost?",
            "{name} fills {n} boxes with {a} {x} and {b} {y} each. How many dollars does {name} spend?",
        ),
        "Multiply the cost of one box by the number of boxes.",
        "({a} * {p} + {b} * {q}) * {n}",
    ),
    ShopTemplate(
        "every day",
        (
            "{name} buys {a} {x} every day. How many dollars is that in {n} days?",
            "A school needs {a} {x} a day. What do they cost in {n} days?",
        ),
        "Multiply the price by the count and the days.",
        "{a} * {p} * {n}",
    ),
    ShopTemplate(
        "share",
        (
            "{name} and friends buy {a} {x} and pay {n} equal parts. How many whole dollars is one part?",
            "The cost of {a} {x} is divided by {n}. What is that, rounded down?",
        ),
        "Divide the cost and round down.",
        "{a} * {p} // {n}",
    ),
)


@dataclass(frozen=True, slots=True)
class ShopProblem:
    """One question and the way to its answer.

    Attributes:
        key: The template's name, the items and the numbers; problems with one key differ in names and wording alone.
        question: The user's text.
        items: The numbers of those whose prices are needed, in the order of the question.
        plan: One sentence of reasoning.
        expression: What to calculate, with the prices in it.
    """

    key: tuple[str | int, ...]
    question: str
    items: tuple[str, ...]
    plan: str
    expression: str


def draw_problem(template: ShopTemplate, rng: Random) -> ShopProblem:
    """A question of this kind with items, numbers, names and wording drawn from `rng`; its answer may be negative."""
    x, y = rng.sample(list(PRICES), 2)
    a, b = rng.sample(COUNTS, 2)
    numbers = {"a": a, "b": b, "m": 10 * rng.randint(*MONEY), "n": rng.randint(*PARTS)}
    question = rng.choice(template.wordings).format(
        **numbers, x=f"pieces of item {x}", y=f"pieces of item {y}", name=rng.choice(NAMES)
    )
    used = [number for field, number in numbers.items() if f"{{{field}}}" in template.expression]
    items = (x, y) if "{q}" in template.expression else (x,)
    return ShopProblem(
        key=(template.name, *items, *used),
        question=question,
        items=items,
        plan=template.plan,
        expression=template.expression.format(**numbers, p=PRICES[x], q=PRICES[y]),
    )


def answer_to(problem: ShopProblem) -> int:
    """The right answer."""
    return int(calculate(expression=problem.expression))


def problem_stream(rng: Random) -> Iterator[ShopProblem]:
    """Endless problems, every kind as often as any other, no key twice, every answer positive."""
    seen: set[tuple[str | int, ...]] = set()
    while True:
        template = rng.choice(TEMPLATES)
        problem = draw_problem(template, rng)
        while problem.key in seen or answer_to(problem) <= 0:
            problem = draw_problem(template, rng)
        seen.add(problem.key)
        yield problem


def split_problems(seed: int, held_out_count: int, validation_count: int, training_count: int) -> Split[ShopProblem]:
    """The same split for the same arguments; held-out problems depend on the seed and their own count alone."""
    stream = problem_stream(Random(seed))  # noqa: S311 - a reproducible data set, not a secret
    return split(stream, held_out_count, validation_count, training_count)
