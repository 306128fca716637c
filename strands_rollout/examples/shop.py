"""Two tools for an agent that looks up prices and calculates, with several calls per question.

`configs/shop.yaml` names the tools; `shop.jsonl` has a few rows. A policy's text is untrusted: it is never run as code,
and the size of numbers is bounded so that each call is short.
"""

import ast
import difflib
import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from strands import tool

PRICES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "13": 35, "14": 18, "16": 14, "18": 18, "19": 33, "21": 20, "22": 8, "24": 55,
        "29": 58, "30": 38, "32": 56, "33": 22, "34": 3, "35": 21, "38": 39, "39": 48,
        "41": 59, "44": 22, "45": 57, "46": 51, "48": 35, "49": 15, "51": 29, "53": 30,
        "57": 41, "61": 21, "62": 30, "65": 31, "66": 13, "67": 17, "72": 22, "74": 19,
        "77": 55, "79": 54, "81": 5, "83": 8, "84": 5, "94": 32, "97": 43, "98": 20,
    }
)  # fmt: skip
"""Price of one piece in dollars, by item number."""

MAX_CHARS: Final = 200
MAX_BITS: Final = 256
_ALLOWED_TEXT: Final = re.compile(r"[0-9+\-*/%() ]*")
_UNARY_OPERATORS: Final[Mapping[type[ast.unaryop], Callable[[int], int]]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


@tool
def look_up_price(item: str) -> str:
    """Look up what one piece of an item costs, in dollars.

    Args:
        item: The item's number, such as 35.
    """
    number = item.strip()
    if number not in PRICES:
        near = difflib.get_close_matches(number[:MAX_CHARS], PRICES, n=1)
        raise ValueError(
            f"the shop has no item number {item[:MAX_CHARS]!r}. "
            + (f"Did you mean {near[0]}?" if near else f"Its items are {', '.join(PRICES)}.")
        )
    return str(PRICES[number])


@tool
def calculate(expression: str) -> str:
    """Calculate with integers: + - * // % ** and brackets.

    Args:
        expression: What to calculate, such as 3 * 23 + 4.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {MAX_CHARS} are allowed")
    if not _ALLOWED_TEXT.fullmatch(expression):
        raise ValueError(f"{expression!r} has other characters than digits, + - * // % ** and brackets")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as e:
        raise ValueError(f"{expression!r} is not an expression") from e
    return str(_evaluate(tree.body))


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return _check_size(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY_OPERATORS:
            return _UNARY_OPERATORS[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY_OPERATORS:
            return _check_size(_BINARY_OPERATORS[type(op)](_evaluate(left), _evaluate(right)))
    raise ValueError(f"{ast.unparse(node)!r} is not allowed; use integers, + - * // % ** and brackets")


def _floor_divide(left: int, right: int) -> int:
    if right == 0:
        raise ValueError(f"{left} // 0: nothing can be divided by zero")
    return left // right


def _remainder(left: int, right: int) -> int:
    return left - _floor_divide(left, right) * right


def _power(base: int, exponent: int) -> int:
    """Return a power; refuse a result that is too large before it is computed."""
    if exponent < 0 or exponent * base.bit_length() > MAX_BITS:
        raise ValueError(f"{base} ** {exponent} is not an integer or too large; at most {MAX_BITS} bits are allowed")
    return int(base**exponent)


def _check_size(value: int) -> int:
    if value.bit_length() > MAX_BITS:
        raise ValueError(f"a number is too large; at most {MAX_BITS} bits are allowed")
    return value


_BINARY_OPERATORS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: _floor_divide,
    ast.Mod: _remainder,
    ast.Pow: _power,
}
