"""Checkpoints and the run's folder: there whole or not at all, and never of another run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from strands_rollout.errors import ConfigError
from strands_rollout.samples import Sample
from strands_rollout.train.options import TrainOptions, UpdateSettings
from strands_rollout.train.rollouts import Group
from strands_rollout.train.run_folder import Checkpoints, RunState, TrainFolder

CUT = Sample(
    prompt="p", tokens=[1, 2, 3], response_length=2, loss_mask=[1, 1], rollout_log_probs=[-0.5, -0.25], index=4
)
CUT.status = Sample.Status.ABORTED
OVER, SIBLING = (Sample(prompt="q", tokens=[1, at], response_length=1, index=5, rollout_id=5) for at in (2, 3))
FALLING = UpdateSettings(decay="linear")
OPTIONS = TrainOptions(
    out=Path("run"), steps=5, model_dir=Path("model"), data=Path("data"), held_out=Path("held"), update=FALLING
)


def saved(folder: Path, step: int) -> Path:
    checkpoints = Checkpoints(folder)
    part = checkpoints.begin(step)
    (part / "policy.pt").write_text("weights")
    checkpoints.finish(
        part, RunState(step, 7 * step, [Group(6, {0: [OVER, SIBLING], 1: [CUT]})], {"accuracy_start": 0.7})
    )
    return folder / f"step-{step:06d}"


def test_a_checkpoint_gives_back_what_it_was_given(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    newest = Checkpoints(tmp_path).newest()
    assert newest is not None
    assert (newest / "policy.pt").read_text() == "weights"
    progress = Checkpoints.read(newest)
    assert (progress.step, progress.next_position, progress.facts) == (3, 21, {"accuracy_start": 0.7})
    assert progress.waiting[0].position == 6
    assert progress.waiting[0].episodes == {0: [OVER, SIBLING], 1: [CUT]}


def test_only_the_newest_is_kept_and_an_unfinished_one_does_not_count(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    kept = saved(tmp_path, 12)
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]
    Checkpoints(tmp_path).begin(20)
    assert Checkpoints(tmp_path).newest() == kept


def test_a_broken_checkpoint_is_refused_with_words(tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text('{"step": 1}')
    with pytest.raises(ConfigError, match=r"can't go on from .*progress\.json.*--out"):
        Checkpoints.read(tmp_path)


def test_a_folder_is_one_runs_own(tmp_path: Path) -> None:
    folder = TrainFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.claim(OPTIONS, {"commit": None, "versions": {}})
    told = json.loads((tmp_path / "run/options.json").read_text())
    assert told["options"]["update"]["learning_rate"] == OPTIONS.update.learning_rate
    saved(tmp_path / "run/checkpoints", 2)
    folder.claim(replace(OPTIONS, threads=1), {"commit": None, "versions": {}})  # does not change what a run is
    with pytest.raises(ConfigError, match="steps was 5 and is 9"):  # to which the learning rate falls
        folder.claim(replace(OPTIONS, steps=9), {"commit": None, "versions": {}})
    other = replace(OPTIONS, seed=1, update=replace(FALLING, learning_rate=1.0))
    with pytest.raises(ConfigError, match=r"holds another run: seed was 0 and is 1; update\.learning_rate was .* 1\.0"):
        folder.claim(other, {"commit": None, "versions": {}})


def hold(folder: TrainFolder) -> None:
    with folder.held():
        pass


def test_a_folder_is_held_by_one_run_at_a_time(tmp_path: Path) -> None:
    folder = TrainFolder(tmp_path / "runs/new")
    with folder.held(), pytest.raises(ConfigError, match=r"runs/new/lock is in use by another run .* another --out"):
        hold(folder)
    hold(folder)


def test_a_folder_that_cannot_be_made_is_refused_with_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't make .*file/run: .*; choose another folder"):
        hold(TrainFolder(tmp_path / "file/run"))


def test_a_run_with_a_constant_learning_rate_can_be_made_longer(tmp_path: Path) -> None:
    constant = replace(OPTIONS, update=UpdateSettings(decay="constant"))
    folder = TrainFolder(tmp_path)
    folder.claim(constant, {})
    saved(tmp_path / "checkpoints", 2)
    folder.claim(replace(constant, steps=9), {})
    assert json.loads((tmp_path / "options.json").read_text())["options"]["steps"] == 9


def test_a_folder_without_a_checkpoint_starts_afresh(tmp_path: Path) -> None:
    folder = TrainFolder(tmp_path)
    folder.claim(OPTIONS, {})
    folder.claim(replace(OPTIONS, seed=1), {})
    assert json.loads((tmp_path / "options.json").read_text())["options"]["seed"] == 1
