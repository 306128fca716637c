"""Read and write files that contain a JSON object, and describe how two objects differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from strands_rollout.errors import ConfigError
from strands_rollout.files.safe_files import atomic_replacement, read_regular

MAX_JSON_BYTES: Final = 200_000_000
"""Maximum size of a model's, a tokenizer's or a report's JSON file, in bytes."""


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically.

    Raises:
        ConfigError: The file can't be written.
    """
    try:
        with atomic_replacement(path) as temporary:
            temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"can't write {path}: {e.strerror}; choose another folder with --out") from e


def read_json(path: Path, *, advice: str = "choose another folder with --out") -> dict[str, Any]:
    """Return the object in a JSON file; the message of an error ends with `advice`.

    Raises:
        ConfigError: The file can't be read, or contains no JSON object.
    """
    try:
        value = json.loads(read_regular(path, MAX_JSON_BYTES))
    except OSError as e:
        raise ConfigError(f"can't read {path}: {e.strerror}; {advice}") from e
    except ValueError as e:
        raise ConfigError(f"{path} is not valid JSON: {e}; {advice}") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{path} contains a {type(value).__name__}; expected a JSON object; {advice}")
    return value


def describe_differences(recorded: Mapping[str, Any], requested: Mapping[str, Any]) -> str:
    """Describe the first 10 differences between recorded and requested values, and count the others; "" if equal."""
    found = list(_iter_differences(recorded, json.loads(json.dumps(requested)), ""))
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    return "; ".join(found[:10]) + more


def _iter_differences(recorded: Mapping[str, Any], requested: Mapping[str, Any], where: str) -> Iterator[str]:
    for key in dict.fromkeys([*recorded, *requested]):
        old, new = recorded.get(key, "nothing"), requested.get(key, "nothing")
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _iter_differences(old, new, f"{where}{key}.")
        elif old != new:
            yield f"{where}{key} was {old!r:.120} and is {new!r:.120}"
