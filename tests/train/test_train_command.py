"""`strands-rollout train` as a user runs it: a few small steps on the embedded engine, with the shipped model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments import __main__ as experiments
from strands_rollout.cli import commands
from strands_rollout.dump import read_dump
from strands_rollout.errors import ConfigError

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
pytestmark = pytest.mark.timeout(900)  # of slow runs on a busy machine
APPS = {"cli": commands.app, "experiments": experiments.app}
SMALL = ("--prompts", "4", "--samples-per-prompt", "4", "--threads", "1", "--eval-every", "100")


def command(out: Path, *options: str, held_out: Path | None = None, experiment: Sequence[str] = ()) -> list[str]:
    script = ["-m", "experiments", *experiment, "train"] if experiment else [str(REPOSITORY / "scripts/train_tiny.py")]
    few = ["--held-out", str(held_out)] if held_out else []
    return [sys.executable, *script, "--out", str(out), "--json", *few, *SMALL, *options]


def train(
    out: Path, *options: str, held_out: Path | None = None, experiment: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(out, *options, held_out=held_out, experiment=experiment),
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
    )


def environment() -> dict[str, str]:
    """Where the tests' own agents can be imported."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first of the held-out problems: the tests are not about accuracy."""
    path = tmp_path_factory.mktemp("rows") / "held_out.jsonl"
    lines = (REPOSITORY / "strands_rollout/data/demo.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:8]))
    return path


def steps_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if not name.endswith("_s")} for record in records]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, few_rows: Path) -> tuple[Path, dict[str, Any]]:
    pytest.importorskip("torch")
    out = tmp_path_factory.mktemp("train") / "run"
    done = train(out, "--steps", "3", "--seed", "4", "--updates", "2", held_out=few_rows)
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout.splitlines()[-1])


class TestARunOfThreeSteps:
    pytestmark = [pytest.mark.slow, pytest.mark.torch]  # noqa: RUF012 - pytest's own name

    def test_the_trainer_agrees_with_the_rollout_at_the_first_step(self, trained: Any) -> None:
        _, summary = trained
        assert 0 < summary["logprob_gap_max_step0"] < 1e-3
        assert summary["logprob_gap_mean_step0"] < 1e-5

    def test_the_last_line_is_the_summary(self, trained: Any) -> None:
        out, summary = trained
        assert summary == json.loads((out / "summary.json").read_text())
        assert {"accuracy_start", "accuracy_end", "logprob_gap_max_step0", "steps", "seed"} <= summary.keys()
        assert (summary["steps"], summary["episodes"], summary["seed"], summary["rollout"]) == (3, 48, 4, "tito")

    def test_each_step_is_a_line_of_the_log_under_its_own_weights(self, trained: Any) -> None:
        out, _ = trained
        records = steps_of(out)
        assert [(record["step"], record["weight_version"]) for record in records] == [(0, 0), (1, 1), (2, 2)]
        for record in records:
            assert record["completed"] + record["truncated"] == 16
            assert record["failed"] == record["aborted"] == record["staleness_max"] == 0
            assert record["logprob_gap_max"] < 1e-3  # the engine has the weights that the trainer has
            assert 0 <= record["drift_tokens"] < 0.1
        assert max(record["ratio_max"] for record in records) > 1.0

    def test_what_was_asked_and_what_it_ran_on_is_kept(self, trained: Any) -> None:
        out, _ = trained
        told = json.loads((out / "options.json").read_text())
        assert told["options"]["update"]["updates"] == 2
        assert told["versions"].keys() >= {"strands-rollout", "torch", "transformers"}

    def test_the_policy_is_a_model_folder_with_moved_weights(self, trained: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        out, _ = trained
        new, old = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
            for folder in (out / "weights", REPOSITORY / "strands_rollout/engine/checkpoint")
        )
        moved = max(float((new[name] - old[name]).abs().max()) for name in old)
        assert 1e-6 < moved < 0.1
        assert AutoTokenizer.from_pretrained(out / "weights").encode("2")

    def test_there_are_curves_where_matplotlib_is(self, trained: Any) -> None:
        pytest.importorskip("matplotlib")
        out, _ = trained
        assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.torch
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path: Path, few_rows: Path) -> None:
    pytest.importorskip("torch")
    options = ("--steps", "3", "--save-every", "1", "--updates", "2")
    whole = train(tmp_path / "whole", *options, held_out=few_rows)
    assert whole.returncode == 0, whole.stderr
    cut = tmp_path / "cut"
    process = subprocess.Popen(
        command(cut, *options, held_out=few_rows), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 2/3"):
            os.kill(process.pid, signal.SIGKILL)
            break
    process.communicate(timeout=300)
    assert not (cut / "summary.json").exists()
    resumed = train(cut, *options, held_out=few_rows)
    assert resumed.returncode == 0, resumed.stderr
    assert without_times(steps_of(cut)) == without_times(steps_of(tmp_path / "whole"))
    other = train(cut, *options, "--seed", "1", held_out=few_rows)
    assert other.returncode == 2
    assert "seed was 0 and is 1" in other.stderr


@pytest.mark.slow
@pytest.mark.torch
def test_episodes_that_older_weights_began_do_not_stop_a_run_that_goes_on(tmp_path: Path, few_rows: Path) -> None:
    pytest.importorskip("torch")
    options = ("--extra-prompts", "12", "--lr-decay", "constant", "--learning-rate", "1e-3")
    for steps in ("1", "2"):
        done = train(tmp_path, "--steps", steps, *options, held_out=few_rows)
        assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path)[1]["staleness_max"] == 1
    assert steps_of(tmp_path)[1]["logprob_gap_max"] > 1e-3


