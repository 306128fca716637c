r"""Decide whether two answers are equal.

A rounded value is not equal: 0.333 is not 1/3. The order counts in tuples and intervals, but not in sets. Notation that
is not understood equals only itself. Intervals, and inequalities that are linear in one variable, are compared as sets
of real numbers.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf
from typing import Final

from strands_rollout.grading import numeric, values
from strands_rollout.grading.expression import GREEK, Expression, Notation, canonical_key, notation_of
from strands_rollout.grading.numeric import Budget, OutOfTimeError, TooComplexError, Value
from strands_rollout.grading.values import Combination, Formula, Key, Matrix, Relation, ValueGroup, exact_number, key_of

_INTERVALS: Final = ("()", "[]", "(]", "[)")
_INFINITIES: Final = {r"\infty": inf, r"+\infty": inf, r"-\infty": -inf}
_MIRRORED_SIGNS: Final = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "=": "=", r"\ne": r"\ne"}
MAX_ANSWER_CHARS: Final = 600
"""Maximum characters of a prediction and of a label; a longer text equals only the same text."""
CPU_LIMIT_S: Final = 5.0
_EQUALS: Final = re.compile(r"=|\\in(?![A-Za-z])")
_OTHER_SIGN: Final = re.compile(r"[<>,;]|\\(?:le|ge|ne|approx|equiv|sim|cup|pm)(?![A-Za-z])|\s(?:or|and)\s")
# a name before "=" or "\in": x, x_1, f(x), (a, b), AB, "The area"
_NAME: Final = re.compile(
    r"(?!(?:\\pi|[xyz]{2,3})(?![A-Za-z]))"  # in xy = 1, unlike AB = 1, xy is a product
    r"(?:\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?'*(?:\([A-Za-z0-9, ]+\))?|\([A-Za-z](?:\s*,\s*[A-Za-z])+\)"
    r"|[A-Za-z]{2,}(?: [A-Za-z]+)*)"
)
_COMMAND: Final = re.compile(r"\\[A-Za-z]+")
_QUANTITIES: Final = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|angle|sum|prod|int|lim|gcd|lcm|max|min|det)(?![A-Za-z])")
_CHOICE: Final = re.compile(r"\(?\s*(?P<letter>[A-J])\s*[).:]\s*(?P<rest>.*)")
# "(C) 12"; not "(A) and (B)" or "(A) only", nor a formula that begins with (A), such as "(A) + 1"
_LABELED_CHOICE: Final = re.compile(
    r"\(?\s*(?P<letter>[A-F])\s*\)\s+(?P<rest>(?!(?:and|or|only)\b|[-+=^*/(\[]|\\cdot)\S.*)"
)
_LETTER: Final = re.compile(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])")
# one to three letters other than e, i, o and u, such as "xy", are a product, not a word
_PRODUCT: Final = re.compile(r"[A-DF-HJ-NP-TV-Za-df-hj-np-tv-z]{1,3}")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        equal: True if the answer counts as equal to the label.
        method: The rule that decided: "exact" (the same text or notation), "number" (both are numbers), "words"
            (both are words, dates or numbers in words; or both are times of day), "unit" (different units),
            "algebra" (the values of formulas, sets or relations), "algebra_refused" (a value too large or too small
            to compute, or too many steps), "algebra_timeout", "empty" (no answer), "no_label", "too_long".
    """

    equal: bool
    method: str


def compare(prediction: str, label: str, cpu_s: float = CPU_LIMIT_S) -> Comparison:
    """Compare an extracted answer with a label, both as written.

    The label's form decides what the answer may omit, such as a unit or "x =". The answer is wrong if the comparison
    takes more than `cpu_s` CPU seconds.
    """
    if not label.strip():
        return Comparison(equal=False, method="no_label")
    if not prediction.strip():
        return Comparison(equal=False, method="empty")
    if prediction.strip() == label.strip():
        return Comparison(equal=True, method="exact")
    if max(len(prediction), len(label)) > MAX_ANSWER_CHARS:
        return Comparison(equal=False, method="too_long")
    try:
        return _compare(notation_of(prediction), notation_of(label), Budget(cpu_s))
    except OutOfTimeError:
        return Comparison(equal=False, method="algebra_timeout")
    except TooComplexError:
        return Comparison(equal=False, method="algebra_refused")


