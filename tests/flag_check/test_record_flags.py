"""`scripts/record_flags.py` writes what the parsers say, and nothing where one of them can't be asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from flag_checkout import FILES, MEGATRON, ROUTER, SGLANG, write_checkout

from strands_rollout.flag_check.flag_table import read_record, recorded_table

SCRIPT = Path(__file__).parents[2] / "scripts/record_flags.py"


def committed(checkout: Path) -> str:
    """Commit all of a checkout and return the commit."""
    git = [
        "git",
        "-C",
        str(checkout),
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.org",
        "-c",
        "commit.gpgsign=false",
    ]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *command], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def record(slime: Path, megatron: Path, out: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    command = [sys.executable, SCRIPT, "--slime", slime, "--megatron", megatron, "--out", out, "--patches", "patches"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_record_holds_the_flags_and_what_was_asked(tmp_path: Path) -> None:
    slime = write_checkout(tmp_path / "slime", FILES, SGLANG, ROUTER)
    megatron = write_checkout(tmp_path / "megatron", MEGATRON)
    commits = [committed(slime), committed(megatron)]

    done = record(slime, megatron, tmp_path / "flags.json")

    assert done.returncode == 0, done.stderr
    written = read_record(tmp_path / "flags.json")
    versions = [source["version"] for source in written["sources"].values()]
    assert versions[:3] == [f"commit {commits[0]}", f"commit {commits[1]} with patches", "9.9 with patches"]
    assert "PyPI's build" in versions[3]
    table = recorded_table(written)
    assert [flag.nargs for flag in table.find("--newest-of-megatron")] == ["+"]
    assert table.left_out == {"--sglang-tp-size"}


@pytest.mark.parametrize("missing", ["megatron", "sglang"])
def test_nothing_is_written_where_a_parser_cannot_be_asked(missing: str, tmp_path: Path) -> None:
    slime = write_checkout(tmp_path / "slime", FILES, ROUTER, *([SGLANG] if missing == "megatron" else []))
    megatron = write_checkout(tmp_path / "megatron", MEGATRON if missing == "sglang" else {"README": ""})

    done = record(slime, megatron, tmp_path / "flags.json")

    assert done.returncode == 1
    assert f"No module named '{missing}'" in done.stderr
    assert not (tmp_path / "flags.json").exists()
