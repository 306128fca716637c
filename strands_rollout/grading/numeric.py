r"""Compare formulas by computing them: exactly as fractions if possible, else to 160 digits.

Variables get several sets of fixed values. Two formulas are equal if they agree to 75 digits for every set. A set
counts only if both formulas have a value. Every step is bounded in size and the steps are counted, so no formula takes
long or needs a process of its own. Functions with a `Budget` raise `TooComplexError` if no steps are left, or if a part
of a formula is too large or too small to compute. If the time is over, they raise `OutOfTimeError`.
"""

from __future__ import annotations

import functools
import math
import operator
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, TypeAlias

from strands_rollout.grading.expression import Expression

_DIGITS: Final = 160
_AGREEING_DIGITS: Final = 75
_MAX_EXPONENT: Final = 60  # a value that is neither a fraction nor 0 must lie between 10**-60 and 10**60
_MAX_BITS: Final = 60_000  # bits of a fraction's numerator and denominator together
_BITS_PER_STEP: Final = 500
_MAX_STEPS: Final = 8_000
_FLOAT_STEPS: Final = 4
_MAX_FACTORIAL: Final = 1000
_FRACTION_POINTS: Final = range(6)  # indices of the points where variables are fractions
_WHOLE_POINTS: Final = range(6, 10)  # indices of the points where variables are whole numbers
_MIN_POINTS: Final = 2  # minimum number of points where both formulas have a value
_LINE_SAMPLES: Final = (Fraction(0), Fraction(1), Fraction(17, 5), Fraction(-29, 7), Fraction(211, 3))
# denominators of variables' values; even, so that a negative number to the power of such a value is not real
_DENOMINATORS: Final = (26, 34, 38, 46, 58, 62)


class _Local(threading.local):
    """An mpmath context for each thread, because mpmath's functions change the precision of their context."""

    @functools.cached_property
    def mp(self) -> Value:
        from mpmath.ctx_mp import MPContext  # imported on first use: words and plain numbers are compared without it

        context = MPContext()
        context.dps = _DIGITS
        return context

    @functools.cached_property
    def epsilon(self) -> Value:
        return self.mp.mpf(10) ** -_AGREEING_DIGITS


_local = _Local()

Value: TypeAlias = Any
"""A Fraction, or a real or complex number of mpmath, a library without type information."""


class TooComplexError(ValueError):
    """A part of a formula is too large or too small to compute, or the comparison takes too many steps."""


class OutOfTimeError(TooComplexError):
    """The comparison has used up its time."""


class _UndefinedError(ValueError):
    """A formula has no value at this point, as 1/x at 0."""


class Budget:
    """Limits of a comparison: its steps and its time."""

    def __init__(self, cpu_s: float) -> None:
        self._deadline = time.thread_time() + cpu_s
        self._steps = _MAX_STEPS

    def spend(self, steps: int) -> None:
        """Use up some steps.

        Raises:
            TooComplexError: No steps are left.
            OutOfTimeError: The time is over.
        """
        self._steps -= steps
        if self._steps < 0:
            raise TooComplexError("the comparison takes too many steps")
        if time.thread_time() > self._deadline:
            raise OutOfTimeError("the comparison takes too long")


def are_equal(first: Expression, second: Expression, budget: Budget) -> bool:
    """Return whether two formulas have the same value at each tried point where both have a value.

    Formulas with variables need at least two such points. `log` without a base may be natural or decimal, but must
    be the same in both formulas.
    """
    min_points = _MIN_POINTS if first.symbols() | second.symbols() else 1
    for pairs in _interpretations(first, second, budget):
        agreeing = 0
        for pair in pairs:
            if not is_close(*pair):
                break
            agreeing += 1  # noqa: SIM113 - counts the pairs
        else:
            if agreeing >= min_points:
                return True
    return False


def are_proportional(first: Expression, second: Expression, budget: Budget, *, positive_factor: bool = False) -> bool:
    """Return whether two formulas differ only by a constant factor that is not 0 (above 0 if `positive_factor`).

    For example, x - 2 and 2x - 4 are proportional. Formulas without variables, or with different variables, are not
    proportional. If `positive_factor`, neither are formulas with complex values, because complex numbers have no sign.
    """
    if not first.symbols() or first.symbols() != second.symbols():
        return False
    for pairs in _interpretations(first, second, budget):
        (a, b), *others = [*pairs] or [(0, 0)]
        if len(others) < _MIN_POINTS or not a or not b or (positive_factor and not _have_same_sign(a, b)):
            continue
        if all(is_close(_multiply(a, d), _multiply(b, c)) for c, d in others):
            return True
    return False


