"""Can the settings of a rollout be used: are they valid, and is there what they name?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from strands_rollout.config import RolloutSettings
from strands_rollout.doctor.finding import Finding, error, good, skipped, warning
from strands_rollout.errors import ConfigError, RolloutError

_IMPORTABLE: Final = "correct it; a module of your own must be installed, or its folder be on PYTHONPATH"


def check_config(path: Path | None) -> list[Finding]:
    """Whether a YAML for slime's --custom-config-path is right, and what it names can be loaded."""
    if path is None:
        return [skipped("config", "no --config, and no configs/math_code.yaml here: the defaults hold")]
    from strands_rollout.config_file import read_config_file

    try:
        settings = read_config_file(path)
    except ConfigError as e:
        return [error("config", str(e), "correct it; all settings with their meaning: strands-rollout config")]
    given = ", ".join(sorted(settings.model_fields_set)) or "no setting"
    return [good("config", f"{path}: {given} set, all valid"), *_other_keys(path), *_load_named(settings)]


def _other_keys(path: Path) -> list[Finding]:
    import yaml

    from strands_rollout.config_file import KEY

    others = sorted(str(key) for key in yaml.safe_load(path.read_text(encoding="utf-8")) if key != KEY)
    if not others:
        return []
    found = f"{path} also sets {', '.join(others)}: slime lets these override its command line, in silence"
    return [warning("config: other keys", found, "give them on slime's command line instead")]


def _load_named(settings: RolloutSettings) -> list[Finding]:
    """An error for each setting whose named thing can't be loaded; the tools first, which may register parsers."""
    from strands_rollout.slime_seam import load_should_abort
    from strands_rollout.tool_loading import load_conversation_manager, load_function, load_hooks, load_tools
    from strands_rollout.tool_parsers import AUTO, get_parser

    steps: dict[str, Callable[[], object]] = {
        "tools": lambda: load_tools(settings.tools),
        "row_tools": lambda: load_tools(settings.row_tools),
        "agent_factory": lambda: settings.agent_factory and load_function(settings.agent_factory, "an agent"),
        "environment": lambda: settings.environment and load_function(settings.environment, "an environment"),
        "resources": lambda: [load_function(path, "a resource") for path in settings.resources.values()],
        "hooks": lambda: load_hooks(settings.hooks),
        "conversation_manager": lambda: load_conversation_manager(settings.conversation_manager),
        "should_abort": lambda: isinstance(settings.should_abort, str) and load_should_abort(settings.should_abort),
        "tool_parser": lambda: settings.tool_parser == AUTO or get_parser(settings.tool_parser),
        "executor": lambda: _make_executor(settings.executor),
    }
    findings = []
    for name, load in steps.items():
        try:
            load()
        except RolloutError as e:
            findings.append(error(f"config: {name}", str(e), _IMPORTABLE))
    tools = ", ".join(tool if isinstance(tool, str) else tool.shown_name for tool in settings.tools) or "none"
    return findings or [good("config: names", f"tools {tools} and all else that the settings name can be loaded")]


def _make_executor(setting: str | dict[str, Any]) -> None:
    from strands_rollout.executors import make_executor

    asyncio.run(make_executor(setting).aclose())
