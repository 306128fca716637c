"""Reports of a training run: `TrainingProgress` without a terminal, `WandbLog`, and curves."""

import importlib.util
import io
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_runs import step_records
from rich.console import Console

from experiments.curves import curve_of
from strands_rollout.errors import ConfigError
from strands_rollout.train import run_folder
from strands_rollout.train.run_folder import StepRecord, TrainingProgress, check_wandb, draw_run, with_final_evaluation


def test_show_step_prints_line_without_terminal() -> None:
    out = io.StringIO()
    with TrainingProgress(Console(file=out, width=40), total=60, done=12) as progress:
        progress.show_phase("rollout")
        progress.show_step(
            {"step": 12, "reward": 0.255, "accuracy": 0.61, "held_out_accuracy": 0.7, "rollout_s": 4.0, "train_s": 2.5}
        )
        progress.show_phase("rollout")
        progress.show_step({"step": 13, "reward": None, "accuracy": 0.5, "parts/near": 0.125})
    assert out.getvalue().splitlines() == [
        "step 13/60: rollout ...",
        "step 13/60  reward 0.26  accuracy 61%  held out 70%  6.5 s",
        "step 14/60  accuracy 50%  near 0.12  0.0 s",
    ]


def test_show_phase_prints_line_without_terminal() -> None:
    out = io.StringIO()
    with TrainingProgress(Console(file=out, width=40), total=2) as progress:
        for step in range(2):
            progress.show_phase("rollout")
            progress.show_phase("training")
            progress.show_step({"step": step, "held_out_reward": 0.5})
        progress.show_phase("held out: 26 episodes")
    assert out.getvalue().splitlines() == [
        "step 1/2: rollout ...",
        "step 1/2: training ...",
        "step 1/2  held-out reward 0.50  0.0 s",
        "step 2/2  held-out reward 0.50  0.0 s",
        "after step 2: held out: 26 episodes ...",
    ]


def test_show_step_warns_without_reward_spread() -> None:
    out = io.StringIO()
    with TrainingProgress(Console(file=out, width=40), total=60, groups=4) as progress:
        for dropped in (3, 4, 4, 4, 4, 0, 4):
            progress.show_step({"reward": -1.0, "dropped_groups": dropped})
    told = [line.partition(": ")[0] for line in out.getvalue().splitlines() if line.startswith("rewards")]
    steps = ("step 2", "3 steps in a row up to step 4", "step 7")
    assert told == [f"rewards gave no learning signal in {words}" for words in steps]
    assert "--samples-per-prompt" in out.getvalue()


KEY = "5ec4e75ec4e75ec4e75ec4e75ec4e75ec4e75ec4e7"
STEPS = """
from pathlib import Path

from strands_rollout.train.run_folder import WandbLog

with WandbLog(Path("run"), {"seed": 3, "rollout": "tito"}) as log:
    for step in range(3):
        log.append({"step": step, "reward": step / 2, "loss": float("nan")})
    log.log_summary({"accuracy_end": 0.9})
"""
needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")


