"""Tools of the episodes: a store, and tools that start agents of their own."""

import asyncio
import sys
from pathlib import Path
from typing import Final

from mcp import StdioServerParameters, stdio_client
from pydantic import BaseModel, Field
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.tools.mcp import MCPClient

from strands_rollout import sub_agent_model

STOCK: Final = {"bolts": 120, "nuts": 75, "screws": 9}
MCP_SERVER: Final = Path(__file__).with_name("mcp_server.py")


class Box(BaseModel):
    """A packed box."""

    item: str = Field(description="What is in it.")
    count: int = Field(description="How many.")


@tool
async def stock(item: str) -> str:
    """Tell how many of an item are in stock.

    Args:
        item: Its name.
    """
    # the first of parallel calls ends last
    await asyncio.sleep(STOCK.get(item, 0) / 2000)
    if item not in STOCK:
        raise LookupError(f"there are no {item}")
    return str(STOCK[item])


@tool
def throw_away(item: str) -> str:
    """Throw all of an item away.

    Args:
        item: Its name.
    """
    return f"the {item} are gone"


@tool
async def ask_expert(question: str) -> str:
    """Ask an expert.

    Args:
        question: What to ask.
    """
    return str(await _sub_agent("You are an expert.", tools=[stock]).invoke_async(question))


@tool
async def pack(item: str) -> str:
    """Have all of an item packed.

    Args:
        item: Its name.
    """
    result = await _sub_agent("You pack boxes.").invoke_async(f"Pack the {item}.", structured_output_model=Box)
    assert isinstance(result.structured_output, Box)
    return result.structured_output.model_dump_json()


def _sub_agent(system_prompt: str, **more: object) -> Agent:
    return Agent(
        model=sub_agent_model(),
        system_prompt=system_prompt,
        callback_handler=None,
        conversation_manager=NullConversationManager(),
        **more,
    )


def mcp_client() -> MCPClient:
    """A client of an MCP server of its own, which runs while an agent uses it."""
    return MCPClient(lambda: stdio_client(StdioServerParameters(command=sys.executable, args=[str(MCP_SERVER)])))


arithmetic: Final = mcp_client()
"""By this name the settings find it; nothing runs before an agent asks for its tools."""