def _compare(prediction: Notation, label: Notation, budget: Budget) -> Comparison:
    if prediction.unit and label.unit and prediction.unit != label.unit:
        return Comparison(equal=False, method="unit")
    label = _reduce_choice_in_label(label, prediction)
    prediction = _reduce_choice_in_prediction(prediction, label)
    number_text, number_in_words = values.split_repetition_in_words(prediction.text)
    if number_in_words is not None and exact_number(number_text) == number_in_words:
        prediction = replace(prediction, text=number_text)
    prediction, label = _drop_bases(prediction, label)
    first, second = exact_number(prediction.text), exact_number(label.text)
    if first is not None and second is not None:
        return Comparison(_are_numbers_equal(first, second, (prediction.unit, label.unit)), method="number")
    if canonical_key(prediction.text) == canonical_key(label.text):
        return Comparison(equal=True, method="exact")
    words = _words_or_number(prediction), _words_or_number(label)
    if None not in words:
        return Comparison(words[0] == words[1], method="words")
    is_same_time = values.are_same_time(*(f"{side.text} {side.unit}".strip() for side in (prediction, label)))
    if is_same_time is not None:
        return Comparison(is_same_time, method="words")
    return Comparison(_are_answers_equal(prediction, label, budget), method="algebra")


def _reduce_choice_in_prediction(prediction: Notation, label: Notation) -> Notation:
    """Reduce a prediction "(B) 12" to the letter if the label is a letter, else to the rest; keep lists of choices."""
    choice = _CHOICE.fullmatch(prediction.text)
    if choice is None or _LETTER.search(choice["rest"]) or _OTHER_SIGN.search(choice["rest"]):
        return prediction
    is_letter = _LETTER.fullmatch(label.text.strip("()"))
    return replace(prediction, text=choice["letter"] if is_letter else choice["rest"] or prediction.text)


def _reduce_choice_in_label(label: Notation, prediction: Notation) -> Notation:
    """Reduce a label "(C) 12" to the letter if the prediction is a letter, else to the rest.

    A label stays unchanged if the prediction is a choice with another letter, such as "(B) 12".
    """
    choice, predicted = _LABELED_CHOICE.fullmatch(label.text), _CHOICE.fullmatch(prediction.text)
    if choice is None or _LETTER.search(choice["rest"]) or _OTHER_SIGN.search(choice["rest"]):
        return label
    if predicted and predicted["rest"] and predicted["letter"] != choice["letter"]:
        return label
    is_letter = _LETTER.fullmatch(prediction.text.strip("()"))
    return replace(label, text=choice["letter"] if is_letter else choice["rest"])


def _drop_bases(prediction: Notation, label: Notation) -> tuple[Notation, Notation]:
    """Drop the bases, as in `101_2`, if the label has a base and the prediction has the same base or none.

    If only the prediction has a base and the label is a number, replace the prediction with its decimal value.
    """
    predicted, expected = values.numeral_in_base(prediction.text), values.numeral_in_base(label.text)
    has_same_base = predicted is None or expected is None or predicted[1] == expected[1]
    if expected and has_same_base and (predicted or "_" not in prediction.text):
        label = replace(label, text=expected[0])
        return replace(prediction, text=predicted[0]) if predicted else prediction, label
    if predicted and not expected and exact_number(label.text) is not None:
        with contextlib.suppress(ValueError):  # a digit that the base lacks
            return replace(prediction, text=str(int(*predicted))), label
    return prediction, label


def _are_numbers_equal(first: Fraction, second: Fraction, units: tuple[str, str]) -> bool:
    """Return whether two numbers are equal; if only one has a percent sign, 50% is both 50 and 0.5."""
    if first == second or "%" not in units or units[0] == units[1]:
        return first == second
    return first == 100 * second if units[0] == "%" else 100 * first == second


def _words_or_number(notation: Notation) -> Hashable | None:
    """Return a key of a text that is words or a number; None for a text that may be a formula, such as "xy"."""
    number = exact_number(notation.text)
    if number is not None or (not notation.is_text and _PRODUCT.fullmatch(notation.text)):
        return number
    return values.words_key(notation.text)


