"""Figures: medians over rounds, ratios round by round, tables, the loop's lag, memory, shares by package."""

from bench_stage import measured

from benchmarks.client import all_ratios, medians
from benchmarks.report import result_tables

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


def test_the_tables_show_each_variant_and_what_ours_is_to_it() -> None:
    versions = {"python": "3.11", "strands-rollout": "1", "strands-agents": "1", "strands-sglang": None, "openai": None}
    facts = {"versions": versions, "machine": {"processor": "a processor", "cores": 2}, "collector": "own"}
    facts |= {"tokenizer": {"name": "a-tokenizer", "vocab_size": 9}, "command": "python -m benchmarks client"}
    few = measured("openai", 99.0, episodes=8)
    wire = [f"{name}_per_trajectory" for name in ("wall_ms", "bytes_sent", "bytes_received")]
    wire += ["cpu_ms_per_request", "client_busy_percent", "engine_busy_percent"]
    rows = [{**row, **dict.fromkeys(wire, 1.0)} for row in medians([*ROUNDS, few])]
    shown = result_tables({**facts, "medians": rows, "ratios": all_ratios(ROUNDS), "measurements": []})
    for line in (
        "tokenised again | 99 (8 at once)",
        "| ours / floor, 20 tool turns | 64 | 3.00 | 2.00 to 4.00 | 3 | 2.30 |",
        "| ours: 80 turns / 20 turns | 64 | 4.00 | 3.00 to 5.00 | 3 | 6.00 |",
        "| floor: the requests alone | 5 (ours: 3.00x) |",
        "| strands-rollout | 12 | 50 |",
        "tokenizer a-tokenizer of 9 tokens",
    ):
        assert line in shown
    assert "strands-sglang" not in shown
