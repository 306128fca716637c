"""The log of a training run's steps: written as they end, read while it grows, resumed after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.train.run_folder import StepLog, read_steps


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.jsonl"


def write(path: Path, steps: int, **values: float) -> None:
    with StepLog(path) as log:
        for step in range(steps):
            log.append({"step": step, "weight_version": str(step), **values})


def test_a_step_can_be_read_as_soon_as_it_is_appended(path: Path) -> None:
    with StepLog(path) as log:
        for step in range(3):
            log.append({"step": step, "reward": 0.5 * step, "weight_version": f"v{step}"})
            assert read_steps(path) == log.records
    assert log.records[2] == {"step": 2, "reward": 1.0, "weight_version": "v2"}


def test_what_is_no_finite_number_is_null_in_the_file_and_in_memory(path: Path) -> None:
    with StepLog(path) as log:
        written = log.append({"step": 0, "loss": float("nan"), "ratio_max": float("inf"), "grad_norm": 0.0})
    assert written == {"step": 0, "loss": None, "ratio_max": None, "grad_norm": 0.0}
    assert path.read_text() == '{"step": 0, "loss": null, "ratio_max": null, "grad_norm": 0.0}\n'
    assert read_steps(path) == [written]


def test_a_killed_writer_leaves_all_steps_that_it_appended(path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from strands_rollout.train.run_folder import StepLog
log = StepLog(Path({str(path)!r}))
for step in range(3):
    log.append({{"step": step}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], env={**os.environ}, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert [record["step"] for record in read_steps(path)] == [0, 1, 2]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_half_written_last_line_is_left_out_and_dropped_on_resume(path: Path, cut: int) -> None:
    write(path, 3, reward=1.0)
    path.write_bytes(path.read_bytes()[:-cut])
    assert [record["step"] for record in read_steps(path)] == [0, 1]
    with StepLog(path, first_step=2) as log:
        log.append({"step": 2, "reward": -1.0})
    assert [(record["step"], record["reward"]) for record in read_steps(path)] == [(0, 1.0), (1, 1.0), (2, -1.0)]


def test_resuming_drops_the_steps_that_are_done_again(path: Path) -> None:
    write(path, 5, reward=1.0)
    with StepLog(path, first_step=2) as log:
        assert [record["step"] for record in log.records] == [0, 1]
        assert len(read_steps(path)) == 2
        log.append({"step": 2, "reward": 0.0})
    assert [record["reward"] for record in read_steps(path)] == [1.0, 1.0, 0.0]
    assert [file.name for file in path.parent.iterdir()] == ["steps.jsonl"]


def test_a_new_run_over_an_old_log_starts_it_afresh(path: Path) -> None:
    write(path, 3)
    with StepLog(path) as log:
        assert log.records == []
    assert path.read_bytes() == b""


def test_a_log_that_does_not_reach_to_the_checkpoint_is_refused_and_kept(path: Path) -> None:
    write(path, 2)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"ends before step 2; expected all steps before 4"):
        StepLog(path, first_step=4)
    assert path.read_bytes() == before


@pytest.mark.parametrize("step", [0, 2, None])
def test_a_step_that_is_not_the_next_one_is_refused(path: Path, step: int | None) -> None:
    with StepLog(path) as log:
        log.append({"step": 0})
        with pytest.raises(RolloutError, match=rf"got step {step}; expected 1, the next one"):
            log.append({"step": step})
    assert len(read_steps(path)) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "steps.jsonl:2 is no JSON"),
        ("[1]", "steps.jsonl:2 is another thing than the record of step 1"),
        ('{"step": 3}', "steps.jsonl:2 is another thing than the record of step 1"),
        ('{"step": 1, "reward": [1]}', "steps.jsonl:2 holds more than numbers and texts"),
    ],
)
def test_a_line_that_is_no_step_is_refused_by_its_number(path: Path, line: str, words: str) -> None:
    path.write_text(f"{json.dumps({'step': 0})}\n{line}\n")
    with pytest.raises(ConfigError, match=words):
        read_steps(path)


def test_a_log_that_can_not_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read .*steps.jsonl: No such file"):
        read_steps(tmp_path / "steps.jsonl")
    with pytest.raises(ConfigError, match=r"can't write .*steps.jsonl: No such file.*choose another --out"):
        StepLog(tmp_path / "missing" / "steps.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_to_be_one(path: Path) -> None:
    with StepLog(path) as log, Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), log._file.fileno())
        with pytest.raises(RolloutError, match=r"No space left on device; make room and resume the run"):
            log.append({"step": 0})
        assert log.records == []
