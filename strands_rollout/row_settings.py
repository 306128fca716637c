"""What a row of the data set sets for its own episode, in its metadata.

Knows the settings; nothing of what they do. Rows are data: they choose among the tools that the configuration names,
and can neither import nor start anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final

from strands_rollout.config import RolloutSettings, checked_settings
from strands_rollout.errors import ConfigError
from strands_rollout.mcp_settings import McpServer

ROW_KEY: Final = "strands_rollout_settings"
MAY_SET: Final = (
    "enable_thinking",
    "episode_timeout_s",
    "max_parallel_tool_calls",
    "max_tool_calls",
    "max_tool_iterations",
    "max_turn_tokens",
    "max_user_turns",
    "min_turn_tokens",
    "system_prompt",
    "tool_timeout_s",
    "tools",
)


def with_row_settings(settings: RolloutSettings, metadata: object) -> RolloutSettings:
    """The settings of one episode: those of the run, and over them what its row sets.

    Args:
        settings: Of the run.
        metadata: Of the sample; read is its key `strands_rollout_settings`, a mapping. `tools` in it are dotted paths
            or names of MCP servers, each from `tools` or `row_tools` of the run's settings.

    Raises:
        ConfigError: It is no mapping, or sets what a row can't set, a tool that the run's settings don't name, or a
            value out of range.
    """
    row = metadata.get(ROW_KEY) if isinstance(metadata, Mapping) else None
    if row is None:
        return settings
    if not isinstance(row, Mapping):
        raise ConfigError(f"got {ROW_KEY}={row!r:.200} in a row's metadata; expected a mapping of settings")
    given = dict(row)
    for name in given.keys() - set(MAY_SET):
        near = get_close_matches(str(name), MAY_SET, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"expected some of {', '.join(MAY_SET)}"
        raise ConfigError(f"got {name!r} in {ROW_KEY} of a row's metadata; {hint}")
    if "tools" in given:
        given["tools"] = _chosen(given["tools"], [*settings.tools, *settings.row_tools])
    values = {name: getattr(settings, name) for name in settings.model_fields_set}
    return checked_settings({**values, **given}, f"{ROW_KEY} of a row's metadata")


def _chosen(names: object, offered: Sequence[str | McpServer]) -> list[str | McpServer]:
    if not isinstance(names, Sequence) or isinstance(names, str):
        raise ConfigError(f"got tools={names!r:.200} in {ROW_KEY} of a row's metadata; expected a list of names")
    by_name: dict[Any, str | McpServer] = {_name(tool): tool for tool in offered}
    by_name.pop(None, None)
    missing = [name for name in names if not isinstance(name, str) or name not in by_name]
    if missing:
        raise ConfigError(
            f"got the tools {missing} in {ROW_KEY} of a row's metadata; expected some of {sorted(by_name)}. A row "
            "chooses among the tools and row_tools of the configuration, an MCP server by its name there"
        )
    return [by_name[name] for name in names]


def _name(tool: str | McpServer) -> str | None:
    return tool if isinstance(tool, str) else tool.name
