"""Tools with the name of the code tool, so that the shipped model calls them: one fails first, one hangs on demand.

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
    """Fail in the first call, work in later ones; `began` counts the calls."""
    began.append(code)
    if len(began) == 1:
        raise RuntimeError("the interpreter is out of order")
    return printed(code)


@tool(name=CODE_TOOL_NAME, description=DESCRIPTION, inputSchema=CODE_TOOL_SCHEMA)
async def hanging_on_demand(code: str) -> str:
    """Hang while `is_to_hang` is set, then work."""
    began.append(code)
    while is_to_hang.is_set():  # noqa: ASYNC110 - tests on any loop set it
        await asyncio.sleep(0.02)
    return printed(code)


def printed(code: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    return out.getvalue().strip()
