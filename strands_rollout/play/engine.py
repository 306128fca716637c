"""Prepare what a run needs: a running or the embedded engine, its tokenizer, the settings and the code sandbox."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from strands_rollout.client.client import ServerInfo, fetch_server_info
from strands_rollout.client.transport import create_client, parse_base_url, redacted
from strands_rollout.code_tool.executors import shared_executor
from strands_rollout.code_tool.local import LocalExecutor
from strands_rollout.engine import engine_process
from strands_rollout.errors import ConfigError, EngineResponseError, EngineUnavailableError
from strands_rollout.play.options import SHIPPED_MODEL
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.inputs import read_checked_config

SHIPPED_MODEL_EXECUTOR: Final = {"name": "local", "isolation": "rlimits"}
"""Executor for the shipped model's code; it requires only the weakest isolation, which more systems support."""


@asynccontextmanager
async def served_engine(base_url: str | None, model_dir: Path | None) -> AsyncIterator[str]:
    """Yield the URL of a running engine; without a `base_url`, run the embedded engine until the block ends.

    A running engine is asked for its model first: without this check, episodes would fail only after all retries of
    `engine_patience_s`. The embedded engine serves the model in `model_dir`; None for the shipped model.

    Raises:
        ConfigError: The URL is not the URL of an HTTP server.
        EngineUnavailableError: No server answers at the URL, or the embedded engine can't start or serve the model.
    """
    if base_url is None:
        async with engine_process(model_dir) as url:
            yield url
        return
    with suppress(EngineResponseError):  # a busy engine may recover
        await fetch_engine_info(base_url)
    yield base_url


async def fetch_engine_info(base_url: str) -> ServerInfo:
    """Ask the engine for its model, tokenizer and limits.

    Raises:
        ConfigError: The URL is not the URL of an HTTP server.
        EngineUnavailableError: No server answers.
        EngineResponseError: The server is busy or failing.
    """
    async with create_client(base_url) as http:
        url = redacted(http.base_url)
        try:
            return await fetch_server_info(http, url=url)
        except EngineUnavailableError as e:
            raise EngineUnavailableError(
                f"no engine answers at {url}: {_cause_of(e)}; start one there (SGLang's server, or "
                "`strands-rollout serve`), or correct --base-url"
            ) from e


def _cause_of(error: Exception) -> str:
    """Return the operating system's message, such as "Connection refused", or the error's own text."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
        cause = cause.__cause__ or cause.__context__
    return str(error)


def check_is_engine(info: ServerInfo, base_url: str) -> None:
    """Raise ConfigError if the server names neither a tokenizer nor a model."""
    if (info.raw.get("tokenizer_path") or info.model_path) is None:
        got = f"the server at {redacted(parse_base_url(base_url))} names no model; expected an SGLang server or router"
        raise ConfigError(f"{got}. Check the URL's port")


def tokenizer_folder(info: ServerInfo, base_url: str) -> Path:
    """Return the folder of the tokenizer that the engine reports.

    Raises:
        ConfigError: The server names neither a tokenizer nor a model, or the named tokenizer is not a folder on this
            machine. If no tokenizer is named, the model's path is used instead.
    """
    check_is_engine(info, base_url)
    path = info.raw.get("tokenizer_path") or info.model_path
    if not isinstance(path, str) or not Path(path).is_dir():
        got = f"names the tokenizer {path!r}, which is not a folder on this machine"
        remedy = "pass the policy's tokenizer with --tokenizer DIR"
        raise ConfigError(f"the engine at {redacted(parse_base_url(base_url))} {got}; {remedy}")
    return Path(path)


async def fetch_tokenizer_folder(base_url: str) -> Path:
    """Ask an engine for the folder of its tokenizer; see `fetch_engine_info` and `tokenizer_folder` for errors."""
    return tokenizer_folder(await fetch_engine_info(base_url), base_url)


async def start_executor(setting: str | Mapping[str, Any]) -> str:
    """Return the isolation of the executor in a setting; "unknown" unless the executor is local.

    A local executor is started for this, before episodes need it.

    Raises:
        ConfigError: The executor does not exist.
        SandboxError: The sandbox can't be started.
    """
    sandbox = shared_executor(setting)
    return (await sandbox.start()).isolation if isinstance(sandbox, LocalExecutor) else "unknown"


async def load_settings(
    config: Path | None, changes: Sequence[str] | None, base_url: str | None, model: Path | None
) -> RolloutSettings:
    """Read the settings of --config and --set; the shipped model uses `SHIPPED_MODEL_EXECUTOR` if they set no executor.

    Raises:
        ConfigError: The file can't be read, a setting is unknown or invalid, or code that a setting names can't be
            loaded.
    """
    settings = await read_checked_config(config, changes)
    if base_url is None and model is None and "executor" not in settings.model_fields_set:
        return settings.model_copy(update={"executor": SHIPPED_MODEL_EXECUTOR})
    return settings


def shipped_model_note(
    settings: RolloutSettings, config: Path | None, base_url: str | None, model: Path | None
) -> str | None:
    """Return a note if the shipped model plays another agent than in its training; else None."""
    defaults, names = (
        RolloutSettings(),
        ("tools", "row_tools", "system_prompt", "agent_factory", "agent_program", "environment"),
    )
    changed = [name for name in names if getattr(settings, name) != getattr(defaults, name)]
    if not changed or base_url is not None or model not in (None, SHIPPED_MODEL):
        return None
    code_tool = "which it recognizes by the name" if settings.has_code_tool else "which your agent does not have"
    shown_config = "" if config is None else f"{config} "
    return (
        f"note: the shipped model was trained on math with the tool execute_python_code(code), {code_tool}, and not "
        f"with your {' and '.join(changed)}. Play without a model (strands-rollout try {shown_config}--script FILE, or "
        "--you), or with another model (--base-url URL)"
    )
