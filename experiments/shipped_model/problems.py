"""Draws word problems from the templates, and splits them into training and held-out problems that share nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Final

from experiments.shipped_model.task import Split
from experiments.shipped_model.templates import TEMPLATES, Template

NAMES: Final = (
    "Ada", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Ivy", "Jack", "Kim", "Leo",
    "Maria", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tara", "Victor",
)  # fmt: skip
ITEMS: Final = (
    "apples", "balls", "books", "bottles", "buttons", "cakes", "candles", "cards", "coins", "cookies",
    "cups", "flowers", "lamps", "marbles", "notebooks", "oranges", "pencils", "plates", "shells", "stamps",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Problem:
    """One question and the ways to solve it.

    Attributes:
        key: The template's name and the numbers; two problems with one key differ in names and wording alone.
        question: The user's text.
        plan: One sentence of reasoning.
        expression: Python whose value is the answer.
        first: Python of an intermediate value, or "".
        rest: A format string that makes the answer of `{first}`, or "".
        imports: The line that the expressions need before them, or "".
    """

    key: tuple[str | int, ...]
    question: str
    plan: str
    expression: str
    first: str
    rest: str
    imports: str


def draw_problem(template: Template, rng: Random) -> Problem:
    """A problem of this kind with numbers, names and wording drawn from `rng`."""
    numbers = dict(template.numbers(rng))
    name, other = rng.sample(NAMES, 2)
    items, things = rng.sample(ITEMS, 2)
    question = rng.choice(template.wordings).format(**numbers, name=name, other=other, items=items, things=things)
    return Problem(
        key=(template.name, *numbers.values()),
        question=question[0].upper() + question[1:],
        plan=template.plan,
        expression=template.expression.format(**numbers),
        first=template.first.format(**numbers),
        rest=template.rest.format(**numbers, first="{first}"),
        imports=template.imports,
    )


def problem_stream(rng: Random) -> Iterator[Problem]:
    """Endless problems, every kind as often as any other, no key twice."""
    seen: set[tuple[str | int, ...]] = set()
    while True:
        problem = draw_problem(rng.choice(TEMPLATES), rng)
        if problem.key not in seen:
            seen.add(problem.key)
            yield problem


def split_problems(seed: int, held_out_count: int, validation_count: int, training_count: int) -> Split[Problem]:
    """The same split for the same arguments; held-out problems depend on the seed and their own count alone."""
    stream = problem_stream(Random(seed))
    counts = (held_out_count, validation_count, training_count)
    return Split(*(tuple(islice(stream, count)) for count in counts))
