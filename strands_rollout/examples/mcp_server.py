"""An MCP server on standard input and output: `python -m strands_rollout.examples.mcp_server`.

`configs/mcp.yaml` names the command of this server, so that the agent has the server's tools. Any MCP server, in any
language, can be named in the same way.
"""

from typing import Any

from pydantic import Field


def make_server() -> Any:  # noqa: ANN401 - the class depends on mcp's version
    """Return a server with one tool."""
    try:
        from mcp.server import MCPServer as Server  # mcp 2
    except ImportError:
        from mcp.server.fastmcp import FastMCP as Server  # type: ignore[attr-defined, no-redef, unused-ignore] # mcp 1
    server = Server("units", log_level="WARNING")

    @server.tool()  # type: ignore[untyped-decorator, unused-ignore]
    def to_kilometres(miles: float = Field(description="A distance in miles.")) -> float:
        """Convert miles to kilometres."""
        return miles * 1.609344

    return server


if __name__ == "__main__":
    make_server().run()
