"""A code tool that runs nothing: it knows each script's code and what that prints.

Name, description and schema are the code tool's own, so that prompts are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from strands import tool

from strands_rollout.bench.answer_script import AnswerScript
from strands_rollout.prompts import CODE_TOOL_DESCRIPTION, CODE_TOOL_NAME, CODE_TOOL_SCHEMA

NULL_TOOL_PATH: Final = f"{__name__}.answer_from_script"
_RESULTS: Final[dict[str, str]] = {}


def learn_results(scripts: Iterable[AnswerScript]) -> None:
    """Let the tool know the results of these scripts' calls."""
    _RESULTS.update((turn.code, turn.result) for script in scripts for turn in script.turns if turn.code)


@tool(name=CODE_TOOL_NAME, description=CODE_TOOL_DESCRIPTION, inputSchema={"json": CODE_TOOL_SCHEMA})
async def answer_from_script(code: str) -> str:
    """What the script says that this code prints; an unknown code is an error."""
    return _RESULTS[code]
