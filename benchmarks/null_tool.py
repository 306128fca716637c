"""A code tool that runs nothing: it knows each script's code and what that prints.

Name, description and schema are the code tool's own, so that prompts are the same. A file of its own because the
rollout loads it by its dotted path, and because a variant without an agent does not load Strands.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from strands import tool

from benchmarks.script import Script
from strands_rollout.code_tool.tool import CODE_TOOL_DESCRIPTION, CODE_TOOL_NAME, CODE_TOOL_SCHEMA

NULL_TOOL_PATH: Final = f"{__name__}.answer_from_script"
_RESULTS: Final[dict[str, str]] = {}


def learn_results(scripts: Iterable[Script]) -> None:
    _RESULTS.update((turn.code, turn.result) for script in scripts for turn in script.turns if turn.code)


@tool(name=CODE_TOOL_NAME, description=CODE_TOOL_DESCRIPTION, inputSchema={"json": CODE_TOOL_SCHEMA})
async def answer_from_script(code: str) -> str:
    """What the script says that this code prints; an unknown code is an error."""
    return _RESULTS[code]
