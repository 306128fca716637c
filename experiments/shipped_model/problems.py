"""Draw word problems from the templates, and split them into training, validation and held-out problems."""

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
    """A question and the ways to solve it.

    Attributes:
        key: Name of the template, and the numbers; problems with equal keys differ only in names and wording.
        question: Text of the user's message.
        plan: A sentence of reasoning.
        expression: Python expression of the answer.
        first: Python expression of an intermediate value, or "".
        rest: Format string of the answer's expression, with `{first}` for the intermediate value, or "".
        imports: Import statement that the expressions need, or "".
    """

    key: tuple[str | int, ...]
    question: str
    plan: str
    expression: str
    first: str
    rest: str
    imports: str


def draw_problem(template: Template, rng: Random) -> Problem:
    """Draw the numbers, names and wording of a problem."""
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
    """Yield problems without end; all templates are equally likely, and no key repeats."""
    seen: set[tuple[str | int, ...]] = set()
    while True:
        problem = draw_problem(rng.choice(TEMPLATES), rng)
        if problem.key not in seen:
            seen.add(problem.key)
            yield problem


def split_problems(seed: int, held_out_count: int, validation_count: int, training_count: int) -> Split[Problem]:
    """Draw a split from the seed. The held-out problems depend only on `seed` and `held_out_count`."""
    stream = problem_stream(Random(seed))
    counts = (held_out_count, validation_count, training_count)
    return Split(*(tuple(islice(stream, count)) for count in counts))
