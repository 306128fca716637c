"""Answer tool calls as in a rollout, with the package's parser, Strands' tools and their messages."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from strands.types._events import ToolResultEvent
from strands.types.tools import AgentTool, ToolUse

from strands_rollout.code_tool import SubprocessExecutor
from strands_rollout.code_tool.tool import code_tool
from strands_rollout.errors import SandboxError
from strands_rollout.model.answers import failure_message
from strands_rollout.template.messages import tool_result_text
from strands_rollout.tool_parsers import ParseFailure, ToolCall, get_parser

TIMEOUT_S: Final = 10.0
BATCH_TIMEOUT_S: Final = 120.0
_RUN_PROGRAMS: Final = """\
import contextlib, io, json
answers = []
for code in json.loads({codes!r}):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {{"__name__": "__main__"}})
    answers.append(printed.getvalue().rstrip("\\n"))
print(json.dumps(answers))
"""


OpenTools = Callable[[], AbstractAsyncContextManager[Sequence[AgentTool]]]
"""Function that returns a context manager with an agent's tools."""


@asynccontextmanager
async def code_tools() -> AsyncIterator[Sequence[AgentTool]]:
    """Yield only the code tool."""
    async with SubprocessExecutor(timeout_s=TIMEOUT_S) as executor:
        yield [code_tool(executor, timeout_s=TIMEOUT_S)]


def answer_turns(turns: Sequence[str], open_tools: OpenTools) -> list[list[str]]:
    """Return the tools' answers to each assistant turn, in the order of its calls; empty for a turn without calls.

    Args:
        turns: Sampled texts without the end-of-turn token.
        open_tools: Function that returns a context manager with the agent's tools.

    Raises:
        SandboxError: Code could not be run at all.
    """
    return asyncio.run(_answer_all(turns, open_tools))


async def _answer_all(turns: Sequence[str], open_tools: OpenTools) -> list[list[str]]:
    parser = get_parser("hermes")
    async with open_tools() as opened:
        tools = {tool.tool_name: tool for tool in opened}
        return await asyncio.gather(
            *(asyncio.gather(*(_answer(call, tools) for call in parser.parse(turn))) for turn in turns)
        )


async def _answer(call: ToolCall | ParseFailure, tools: Mapping[str, AgentTool]) -> str:
    if isinstance(call, ParseFailure):
        return failure_message(call.reason)
    if call.name not in tools:
        return f"Unknown tool: {call.name}"
    use: ToolUse = {"toolUseId": "call", "name": call.name, "input": call.arguments}
    async for event in tools[call.name].stream(use, {}):
        if isinstance(event, ToolResultEvent):
            if isinstance(event.exception, SandboxError):
                raise event.exception
            return tool_result_text(event.tool_result["content"])
    raise ValueError(f"expected a result of {call}; got none")


def run_programs(codes: Sequence[str]) -> list[str]:
    """Return the output of each program, as the code tool would. One process runs all of them: thousands in seconds.

    Args:
        codes: Programs that print something, succeed, and do not affect each other.

    Raises:
        ValueError: A program failed.
    """
    return asyncio.run(_run_all(codes))


async def _run_all(codes: Sequence[str]) -> list[str]:
    program = _RUN_PROGRAMS.format(codes=json.dumps(list(codes)))
    async with SubprocessExecutor(timeout_s=BATCH_TIMEOUT_S, max_output_chars=16_000_000) as executor:
        result = await executor.run(program)
    if result.exit_code != 0 or result.truncated:
        raise ValueError(f"expected {len(codes)} programs to succeed; got {result.infra_error or result.stderr!r}")
    answers: list[str] = json.loads(result.stdout)
    return answers
