"""An MCP server with the tools of agent.py, on standard input and output; rollout.yaml starts it."""

import agent

try:
    from mcp.server import MCPServer  # mcp 2
except ImportError:
    from mcp.server.fastmcp import FastMCP as MCPServer  # mcp 1

server = MCPServer("shop", log_level="WARNING")
for tool in (agent.look_up_price, agent.execute_python_code):
    server.add_tool(tool.__wrapped__)

if __name__ == "__main__":
    server.run()