def _are_answers_equal(prediction: Notation, label: Notation, budget: Budget) -> bool:
    if are_keys_equal(key_of(prediction.text), key_of(label.text), budget):
        return True
    names, label_sides = _split_names(label.text)
    # a label that is still an equation without its names, such as 2x = 42, equals only an equation, and equations were
    # compared above
    if len(label_sides) != 1:
        return False
    sides = _sides_to_match(prediction.text, names)
    units = prediction.unit, label.unit
    return bool(sides) and all(_are_values_equal(key_of(side), key_of(label_sides[0]), units, budget) for side in sides)


def _are_values_equal(first: Key, second: Key, units: tuple[str, str], budget: Budget) -> bool:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return _are_numbers_equal(first, second, units)
    if are_keys_equal(first, second, budget):
        return True
    formulas = node_of(first), node_of(second)
    if units[0] == units[1] or formulas[0] is None or formulas[1] is None:
        return False
    return numeric.are_equal(_in_base_units(formulas[0], units[0]), _in_base_units(formulas[1], units[1]), budget)


def _in_base_units(node: Expression, unit: str) -> Expression:
    """Return the value in the unit that formulas use: 50% as 1/2, 180 degrees as pi."""
    if unit == "%":
        return Expression("quotient", (node, Expression("number", value=Fraction(100))))
    return Expression("degrees", (node,)) if unit == "°" else node


def _split_names(text: str) -> tuple[list[str], list[str]]:
    r"""Return the names at the start of an equation, as in "x =" or "x \in", and its other sides."""
    sides = values.split_at(text.removeprefix("="), _EQUALS)[0]
    if not all(sides):
        return [], [text]
    if len(sides) == 2 and _NAME.fullmatch(sides[1]) and not _NAME.fullmatch(sides[0]) and r"\in" not in text:  # 5 = x
        sides.reverse()
    count = 0
    while count < len(sides) - 1 and _NAME.fullmatch(sides[count]):
        count += 1
    return [canonical_key(side) for side in sides[:count]], sides[count:]


def _sides_to_match(prediction: str, label_names: list[str]) -> list[str]:
    r"""Return all sides of a prediction that must equal the label: in x = 6 \cdot 7 = 42, both sides after x.

    Return an empty list if the prediction names something else than the label, repeats itself, as in 42 = 42, or has
    other signs in addition to =. If the label has no name, two kinds of left sides count as names: a function of a
    variable (\sin x = 1/2), and several variables (m + n = 42). Any other left side does not: 2x = 42 means that x is
    21.
    """
    names, sides = _split_names(prediction)
    if names and label_names and names[0] != label_names[0]:
        return []
    if len(sides) > 1 and values.split_at(prediction, _OTHER_SIGN)[1]:
        return []
    if len(sides) > 1 and not names and not label_names and _is_quantity(sides[0]):
        sides = sides[1:]
    return sides if len({canonical_key(side) for side in sides}) == len(sides) else []


def _is_quantity(side: str) -> bool:
    """Return whether a left side names the requested quantity: several variables, or a function of a variable."""
    letters = {letter for letter in _COMMAND.sub(" ", side) if letter.isalpha()}
    letters |= {name for name in _COMMAND.findall(side) if name[1:] in GREEK}
    return len(letters) > 1 or (bool(letters) and _QUANTITIES.search(side) is not None)


def are_keys_equal(first: Key, second: Key, budget: Budget) -> bool:
    """Return whether two keys are the same value; the order of the keys does not matter."""
    if first == second:
        return True
    if isinstance(first, Relation | Combination) or isinstance(second, Relation | Combination):
        return _are_conditions_equal(first, second, budget)
    if isinstance(first, ValueGroup) and isinstance(second, ValueGroup):
        return _are_groups_equal(first, second, budget)
    if isinstance(first, Matrix) or isinstance(second, Matrix):
        return _are_matrices_equal(first, second, budget)
    if isinstance(first, ValueGroup) or isinstance(second, ValueGroup):
        return _are_regions_equal(first, second, budget) if _is_reals(first) or _is_reals(second) else False
    ends = _INFINITIES.get(_text(first)), _INFINITIES.get(_text(second))
    if ends != (None, None):
        return ends[0] == ends[1]
    nodes = node_of(first), node_of(second)
    return nodes[0] is not None and nodes[1] is not None and numeric.are_equal(nodes[0], nodes[1], budget)


