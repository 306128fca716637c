"""More kinds of word problem: ages, journeys, shapes, sequences and whole numbers. Data only, as `templates.py`."""

from __future__ import annotations

from typing import Final

from experiments.shipped_model.templates import AMOUNTS, SHOPPING, Template, between, exact, falling, rising

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
        exact("c", lambda n: n["b"] * n["r"], b=(4, 99), r=(3, 60)),
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
        lambda rng: {**falling(3, 90)(rng), **between(c=(3, 60), d=(10, 900))(rng)},
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
        falling(5, 900),
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
        rising(2, 400),
    ),
    Template(
        "sum_of_squares",
        ("What is the sum of the squares of the integers from {a} to {b}?",),
        "Sum the squares over the range.",
        "sum(n * n for n in range({a}, {b} + 1))",
        rising(1, 90),
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
        rising(10, 3000, c=(3, 40)),
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
        falling(4, 120),
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
        rising(2, 2000),
        imports="from sympy import primerange",
    ),
)

TEMPLATES: Final = SHOPPING + AMOUNTS + AGES_AND_JOURNEYS + NUMBERS
