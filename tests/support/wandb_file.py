"""Read the history of an offline wandb run, and the tables in it.

A `.wandb` file is a header of 7 bytes, then a log in LevelDB's format: blocks of 32 KiB with records. A record has a
header of checksum (4 bytes), length (2) and type (1); a long record has several parts. Each record is a protobuf. As a
program, this module prints the history as JSON, so that the process of the tests need not import wandb.
"""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE_HEADER, _BLOCK, _RECORD_HEADER = 7, 32768, 7
_FULL, _FIRST, _LAST = 1, 2, 4


def _records(content: bytes) -> Iterator[bytes]:
    assert content[:4] == b":W&B"
    position, parts = _FILE_HEADER, b""
    while position + _RECORD_HEADER <= len(content):
        if _BLOCK - position % _BLOCK < _RECORD_HEADER:
            position += _BLOCK - position % _BLOCK  # the end of a block is too short for a header
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        position += _RECORD_HEADER
        parts = b"" if kind in (_FULL, _FIRST) else parts
        parts += content[position : position + length]
        position += length
        if kind in (_FULL, _LAST):
            yield parts


def history(run: Path) -> list[dict[str, Any]]:
    """Return the rows of the history in a run's folder; a table is a dict with its columns and data."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    (log,) = run.glob("*.wandb")
    for content in _records(log.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                _put(row, list(item.nested_key) or [item.key], json.loads(item.value_json))
            rows.append({name: _loaded(run, value) for name, value in row.items()})
    return rows


def _put(row: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set a nested value; some versions of wandb write a mapping whole, others entry by entry."""
    for key in keys[:-1]:
        row = row.setdefault(key, {})
    row[keys[-1]] = value


def _loaded(run: Path, value: Any) -> Any:
    if not isinstance(value, dict) or value.get("_type") != "table-file":
        return value
    return dict(json.loads((run / "files" / value["path"]).read_text()))


if __name__ == "__main__":
    print(json.dumps(history(Path(sys.argv[1]))))