def node_of(key: Key) -> Expression | None:
    """Return the tree of a number or a formula; None for any other key, or if the formula was not parsed."""
    if isinstance(key, Fraction):
        return Expression("number", value=key)
    return key.node if isinstance(key, Formula) else None


def _text(key: Key) -> str:
    return key.text if isinstance(key, Formula) else ""


def _is_reals(key: Key) -> bool:
    return _text(key) == r"\mathbb{R}"


def _are_groups_equal(first: ValueGroup, second: ValueGroup, budget: Budget) -> bool:
    named = values.named_values(first), values.named_values(second)
    if (named[0] is None) != (named[1] is None):  # one group has names, and the other omits them
        first, second = named[0] or first, named[1] or second
    if not (first.is_set and second.is_set):
        brackets = {first.brackets, second.brackets}
        # a bare list equals a tuple, but a bare pair does not equal an interval
        is_interval = len(first.items) == 2 and brackets != {"", "()"}
        if len(brackets) == 2 and ("" not in brackets or is_interval):
            return False
        return _are_sequences_equal(first.items, second.items, budget)
    may_repeat = first.brackets == second.brackets == r"\{\}"  # sets; a bare list is a multiset
    if len(first.items) != len(second.items) and not may_repeat:
        return False
    if not may_repeat:
        return _covers(first.items, second.items, budget, once=True)
    return all(
        _covers(*pair, budget, once=False) for pair in ((first.items, second.items), (second.items, first.items))
    )


def _are_sequences_equal(first: Sequence[Key], second: Sequence[Key], budget: Budget) -> bool:
    return len(first) == len(second) and all(are_keys_equal(*pair, budget) for pair in zip(first, second, strict=True))


def _covers(first: Sequence[Key], second: Sequence[Key], budget: Budget, *, once: bool) -> bool:
    """Return whether each item of `second` equals an item of `first`; if `once`, a different item each time."""
    candidates = list(first)
    for item in second:
        found = next(
            (position for position, other in enumerate(candidates) if are_keys_equal(other, item, budget)), None
        )
        if found is None:
            return False
        if once:
            del candidates[found]
    return True


def _are_matrices_equal(first: Key, second: Key, budget: Budget) -> bool:
    """Return whether two matrices are equal; a column or row also equals the tuple of its entries."""
    if isinstance(first, Matrix) and isinstance(second, Matrix):
        return len(first.rows) == len(second.rows) and all(
            _are_sequences_equal(*rows, budget) for rows in zip(first.rows, second.rows, strict=True)
        )
    matrix, other = (first, second) if isinstance(first, Matrix) else (second, first)
    if not isinstance(matrix, Matrix) or not isinstance(other, ValueGroup) or other.brackets != "()":
        return False
    columns = {len(row) for row in matrix.rows}
    entries = [row[0] for row in matrix.rows] if columns == {1} else matrix.rows[0] if len(matrix.rows) == 1 else ()
    return _are_sequences_equal(entries, other.items, budget)


def _are_conditions_equal(first: Key, second: Key, budget: Budget) -> bool:
    """Return whether it can be shown that two conditions, such as equations, hold for the same values."""
    names = _variables(first), _variables(second)
    if names[0] and names[1] and names[0] != names[1]:
        return False
    if _are_regions_equal(first, second, budget):
        return True
    if isinstance(first, Combination) and isinstance(second, Combination) and first.kind == second.kind:
        if first.kind == "without":
            return _are_sequences_equal(first.parts, second.parts, budget)
        return len(first.parts) == len(second.parts) and _covers(first.parts, second.parts, budget, once=True)
    if not isinstance(first, Relation) or not isinstance(second, Relation):
        return False
    mirrored = Relation(second.parts[::-1], tuple(_MIRRORED_SIGNS[sign] for sign in reversed(second.signs)))
    return any(
        first.signs == other.signs
        and (
            _are_sequences_equal(first.parts, other.parts, budget)
            or _are_differences_proportional(first, other, budget)
        )
        for other in (second, mirrored)
    )


