"""The recorded list of flags: where it is from, and that it can be read and compared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from strands_rollout.errors import ConfigError
from strands_rollout.flag_check.flag import Flag
from strands_rollout.flag_check.flag_table import RECORD, SYSTEMS, read_record, recorded_table


def test_the_record_names_what_each_system_was_asked_at() -> None:
    sources = read_record()["sources"]

    assert list(sources) == list(SYSTEMS)
    for system in ("slime", "megatron"):
        assert re.match(r"commit [0-9a-f]{40}\b", sources[system]["version"])
    for system in ("sglang", "router"):
        assert re.match(r"\d+\.\d+\.\d+", sources[system]["version"])


def test_the_record_has_one_flag_a_line_in_order() -> None:
    lines = [
        line.rstrip(",") for line in RECORD.read_text(encoding="utf-8").splitlines() if line.startswith('{"names"')
    ]
    rows = [json.loads(line) for line in lines]

    assert rows == read_record()["flags"]
    assert rows == sorted(rows, key=lambda row: (SYSTEMS.index(row["system"]), row["names"]))


def test_the_record_is_small() -> None:
    assert RECORD.stat().st_size < 300_000


def test_a_flag_survives_being_written_and_read() -> None:
    for row in read_record()["flags"]:
        assert Flag.read(row).row() == row


@pytest.mark.parametrize(
    ("name", "system"),
    [
        ("--rollout-batch-size", "slime"),
        ("--spec", "megatron"),
        ("--lr", "megatron"),
        ("--train-iters", "megatron"),  # generated from a dataclass
        ("--use-gated-attention", "megatron"),  # of slime's patch
        ("--sglang-release-hicache", "sglang"),  # of slime's patch
        ("--sglang-mem-fraction-static", "sglang"),
        ("--sglang-router-port", "slime"),
        ("--router-policy", "router"),
    ],
)
def test_every_kind_of_flag_is_recorded(name: str, system: str) -> None:
    assert [flag.system for flag in recorded_table(read_record()).find(name)] == [system]


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "flags.json"
    file.write_text('{"format": 2}')

    with pytest.raises(ConfigError, match="format 2"):
        read_record(file)
    with pytest.raises(ConfigError, match="expected the recorded list"):
        read_record(file.parent / "absent.json")
