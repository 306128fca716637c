"""`atomic_replacement`, `JsonLog`, `encode_json`, and the code tool's modules, which need no third-party libraries."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import strands_rollout
from strands_rollout.errors import ConfigError
from strands_rollout.files.json_codec import decode_json, encode_json
from strands_rollout.files.json_log import JsonLog, complete_lines
from strands_rollout.files.safe_files import atomic_replacement, open_exclusive


def test_atomic_replacement_writes_the_whole_file_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_replacement(path) as temporary:
        temporary.write_text("first")
        assert not path.exists()
    assert path.read_text() == "first"

    def write_half() -> None:
        with atomic_replacement(path) as temporary:
            temporary.write_text("sec")
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        write_half()
    assert ([*tmp_path.iterdir()], path.read_text()) == ([path], "first")


def test_json_log_appends_after_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a"')
    assert [*complete_lines(path)] == [
        b'{"a": 1}\n',
        b'{"a": 2}\n',
    ]  # the writer may be in the middle of the third line
    log = JsonLog(path, remedy="make room")
    assert (log.dropped_bytes, log.is_empty) == (4, False)
    with pytest.raises(ConfigError, match="in use by another run"):
        JsonLog(path, remedy="make room")
    log.append(b'{"a": 3}\n')
    assert [*complete_lines(path)] == [b'{"a": 1}\n', b'{"a": 2}\n', b'{"a": 3}\n']
    log.keep_first(1)
    log.append(b'{"a": 4}\n')
    assert path.read_bytes() == b'{"a": 1}\n{"a": 4}\n'
    log.close()
    JsonLog(path, remedy="make room").close()


def test_open_exclusive_names_a_missing_lock_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_file: int, _operation: int) -> None:  # as on NFS without a lock service
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"can't lock .*/log: No locks available; choose an --out on a file system"):
        open_exclusive(tmp_path / "log")


def test_code_tool_imports_no_third_party_library() -> None:
    """The sandbox's Python may lack this package's requirements."""
    modules = ("code_tool.local", "code_tool.executors", "code_tool.supervisor_link", "code_tool.remote_supervisor")
    program = f"import importlib; [importlib.import_module('strands_rollout.' + one) for one in {modules}]"
    environment = {**os.environ, "PYTHONPATH": str(Path(strands_rollout.__file__).parents[1])}
    child = subprocess.run([sys.executable, "-S", "-c", program], env=environment, capture_output=True, check=False)
    assert (child.returncode, child.stderr) == (0, b"")


@pytest.mark.parametrize("other", ["plain", "\ud800", 2**70, "NaN", "2 Infinity \ud800"])
def test_encode_json_writes_non_finite_numbers_as_null(other: Any) -> None:
    text = encode_json({"other": other, "numbers": [float("nan"), {"a": float("inf")}, -float("inf"), 0.5]})
    assert decode_json(text) == {"other": other, "numbers": [None, {"a": None}, None, 0.5]}


def test_encode_json_refuses_deep_nesting() -> None:
    nested: list[Any] = []
    for _ in range(200_000):
        nested = [nested]
    with pytest.raises(ValueError, match="values are nested too deeply"):
        encode_json(nested)
    while nested:  # freed level by level, since freeing all at once would recurse
        nested = nested.pop()