def _are_differences_proportional(first: Relation, second: Relation, budget: Budget) -> bool:
    """Return whether the left sides minus the right sides are proportional, as for y - 2x = 1 and y = 2x + 1.

    Equations are also compared after multiplying them by their divisors, as for xy = 1 and y = 1/x.
    """
    differences = _difference(first), _difference(second)
    if differences[0] is None or differences[1] is None:
        return False
    needs_positive_factor = first.signs[0] not in ("=", r"\ne")  # a negative factor reverses an inequality
    if numeric.are_proportional(differences[0], differences[1], budget, positive_factor=needs_positive_factor):
        return True
    divisors = [sorted(_divisors(difference), key=repr) for difference in (differences[0], differences[1])]
    if needs_positive_factor or not any(divisors):
        return False
    products = [
        Expression("product", (difference, *factors))
        for difference, factors in zip(differences, divisors, strict=True)
        if difference is not None
    ]
    return numeric.are_proportional(products[0], products[1], budget)


def _difference(relation: Relation) -> Expression | None:
    left, right = (node_of(part) for part in relation.parts[:2])
    if len(relation.parts) != 2 or left is None or right is None:
        return None
    return Expression("sum", (left, Expression("negative", (right,))))


def _divisors(node: Expression) -> set[Expression]:
    """Return the divisors with variables in a formula's terms: y = 1/x, multiplied by the divisor x, is xy = 1."""
    if node.kind not in ("sum", "product", "negative", "quotient"):
        return set()
    divisor = node.args[-1] if node.kind == "quotient" else None
    divisors = {divisor} if divisor is not None and divisor.symbols() else set()
    return divisors.union(*(_divisors(arg) for arg in node.args if arg is not divisor))


def _variables(key: Key) -> set[str]:
    if isinstance(key, Relation | Combination):
        return set().union(*map(_variables, key.parts))
    node = node_of(key)
    return node.symbols() if node is not None else set()


def _are_regions_equal(first: Key, second: Key, budget: Budget) -> bool:
    pieces, others = _region(first, budget), _region(second, budget)
    if pieces is None or others is None or len(pieces) != len(others):
        return False
    pairs = zip(pieces, others, strict=True)
    return all(_compare_cuts(piece[end], other[end]) == 0 for piece, other in pairs for end in (0, 1))


def _region(key: Key, budget: Budget) -> list[Piece] | None:
    """Return the real numbers in an interval, in a set, or allowed by a condition on one variable; None if unknown.

    The pieces are disjoint and in ascending order.
    """
    if _is_reals(key):
        return [REALS]
    if isinstance(key, ValueGroup):
        return _interval(key, budget)
    if isinstance(key, Relation):
        return _solution_set(key, budget)
    if not isinstance(key, Combination):
        return None
    if key.kind == "without":
        whole_key, excluded_key = key.parts
        if not isinstance(excluded_key, ValueGroup | Relation | Combination):
            excluded_key = ValueGroup(r"\{\}", (excluded_key,))
        whole, excluded = _region(whole_key, budget), _region(excluded_key, budget)
        return None if whole is None or excluded is None else _intersection([whole, _complement(excluded)])
    regions = [_region(part, budget) for part in key.parts]
    known = [region for region in regions if region is not None]
    if len(known) != len(regions):
        return None
    return _union([piece for region in known for piece in region]) if key.kind == "or" else _intersection(known)


def _interval(group: ValueGroup, budget: Budget) -> list[Piece] | None:
    """Return the pieces of an interval whose ends ascend, or of a set of numbers; None for any other group."""
    if group.brackets == r"\{\}":
        points = [_end_point(item, budget) for item in group.items]
        return None if None in points else _union([((point, False), (point, True)) for point in points])
    if group.brackets not in _INTERVALS or len(group.items) != 2:
        return None
    low, high = (_end_point(item, budget) for item in group.items)
    if low is None or high is None or _compare_cuts((low, False), (high, False)) >= 0:
        return None
    return [((low, group.brackets[0] == "("), (high, group.brackets[1] == "]"))]


def _end_point(key: Key, budget: Budget) -> Value | None:
    if _text(key) in _INFINITIES:
        return _INFINITIES[_text(key)]
    node = node_of(key)
    return None if node is None or node.symbols() else numeric.value_of(node, budget)


