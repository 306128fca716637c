"""What is written beside a data file: where it came from, what was done, and its checksum.

Knows the form of the manifest; must not know how its numbers came about.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from preparation.errors import PreparationError
from preparation.output import sha256_of, write_whole
from preparation.request import Request
from strands_rollout import __version__

FORMAT: Final = 1


def arguments_of(request: Request, input_sha256: str | None) -> dict[str, Any]:
    """All that decides a file's content: settings, and checksums of the files it is made from and compared with."""
    return {
        **request.arguments(),
        "input_sha256": input_sha256,
        "against": {str(path): sha256_of(path) if path.is_file() else None for path in request.against},
    }


def new_manifest(arguments: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """A manifest of a file that is being written now."""
    return {
        "format": FORMAT,
        **facts,
        "arguments": arguments,
        "strands_rollout": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_manifest(manifest: dict[str, Any], path: Path) -> None:
    """Write it in one step."""
    write_whole(path, [json.dumps(manifest, indent=2, ensure_ascii=False).encode(), b"\n"])


def finished_manifest(request: Request, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of the file that is there, if it was made with these arguments and was not changed since."""
    try:
        manifest = json.loads(request.manifest_file.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("arguments") != arguments:
        return None
    try:
        return manifest if manifest.get("sha256") == sha256_of(request.out) else None
    except FileNotFoundError:
        return None
    except OSError as e:
        raise PreparationError(f"can't read {request.out}: {e.strerror}") from e