def value_of(node: Expression, budget: Budget, symbols: Mapping[str, Fraction] | None = None) -> Value | None:
    """Return the real value of a formula for the values `symbols` of its variables; None if it has no real value."""
    try:
        value = _Evaluation(budget, symbols or {}).of(node)
    except _UndefinedError:
        return None
    return value if _is_real(value) else None


def root_of_line(node: Expression, name: str, budget: Budget) -> tuple[Value, bool] | None:
    """If a formula is linear in `name`, its only variable, return its root and whether it rises; else return None."""
    values = [value_of(node, budget, {name: sample}) for sample in _LINE_SAMPLES]
    if node.symbols() != {name} or None in values:
        return None
    at_zero, *others = map(_to_mpmath, values)
    slopes = [(value - at_zero) / _to_mpmath(sample) for value, sample in zip(others, _LINE_SAMPLES[1:], strict=True)]
    if abs(slopes[0]) < _local.epsilon or not all(is_close(slopes[0], slope) for slope in slopes):
        return None
    return -at_zero / slopes[0], bool(slopes[0] > 0)


def is_close(a: Value, b: Value) -> bool:
    """Return whether two values are equal: exactly for fractions, else to 75 digits."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    return bool(abs(_to_mpmath(a) - _to_mpmath(b)) <= max(abs(_to_mpmath(a)), abs(_to_mpmath(b))) * _local.epsilon)


def is_less(a: Value, b: Value) -> bool:
    """Return whether a real value is less than another and not close to it."""
    return not is_close(a, b) and bool(_to_mpmath(a) < _to_mpmath(b))


def _interpretations(first: Expression, second: Expression, budget: Budget) -> Iterator[Iterator[tuple[Value, Value]]]:
    """Yield the pairs of values for each reading of `log` without a base: natural first, then decimal."""
    yield _values_at_points(first, second, budget, decimal_log=False)
    if first.has("log") or second.has("log"):
        yield _values_at_points(first, second, budget, decimal_log=True)


def _values_at_points(
    first: Expression, second: Expression, budget: Budget, *, decimal_log: bool
) -> Iterator[tuple[Value, Value]]:
    """Yield the values of both formulas at each tried point where both have a value.

    The variables are fractions. If there is no such point with fractions, as for (-1)^n, they are whole numbers.
    """
    is_complex = any(node.has("constant", name) for node in (first, second) for name in ("i", "imath"))
    names = sorted(first.symbols() | second.symbols())
    found = False
    for points in (_FRACTION_POINTS, _WHOLE_POINTS) if names else (range(1),):
        for point in points:
            values = {name: _variable_value(point, name) for name in names}
            evaluation = _Evaluation(budget, values, is_complex=is_complex, decimal_log=decimal_log)
            try:
                pair = evaluation.of(first), evaluation.of(second)
            except _UndefinedError:
                continue
            found = True
            yield pair
        if found:
            return


def _variable_value(point: int, name: str) -> Fraction:
    """Return a variable's value at a point: a whole number from 2 to 12 at `_WHOLE_POINTS`, else a fraction.

    The fraction is positive at the first three points, less than 1 at the third, and of either sign at later points.
    """
    rng = random.Random(f"{point} {name}")  # noqa: S311 - the same values each time, and not a secret
    if point in _WHOLE_POINTS:
        return Fraction(rng.randint(2, 12))
    value = Fraction(rng.randrange(3, 26 if point == 2 else 97, 2), rng.choice(_DENOMINATORS))
    return value if point < 3 else value * rng.choice((-1, 1))


_SIMPLE_OPERATIONS: Final[Mapping[str, Callable[..., Value]]] = {
    "negative": operator.neg,
    "abs": abs,
    "degrees": lambda value: _to_mpmath(value) * _local.mp.pi / 180,
}


class _Evaluation:
    """Evaluator of formulas at a point. A method `_<kind>` computes an expression of this kind."""

    def __init__(
        self, budget: Budget, symbols: Mapping[str, Fraction], *, is_complex: bool = False, decimal_log: bool = False
    ) -> None:
        self._budget = budget
        self._symbols = symbols
        self._is_complex = is_complex
        self._decimal_log = decimal_log

    def of(self, node: Expression) -> Value:
        """Return the value of a formula; raise _UndefinedError if it has none at this point."""
        if node.kind == "number":
            return self._checked_value(node.value)
        if node.kind == "symbol":
            return self._symbols[node.name]
        if node.kind == "constant":
            return self._constant(node.name)
        values = [self.of(arg) for arg in node.args]
        if node.kind in _SIMPLE_OPERATIONS:
            return self._checked_value(_SIMPLE_OPERATIONS[node.kind](*values))
        operation = getattr(self, f"_{node.kind}", None)
        if operation is None:
            return self._checked_value(self._function(node.kind, *values), is_exact=False)
        return self._checked_value(operation(*values))

    def _checked_value(self, value: Value, *, is_exact: bool = True) -> Value:
        """Spend steps on a value, check its size, and return it.

        An inexact value that is almost 0 becomes 0. A complex number without an imaginary part becomes real.
        """
        if isinstance(value, Fraction):
            bits = _bits(value)
            self._budget.spend(1 + bits // _BITS_PER_STEP)
            if bits > _MAX_BITS:
                raise TooComplexError("a number with too many digits")
            return value
        self._budget.spend(_FLOAT_STEPS)
        size = abs(value)
        if not _local.mp.isfinite(size):
            raise _UndefinedError
        if not is_exact and size < _local.epsilon:  # sin(pi), which is not quite 0 in floats
            return Fraction(0)
        if size and not _local.mp.mpf(10) ** -_MAX_EXPONENT < size < _local.mp.mpf(10) ** _MAX_EXPONENT:
            raise TooComplexError("a number that is too large or too small")
        return value.real if not value.imag else value

    def _constant(self, name: str) -> Value:
        if name in ("i", "imath"):
            return _local.mp.mpc(0, 1)
        if name == "infty":
            raise _UndefinedError
        return +_local.mp.pi if name == "pi" else +_local.mp.e

    def _sum(self, *values: Value) -> Value:
        total = values[0]
        for value in values[1:]:
            if isinstance(total, Fraction) and isinstance(value, Fraction):
                total = self._checked_value(total + value)
                continue
            total, value = _to_mpmath(total), _to_mpmath(value)
            largest = max(abs(total), abs(value))
            total += value
            # a remainder below the agreeing digits is a rounding error
            total = Fraction(0) if abs(total) <= largest * _local.epsilon else total
        return total

    def _product(self, *values: Value) -> Value:
        product = values[0]
        for value in values[1:]:
            product = self._checked_value(_multiply(product, value))
        return product

    def _quotient(self, numerator: Value, denominator: Value) -> Value:
        if not denominator:
            raise _UndefinedError
        if isinstance(numerator, Fraction) and isinstance(denominator, Fraction):
            return numerator / denominator
        return _to_mpmath(numerator) / _to_mpmath(denominator)

    def _power(self, base: Value, exponent: Value) -> Value:
        if not base:
            if not _is_real(exponent) or exponent <= 0:
                raise _UndefinedError
            return Fraction(0)
        if isinstance(exponent, Fraction) and exponent.denominator == 1:
            bits = _bits(base) if isinstance(base, Fraction) else 1
            if abs(exponent) * bits > _MAX_BITS:
                raise TooComplexError("a power with too many digits")
            return base**exponent.numerator
        if not self._is_complex and _is_real(base) and base < 0:
            if not isinstance(exponent, Fraction) or exponent.denominator % 2 == 0:
                raise _UndefinedError
            root = self._power(-base, exponent)
            return -root if exponent.numerator % 2 else root
        return self._exp(_to_mpmath(exponent) * _local.mp.log(_to_mpmath(base)))

    def _exp(self, value: Value) -> Value:
        if abs(value) > 3 * _MAX_EXPONENT:
            raise TooComplexError("too large an exponent")
        return _local.mp.exp(_to_mpmath(value))

    def _root(self, radicand: Value, index: Value) -> Value:
        if index == 2 and isinstance(radicand, Fraction) and radicand >= 0:
            numerator, denominator = math.isqrt(radicand.numerator), math.isqrt(radicand.denominator)
            if numerator * numerator == radicand.numerator and denominator * denominator == radicand.denominator:
                return Fraction(numerator, denominator)
        is_odd = isinstance(index, Fraction) and index.denominator == 1 and index.numerator % 2 == 1
        if is_odd and _is_real(radicand) and radicand < 0:
            return -self._power(-radicand, 1 / index)
        return self._power(radicand, self._quotient(Fraction(1), index))

    def _floor(self, value: Value) -> Value:
        if isinstance(value, Fraction):
            return Fraction(math.floor(value))
        if not _is_real(value):
            raise _UndefinedError
        nearest = Fraction(int(_local.mp.nint(value)))
        return nearest if is_close(nearest, value) else Fraction(int(_local.mp.floor(value)))

    def _ceil(self, value: Value) -> Value:
        return -self._floor(-value)

    def _factorial(self, value: Value) -> Value:
        if not isinstance(value, Fraction) or value < 0:
            raise _UndefinedError
        if value > _MAX_FACTORIAL:
            raise TooComplexError("too large a factorial")
        if value.denominator == 1:
            return Fraction(math.factorial(value.numerator))
        return _local.mp.gamma(_to_mpmath(value + 1))

    def _binomial(self, total: Value, chosen: Value) -> Value:
        if not isinstance(total, Fraction) or not isinstance(chosen, Fraction) or chosen.denominator != 1 or chosen < 0:
            raise _UndefinedError
        if total.denominator == 1 and total >= chosen:
            chosen = min(chosen, total - chosen)
        if chosen > _MAX_FACTORIAL:
            raise TooComplexError("too large a binomial coefficient")
        result = Fraction(1)
        for step in range(int(chosen)):
            result = self._checked_value(result * (total - step) / (step + 1))
        return result

    def _gcd(self, *values: Value) -> Value:
        return Fraction(math.gcd(*self._whole_numbers(values)))

    def _lcm(self, *values: Value) -> Value:
        return Fraction(math.lcm(*self._whole_numbers(values)))

    def _whole_numbers(self, values: Sequence[Value]) -> list[int]:
        if not all(isinstance(value, Fraction) and value.denominator == 1 for value in values) or not any(values):
            raise _UndefinedError
        if sum(_bits(value) for value in values) > _MAX_BITS:
            raise TooComplexError("too large numbers")
        return [value.numerator for value in values]

    def _log(self, value: Value, base: Value | None = None) -> Value:
        if base is None and not self._decimal_log:
            return self._ln(value)
        return self._quotient(self._ln(value), self._ln(Fraction(10) if base is None else base))

    def _lg(self, value: Value) -> Value:
        return self._log(value, Fraction(10))

    def _ln(self, value: Value) -> Value:
        if not value or not (self._is_complex or (_is_real(value) and value > 0)):
            raise _UndefinedError
        return Fraction(0) if value == 1 else _local.mp.log(_to_mpmath(value))

    def _function(self, name: str, value: Value) -> Value:
        is_inverse = name.startswith("arc")
        if is_inverse and name != "arctan" and not self._is_complex and abs(value) > 1:
            raise _UndefinedError
        method = getattr(_local.mp, f"a{name[3:]}" if is_inverse else name)
        if name in ("sinh", "cosh", "tanh") and abs(value) > 3 * _MAX_EXPONENT:
            raise TooComplexError("too large an argument")
        try:
            return method(_to_mpmath(value))
        except ZeroDivisionError as e:
            raise _UndefinedError from e


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _multiply(first: Value, second: Value) -> Value:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first * second
    if not first or not second:
        return Fraction(0)
    return _to_mpmath(first) * _to_mpmath(second)


def _have_same_sign(a: Value, b: Value) -> bool:
    return _is_real(a) and _is_real(b) and (a > 0) == (b > 0)


def _is_real(value: Value) -> bool:
    return isinstance(value, Fraction) or not value.imag


def _to_mpmath(value: Value) -> Value:
    if not isinstance(value, Fraction):
        return value
    return _local.mp.mpf(value.numerator) / value.denominator
