"""Reads a command's configuration, and finds all that it names before anything starts."""

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from strands_rollout.agent import tool_loading
from strands_rollout.code_tool.executors import make_executor
from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.settings import RolloutSettings, read_config_file
from strands_rollout.slime_plugin.slime_adapter import load_should_abort
from strands_rollout.tool_parsers import AUTO, get_parser


async def read_checked_config(path: Path | None, changes: Sequence[str] | None = None) -> RolloutSettings:
    """The settings of a file, all of whose names can be loaded; its folder and the working directory are searched too.

    Raises:
        ConfigError: The file can't be used, or something that it names is not there; the message has a line for each.
    """
    settings = read_config_file(path, changes)
    if path is not None or changes:
        await check_names(path, settings)
    return settings


async def check_names(path: Path | None, settings: RolloutSettings) -> None:
    """Raise ConfigError, with a line for each, where something that a file's settings name is not there."""
    search_beside(path)
    faults = [f"  {name}: {error}" for name, error in await named_faults(settings)]
    if faults:
        raise ConfigError("\n".join([f"{path or '--set'} names what can't be used:", *faults]))


def search_beside(path: str | Path | None) -> None:
    """Let modules be imported from the working directory and a configuration's folder, as from a script's own."""
    for folder in [str(Path.cwd())] if path is None else [str(Path.cwd()), str(Path(path).resolve().parent)]:
        if folder not in sys.path:
            sys.path.insert(0, folder)


async def named_faults(settings: RolloutSettings, *, connects: bool = False) -> list[tuple[str, RolloutError]]:
    """Each setting that names what can't be loaded, with the error; `connects` tries MCP servers too."""
    load = tool_loading.load_function
    load_tools: Callable[[tool_loading.Named], object] = tool_loading.try_tools if connects else tool_loading.load_tools
    # the tools first, which may register parsers
    steps: dict[str, Callable[[], object]] = {
        "tools": lambda: load_tools(settings.tools),
        "row_tools": lambda: load_tools(settings.row_tools),
        "agent_factory": lambda: settings.agent_factory and load(settings.agent_factory, "an agent"),
        "environment": lambda: settings.environment and load(settings.environment, "an environment"),
        "resources": lambda: [load(path, "a resource") for path in settings.resources.values()],
        "hooks": lambda: tool_loading.load_hooks(settings.hooks),
        "conversation_manager": lambda: tool_loading.load_conversation_manager(settings.conversation_manager),
        "should_abort": lambda: isinstance(settings.should_abort, str) and load_should_abort(settings.should_abort),
        "tool_parser": lambda: settings.tool_parser == AUTO or get_parser(settings.tool_parser),
        "executor": lambda: make_executor(settings.executor).aclose(),
    }
    faults = []
    for name, step in steps.items():
        try:
            if inspect.isawaitable(done := step()):
                await done
        except RolloutError as e:
            faults.append((name, e))
    return faults
