"""Curves of training: what a line and its band are."""

import math
import struct
from pathlib import Path

import pytest
from recorded_runs import records

from experiments.curves import curve_of
from strands_rollout.train.reporting import draw_run
from strands_rollout.train.run_folder import StepRecord


def size_of(picture: Path) -> tuple[int, int]:
    """Width and height in pixels."""
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    return struct.unpack(">II", content[16:24])


def test_a_line_is_the_mean_and_its_band_reaches_from_the_least_to_the_greatest_seed() -> None:
    rewards = (0.5, lambda step: 1 + step, 0.0)
    curve = curve_of("reward", [records(2, reward=reward) for reward in rewards])
    assert (curve.steps, curve.mean) == ([0, 1], pytest.approx([0.5, 2.5 / 3]))
    assert (curve.low, curve.high) == ([0.0, 0.0], [1.0, 2.0])


def test_a_line_has_the_steps_that_all_seeds_have() -> None:
    ended_early, whole = records(2, reward=-1.0), records(5, reward=1.0)
    assert curve_of("reward", [ended_early, whole]).steps == [0, 1]
    measured_now_and_then = [record for record in records(5, reward=1.0) if record["step"] in (0, 4)]
    assert curve_of("reward", [measured_now_and_then, whole]).steps == [0, 4]
    collapsed: list[StepRecord] = [{"step": 0, "entropy": 0.5}, {"step": 1, "entropy": None}]
    gap = curve_of("entropy", [records(2, entropy=0.7), collapsed])
    assert gap.mean[0] == pytest.approx(0.6)
    assert all(math.isnan(values[1]) for values in (gap.mean, gap.low, gap.high)), "no finite number: a gap"


def test_runs_without_any_value_collapsed_at_once_and_over_orders_of_magnitude_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    collapsed = records(2, reward=float("nan"), kl_k3=0.0, ratio_min=0.0)
    for run in (records(1), collapsed, records(5, reward=0.5, kl_k3=lambda step: 10.0 ** -(3 * step))):
        draw_run(run, tmp_path / "curves.png", title="nothing measured, or zeros")
        assert size_of(tmp_path / "curves.png")[0] == 1500
