"""An MCP server with tools that report its process, environment and arguments, raise, and end the server."""

import os
import sys

try:
    from mcp.server import MCPServer as Server  # mcp 2
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server  # mcp 1

server = Server("facts", log_level="CRITICAL")


@server.tool()
def facts() -> str:
    """Tell the process, a variable and the arguments."""
    return f"{os.getpid()} {os.environ.get('FACT')} {' '.join(sys.argv[1:])}"


@server.tool()
def fail(reason: str) -> str:
    """Raise."""
    raise ValueError(reason)


@server.tool()
def end() -> str:
    """End this server."""
    os._exit(3)


if "--named" in sys.argv:  # names that MCP allows and Strands refuses

    def named(name: str) -> None:
        server.add_tool(lambda: f"called {name}", name=name, description="Counts.")

    for name in ("store.count", "store_count", "store/count", f"store.{'x' * 80}"):
        named(name)


if __name__ == "__main__":
    if "--port" in sys.argv:
        import uvicorn

        app = server.streamable_http_app()
        uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[sys.argv.index("--port") + 1]), log_level="critical")
    else:
        server.run()
