"""An MCP server among an agent's tools, as the settings name it: by its command, or by its URL.

Knows the settings' form alone; the connection is `mcp_servers`' business.
"""

from __future__ import annotations

import shlex
import sys
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class McpServer(BaseModel):
    """One server; the keys are those of an `mcpServers` file, as Strands reads them, `name` and `per_episode` besides.

    `${VAR}` in a string is taken from the environment.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str | None = Field(default=None, description="By which a row may choose it.")
    command: str | None = Field(
        default=None,
        description="What starts it, split as a shell would, `python` being this process's; it talks on stdio.",
    )
    args: tuple[str, ...] = Field(default=(), description="Further arguments of the command.")
    env: dict[str, str] | None = Field(default=None, description="Environment variables of the command.")
    cwd: str | None = Field(default=None, description="Folder of the command.")
    url: str | None = Field(default=None, description="Of a server that runs.")
    headers: dict[str, str] | None = Field(default=None, description="Sent with each request to the URL.")
    transport: Literal["stdio", "streamable-http", "sse"] | None = Field(
        default=None, description='"stdio" of a command, "streamable-http" of a URL unless it is "sse".'
    )
    prefix: str | None = Field(default=None, description="Put before the names of its tools.")
    tool_filters: dict[Literal["allowed", "rejected"], tuple[str, ...]] | None = Field(
        default=None, description="Names of its tools, or patterns of names, that are offered or not."
    )
    startup_timeout: int = Field(default=30, ge=1, description="Seconds that its start may take.")
    per_episode: bool = Field(
        default=False, description="A connection, and with a command a process, for each episode; else all share one."
    )

    @model_validator(mode="before")
    @classmethod
    def _of_url(cls, given: Any) -> Any:  # noqa: ANN401 - whatever a file holds
        return {"url": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _is_one_server(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("an MCP server needs either a command or a url")
        return self

    @property
    def shown_name(self) -> str:
        """What it is called in messages."""
        return self.name or self.url or str(self.command)

    def as_strands_config(self) -> dict[str, Any]:
        """The entry of an `mcpServers` mapping for this server."""
        config = self.model_dump(mode="json", exclude_none=True, exclude={"name", "per_episode", "command", "args"})
        if self.command is not None:
            first, *rest = shlex.split(self.command)
            first = sys.executable if first == "python" else first
            config |= {"command": first, "args": [*rest, *self.args]}
        return config


def kind_of_tool(given: object) -> str:
    """Which of the two forms an entry of `tools` has: "path" or "server"."""
    is_path = isinstance(given, str) and "://" not in given
    return "path" if is_path else "server"
