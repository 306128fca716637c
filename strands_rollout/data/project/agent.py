"""The agent's tools: functions that the policy may call. Replace them with your own.

The shipped model knows a single tool, by its name and parameter: `execute_python_code(code)`. Here it is a shop's till.
"""

import ast
import operator

from strands import tool

PRICES = {"cards": 46, "cookies": 84, "lamps": 79}
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


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
    if len(code) > 100:
        raise ValueError(f"got {len(code)} characters; the till takes 100")
    return value(ast.parse(code.strip().removeprefix("print"), mode="eval").body)


def value(node: ast.expr) -> int:
    """Evaluate arithmetic without `eval`, which must never receive text of the policy."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left, sign, right) if type(sign) in SIGNS:
            return SIGNS[type(sign)](value(left), value(right))
    raise ValueError("the till takes one line, such as print(3 * 12 + 4)")
