"""`strands-rollout train` as a user runs it: a few small steps on the embedded engine, with the shipped model."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments import __main__ as experiments
from strands_rollout.cli import commands
from strands_rollout.dump import read_dump
from strands_rollout.errors import ConfigError

pytest.importorskip("torch")

REPOSITORY = Path(__file__).parents[2]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]  # for a busy machine
APPS = {"cli": commands.app, "experiments": experiments.app}
SMALL = ("--prompts", "4", "--samples-per-prompt", "4", "--threads", "1", "--eval-every", "100")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}


def command(out: Path, *options: str, held_out: Path | None = None, experiment: Sequence[str] = ()) -> list[str]:
    script = ["-m", "experiments", *experiment, "train"] if experiment else [str(REPOSITORY / "scripts/train_tiny.py")]
    few = ["--held-out", str(held_out)] if held_out else []
    return [sys.executable, *script, "--out", str(out), "--json", *few, *SMALL, *options]


def train(out: Path, *options: str, code: int = 0, **more: Any) -> subprocess.CompletedProcess[str]:
    arguments = command(out, *options, **more)
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == code, done.stderr
    return done


def killed(out: Path, *options: str, after: str, held_out: Path) -> None:
    arguments = command(out, *options, held_out=held_out)
    with subprocess.Popen(
        arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stderr is not None
        assert any(line.startswith(after) for line in process.stderr)
        process.kill()


def summary_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the first held-out problems to a file; few suffice, because accuracy does not matter here."""
    path = tmp_path_factory.mktemp("rows") / "held_out.jsonl"
    lines = (REPOSITORY / "strands_rollout/data/demo.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:8]))
    return path


def steps_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if not name.endswith("_s")} for record in records]


@pytest.mark.slow
def test_train_writes_log_options_policy_and_curves(tmp_path, few_rows):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = train(tmp_path, "--steps", "3", "--seed", "4", "--updates", "2", held_out=few_rows)
    summary = summary_of(done)
    assert summary["samples"] == str(tmp_path / "samples")
    assert len(list((tmp_path / "samples").iterdir())) == 3
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert {"accuracy_start", "accuracy_end"} <= summary.keys()
    assert (summary["steps"], summary["episodes"], summary["seed"], summary["rollout"]) == (3, 48, 4, "tito")
    assert 0 < summary["logprob_gap_max_step0"] < 1e-3, "the trainer's logprobs agree with the rollout's"
    assert summary["logprob_gap_mean_step0"] < 1e-5
    records = steps_of(tmp_path)
    assert [(record["step"], record["weight_version"]) for record in records] == [(0, 0), (1, 1), (2, 2)]
    for record in records:
        assert record["completed"] + record["truncated"] == 16
        assert record["failed"] == record["aborted"] == record["staleness_max"] == 0
        assert record["logprob_gap_max"] < 1e-3, "the engine has the trainer's weights"
        assert 0 <= record["drift_tokens"] < 0.1
    assert [record.get("mismatch_tokens") for record in records] == [0, None, None], "compared on the first step only"
    assert max(record["ratio_max"] for record in records) > 1.0
    recorded = json.loads((tmp_path / "options.json").read_text())
    assert recorded["options"]["update"]["updates"] == 2
    assert recorded["versions"].keys() >= {"strands-rollout", "torch", "transformers"}
    new, old = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (tmp_path / "weights", REPOSITORY / "strands_rollout/engine/checkpoint")
    )
    moved = max(float((new[name] - old[name]).abs().max()) for name in old)
    assert 1e-6 < moved < 0.1
    assert AutoTokenizer.from_pretrained(tmp_path / "weights").encode("2")
    if find_spec("matplotlib"):
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_train_resumes_killed_run_identically(tmp_path, few_rows):
    options = ("--steps", "3", "--save-every", "1", "--updates", "2", "--set", "mismatch_check=every_step")
    train(tmp_path / "whole", *options, held_out=few_rows)
    cut = tmp_path / "cut"
    killed(cut, *options, after="step 2/3", held_out=few_rows)
    train(cut, *options, held_out=few_rows)
    assert without_times(steps_of(cut)) == without_times(steps_of(tmp_path / "whole"))
    other = train(cut, *options, "--seed", "1", held_out=few_rows, code=2)
    assert "seed was 0 and is 1" in other.stderr


