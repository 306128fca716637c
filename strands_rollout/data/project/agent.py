"""The agent's tools: functions that the policy may call. Replace them with your own.

A tool is a function with type hints and a docstring, which the policy reads. The calculator is called
`execute_python_code(code)` here, because the model shipped with strands-rollout was trained with this tool only.
"""

import ast
import operator

from strands import tool

PRICES = {"cards": 46, "cookies": 84, "lamps": 79}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MAX_CHARS = 100


@tool
def look_up_price(item: str) -> int:
    """Look up what one piece of an item costs, in dollars.

    Args:
        item: The item's name, such as cards.
    """
    if item not in PRICES:
        raise ValueError(f"the shop has no {item!r}; it has {', '.join(PRICES)}")  # the policy reads this
    return PRICES[item]


@tool
def execute_python_code(code: str) -> int:
    """Run Python code and return what it prints.

    Args:
        code: The Python code to run.
    """
    if len(code) > MAX_CHARS:
        raise ValueError(f"got {len(code)} characters; expected at most {MAX_CHARS}")
    return calculate(ast.parse(code.strip().removeprefix("print"), mode="eval").body)


def calculate(node: ast.expr) -> int:
    """Return the value of an expression with integers; never pass text of a policy to `eval` or `exec`."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](calculate(left), calculate(right))
    raise ValueError("expected one line of arithmetic, such as print(3 * 12 + 4)")
