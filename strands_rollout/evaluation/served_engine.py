"""What a command runs episodes on: a running engine or the embedded one, its tokenizer, the code sandbox."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

from strands_rollout.client.client import ServerInfo, fetch_server_info
from strands_rollout.client.transport import create_client, parse_base_url, redacted
from strands_rollout.code_tool.executors import shared_executor
from strands_rollout.code_tool.local.executor import LocalExecutor
from strands_rollout.engine.process import engine_process
from strands_rollout.errors import ConfigError

SHIPPED_MODELS_EXECUTOR: Final = {"name": "local", "isolation": "rlimits"}
"""Our own model's code needs no Linux to run; the strongest isolation there is is used in any case."""


def served_engine(base_url: str | None, model_dir: Path | None) -> AbstractAsyncContextManager[str]:
    """The URL of an engine that runs already, or else of the embedded one, for as long as the block lasts."""
    return engine_process(model_dir) if base_url is None else nullcontext(base_url)


async def ask_engine(base_url: str) -> ServerInfo:
    """Ask the engine for its model, tokenizer and limits.

    Raises:
        ConfigError: The URL is not one of an HTTP server.
        EngineUnavailableError: Nothing answers.
    """
    async with create_client(base_url) as http:
        return await fetch_server_info(http, url=redacted(http.base_url))


def tokenizer_folder(info: ServerInfo, base_url: str) -> Path:
    """The folder of the tokenizer that an engine says it uses.

    Raises:
        ConfigError: It names none, or none on this machine.
    """
    named = info.raw.get("tokenizer_path") or info.model_path
    if not isinstance(named, str) or not Path(named).is_dir():
        raise ConfigError(
            f"the engine at {redacted(parse_base_url(base_url))} names the tokenizer {named!r}, which is no folder on "
            "this machine; pass the served model's tokenizer with --tokenizer DIR"
        )
    return Path(named)


async def served_tokenizer(base_url: str) -> Path:
    """Ask an engine for the folder of its tokenizer; see `ask_engine` and `tokenizer_folder` for what is raised."""
    return tokenizer_folder(await ask_engine(base_url), base_url)


async def start_executor(setting: str | Mapping[str, Any]) -> str:
    """Start the code sandbox before episodes need it; returns its isolation, "unknown" where it does not report it.

    Raises:
        ConfigError: There is no such executor.
        SandboxError: It can't be started.
    """
    sandbox = shared_executor(setting)
    return (await sandbox.start()).isolation if isinstance(sandbox, LocalExecutor) else "unknown"
