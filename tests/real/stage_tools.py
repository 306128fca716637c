"""Tools in the place of the code tool, which the shipped model calls: one that fails at first, and one that hangs.

Settings name them by their dotted paths.
"""

import asyncio
import contextlib
import io
import threading
from typing import Final

from strands import tool

from strands_rollout.code_tool.tool import CODE_TOOL_NAME, CODE_TOOL_SCHEMA, execute_python_code

DESCRIPTION: Final = str(execute_python_code.tool_spec["description"])
began: Final[list[str]] = []
is_to_hang: Final = threading.Event()


@tool(name=CODE_TOOL_NAME, description=DESCRIPTION, inputSchema=CODE_TOOL_SCHEMA)
async def failing_at_first(code: str) -> str:
    """Works from the second call on; `began` tells which it is."""
    began.append(code)
    if len(began) == 1:
        raise RuntimeError("the interpreter is out of order")
    return printed(code)


@tool(name=CODE_TOOL_NAME, description=DESCRIPTION, inputSchema=CODE_TOOL_SCHEMA)
async def hanging_while_told(code: str) -> str:
    """Hangs where it says so, else works."""
    began.append(code)
    while is_to_hang.is_set():  # noqa: ASYNC110 - tests on any loop set it
        await asyncio.sleep(0.02)
    return printed(code)


def printed(code: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    return out.getvalue().strip()
