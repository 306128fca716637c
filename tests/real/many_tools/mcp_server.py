"""An MCP server on standard input and output: sums, a division that can fail, pictures, bytes, and its own end."""

import base64
import os

from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.types import BlobResourceContents, EmbeddedResource

_PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
server = MCPServer("arithmetic", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def divide(a: int, b: int) -> int:
    """Divide two numbers."""
    return a // b


@server.tool()
def draw() -> Image:
    """Draw a dot."""
    return Image(data=_PIXEL, format="png")


@server.tool()
def fetch() -> EmbeddedResource:
    """Fetch the key as bytes."""
    blob = BlobResourceContents(uri="key://1", mime_type="application/octet-stream", blob="AAEC")
    return EmbeddedResource(type="resource", resource=blob)


@server.tool()
def stop() -> str:
    """Stop this server."""
    os._exit(3)


if __name__ == "__main__":
    server.run()
