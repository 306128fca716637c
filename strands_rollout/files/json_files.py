"""Files with a JSON object, written atomically."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from strands_rollout.errors import ConfigError
from strands_rollout.files.safe_files import read_regular, replaced

MAX_JSON_BYTES: Final = 200_000_000
"""Maximum bytes of a JSON file of a model, a tokenizer or a report."""


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically.

    Raises:
        ConfigError: It can't be written.
    """
    try:
        with replaced(path) as beside:
            beside.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"can't write {path}: {e.strerror}; choose another folder with --out") from e


def read_json(path: Path, *, advice: str = "choose another folder with --out") -> dict[str, Any]:
    """Return the object in a JSON file; `advice` ends the message of an error.

    Raises:
        ConfigError: The file can't be read, or holds no JSON object.
    """
    try:
        value = json.loads(read_regular(path, MAX_JSON_BYTES))
    except OSError as e:
        raise ConfigError(f"can't read {path}: {e.strerror}; {advice}") from e
    except ValueError as e:
        raise ConfigError(f"{path} is no JSON: {e}; {advice}") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}; expected an object; {advice}")
    return value


def differences(there: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Return the first 10 differences between a file's content and a new content, as text; "" if equal."""
    found = list(_differences(there, json.loads(json.dumps(asked)), ""))
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    return "; ".join(found[:10]) + more


def _differences(there: Mapping[str, Any], asked: Mapping[str, Any], where: str) -> Iterator[str]:
    for key in dict.fromkeys([*there, *asked]):
        first, second = there.get(key, "nothing"), asked.get(key, "nothing")
        if isinstance(first, dict) and isinstance(second, dict):
            yield from _differences(first, second, f"{where}{key}.")
        elif first != second:
            yield f"{where}{key} was {first!r:.120} and is {second!r:.120}"
