"""Curves of training: what a line and its band are, and what is in the picture."""

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from recorded_runs import records

from strands_rollout.train.curves import PANELS, Panel, curve_of, draw_comparison, draw_run, wants_log_axis
from strands_rollout.train.run_folder import StepRecord

BLUE, VERMILION, GREEN = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)


def panel(title: str) -> Panel:
    return next(one for one in PANELS if one.title.startswith(title))


def size_of(picture: Path) -> tuple[int, int]:
    """Width and height in pixels."""
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    return struct.unpack(">II", content[16:24])


def pixels_of(picture: Path, colour: Sequence[int], *, rows: int | None = None) -> int:
    """How many pixels of the file, or of its last rows, have this colour, up to rounding where lines overlap."""
    from matplotlib.image import imread

    pixels = imread(picture)[-(rows or 0) :, :, :3] * 255
    return int((abs(pixels - colour) < 2).all(axis=2).sum())


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


@pytest.mark.parametrize(("title", "is_log"), [("KL", True), ("importance ratio", True), ("reward", False)])
def test_an_axis_is_logarithmic_where_values_span_orders_of_magnitude(title: str, is_log: bool) -> None:
    wide = curve_of("value", [records(4, value=lambda step: 10.0 ** -(3 * step))])
    narrow = curve_of("value", [records(4, value=lambda step: 1.0 - 0.01 * step)])
    assert wants_log_axis(panel(title), [wide]) is is_log
    assert not wants_log_axis(panel(title), [narrow])


def test_a_run_is_drawn_with_a_panel_for_each_value(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    nothing = {"stale_tokens": 0.0, "entropy": None}  # has no panel
    draw_run(records(5, reward=lambda step: step / 4, **nothing), tmp_path / "one.png", title="one row")
    draw_run(
        records(5, reward=0.5, tool_calls=1.0, entropy=0.2, kl_k3=lambda step: 10.0**-step),
        tmp_path / "two.png",
        title="two rows",
    )
    (width, one_row), (same_width, two_rows) = size_of(tmp_path / "one.png"), size_of(tmp_path / "two.png")
    assert width == same_width == 1500
    assert two_rows - one_row == 345
    assert pixels_of(tmp_path / "one.png", BLUE) > 500
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.png", "two.png"]


def test_each_variant_has_a_colour_of_its_own_and_a_name_in_the_legend(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    variants = {
        "rollout=tito": [records(5, reward=0.5), records(5, reward=0.7)],
        "rollout=retokenised": [records(5, reward=-0.5), records(3, reward=-0.3)],
    }
    draw_comparison(variants, tmp_path / "both.png")
    assert pixels_of(tmp_path / "both.png", BLUE) > 500
    assert pixels_of(tmp_path / "both.png", VERMILION) > 300  # its second seed has fewer steps
    assert pixels_of(tmp_path / "both.png", GREEN) == 0
    assert pixels_of(tmp_path / "both.png", BLUE, rows=50) > 50
    assert pixels_of(tmp_path / "both.png", VERMILION, rows=50) > 50
    band = tuple(round(255 + 0.18 * (part - 255)) for part in BLUE)
    assert pixels_of(tmp_path / "both.png", band) > 5000


def test_a_run_without_any_value_and_one_that_collapsed_at_once_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for run in (records(1), records(2, reward=float("nan"), kl_k3=0.0, ratio_min=0.0)):
        draw_run(run, tmp_path / "curves.png", title="nothing measured, or zeros")
        assert size_of(tmp_path / "curves.png")[0] == 1500