def _solution_set(relation: Relation, budget: Budget) -> list[Piece] | None:
    """Return the solutions of an inequality or chain of inequalities in one variable."""
    names = _variables(relation)
    if len(names) != 1 or "=" in relation.signs:
        return None
    regions = []
    for left, sign, right in zip(relation.parts, relation.signs, relation.parts[1:], strict=False):
        region = _solve_inequality(left, sign, right, next(iter(names)), budget)
        if region is None:
            return None
        regions.append(region)
    return _intersection(regions)


def _solve_inequality(left: Key, sign: str, right: Key, name: str, budget: Budget) -> list[Piece] | None:
    """Return the solutions of `left sign right` in the variable `name`.

    Return None if the inequality is not linear, or has an infinity and does not hold for all real numbers.
    """
    if _text(left) in _INFINITIES or _text(right) in _INFINITIES:
        return [REALS] if _holds_for_all_reals(left, sign, right) else None
    difference = _difference(Relation((left, right), (sign,)))
    line = None if difference is None else numeric.root_of_line(difference, name, budget)
    if line is None:
        return None
    root, rises = line
    if sign == r"\ne":
        return [(REALS[0], (root, False)), ((root, True), REALS[1])]
    is_closed = sign in (r"\le", r"\ge")
    is_above_root = (sign in (">", r"\ge")) == rises
    return [((root, not is_closed), REALS[1]) if is_above_root else (REALS[0], (root, is_closed))]


def _holds_for_all_reals(left: Key, sign: str, right: Key) -> bool:
    r"""Return whether an inequality with an infinity holds for all real numbers: -\infty < x < \infty."""
    is_ascending = _INFINITIES.get(_text(left)) == -inf or _INFINITIES.get(_text(right)) == inf
    return is_ascending if sign in ("<", r"\le") else not is_ascending and sign in (">", r"\ge")


Cut = tuple[Value, bool]
"""A cut of the number line at a number: just before it (False) or just after it (True). The number is a value of
`numeric`, or an infinite float."""
Piece = tuple[Cut, Cut]
"""The numbers between two cuts: [1, 2) goes from just before 1 to just before 2."""
REALS: Final[Piece] = ((-inf, True), (inf, False))


def _union(pieces: list[Piece]) -> list[Piece]:
    union: list[Piece] = []
    by_cut = functools.cmp_to_key(_compare_cuts)
    for piece in sorted(pieces, key=lambda piece: by_cut(piece[0])):
        if not union or _compare_cuts(union[-1][1], piece[0]) < 0:
            union.append(piece)
        elif _compare_cuts(union[-1][1], piece[1]) < 0:
            union[-1] = union[-1][0], piece[1]
    return union


def _complement(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the complement of disjoint pieces; the given and the returned pieces are in ascending order."""
    cuts = [REALS[0], *(cut for piece in pieces for cut in piece), REALS[1]]
    gaps = zip(cuts[::2], cuts[1::2], strict=True)
    return [(low, high) for low, high in gaps if _compare_cuts(low, high) < 0]


def _intersection(regions: Sequence[list[Piece]]) -> list[Piece]:
    result = [REALS]
    for region in regions:
        pairs = [(a, b) for a in result for b in region]
        lows = [b[0] if _compare_cuts(a[0], b[0]) < 0 else a[0] for a, b in pairs]
        highs = [b[1] if _compare_cuts(b[1], a[1]) < 0 else a[1] for a, b in pairs]
        result = [(low, high) for low, high in zip(lows, highs, strict=True) if _compare_cuts(low, high) < 0]
    return _union(result)


def _compare_cuts(first: Cut, second: Cut) -> int:
    a, b = first[0], second[0]
    if isinstance(a, float) or isinstance(b, float):  # a float is infinite: finite numbers are fractions or mpmath's
        is_less, is_same = a == -inf != b or b == inf != a, isinstance(a, float) and isinstance(b, float) and a == b
    else:
        is_less, is_same = numeric.is_less(a, b), numeric.is_close(a, b)
    if is_same:
        return first[1] - second[1]
    return -1 if is_less else 1
