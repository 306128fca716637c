"""Templates of word problems: wordings, solutions in words and in Python, and ranges of numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

Numbers = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Template:
    """A kind of problem; wordings, plan and expressions are format strings over the same fields.

    Attributes:
        name: Unique name; a problem is identified by its template's name and its numbers.
        wordings: Texts of the question, with fields for the numbers, {name}, {other}, {items} and {things}.
        plan: The reasoning before the tool call, in one sentence.
        expression: Python expression of the answer, an integer.
        numbers: Function that draws the fields' values.
        first: Python expression of an intermediate value, or "" without one.
        rest: `expression` with {first} for the intermediate value.
        imports: Import statement that the expression needs, or "".
    """

    name: str
    wordings: tuple[str, ...]
    plan: str
    expression: str
    numbers: Callable[[Random], Numbers]
    first: str = ""
    rest: str = ""
    imports: str = ""


def between(**bounds: tuple[int, int]) -> Callable[[Random], Numbers]:
    """Return a function that draws each field from its own closed range."""
    return lambda rng: {field: rng.randint(low, high) for field, (low, high) in bounds.items()}


def descending_pair(low: int, high: int) -> Callable[[Random], Numbers]:
    """Return a function that draws a > b from one closed range."""
    return lambda rng: dict(zip("ab", sorted(rng.sample(range(low, high + 1), 2), reverse=True), strict=True))


def ascending_pair(low: int, high: int, **bounds: tuple[int, int]) -> Callable[[Random], Numbers]:
    """Return a function that draws a < b from one closed range, and other fields from their own ranges."""
    others = between(**bounds)
    return lambda rng: {**dict(zip("ab", sorted(rng.sample(range(low, high + 1), 2)), strict=True)), **others(rng)}


def percent(fewest: int, most: int) -> Callable[[Random], Numbers]:
    """Return a function that draws an amount a and a percentage b such that b% of a is an integer."""
    return lambda rng: {"a": 20 * rng.randint(fewest, most), "b": 5 * rng.randint(1, 19)}


def with_computed_field(
    field: str, formula: Callable[[Numbers], int], **bounds: tuple[int, int]
) -> Callable[[Random], Numbers]:
    """Return a function that draws fields and computes one more from them, such as a multiple of another field."""
    others = between(**bounds)

    def draw(rng: Random) -> Numbers:
        drawn = others(rng)
        return {**drawn, field: formula(drawn)}

    return draw


SHOPPING: Final = (
    Template(
        "total",
        (
            "{name} buys {a} {items} at {b} dollars each. How many dollars does {name} spend?",
            "A shop sells {items} for {b} dollars each. What do {a} {items} cost in dollars?",
        ),
        "Multiply the price by the count.",
        "{a} * {b}",
        between(a=(3, 99), b=(3, 250)),
    ),
    Template(
        "change",
        (
            "{name} buys {a} {items} at {b} dollars each and pays with {c} dollars. How much change does {name} get?",
            "{name} has {c} dollars and buys {a} {items} for {b} dollars each. How many dollars are left?",
        ),
        "The change is the money minus the cost.",
        "{c} - {a} * {b}",
        with_computed_field("c", lambda n: n["a"] * n["b"] + n["r"], a=(2, 40), b=(2, 60), r=(1, 99)),
        first="{a} * {b}",
        rest="{c} - {first}",
    ),
    Template(
        "two_kinds",
        (
            "{name} buys {a} {items} at {b} dollars each and {c} {things} at {d} dollars each. What is the total cost?",
            "{items} cost {b} dollars and {things} cost {d} dollars. What do {a} {items} and {c} {things} cost?",
        ),
        "Add the cost of both kinds.",
        "{a} * {b} + {c} * {d}",
        between(a=(2, 50), b=(2, 90), c=(2, 50), d=(2, 90)),
        first="{a} * {b}",
        rest="{first} + {c} * {d}",
    ),
    Template(
        "discount",
        (
            "A bike costs {a} dollars. It is sold with a discount of {b} percent. What is the new price in dollars?",
            "{name} gets {b} percent off a price of {a} dollars. How many dollars does {name} pay?",
        ),
        "Take off the percentage.",
        "{a} * (100 - {b}) // 100",
        percent(2, 150),
        first="{a} * {b} // 100",
        rest="{a} - {first}",
    ),
    Template(
        "percent_of",
        ("What is {b} percent of {a}?", "A school has {a} students and {b} percent walk to school. How many walk?"),
        "Multiply by the percentage and divide by 100.",
        "{a} * {b} // 100",
        percent(2, 240),
    ),
    Template(
        "increase",
        (
            "A town of {a} people grows by {b} percent. How many people live there now?",
            "{name} earns {a} dollars and gets a raise of {b} percent. What does {name} earn now?",
        ),
        "Add the percentage to the amount.",
        "{a} + {a} * {b} // 100",
        percent(5, 240),
        first="{a} * {b} // 100",
        rest="{a} + {first}",
    ),
    Template(
        "saving",
        (
            "{name} has {a} dollars and saves {b} dollars a week for {c} weeks. Then {name} spends {d} dollars. "
            "How many dollars are left?",
        ),
        "Add what is saved and subtract what is spent.",
        "{a} + {b} * {c} - {d}",
        between(a=(100, 900), b=(5, 90), c=(3, 40), d=(5, 99)),
        first="{a} + {b} * {c}",
        rest="{first} - {d}",
    ),
    Template(
        "wages",
        (
            "{name} earns {b} dollars an hour and double on Sunday. {name} works {a} hours in the week and {c} hours "
            "on Sunday. What is the pay in dollars?",
        ),
        "Sunday hours count double.",
        "{b} * ({a} + 2 * {c})",
        between(a=(8, 45), b=(8, 60), c=(2, 9)),
        first="{a} + 2 * {c}",
        rest="{b} * {first}",
    ),
)

AMOUNTS: Final = (
    Template(
        "library",
        (
            "A library has {a} books. It buys {b} books and gives away {c} books. How many books does it have now?",
            "{name} has {a} {items}, finds {b} more and loses {c}. How many {items} does {name} have?",
        ),
        "Add what comes and subtract what goes.",
        "{a} + {b} - {c}",
        between(a=(200, 4000), b=(10, 900), c=(10, 200)),
    ),
    Template(
        "bakery",
        (
            "A baker makes {a} trays of {b} {items} and sells {c} of them. How many {items} are left?",
            "{name} packs {a} boxes with {b} {items} each and gives {c} {items} away. How many remain?",
        ),
        "Multiply to get all of them and subtract.",
        "{a} * {b} - {c}",
        with_computed_field("c", lambda n: n["a"] * n["b"] - n["r"], a=(5, 60), b=(5, 48), r=(1, 24)),
        first="{a} * {b}",
        rest="{first} - {c}",
    ),
    Template(
        "paper",
        (
            "A school has {a} classes of {b} students. Today {c} students are ill. Each other student gets {d} "
            "{items}. How many {items} are needed?",
        ),
        "Count the students who are there and multiply.",
        "({a} * {b} - {c}) * {d}",
        between(a=(3, 20), b=(12, 32), c=(2, 30), d=(2, 15)),
        first="{a} * {b} - {c}",
        rest="{first} * {d}",
    ),
    Template(
        "eggs",
        ("A farm has {a} hens and each lays {b} eggs a week. How many boxes of {c} eggs are filled in {d} weeks?",),
        "Count all eggs and divide, rounding down.",
        "{a} * {b} * {d} // {c}",
        between(a=(5, 80), b=(3, 7), c=(6, 12), d=(2, 9)),
        first="{a} * {b} * {d}",
        rest="{first} // {c}",
    ),
    Template(
        "left_over",
        (
            "{name} puts {a} {items} into boxes of {b}. How many {items} are left over?",
            "What is the remainder when {a} is divided by {b}?",
        ),
        "This is the remainder of a division.",
        "{a} % {b}",
        between(a=(100, 5000), b=(3, 60)),
    ),
    Template(
        "boxes_needed",
        (
            "A box holds {b} {items}. How many boxes does {name} need for {a} {items}?",
            "A bus holds {b} people. How many buses are needed for {a} people?",
        ),
        "Divide and round up.",
        "({a} + {b} - 1) // {b}",
        between(a=(100, 4000), b=(6, 60)),
    ),
    Template(
        "share",
        (
            "{c} {items} are shared equally by {b} children. How many {items} does each child get?",
            "{name} reads a book of {c} pages in {b} days, the same number each day. How many pages is that a day?",
        ),
        "Divide equally.",
        "{c} // {b}",
        with_computed_field("c", lambda n: n["b"] * n["r"], b=(3, 60), r=(4, 90)),
    ),
    Template(
        "average",
        (
            "{name} scores {a}, {b} and {c} points. What is the average?",
            "What is the mean of {a}, {b} and {c}?",
        ),
        "Add them and divide by 3.",
        "({a} + {b} + {c}) // 3",
        with_computed_field("c", lambda n: 3 * n["r"] + (-n["a"] - n["b"]) % 3, a=(10, 900), b=(10, 900), r=(4, 300)),
        first="{a} + {b} + {c}",
        rest="{first} // 3",
    ),
    Template(
        "compare",
        (
            "{name} fills {a} bags with {b} {items} each. {other} fills {c} bags with {d} {items} each. "
            "How many more {items} does {name} have?",
        ),
        "Subtract one product from the other.",
        "{a} * {b} - {c} * {d}",
        between(a=(30, 60), b=(30, 80), c=(3, 29), d=(3, 29)),
        first="{c} * {d}",
        rest="{a} * {b} - {first}",
    ),
)

AGES_AND_JOURNEYS: Final = (
    Template(
        "times_as_old",
        (
            "{name} is {a} years old and {other} is {b} times as old. How old will {other} be in {c} years?",
            "A tree is {a} years old. A house is {b} times as old. How old will the house be in {c} years?",
        ),
        "Multiply the age and add the years.",
        "{a} * {b} + {c}",
        between(a=(3, 80), b=(2, 9), c=(2, 60)),
        first="{a} * {b}",
        rest="{first} + {c}",
    ),
    Template(
        "sum_of_ages",
        ("{name} is {a} years old. {other} is {b} years older. What is the sum of their ages?",),
        "Add both ages.",
        "{a} + {a} + {b}",
        between(a=(3, 90), b=(2, 60)),
        first="{a} + {b}",
        rest="{a} + {first}",
    ),
    Template(
        "distance",
        (
            "A train travels {a} kilometers an hour for {b} hours. How many kilometers does it travel?",
            "{name} drives for {b} hours at {a} kilometers an hour. How far does {name} drive in kilometers?",
        ),
        "Multiply the speed by the time.",
        "{a} * {b}",
        between(a=(20, 320), b=(2, 48)),
    ),
    Template(
        "two_legs",
        (
            "{name} drives {a} hours at {b} kilometers an hour and then {c} hours at {d} kilometers an hour. "
            "How many kilometers is that in all?",
        ),
        "Add the distance of both parts.",
        "{a} * {b} + {c} * {d}",
        between(a=(2, 12), b=(30, 130), c=(2, 12), d=(30, 130)),
        first="{a} * {b}",
        rest="{first} + {c} * {d}",
    ),
    Template(
        "hours",
        (
            "A ship sails {c} kilometers at {b} kilometers an hour. How many hours does it take?",
            "How many hours does {name} need for {c} kilometers at {b} kilometers an hour?",
        ),
        "Divide the distance by the speed.",
        "{c} // {b}",
        with_computed_field("c", lambda n: n["b"] * n["r"], b=(4, 99), r=(3, 60)),
    ),
    Template(
        "machine",
        (
            "A machine makes {a} {items} a minute. How many {items} does it make in {b} hours?",
            "A printer prints {a} pages a minute. How many pages does it print in {b} hours?",
        ),
        "An hour has 60 minutes.",
        "{a} * 60 * {b}",
        between(a=(3, 90), b=(2, 24)),
        first="{a} * 60",
        rest="{first} * {b}",
    ),
    Template(
        "tank",
        (
            "A tank gains {a} liters a minute and loses {b} liters a minute. It holds {d} liters now. "
            "How many liters does it hold after {c} minutes?",
        ),
        "Each minute adds the difference.",
        "{d} + ({a} - {b}) * {c}",
        lambda rng: {**descending_pair(3, 90)(rng), **between(c=(3, 60), d=(10, 900))(rng)},
        first="({a} - {b}) * {c}",
        rest="{d} + {first}",
    ),
    Template(
        "fence",
        (
            "A field is {a} meters long and {b} meters wide. How many meters of fence go around it?",
            "What is the perimeter of a rectangle with sides {a} and {b}?",
        ),
        "The perimeter is twice the sum of the sides.",
        "2 * ({a} + {b})",
        descending_pair(5, 900),
    ),
    Template(
        "tiles",
        ("A floor is {a} meters long and {b} meters wide. Each square meter needs {c} tiles. How many tiles is that?",),
        "Multiply the area by the tiles.",
        "{a} * {b} * {c}",
        between(a=(3, 40), b=(3, 40), c=(4, 25)),
        first="{a} * {b}",
        rest="{first} * {c}",
    ),
)

NUMBERS: Final = (
    Template(
        "sum_of_range",
        ("What is the sum of all integers from {a} to {b}?", "Add up all whole numbers from {a} to {b}."),
        "Sum the range, with both ends.",
        "sum(range({a}, {b} + 1))",
        ascending_pair(2, 400),
    ),
    Template(
        "sum_of_squares",
        ("What is the sum of the squares of the integers from {a} to {b}?",),
        "Sum the squares over the range.",
        "sum(n * n for n in range({a}, {b} + 1))",
        ascending_pair(1, 90),
    ),
    Template(
        "sequence_term",
        ("A sequence starts at {a} and each term is {b} more than the last. What is term number {c}?",),
        "Add the step to the start, one time less than the number.",
        "{a} + ({c} - 1) * {b}",
        between(a=(2, 900), b=(2, 60), c=(5, 90)),
        first="({c} - 1) * {b}",
        rest="{a} + {first}",
    ),
    Template(
        "rows_of_seats",
        (
            "A theater has {c} rows. The first row has {a} seats and each next row has {b} more. "
            "How many seats are there?",
            "{name} saves {a} dollars in the first month and {b} dollars more each next month. How much is saved in "
            "{c} months?",
        ),
        "Sum the terms of the sequence.",
        "sum({a} + {b} * i for i in range({c}))",
        between(a=(5, 90), b=(2, 20), c=(4, 40)),
    ),
    Template(
        "multiples",
        (
            "How many integers from {a} to {b} are divisible by {c}?",
            "How many multiples of {c} are there from {a} to {b}?",
        ),
        "Count the numbers without a remainder.",
        "len([n for n in range({a}, {b} + 1) if n % {c} == 0])",
        ascending_pair(10, 3000, c=(3, 40)),
    ),
    Template(
        "common_divisor",
        (
            "What is the greatest common divisor of {c} and {d}?",
            "{name} cuts ropes of {c} and {d} meters into equal parts with no rest. How long can a part be at most?",
        ),
        "This is the greatest common divisor.",
        "math.gcd({c}, {d})",
        lambda rng: {"c": (k := rng.randint(2, 60)) * rng.randint(2, 60), "d": k * rng.randint(2, 60)},
        imports="import math",
    ),
    Template(
        "common_multiple",
        (
            "What is the least common multiple of {a} and {b}?",
            "One bell rings every {a} minutes and another every {b} minutes. They ring together now. "
            "After how many minutes do they ring together again?",
        ),
        "This is the least common multiple.",
        "math.lcm({a}, {b})",
        descending_pair(4, 120),
        imports="import math",
    ),
    Template(
        "power_remainder",
        ("What is the remainder when {a} to the power {b} is divided by {c}?",),
        "Use a modular power.",
        "pow({a}, {b}, {c})",
        between(a=(2, 60), b=(3, 200), c=(7, 400)),
    ),
    Template(
        "digit_sum",
        ("What is the sum of the digits of {a} times {b}?",),
        "Multiply and add the digits.",
        "sum(int(d) for d in str({a} * {b}))",
        between(a=(12, 900), b=(12, 900)),
    ),
    Template(
        "primes",
        ("How many prime numbers are there from {a} to {b}?",),
        "Count the primes in the range.",
        "len(list(primerange({a}, {b} + 1)))",
        ascending_pair(2, 2000),
        imports="from sympy import primerange",
    ),
)

TEMPLATES: Final = SHOPPING + AMOUNTS + AGES_AND_JOURNEYS + NUMBERS
