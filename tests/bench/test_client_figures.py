"""Figures: medians over rounds, ratios round by round, tables, the loop's lag, memory, shares by package."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections import Counter
from typing import Any

import orjson
import pytest
from bench_stage import measured

from benchmarks.client import ClientOptions, all_ratios, medians
from benchmarks.measuring import LoopLag, percentile
from benchmarks.profiling import profile_figures, start_profile
from benchmarks.report import result_tables
from benchmarks.worker import array_bytes

ROUNDS = [
    *[measured("ours", cpu, round=n) for n, cpu in enumerate((10.0, 40.0, 12.0))],
    *[measured("floor", cpu, round=n) for n, cpu in enumerate((5.0, 10.0, 4.0))],
    *[measured("ours", cpu, round=n, turns=80) for n, cpu in enumerate((50.0, 120.0, 48.0))],
]


def options(**changed: Any) -> ClientOptions:
    return ClientOptions(
        **{
            "turns": (1, 80),
            "concurrency": (64,),
            "episodes": None,
            "repeats": 2,
            "variants": ("ours", "floor", "openai"),
            "measures": ("cpu", "lag", "code", "memory"),
            "tokenizer_dir": None,
            **changed,
        }
    )


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    found = {(one["ratio"], one["turns"]): one["value"] for one in all_ratios(ROUNDS)}
    assert found == {("ours / floor", 20): 3.0, ("ours: 80 turns / 20 turns", 80): 4.0}


def test_a_figure_is_the_median_of_its_rounds() -> None:
    found = {(row["variant"], row["turns"]): (row["cpu_ms_per_trajectory"], row["rounds"]) for row in medians(ROUNDS)}
    assert found == {("ours", 20): (12.0, 3), ("floor", 20): (5.0, 3), ("ours", 80): (50.0, 3)}


def test_variants_take_turns_and_another_one_begins_each_round() -> None:
    steps = list(options(measures=("cpu",), turns=(5,), variants=("ours", "floor")).steps())
    assert [(step.round, step.variant) for step in steps] == [(0, "ours"), (0, "floor"), (1, "floor"), (1, "ours")]


def test_what_takes_minutes_is_measured_once() -> None:
    variants = ("ours", "strands-sglang", "openai")
    steps = options(measures=("cpu",), turns=(5, 80), variants=variants).steps()
    rounds = Counter((step.variant, step.turns) for step in steps)
    assert [rounds[variant, 5] for variant in variants] == [2, 2, 1]
    assert [rounds[variant, 80] for variant in variants] == [2, 1, 0]


def test_the_streamed_variant_plays_any_turns_where_it_is_asked_for_them_alone() -> None:
    alone = options(measures=("cpu", "memory"), turns=(80,), variants=("openai",)).steps()
    assert [(step.kind, step.turns) for step in alone] == [("cpu", 80), ("rss", 80), ("traced", 80)]


def test_a_long_episode_of_a_slow_variant_is_played_few_times() -> None:
    steps = options(measures=("cpu",), turns=(20, 80), variants=("ours", "strands-sglang")).steps()
    episodes = {(step.variant, step.turns): step.episodes for step in steps}
    assert episodes == {
        ("ours", 20): 64,
        ("ours", 80): 64,
        ("strands-sglang", 20): 64,
        ("strands-sglang", 80): 8,
    }


@pytest.mark.parametrize(("turns", "lag", "profile"), [((1, 5, 20, 80), 5, 20), ((80,), 80, 80), ((1, 2), 2, 2)])
def test_lag_and_profile_are_of_turns_that_were_asked_for(turns: tuple[int, ...], lag: int, profile: int) -> None:
    asked = options(turns=turns, variants=("ours",), measures=("lag", "code", "profile"))
    assert [(step.kind, step.turns) for step in asked.steps()] == [
        ("lag", lag),
        ("lag", lag),
        ("profile", profile),
    ]


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


def test_episodes_that_are_asked_for_are_played() -> None:
    cpu = [step for step in options(episodes=7).steps() if step.kind == "cpu"]
    assert {step.episodes for step in cpu} == {7}


def test_the_tables_show_each_variant_and_what_ours_is_to_it() -> None:
    facts = {
        "versions": {
            "python": "3.11",
            "strands-rollout": "1",
            "strands-agents": "1",
            "strands-sglang": None,
            "openai": None,
        },
        "machine": {"processor": "a processor", "cores": 2},
        "tokenizer": {"name": "a-tokenizer", "vocab_size": 9},
        "command": "python -m benchmarks client",
        "collector": "own",
    }
    few = measured("openai", 99.0, episodes=8)
    rows = [{**row, **dict.fromkeys(_WIRE, 1.0)} for row in medians([*ROUNDS, few])]
    shown = result_tables({**facts, "medians": rows, "ratios": all_ratios(ROUNDS), "measurements": []})
    assert "tokenised again | 99 (8 at once)" in shown
    assert "| ours / floor, 20 tool turns | 64 | 3.00 | 2.00 to 4.00 | 3 | 2.30 |" in shown
    assert "| ours: 80 turns / 20 turns | 64 | 4.00 | 3.00 to 5.00 | 3 | 6.00 |" in shown
    assert "| floor: the requests alone | 5 (ours: 3.00x) |" in shown
    assert "| strands-rollout | 12 | 50 |" in shown
    assert "tokenizer a-tokenizer of 9 tokens" in shown
    assert "strands-sglang" not in shown


_WIRE = (
    "cpu_ms_per_request",
    "wall_ms_per_trajectory",
    "bytes_sent_per_trajectory",
    "bytes_received_per_trajectory",
    "client_busy_percent",
    "engine_busy_percent",
)


@pytest.mark.parametrize("settle_s", [0.0, 0.05])
async def test_a_loop_is_late_for_as_long_as_it_was_blocked_to_the_end_too(settle_s: float) -> None:
    with LoopLag() as watch:
        await asyncio.sleep(0.01)
        time.sleep(0.4)  # noqa: ASYNC251 - it is to block
        if settle_s:
            await asyncio.sleep(settle_s)
    lags = sorted(watch.lags_ms)
    assert lags[-1] >= 390
    assert sum(lag > 20 for lag in lags) >= 70  # each timer that was due meanwhile, not the last one alone
    assert sum(180 < lag < 220 for lag in lags) >= 6


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
