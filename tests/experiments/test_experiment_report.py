"""The experiment's report agrees with its committed logs.

After `experiments/run.sh FOLDER collect`, write its tables again:

    UPDATE_GOLDEN=1 bash scripts/test.sh tests/experiments/test_experiment_report.py
"""

import os
from pathlib import Path

import pytest

from experiments.comparison import RecordedRun, compare_runs, comparison_table, read_run

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
REPORT = EXPERIMENTS / "README.md"
TABLES = {
    "shipped": ("tito-[0-9]", "retokenised-[0-9]", "openai-[0-9]"),
    "respelled": ("respelled-tito-*", "respelled-retokenised-*"),
    "long": ("long-*",),
    "faults": ("tito-1", "tool-output-rewarded-1"),
}


def runs_of(name: str) -> list[RecordedRun]:
    folders = [folder for pattern in TABLES[name] for folder in sorted((EXPERIMENTS / "runs").glob(pattern))]
    return [read_run(folder) for folder in folders]


def drift_table() -> str:
    """Return the table of drift, with one row per run."""
    rows = [
        "| policy, temperature | accuracy | drifted tokens | episodes with any | KL (k3) |",
        "|---|---:|---:|---:|---:|",
    ]
    for folder in sorted((EXPERIMENTS / "runs").glob("drift-*")):
        (step,) = read_run(folder).steps
        shares = [f"{step[key]:.2%}" for key in ("held_out_accuracy", "drift_tokens", "drift_episodes")]
        name = folder.name.removeprefix("drift-").replace("-", ", ")
        rows.append(f"| {' | '.join([name, *shares, format(step['kl_k3'], '.2g')])} |")
    return "\n".join(rows)


@pytest.mark.parametrize("name", [*TABLES, "drift"])
def test_report_tables_match_their_runs(name: str) -> None:
    rows = drift_table() if name == "drift" else comparison_table(compare_runs(runs_of(name)))
    table = f"<!-- {name} -->\n{rows}\n<!-- end of {name} -->"
    text = REPORT.read_text(encoding="utf-8")
    if os.environ.get("UPDATE_GOLDEN"):
        before, _, rest = text.partition(f"<!-- {name} -->")
        text = before + table + rest.partition(f"<!-- end of {name} -->")[2]
        REPORT.write_text(text, encoding="utf-8")
    assert table in text


def test_report_runs_are_finished_and_of_one_commit() -> None:
    folders = sorted((EXPERIMENTS / "runs").iterdir())
    runs = [read_run(folder) for folder in folders]
    assert all(run.summary is not None for run in runs)
    (commit,) = {run.provenance["commit"] for run in runs}
    assert len(commit) == 40
    for file in (EXPERIMENTS / "runs").rglob("*.json*"):
        assert '"/' not in file.read_text(encoding="utf-8"), file
