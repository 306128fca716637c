"""`python -m experiments compare`: runs grouped into variants, and their figures."""

import json
from pathlib import Path
from typing import Any

import typer
from recorded_runs import step_records, write_run
from typer.testing import CliRunner, Result

from experiments.__main__ import compare
from experiments.comparison import Comparison, Variant, compare_runs, comparison_table, read_run


def compared(*folders: Path) -> Comparison:
    return compare_runs([read_run(folder) for folder in folders])


def only(*folders: Path) -> Variant:
    (variant,) = compared(*folders).variants
    return variant


def test_compare_groups_runs_by_variant(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / f"{rollout}-{seed}", step_records(), rollout=rollout, seed=seed, temperature=1.0)
        for seed in (1, 2)
        for rollout in ("tito", "retokenised")
    ]
    variants = compared(*folders).variants
    assert [variant.label for variant in variants] == ["rollout=tito", "rollout=retokenised"]
    runs = [[run.folder.name for run in variant.runs] for variant in variants]
    assert runs == [["tito-1", "tito-2"], ["retokenised-1", "retokenised-2"]]


def command(*arguments: Any) -> Result:
    app = typer.Typer()
    app.command()(compare)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_compare_prints_table_or_json(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(seed), step_records(kl_k3=0.5), seed=seed, summary={}) for seed in (1, 2)]
    table = command(*folders)
    assert (table.exit_code, table.stdout.rstrip("\n")) == (0, comparison_table(compared(*folders)))
    report = json.loads(command("--json", *folders).stdout)
    (variant,) = report["variants"]
    assert (variant["seeds"], variant["steps"], variant["runs"]) == ([1, 2], [3, 3], list(map(str, folders)))
    assert (variant["kl_k3_mean"], report["notes"]) == ({"mean": 0.5, "std": 0.0, "by_seed": [0.5, 0.5]}, [])
