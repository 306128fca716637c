"""Figures: medians over rounds, ratios round by round, tables, the loop's lag, memory, shares by package."""

from typing import Any

import pytest
from bench_stage import measured

from benchmarks.client import ClientOptions, all_ratios, medians
from benchmarks.report import result_tables

ROUNDS = [
    *[measured("ours", cpu, round=n) for n, cpu in enumerate((10.0, 40.0, 12.0))],
    *[measured("floor", cpu, round=n) for n, cpu in enumerate((5.0, 10.0, 4.0))],
    *[measured("ours", cpu, round=n, turns=80) for n, cpu in enumerate((50.0, 120.0, 48.0))],
]


def options(**changed: Any) -> ClientOptions:
    usual = {"turns": (1, 80), "concurrency": (64,), "episodes": None, "repeats": 2, "tokenizer_dir": None}
    chosen = {"variants": ("ours", "floor", "openai"), "measures": ("cpu", "lag", "code", "memory")}
    return ClientOptions(**{**usual, **chosen, **changed})


def test_figures_and_ratios_are_medians_of_the_rounds() -> None:
    found = {(one["ratio"], one["turns"]): one["value"] for one in all_ratios(ROUNDS)}
    assert found == {("ours / floor", 20): 3.0, ("ours: 80 turns / 20 turns", 80): 4.0}
    rows = {(row["variant"], row["turns"]): (row["cpu_ms_per_trajectory"], row["rounds"]) for row in medians(ROUNDS)}
    assert rows == {("ours", 20): (12.0, 3), ("floor", 20): (5.0, 3), ("ours", 80): (50.0, 3)}


@pytest.mark.parametrize(
    ("asked", "shown", "expected"),
    [
        # variants take turns, and another one begins each round
        (
            {"measures": ("cpu",), "turns": (5,), "variants": ("ours", "floor")},
            ("round", "variant"),
            [(0, "ours"), (0, "floor"), (1, "floor"), (1, "ours")],
        ),
        # what takes minutes is measured once
        (
            {"measures": ("cpu",), "turns": (5, 80), "variants": ("strands-sglang", "openai")},
            ("round", "variant", "turns"),
            [(0, "strands-sglang", 5), (0, "openai", 5), (0, "strands-sglang", 80), (1, "strands-sglang", 5)],
        ),
        # a long episode of a slow variant is played few times
        (
            {"measures": ("cpu",), "turns": (20, 80), "variants": ("strands-sglang",), "repeats": 1},
            ("turns", "episodes"),
            [(20, 64), (80, 8)],
        ),
        # lag and profile are of turns that were asked for
        (
            {"measures": ("lag", "code", "profile"), "turns": (1, 5, 20, 80), "variants": ("ours",)},
            ("kind", "turns"),
            [("lag", 5), ("lag", 5), ("profile", 20)],
        ),
        ({"measures": ("cpu",), "turns": (1,), "variants": ("ours",), "episodes": 7}, ("episodes",), [(7,), (7,)]),
    ],
    ids=["turns taken", "slow ones once", "slow ones few", "detail turns", "episodes"],
)
def test_what_is_asked_for_is_measured(asked: dict[str, Any], shown: tuple[str, ...], expected: list[Any]) -> None:
    steps = options(**asked).steps()
    assert sorted(tuple(getattr(step, name) for name in shown) for step in steps) == sorted(expected)


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
