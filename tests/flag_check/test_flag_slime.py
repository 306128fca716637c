"""The record and the reading of scripts, held against the checkout of slime that SLIME_PATH names."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from strands_rollout.flag_check.dry_run import read_script
from strands_rollout.flag_check.flag import Flag
from strands_rollout.flag_check.flag_table import FlagTable, read_record, recorded_table
from strands_rollout.flag_check.judgement import judge_reading
from strands_rollout.flag_check.launch_text import read_text
from strands_rollout.flag_check.real_parsers import ask, find_slime, table_of

SCRIPTS = Path(__file__).parents[2] / "scripts"
LAUNCH_SCRIPTS = sorted(path.name for path in (*SCRIPTS.glob("strands_*.sh"), *SCRIPTS.glob("eval_*.sh")))
pytestmark = pytest.mark.slime

# its command lacks a backslash, so that train.py gets four flags and the arrays are run as a command of their own
BROKEN = {"run-kimi-k2-Instruct.sh"}


@pytest.fixture(scope="module")
def slime_dir() -> Path:
    named = os.environ.get("SLIME_PATH")
    found = find_slime(Path(named) if named else None)
    if found is None:
        pytest.skip("needs THUDM/slime: set SLIME_PATH to a checkout of it")
    return found


@pytest.fixture(scope="module")
def table(slime_dir: Path) -> FlagTable:
    return table_of(slime_dir)


def commit_of(checkout: Path) -> str:
    return subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()


def test_the_recorded_flags_of_slime_are_those_of_its_checkout(slime_dir: Path) -> None:
    record = read_record()
    if commit_of(slime_dir) not in record["sources"]["slime"]["version"]:
        pytest.skip("the record is of another commit of slime")
    recorded = recorded_table(record)
    asked = [flag for flag in map(Flag.read, ask(slime_dir)["flags"]) if flag.system == "slime"]
    # where Megatron-LM declares a flag too, slime changes its default only
    own = {
        flag
        for flag in asked
        if not any(known.system == "megatron" for name in flag.names for known in recorded.find(name))
    }

    assert own == {flag for flag in recorded.flags if flag.system == "slime"}


def test_the_record_is_of_the_commit_and_version_that_slimes_image_has(slime_dir: Path) -> None:
    record = read_record()
    if commit_of(slime_dir) not in record["sources"]["slime"]["version"]:
        pytest.skip("the record is of another commit of slime")
    recipe = (slime_dir / "docker/Dockerfile").read_text()
    megatron = re.search(r"MEGATRON_COMMIT=(\w+)", recipe)
    sglang = re.search(r"SGLANG_IMAGE_TAG=v([\w.]+)", recipe)

    assert megatron is not None
    assert sglang is not None
    assert f"commit {megatron[1]} " in record["sources"]["megatron"]["version"]
    assert record["sources"]["sglang"]["version"].startswith(f"{sglang[1]} ")


def test_slimes_own_scripts_have_no_error_but_the_one_that_is_broken(slime_dir: Path, table: FlagTable) -> None:
    scripts = [*slime_dir.glob("scripts/run-*.sh"), *slime_dir.glob("scripts/low_precision/run-*.sh")]
    scripts += slime_dir.glob("examples/*/*.sh")
    found = {script.name: judge_reading(read_text(script.read_text(), script, slime_dir), table) for script in scripts}

    assert len(found) > 20
    assert all(findings.flags > 50 for name, findings in found.items() if name not in BROKEN)
    assert {name for name, findings in found.items() if not findings.ok} <= BROKEN, [
        finding.line() for findings in found.values() for finding in findings.findings if finding.severity == "error"
    ]


@pytest.mark.parametrize("name", LAUNCH_SCRIPTS)
def test_each_launch_script_of_this_repository_has_no_fault_with_slimes_model(
    name: str, slime_dir: Path, table: FlagTable
) -> None:
    reading = read_script(SCRIPTS / name, slime_dir)

    assert reading.notes == ()
    assert [finding.line() for finding in judge_reading(reading, table).findings] == []