@pytest.mark.slow
def test_train_continues_episodes_of_older_weights(tmp_path, few_rows):
    options = ("--extra-prompts", "12", "--lr-decay", "constant", "--learning-rate", "1e-3")
    for steps in ("1", "2"):
        train(tmp_path, "--steps", steps, *options, held_out=few_rows)
    assert steps_of(tmp_path)[1]["staleness_max"] == 1
    assert steps_of(tmp_path)[1]["logprob_gap_max"] > 1e-3
    assert [record["mismatch_tokens"] for record in steps_of(tmp_path)] == [0, 0], "compared after each start"


@pytest.mark.slow
def test_train_async_rollouts_are_one_version_old(tmp_path, few_rows):
    train(tmp_path, "--steps", "3", "--async", held_out=few_rows)
    assert [record["staleness_max"] for record in steps_of(tmp_path)] == [0, 1, 1]
    assert [record["stale_tokens"] for record in steps_of(tmp_path)] == [0, 1, 1]


@pytest.mark.slow
def test_train_other_config_model_rows_and_reward(tmp_path):
    rows = REPOSITORY / "strands_rollout/examples/shop.jsonl"
    config = tmp_path / "shop.yaml"
    dumps = f"  dump_dir: {tmp_path / 'dump'}\n  dump_samples: 8\n"
    config.write_text((REPOSITORY / "configs/shop.yaml").read_text() + dumps)
    shop = ("--config", str(config), "--model", str(REPOSITORY / "strands_rollout/engine/checkpoint"))
    out = tmp_path / "run"
    score = "def score(response):\n    return {'score': len(response), 'words': len(response.split())}\n"
    (tmp_path / "reward.py").write_text(score)
    done = train(out, "--steps", "2", *shop, "--data", str(rows), "--reward", "reward.score", held_out=rows)
    assert summary_of(done)["logprob_gap_max_step0"] < 1e-3
    assert min(steps_of(out)[0]["parts/words"], summary_of(done)["held_out_reward_end"]) > 0
    parts = [summary_of(done)[f"held_out_parts_{when}"]["words"] for when in ("start", "end")]
    assert steps_of(out)[0]["held_out_parts/words"] == parts[0] > 0
    assert parts[1] > 0
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert names == ["rollout_000000.jsonl.gz", "rollout_000001.jsonl.gz"]
    assert len(list(read_dump(tmp_path / "dump"))) == 16


def test_train_refuses_fan_out_with_extra_prompts(tmp_path):
    config = tmp_path / "fan_out.yaml"
    config.write_text("strands_rollout: {fan_out: true}\n")
    given = ["train", "--config", str(config), "--out", str(tmp_path / "run"), "--extra-prompts", "2"]
    done = CliRunner().invoke(commands.app, given)
    assert isinstance(done.exception, ConfigError)
    assert "got the setting fan_out and --extra-prompts; expected only one of them" in str(done.exception)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ablation", "message"),
    [
        ("train-tool-tokens", "the trainer's logprobs differ from the rollout's"),
        ("shifted-logprobs", "the trainer's logprobs differ from the rollout's"),
        ("aborted-as-completed", "expected aborted or failed, which is not trained"),
    ],
)
def test_train_stops_at_faulty_samples(ablation, message, tmp_path, few_rows):
    options, experiment = ["--steps", "1"], ["--ablation", ablation]
    if ablation == "aborted-as-completed":
        options += ["--extra-prompts", "4"]
    given = {"held_out": few_rows, "experiment": experiment}
    assert message in train(tmp_path / "checked", *options, code=1, **given).stderr
    train(tmp_path / "unchecked", *options, "--unchecked", **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cli", "train", "--temperature", "0"], "got --temperature 0.0; expected more than 0"),
        (["cli", "train", "--reward", "no.such"], "reward: can't load 'no.such': there is no module 'no'"),
        (["cli", "train", "--async", "--extra-prompts", "2"], "leave out --extra-prompts"),
        (["experiments", "--rollout", "text", "train"], "'text' is not one of 'tito', 'retokenised', 'openai'"),
        (["experiments", "--ablation", "aborted-as-completed", "train"], "needs --extra-prompts"),
    ],
)
def test_train_refuses_contradictory_options(arguments, message, tmp_path):
    command_line, *given = arguments
    done = CliRunner(env={"COLUMNS": "500"}).invoke(APPS[command_line], [*given, "--out", str(tmp_path / "run")])
    assert done.exit_code == 2 or isinstance(done.exception, ConfigError)
    assert message in f"{done.output} {done.exception}"
    assert not (tmp_path / "run").exists()
