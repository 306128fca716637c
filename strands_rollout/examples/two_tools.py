"""Two tools of a warehouse; `configs/two_tools.yaml` names them by their dotted paths.

A tool is a function with type hints and a docstring, which the policy reads. If it raises an exception, the policy gets
an error result with the message.
"""

from types import MappingProxyType
from typing import Final

from strands import tool

STOCK: Final = MappingProxyType({"bolt": 120, "nut": 75, "screw": 0})


@tool
async def count_stock(item: str) -> int:
    """Count how many pieces of an item are in stock.

    Args:
        item: The item's name, such as bolt.
    """
    if item not in STOCK:
        raise ValueError(f"the warehouse has no {item!r}; it has {', '.join(STOCK)}")
    return STOCK[item]


@tool
async def order(item: str, pieces: int) -> str:
    """Order pieces of an item.

    Args:
        item: The item's name.
        pieces: How many, at least 1.
    """
    if item not in STOCK or pieces < 1:
        raise ValueError(f"{pieces} {item!r} can't be ordered; expected at least 1 of {', '.join(STOCK)}")
    return f"Ordered {pieces} of {item}."
