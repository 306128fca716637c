"""Training runs side by side: what is one variant, what its figures are, and what the reader is told."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import typer
from recorded_runs import records, write_run
from typer.testing import CliRunner, Result

from experiments.__main__ import compare
from experiments.comparison import Comparison, Variant, compare_runs, comparison_table, read_run
from strands_rollout.errors import ConfigError
from strands_rollout.train.curves import draw_comparison


def compared(*folders: Path) -> Comparison:
    return compare_runs([read_run(folder) for folder in folders])


def only(*folders: Path) -> Variant:
    (variant,) = compared(*folders).variants
    return variant


def test_runs_that_differ_in_their_seed_alone_are_one_variant(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / f"{rollout}-{seed}", records(), rollout=rollout, seed=seed, temperature=1.0)
        for seed in (1, 2)
        for rollout in ("tito", "retokenised")
    ]
    variants = compared(*folders).variants
    assert [variant.label for variant in variants] == ["rollout=tito", "rollout=retokenised"]
    runs = [[run.folder.name for run in variant.runs] for variant in variants]
    assert runs == [["tito-1", "tito-2"], ["retokenised-1", "retokenised-2"]]


def test_a_label_has_each_option_that_differs_nested_and_missing_ones_too(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", records(), seed=1, rollout="tito", update={"kl": None, "lr": 0.001}, steps=3)
    second = write_run(tmp_path / "b", records(), seed=1, rollout="tito", update={"kl": 0.1, "lr": 0.001}, old=True)
    assert [variant.label for variant in compared(first, second).variants] == [
        "update.kl=null, steps=3, old=-",
        "update.kl=0.1, steps=-, old=true",
    ]


def test_a_seed_counts_once(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, records(), seed=7, rollout="tito") for name in "ab"]
    with pytest.raises(ConfigError, match=r"got 2 runs of all with seed 7; expected one of each seed"):
        compared(*folders)


def test_figures_have_mean_and_sample_deviation_over_seeds(tmp_path: Path) -> None:
    by_seed = {1: 0.001, 2: 0.002, 3: 0.006}
    folders = [
        write_run(tmp_path / str(seed), records(4, kl_k3=lambda step, kl=kl: kl * step), seed=seed)
        for seed, kl in by_seed.items()
    ]
    spread = only(*folders).figures["kl_k3_mean"]
    own = [1.5 * kl for kl in by_seed.values()]
    assert spread.by_seed == pytest.approx(own)
    assert (spread.mean, spread.std) == (pytest.approx(0.0045), pytest.approx(statistics.stdev(own)))
    assert only(*folders).figures["kl_k3_max"].mean == pytest.approx(0.009)
    assert only(folders[0]).figures["kl_k3_mean"].std is None


def test_accuracies_are_those_measured_and_the_summarys_at_the_end(tmp_path: Path) -> None:
    steps = records(4, held_out=[0.61, 0.97, 0.8])
    running = only(write_run(tmp_path / "a", steps, seed=1)).figures
    finished = only(write_run(tmp_path / "b", steps, seed=1, summary={"accuracy_end": 0.5})).figures
    late = write_run(tmp_path / "c", records(5, held_out=[0.6]), seed=1, summary={"accuracy_end": 0.95})
    without_start = [{**record, **({"held_out_accuracy": 0.8} if record["step"] == 2 else {})} for record in records(4)]
    begun_later = only(write_run(tmp_path / "d", without_start, seed=1)).figures
    names = ("accuracy_start", "accuracy_end", "accuracy_best", "step_at_goal")
    assert [running[name].mean for name in names] == [0.61, 0.8, 0.97, 1]
    assert [finished[name].mean for name in names] == [0.61, 0.5, 0.97, 1]
    assert [only(late).figures[name].mean for name in names] == [0.6, 0.95, 0.95, 5]
    assert [begun_later[name].mean for name in names[:2]] == [None, 0.8]
    assert read_run(late).points[-1] == {"step": 5, "held_out_accuracy": 0.95}


def test_gap_drift_ratios_and_time_are_read_from_the_steps(tmp_path: Path) -> None:
    steps = records(
        2,
        logprob_gap_max=lambda step: (2e-5, 0.3)[step],
        drift_tokens=lambda step: (0.0, 0.02)[step],
        drift_episodes=0.25,
        ratio_min=lambda step: (0.9, 1e-3)[step],
        ratio_max=lambda step: (1.1, 40.0)[step],
        rollout_s=20.0,
        train_s=8.0,
        sync_s=1.0,
        eval_s=1.0,
    )
    figures = only(write_run(tmp_path / "a", steps, seed=1)).figures
    found = {name: spread.mean for name, spread in figures.items() if spread.mean is not None}
    assert found == {
        "logprob_gap_max_step0": 2e-5,
        "logprob_gap_max": 0.3,
        "drift_tokens_mean": 0.01,
        "drift_episodes_mean": 0.25,
        "ratio_min": 1e-3,
        "ratio_max": 40.0,
        "minutes": 1.0,
    }


def test_the_reader_is_told_what_is_unfinished_not_finite_and_of_another_commit(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", records(3, loss=lambda step: (0.1, float("nan"))[step > 0]), seed=1, wandb=True)
    second = write_run(tmp_path / "b", records(), seed=2, summary={"accuracy_end": 0.9}, commit="77aa", wandb=False)
    assert only(first, second).label == "all", "how a run is logged makes no variant"
    assert compared(first, second).notes == [
        f"{first} is not finished: 3 steps",
        f"{first}: loss is no finite number in 2 of 3 steps",
        "the runs differ in commit: 4d1c, 77aa",
    ]
    assert comparison_table(compared(first, second)).endswith("\n- the runs differ in commit: 4d1c, 77aa")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("options.json", None, "can't read .*options.json: No such file.*expected the folder of a training run"),
        ("options.json", "{", "options.json is no JSON"),
        ("options.json", "[]", "options.json holds list; expected an object"),
        ("options.json", "{}", "options.json has no options"),
        ("steps.jsonl", "", "steps.jsonl is empty"),
        ("steps.jsonl", None, "can't read .*steps.jsonl"),
        ("summary.json", "3", "summary.json holds int"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, file: str, content: str | None, words: str) -> None:
    folder = write_run(tmp_path / "a", records(), seed=1, summary={})
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_run(folder)


def command(*arguments: Any) -> Result:
    app = typer.Typer()
    app.command()(compare)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_prints_the_table_or_the_json(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(seed), records(kl_k3=0.5), seed=seed, summary={}) for seed in (1, 2)]
    table = command(*folders)
    assert (table.exit_code, table.stdout.rstrip("\n")) == (0, comparison_table(compared(*folders)))
    told = json.loads(command("--json", *folders).stdout)
    (variant,) = told["variants"]
    assert (variant["seeds"], variant["steps"], variant["runs"]) == ([1, 2], [3, 3], list(map(str, folders)))
    assert variant["kl_k3_mean"] == {"mean": 0.5, "std": 0.0, "by_seed": [0.5, 0.5]}
    assert told["notes"] == []


def test_the_command_refuses_a_plot_that_it_can_not_write(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", records(kl_k3=0.5), seed=1)
    other = command("--plot", tmp_path / "curves.pdf", folder)
    assert isinstance(other.exception, ConfigError)
    assert "expected a file that ends in .png" in str(other.exception)
    pytest.importorskip("matplotlib")
    missing = command("--plot", tmp_path / "missing" / "curves.png", folder)
    assert isinstance(missing.exception, ConfigError)
    assert "No such file or directory; choose another --plot" in str(missing.exception)


def test_the_command_draws_the_curves_to_their_end(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = write_run(tmp_path / "a", records(held_out=[0.6]), seed=1, summary={"accuracy_end": 0.95})
    assert command("--plot", tmp_path / "curves.png", folder).exit_code == 0
    draw_comparison({"all": [read_run(folder).points]}, tmp_path / "expected.png")
    assert (tmp_path / "curves.png").read_bytes() == (tmp_path / "expected.png").read_bytes()
