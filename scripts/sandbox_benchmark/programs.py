"""The programs that are run: short, as an agent that solves math problems writes them, with what they must print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Program:
    """A program and its only right output.

    Attributes:
        code: Its text.
        expected: What it prints, without the white space around it.
    """

    code: str
    expected: str


_NUMPY: Final = """\
import numpy as np

A = np.array([[2.0, 1.0, -1.0], [-3.0, -1.0, 2.0], [-2.0, 1.0, 2.0]])
b = np.array([8.0, -11.0, -3.0])
x = np.linalg.solve(A, b)
print([round(float(value), 6) for value in x])
"""
_SYMPY: Final = """\
from sympy import Eq, solve, symbols

a, b = symbols("a b", real=True)
solutions = solve([Eq(a**2 + b**2, 25), Eq(a + b, 7)], [a, b])
print(solutions)
"""
_SLEEPY: Final = """\
import os, time
from sympy import solve, symbols

x = symbols("x")
assert solve(x**2 - 5 * x + 6, x) == [2, 3]
time.sleep({sleep_s})
print(os.getpid())
"""

PROGRAMS: Final = {
    "trivial": Program("print(2 + 3)", "5"),
    "numpy": Program(_NUMPY, "[2.0, 3.0, -1.0]"),
    "sympy": Program(_SYMPY, "[(3, 4), (4, 3)]"),
}


def sleepy_program(sleep_s: float) -> str:
    """A program that solves something with sympy, sleeps, and then prints the number of its process."""
    return _SLEEPY.format(sleep_s=sleep_s)
