"""`TrainFolder` and `StepLog`: the log of steps, checkpoints, and the lock."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from sequences import options

from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.play.options import UpdateSettings
from strands_rollout.samples import Sample
from strands_rollout.train.rollouts import Group
from strands_rollout.train.run_folder import RunState, StepLog, TrainFolder, read_steps


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.jsonl"


def write(path: Path, steps: int, **values: float) -> None:
    with StepLog(path) as log:
        for step in range(steps):
            log.append({"step": step, "weight_version": str(step), **values})


def test_step_log_append_is_readable_immediately(path: Path) -> None:
    """If a run is killed, its appended steps can be read."""
    with StepLog(path) as log:
        for step in range(3):
            log.append({"step": step, "reward": 0.5 * step, "weight_version": f"v{step}"})
            assert read_steps(path) == log.records
        written = log.append({"step": 3, "loss": float("nan"), "ratio_max": float("inf"), "grad_norm": 0.0})
        assert written == {"step": 3, "loss": None, "ratio_max": None, "grad_norm": 0.0}, "NaN and infinity become null"
    assert path.read_text().splitlines()[3] == '{"step": 3, "loss": null, "ratio_max": null, "grad_norm": 0.0}'
    assert read_steps(path)[2:] == [{"step": 2, "reward": 1.0, "weight_version": "v2"}, written]


@pytest.mark.parametrize("cut", [1, 20])
def test_step_log_drops_half_written_line(path: Path, cut: int) -> None:
    write(path, 3, reward=1.0)
    path.write_bytes(path.read_bytes()[:-cut])
    assert [record["step"] for record in read_steps(path)] == [0, 1]
    with StepLog(path, first_step=2) as log:
        log.append({"step": 2, "reward": -1.0})
    assert [record["reward"] for record in read_steps(path)] == [1.0, 1.0, -1.0]


def test_step_log_drops_steps_after_first_step(path: Path) -> None:
    write(path, 5, reward=1.0)
    with StepLog(path, first_step=2) as log:
        assert ([record["step"] for record in log.records], len(read_steps(path))) == ([0, 1], 2)
        log.append({"step": 2, "reward": 0.0})
    assert [record["reward"] for record in read_steps(path)] == [1.0, 1.0, 0.0]
    assert [file.name for file in path.parent.iterdir()] == ["steps.jsonl"]
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"ends before step 3; expected all steps before 4"):
        StepLog(path, first_step=4)
    assert path.read_bytes() == before
    with StepLog(path) as log:
        assert log.records == []
    assert path.read_bytes() == b"", "a new run starts the log from scratch"


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "steps.jsonl:2 is not JSON"), ('{"step": 3}', "steps.jsonl:2 is not the record of step 1")],
)
def test_read_steps_refuses_other_lines(path: Path, line: str, message: str) -> None:
    path.write_text(f"{json.dumps({'step': 0})}\n{line}\n")
    with pytest.raises(ConfigError, match=message):
        read_steps(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_step_log_append_reports_full_disk(path: Path) -> None:
    with StepLog(path) as log, Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), log._log._file.fileno())
        with pytest.raises(RolloutError, match=r"No space left on device; free disk space and resume the run"):
            log.append({"step": 0})
        assert log.records == []


CUT = Sample(prompt="p", tokens=[1, 2, 3], response_length=2, loss_mask=[1, 1], rollout_log_probs=[-0.5, -0.25])
CUT.status = Sample.Status.ABORTED
OVER, SIBLING = (Sample(prompt="q", tokens=[1, at], response_length=1, index=5, rollout_id=5) for at in (2, 3))
FALLING = UpdateSettings(decay="linear")
OPTIONS = options(steps=5, update=FALLING)


def write_weights(path: Path) -> None:
    path.write_text("weights")


def saved(folder: TrainFolder, step: int) -> str:
    state = RunState(step, 7 * step, [Group(6, {0: [OVER, SIBLING], 1: [CUT]})], {"accuracy_start": 0.7})
    folder.save_checkpoint(state, write_weights)
    return f"step-{step:06d}"


def test_run_state_reads_saved_checkpoint(tmp_path: Path) -> None:
    folder = TrainFolder(tmp_path)
    saved(folder, 3)
    newest = folder.newest_checkpoint()
    assert newest is not None
    assert (newest / "policy.pt").read_text() == "weights"
    expected = RunState(3, 21, [Group(6, {0: [OVER, SIBLING], 1: [CUT]})], {"accuracy_start": 0.7})
    assert RunState.read(newest) == expected
    (newest / "progress.json").write_text('{"step": 1}')
    with pytest.raises(ConfigError, match=r"can't resume from .*progress\.json.*--out"):
        RunState.read(newest)


def test_save_checkpoint_keeps_only_newest(tmp_path: Path) -> None:
    folder = TrainFolder(tmp_path)
    saved(folder, 3)
    kept = saved(folder, 12)
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert checkpoint.name == kept

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.save_checkpoint(RunState(20, 0), killed)
    assert folder.newest_checkpoint() == checkpoint


def test_claim_refuses_folder_of_another_run(tmp_path: Path) -> None:
    folder = TrainFolder(tmp_path)
    folder.claim(replace(OPTIONS, seed=1), {})
    folder.claim(OPTIONS, {"commit": None, "versions": {}})  # without a checkpoint, another run may use the folder
    recorded = json.loads((tmp_path / "options.json").read_text())
    assert recorded["options"]["update"]["learning_rate"] == OPTIONS.update.learning_rate
    saved(folder, 2)
    folder.claim(replace(OPTIONS, threads=1), {})  # `threads` does not identify a run
    with pytest.raises(ConfigError, match="steps was 5 and is 9"):  # the learning rate's schedule depends on `steps`
        folder.claim(replace(OPTIONS, steps=9), {})
    other = replace(OPTIONS, seed=1, update=replace(FALLING, learning_rate=1.0))
    with pytest.raises(ConfigError, match=r"holds another run: seed was 0 and is 1; update\.learning_rate was .* 1\.0"):
        folder.claim(other, {})


def hold(folder: TrainFolder) -> None:
    with folder.locked():
        pass


def test_locked_refuses_second_process(tmp_path: Path) -> None:
    folder = TrainFolder(tmp_path / "runs/new")
    with folder.locked(), pytest.raises(ConfigError, match=r"runs/new/lock is in use by another run .* another --out"):
        hold(folder)
    hold(folder)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't create .*file/run: .*; choose another folder"):
        hold(TrainFolder(tmp_path / "file/run"))
