"""What an evaluation's results depend on, as JSON: two runs with different ones must not share a folder.

Knows settings, data sets and what an engine says of itself; where an engine is reached, and how many episodes run at
once, is no part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strands_rollout import __version__
from strands_rollout.config import RolloutSettings
from strands_rollout.evaluation.plan import EvalSet
from strands_rollout.server_info import ServerInfo


def run_identity(
    sets: Sequence[EvalSet],
    settings: RolloutSettings,
    info: ServerInfo,
    tokenizer_dir: Path,
    *,
    seed: int | None,
    max_context_tokens: int | None,
) -> dict[str, Any]:
    """The identity of a run.

    Args:
        sets: The data sets.
        settings: Of the rollout.
        info: What the engine says of itself.
        tokenizer_dir: The served model's.
        seed: Of the run.
        max_context_tokens: Of an episode.
    """
    return {
        "strands_rollout": __version__,
        "model": info.model_path,
        "weight_version": info.weight_version,
        "tokenizer": str(tokenizer_dir.resolve()),
        "seed": seed,
        "max_context_length": max_context_tokens,
        "settings": settings_identity(settings),
        "data_sets": {chosen.name: chosen.identity for chosen in sets},
    }


def settings_identity(settings: RolloutSettings) -> dict[str, Any]:
    """All settings that results depend on, as JSON; options of executors and MCP servers, secret perhaps, hashed."""
    values = settings.model_dump(mode="json", exclude={"dump_dir", "dump_samples"})
    values["executor"] = _identity(values["executor"])
    for name in ("tools", "row_tools"):
        values[name] = [_identity(tool) for tool in values[name]]
    return values


def _identity(named: Any) -> Any:  # noqa: ANN401 - a name, or a mapping of name and options
    if not isinstance(named, dict):
        return named
    options = {key: value for key, value in named.items() if key != "name"}
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()
    return {"name": named.get("name"), "options_sha256": digest}
