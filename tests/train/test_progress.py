"""How far a training run is: a line a step where nobody watches, a bar where somebody does."""

from __future__ import annotations

import io

from rich.console import Console

from strands_rollout.train.reporting import TrainingProgress


def test_without_a_terminal_each_step_is_a_line() -> None:
    out = io.StringIO()
    with TrainingProgress(Console(file=out, width=40), total=60, done=12) as progress:
        progress.phase("rollout")
        progress.step_done(
            {"step": 12, "reward": 0.255, "accuracy": 0.61, "held_out_accuracy": 0.7, "rollout_s": 4.0, "train_s": 2.5}
        )
        progress.step_done({"step": 13, "reward": None, "accuracy": 0.5})
    assert out.getvalue().splitlines() == [
        "step 13/60  reward 0.26  accuracy 61%  held out 70%  6.5 s",
        "step 14/60  accuracy 50%  0.0 s",
    ]


def test_a_terminal_shows_one_bar_with_the_phase() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, force_interactive=True, color_system=None)
    with TrainingProgress(console, total=60, done=12) as progress:
        assert "12/60" in out.getvalue()
        progress.step_done({"step": 12, "reward": 0.25, "accuracy": 0.61})
        progress.phase("training")
    last = out.getvalue().split("\r")[-1]
    assert "reward 0.25  accuracy 61%  training" in last
    assert "13/60" in last
