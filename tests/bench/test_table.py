"""The table of the benchmarks: steps that are compared follow each other, and a row has figures or a reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench_stage import SHIPPED_TOKENIZER
from typer.testing import CliRunner

from benchmarks import table as benchmark
from benchmarks.__main__ import app
from benchmarks.client import BenchProcessError
from benchmarks.table import GROUPS, Row, Run, Sizes, all_rows, as_markdown
from benchmarks.variants import VARIANTS, Step

OURS, OTHER = (Step("cpu", variant, turns=5, concurrency=1, episodes=1) for variant in ("ours", "floor"))
MANY = Step("cpu", "ours", turns=20, concurrency=1, episodes=1)
FACTS = {
    "command": "python -m benchmarks table",
    "versions": {"strands-rollout": "1", "strands-agents": "2", "openai": None, "python": "3.11"},
    "machine": {"processor": "a processor", "cores": 2},
    "tokenizer": {"name": "shipped", "vocab_size": 1200},
}


def ratio(one: Any, other: Any) -> float:
    return float(one["ms"] / other["ms"])


def run_of(**changed: Any) -> Run:
    rows = [Row("a", "ours / floor", (OURS, OTHER), ratio, goal=0.5), Row("b", "20 / 5", (MANY, OURS), ratio)]
    return Run(**{"facts": FACTS, "rows": rows, "rounds": 3, "skipped": {}, **changed})


def test_each_round_begins_with_another_of_the_compared_steps() -> None:
    assert [list(run_of().plan(number)) for number in range(3)] == [
        [OURS, OTHER, MANY],
        [OTHER, OURS, MANY],
        [OURS, OTHER, MANY],
    ]


def test_plan_omits_skipped_steps_and_finished_rows() -> None:
    run = run_of(rows=[*run_of().rows, Row("c", "once", (Step("rss", "ours", 20, 1, 1),), ratio, rounds=1)])
    run.skipped[OTHER] = "no floor"
    assert [len(list(run.plan(number))) for number in range(2)] == [3, 2]


def test_row_has_the_median_and_quartiles_of_the_rounds_ratios() -> None:
    rounds = [{OURS: {"ms": ms}, OTHER: {"ms": 2.0}} for ms in (1.0, 2.0, 4.0)]
    run = run_of(measured=[*rounds, {OURS: {"ms": 9.0}}])  # interrupted in the fourth round
    row, other = run.result()["rows"]
    assert row == {
        "group": "a",
        "name": "ours / floor",
        "goal": 0.5,
        "median": 1.0,
        "quartiles": (0.5, 2.0),
        "values": [0.5, 1.0, 2.0],
    }
    assert other["skipped"] == "the run ended before this row was measured"


def test_table_says_why_a_row_has_no_figure() -> None:
    measured = [{OURS: {"ms": 1.0}, MANY: {"ms": 4.0}}]
    run = run_of(skipped={OTHER: "it needs more"}, measured=measured, facts={**FACTS, "peer": None})
    assert as_markdown(run.result()).splitlines()[2:] == [
        "|  | median | quartiles | rounds | goal |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| ours / floor | skipped: it needs more |  |  | 0.5 |",
        "| 20 / 5 | 4 | 4 to 4 | 1 |  |",
    ]


def test_failed_step_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start = [row for row in all_rows(Sizes()) if row.group == "start"]
    run, calls = run_of(rows=start), []

    def fail() -> Any:
        calls.append(1)
        raise BenchProcessError("output\nthe reason")

    monkeypatch.setattr(benchmark, "_measure_start", fail)
    benchmark.measure_all(run, SHIPPED_TOKENIZER, lambda *_step: None, lambda: None)
    assert len(calls) == 1
    assert "| import strands_rollout, ms | failed: the reason |" in as_markdown(run.result())


def test_steps_of_all_rows_are_of_known_variants() -> None:
    assert {step.variant for row in all_rows(Sizes()) for step in row.steps} <= set(VARIANTS)
    assert GROUPS == ("peer", "floor", "growth", "agents", "gateway", "workers", "memory", "lag", "start")


def test_interrupted_table_has_the_rounds_so_far(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = iter([{"help_cpu_ms": 100.0, "import_ms": 20.0, "import_generate_ms": 900.0}])

    def measure() -> Any:
        try:
            return next(figures)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(benchmark, "_measure_start", measure)
    out = tmp_path / "table.json"
    options = ["--rows", "start", "--tokenizer", str(SHIPPED_TOKENIZER), "--out", str(out)]
    result = CliRunner().invoke(app, ["table", *options])
    assert result.exit_code == 130
    assert "| strands-rollout --help, CPU, ms | 100 | 100 to 100 | 1 | 300 |" in result.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["values"] for row in rows] == [[20.0], [900.0], [100.0]]


@pytest.mark.end_to_end
def test_table_measures_the_start() -> None:
    options = ["--rows", "start", "--repeats", "2", "--quick", "--json", "--tokenizer", str(SHIPPED_TOKENIZER)]
    result = CliRunner().invoke(app, ["table", *options])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert all(len(row["values"]) == 2 and row["median"] > 0 for row in rows)