@pytest.mark.slow
@pytest.mark.torch
def test_rollouts_that_run_ahead_are_one_version_old(tmp_path: Path, few_rows: Path) -> None:
    pytest.importorskip("torch")
    done = train(tmp_path, "--steps", "3", "--async", held_out=few_rows)
    assert done.returncode == 0, done.stderr
    assert [record["staleness_max"] for record in steps_of(tmp_path)] == [0, 1, 1]
    assert [record["stale_tokens"] for record in steps_of(tmp_path)] == [0, 1, 1]


@pytest.mark.slow
@pytest.mark.torch
def test_another_agent_is_trained_by_naming_its_config_model_and_rows(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    rows = REPOSITORY / "strands_rollout/examples/shop.jsonl"
    config = tmp_path / "shop.yaml"
    dumps = f"  dump_dir: {tmp_path / 'dump'}\n  dump_samples: 8\n"
    config.write_text((REPOSITORY / "configs/shop.yaml").read_text() + dumps)
    shop = ("--config", str(config), "--model", str(REPOSITORY / "strands_rollout/engine/checkpoint"))
    out = tmp_path / "run"
    done = train(out, "--steps", "2", *shop, "--data", str(rows), held_out=rows)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["logprob_gap_max_step0"] < 1e-3
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert names == ["rollout_000000.jsonl.gz", "rollout_000001.jsonl.gz"]
    assert len(list(read_dump(tmp_path / "dump"))) == 16


def two_agents(folder: Path, **more: Any) -> Path:
    """A configuration of an agent that asks another one, each of them trained."""
    settings = {
        "agent_factory": "delegating_agent.build",
        "fan_out": True,
        "executor": {"name": "local", "isolation": "rlimits"},
        "dump_dir": str(folder / "dump"),
        **more,
    }
    path = folder / "two_agents.yaml"
    path.write_text(json.dumps({"strands_rollout": settings}))
    return path


@pytest.mark.slow
@pytest.mark.torch
def test_all_agents_of_an_episode_are_trained_also_after_a_kill(tmp_path: Path, few_rows: Path) -> None:
    pytest.importorskip("torch")
    options = ("--config", str(two_agents(tmp_path)), "--steps", "2", "--save-every", "1", "--updates", "2")
    done = train(tmp_path / "whole", *options, held_out=few_rows)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["episodes"] == 32
    assert 0 < summary["logprob_gap_max_step0"] < 1e-3
    whole = steps_of(tmp_path / "whole")
    dumped = list(read_dump(tmp_path / "dump"))
    for record in whole:
        assert record["completed"] + record["truncated"] == record["episodes"] == 16
        assert record["samples"] > 20
        assert record["logprob_gap_max"] < 1e-3
    assert len(dumped) == sum(record["samples"] for record in whole)
    kinds = [one.to_sample().metadata["strands_rollout"]["fan_out"]["kind"] for one in dumped]
    assert (kinds.count("main"), kinds.count("agent")) == (32, len(dumped) - 32)
    cut = subprocess.Popen(
        command(tmp_path / "cut", *options, held_out=few_rows),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert cut.stderr is not None
    any(line.startswith("step 1/2") for line in cut.stderr)
    cut.kill()
    cut.communicate(timeout=300)
    resumed = train(tmp_path / "cut", *options, held_out=few_rows)
    assert resumed.returncode == 0, resumed.stderr
    assert without_times(steps_of(tmp_path / "cut")) == without_times(whole)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    ("experiment", "options"), [((), ("--async",)), (("--rollout", "retokenised"), ()), ((), ("--loss-mean", "token"))]
)
def test_agents_of_an_episode_are_trained_in_every_way_that_takes_whole_episodes(
    experiment: tuple[str, ...], options: tuple[str, ...], tmp_path: Path, few_rows: Path
) -> None:
    pytest.importorskip("torch")
    config = two_agents(tmp_path)
    all_options = ("--config", str(config), "--steps", "2", *options)
    done = train(tmp_path / "run", *all_options, held_out=few_rows, experiment=experiment)
    assert done.returncode == 0, done.stderr
    assert all(record["samples"] > 20 and record["episodes"] == 16 for record in steps_of(tmp_path / "run"))


@pytest.mark.parametrize(
    ("experiment", "options", "words"),
    [
        ([], ["--extra-prompts", "2"], "partial rollouts (--extra-prompts) can't be collected of several samples"),
        (["--rollout", "openai"], [], "a chat endpoint (--rollout openai) has one agent's one history"),
    ],
)
def test_a_fan_out_is_refused_where_slime_or_an_endpoint_takes_none(
    experiment: list[str], options: list[str], words: str, tmp_path: Path
) -> None:
    for needed in ("torch", "openai"):
        pytest.importorskip(needed)
    given = [*experiment, "train", "--config", str(two_agents(tmp_path)), "--out", str(tmp_path / "run"), *options]
    done = CliRunner().invoke(APPS["experiments"], given)
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("rollout", ["retokenised", "openai"])
def test_text_pipelines_are_trained_for_comparison(rollout: str, tmp_path: Path, few_rows: Path) -> None:
    pytest.importorskip("torch")
    done = train(tmp_path, "--steps", "2", "--updates", "1", held_out=few_rows, experiment=("--rollout", rollout))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["rollout"] == rollout
    for record in steps_of(tmp_path):
        assert record["ratio_mean"] == pytest.approx(1.0, abs=1e-3)  # of the trainer's own logprobs
        assert 0 <= record["drift_tokens"] < 0.2
        assert ("logprob_gap_max" in record) == (rollout == "retokenised")
        # the episodes call a tool first, and Strands' model drops the reasoning of that turn
        assert record.get("reread_turns", 0) > 0 if rollout == "openai" else "reread_turns" not in record


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    ("ablation", "words"),
    [
        ("train-tool-tokens", "the trainer's logprobs differ from the rollout's"),
        ("shifted-logprobs", "the trainer's logprobs differ from the rollout's"),
        ("aborted-as-completed", "an unfinished one must not be trained as one that ended"),
    ],
)
def test_faulty_samples_stop_a_run_with_words(ablation: str, words: str, tmp_path: Path, few_rows: Path) -> None:
    pytest.importorskip("torch")
    options, experiment = ["--steps", "1"], ["--ablation", ablation]
    if ablation == "aborted-as-completed":
        options += ["--extra-prompts", "4"]
    done = train(tmp_path / "checked", *options, held_out=few_rows, experiment=experiment)
    assert done.returncode == 1, done.stderr
    assert words in done.stderr
    unchecked = train(tmp_path / "unchecked", *options, "--unchecked", held_out=few_rows, experiment=experiment)
    assert unchecked.returncode == 0, unchecked.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cli", "train", "--temperature", "0"], "got --temperature 0.0; expected more than 0"),
        (["cli", "train", "--async", "--extra-prompts", "2"], "leave out --extra-prompts"),
        (["cli", "train", "--loss-mean", "batch"], "expected one of sample, token"),
        (["experiments", "--rollout", "text", "train"], "'text' is not one of 'tito', 'retokenised', 'openai'"),
        (["experiments", "--ablation", "aborted-as-completed", "train"], "needs --extra-prompts"),
        (["experiments", "--rollout", "openai", "--ablation", "shifted-logprobs", "train"], "needs --rollout tito"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command_line, *given = arguments
    done = CliRunner(env={"COLUMNS": "500"}).invoke(APPS[command_line], [*given, "--out", str(tmp_path / "run")])
    assert done.exit_code == 2 or isinstance(done.exception, ConfigError)
    assert message in f"{done.output} {done.exception}"
    assert not (tmp_path / "run").exists()