def child(folder: Path, *arguments: str) -> str:
    """Run Python with wandb offline, writing to this folder only, and return its output."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "XDG_"))},
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": KEY,
        "WANDB_ERROR_REPORTING": "false",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        **{f"WANDB_{name}_DIR": str(folder / name) for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT")},
    }
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.end_to_end
@needs_wandb
def test_wandb_log_gets_steps_and_no_secret(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    child(tmp_path, "-c", STEPS, f"--base-url=http://user:{KEY}@host")
    (logged,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    reader = Path(__file__).parents[1] / "support" / "wandb_file.py"
    rows = json.loads(child(tmp_path, str(reader), str(logged)))
    assert [(row["step"], row["reward"], "loss" in row) for row in rows] == [(at, at / 2, False) for at in range(3)]
    run_id = (tmp_path / "run" / "wandb_id").read_text().strip()
    assert (logged / f"run-{run_id}.wandb").is_file(), "the file has the id of the run to resume"
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 1
    assert not [file for file in files if KEY.encode() in file.read_bytes()]


@needs_wandb
def test_check_wandb_refuses_missing_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ConfigError, match=r"needs WANDB_API_KEY in the environment; set it, or WANDB_MODE=offline"):
        check_wandb()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    check_wandb()


def size_of(picture: Path) -> tuple[int, int]:
    """Return width and height in pixels."""
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    return struct.unpack(">II", content[16:24])


def test_curve_of_has_mean_and_range_over_seeds() -> None:
    rewards = (0.5, lambda step: 1 + step, 0.0)
    curve = curve_of("reward", [step_records(2, reward=reward) for reward in rewards])
    assert (curve.steps, curve.mean) == ([0, 1], pytest.approx([0.5, 2.5 / 3]))
    assert (curve.low, curve.high) == ([0.0, 0.0], [1.0, 2.0])


def test_curve_of_has_steps_common_to_all_seeds() -> None:
    ended_early, whole = step_records(2, reward=-1.0), step_records(5, reward=1.0)
    assert curve_of("reward", [ended_early, whole]).steps == [0, 1]
    measured_now_and_then = [record for record in step_records(5, reward=1.0) if record["step"] in (0, 4)]
    assert curve_of("reward", [measured_now_and_then, whole]).steps == [0, 4]
    collapsed: list[StepRecord] = [{"step": 0, "entropy": 0.5}, {"step": 1, "entropy": None}]
    gap = curve_of("entropy", [step_records(2, entropy=0.7), collapsed])
    assert gap.mean[0] == pytest.approx(0.6)
    assert all(math.isnan(values[1]) for values in (gap.mean, gap.low, gap.high)), "without a finite number: a gap"


def test_draw_run_draws_extreme_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    collapsed = step_records(2, reward=float("nan"), kl_k3=0.0, ratio_min=0.0)
    for run in (step_records(1), collapsed, step_records(5, reward=0.5, kl_k3=lambda step: 10.0 ** -(3 * step))):
        draw_run(run, tmp_path / "curves.png", title="nothing measured, or zeros")
        assert size_of(tmp_path / "curves.png")[0] == 1500


def test_with_final_evaluation_appends_last_weights_results() -> None:
    summary = {"accuracy_end": 0.5, "held_out_reward_end": 0.25, "held_out_parts_end": {"near": 0.75}}
    *steps, end = with_final_evaluation(step_records(2, reward=0.1), summary)
    assert steps == step_records(2, reward=0.1)
    assert end == {
        "step": 2,
        "held_out_accuracy": 0.5,
        "held_out_reward": 0.25,
        "held_out_parts/near": 0.75,
    }
    assert with_final_evaluation(steps, None) == with_final_evaluation(steps, {"accuracy_end": None}) == steps


def test_draw_run_shows_parts_single_points_and_axis_labels(tmp_path: Path, monkeypatch) -> None:
    """A line through one point is invisible without a mark."""
    pytest.importorskip("matplotlib")
    drawn = {}

    def keep(axes, panel, positive) -> None:
        finish(axes, panel, positive)
        drawn[axes.get_title()] = axes

    finish = run_folder._format_axes
    monkeypatch.setattr(run_folder, "_format_axes", keep)
    values = {"reward": 0.5, "entropy": 0.1, "parts/near": 0.25, "parts/short": 1.0}
    end = {"accuracy_end": 0.5, "held_out_reward_end": 0.25, "held_out_parts_end": {"near": 0.75}}
    draw_run(with_final_evaluation(step_records(1, **values), end), tmp_path / "curves.png", title="my run")
    assert all(axes.get_ylabel() and axes.get_xlabel() == "step" for axes in drawn.values()), drawn
    (parts,) = (axes for title, axes in drawn.items() if title.startswith("parts of the reward"))
    assert [text.get_text() for text in parts.get_legend().get_texts()] == ["near", "short"]
    near, near_held_out, short = parts.get_lines()
    assert (list(near.get_ydata()), list(near_held_out.get_ydata()), list(short.get_ydata())) == ([0.25], [0.75], [1.0])
    assert near.get_color() == near_held_out.get_color() != short.get_color()
    assert near_held_out.get_linestyle() == "--"
    assert all(line.get_marker() == "o" for axes in drawn.values() for line in axes.get_lines())
