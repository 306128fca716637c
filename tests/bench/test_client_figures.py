"""Figures: medians over rounds, ratios round by round, tables, the loop's lag, memory, shares by package."""

from bench_stage import measured

from benchmarks.client import all_ratios, medians

ROUNDS = [
    *[measured("ours", cpu, round=n) for n, cpu in enumerate((10.0, 40.0, 12.0))],
    *[measured("floor", cpu, round=n) for n, cpu in enumerate((5.0, 10.0, 4.0))],
    *[measured("ours", cpu, round=n, turns=80) for n, cpu in enumerate((50.0, 120.0, 48.0))],
]


def test_figures_and_ratios_are_medians_of_the_rounds() -> None:
    found = {(one["ratio"], one["turns"]): one["value"] for one in all_ratios(ROUNDS)}
    assert found == {("ours / floor", 20): 3.0, ("ours: 80 turns / 20 turns", 80): 4.0}
    rows = {(row["variant"], row["turns"]): (row["cpu_ms_per_trajectory"], row["rounds"]) for row in medians(ROUNDS)}
    assert rows == {("ours", 20): (12.0, 3), ("floor", 20): (5.0, 3), ("ours", 80): (50.0, 3)}
