"""Figures: medians over rounds, ratios round by round, tables, the loop's lag, memory, shares by package."""

import copy
import json
from typing import Any

import orjson
import pytest
from bench_stage import measured

from benchmarks.client import ClientOptions, all_ratios, medians
from benchmarks.measuring import percentile
from benchmarks.profiling import profile_figures, start_profile
from benchmarks.report import result_tables
from benchmarks.worker import array_bytes

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
        # the streamed variant plays any turns where it is asked for them alone
        (
            {"measures": ("cpu", "memory"), "turns": (80,), "variants": ("openai",)},
            ("kind", "turns"),
            [("cpu", 80), ("rss", 80), ("traced", 80)],
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
    ids=["turns taken", "slow ones once", "streamed alone", "slow ones few", "detail turns", "episodes"],
)
def test_what_is_asked_for_is_measured(asked: dict[str, Any], shown: tuple[str, ...], expected: list[Any]) -> None:
    steps = options(**asked).steps()
    assert sorted(tuple(getattr(step, name) for name in shown) for step in steps) == sorted(expected)


def test_rounds_are_paired_by_their_number() -> None:
    second = [one for one in ROUNDS if one.step.round == 1]
    found = {one["ratio"]: (one["value"], one["rounds"]) for one in all_ratios(second)}
    assert found == {"ours / floor": (4.0, 1), "ours: 80 turns / 20 turns": (3.0, 1)}
    unpaired = [measured("ours", 10.0, round=0), measured("ours", 50.0, round=1, turns=80)]
    assert all_ratios(unpaired) == []


def test_as_many_episodes_are_played_as_are_to_run_at_once() -> None:
    for step in options(concurrency=(512,)).steps():
        assert step.episodes >= step.concurrency or step.variant == "openai"
        assert step.episodes == step.concurrency or step.kind not in ("rss", "traced") or step.variant == "openai"


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


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([3.0], 0.99, 3.0), ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0), (list(range(1, 201)), 0.99, 198)],
)
def test_a_percentile_is_one_of_the_values(values: list[float], share: float, expected: float | None) -> None:
    assert percentile(values, share) == expected


def test_a_number_that_is_held_twice_counts_once() -> None:
    number = 10**6
    assert array_bytes([[number, number]]) == array_bytes([[number]]) + 8
    assert array_bytes([[number], None, [10**6 + 1]]) == 2 * array_bytes([[number]])


def test_a_profile_names_packages_and_their_functions_in_c() -> None:
    def work() -> None:
        for _ in range(300):
            orjson.loads(b"[1, 2, 3]")
            copy.deepcopy([[1], [2]])
            json.dumps({"a": 1})

    profiler = start_profile()
    work()
    profiler.disable()
    shares = profile_figures(profiler)["share_percent_by_package"]
    assert {"orjson", "copy", "json"} <= shares.keys()
    assert sum(shares.values()) == pytest.approx(100, abs=1)
