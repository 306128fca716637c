"""What comes back from running code, exactly as in a rollout: the package's parser, code tool and messages.

Must not know problems, tokens or models.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Final

from strands_rollout.prompts import CODE_TOOL_NAME
from strands_rollout.sandbox import SubprocessExecutor
from strands_rollout.strands_events import failure_message
from strands_rollout.tool_parsers import ParseFailure, ToolCall, get_parser
from strands_rollout.tools import code_tool

TIMEOUT_S: Final = 10.0
BATCH_TIMEOUT_S: Final = 120.0
_RUN_ALL: Final = """\
import contextlib, io, json
answers = []
for code in json.loads({codes!r}):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {{"__name__": "__main__"}})
    answers.append(printed.getvalue().rstrip("\\n"))
print(json.dumps(answers))
"""


def answer_turns(turns: Sequence[str]) -> list[list[str]]:
    """The tool's answers to each assistant turn, in the order of its calls; empty where it calls nothing.

    Args:
        turns: Sampled text without the end-of-turn token.

    Raises:
        SandboxError: Code could not be run at all.
    """
    return asyncio.run(_answer_all(turns))


async def _answer_all(turns: Sequence[str]) -> list[list[str]]:
    parser = get_parser("hermes")
    async with SubprocessExecutor(timeout_s=TIMEOUT_S) as executor:
        run = code_tool(executor, timeout_s=TIMEOUT_S)

        async def answer(call: ToolCall | ParseFailure) -> str:
            if isinstance(call, ParseFailure):
                return failure_message(call)
            if call.name != CODE_TOOL_NAME:
                return f"Unknown tool: {call.name}"
            code = call.arguments.get("code")
            if not isinstance(code, str):
                return "Error: Validation failed for input parameters"
            return await run(code)

        return await asyncio.gather(*(asyncio.gather(*map(answer, parser.parse(turn))) for turn in turns))


def run_programs(codes: Sequence[str]) -> list[str]:
    """What each program prints: as the tool would answer, but in one process, so that thousands take seconds.

    Args:
        codes: Programs that print something, are known to succeed and do not harm each other.

    Raises:
        ValueError: One of them failed.
    """
    return asyncio.run(_run_all(codes))


async def _run_all(codes: Sequence[str]) -> list[str]:
    program = _RUN_ALL.format(codes=json.dumps(list(codes)))
    async with SubprocessExecutor(timeout_s=BATCH_TIMEOUT_S, max_output_chars=16_000_000) as executor:
        result = await executor.run(program)
    if result.exit_code != 0 or result.truncated:
        raise ValueError(f"expected {len(codes)} programs to succeed; got {result.infra_error or result.stderr!r}")
    answers: list[str] = json.loads(result.stdout)
    return answers
