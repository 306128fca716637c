"""Runs of the launch scripts with fakes of Ray and others: what they start, stop and print."""

import os
import re
import shlex
import signal
import time
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from launch_stage import Stage, make_stage

TRAIN = "strands_qwen3_8b.sh"
# a script that does not use train.sh
OWN_SCRIPT = """set -euo pipefail
source "$(dirname "$0")/slime_launch.sh"
model_name=Foo-14B
SLIME_MODEL="${SLIME_MODEL:-qwen3-8B}"
default_gpus_per_engine=4
read_options "$@"
setting NUM_GPUS 4 "GPUs per node" count
colocated_training "Trains Foo." foo
"""


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = make_stage(tmp_path)
    stage.provide_files()
    return stage


@pytest.fixture
def with_ray(stage: Stage) -> Stage:
    stage.ray_runs.write_text("another's")
    return stage


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stage, CompletedProcess[str], str]:
    """Return a run with no setting but a submission id: its stage, its outcome, and the output of its dry run."""
    stage = make_stage(tmp_path_factory.mktemp("plain"))
    stage.provide_files()
    link = stage.root.parent / "train.sh"
    link.symlink_to(stage.root / "scripts" / TRAIN)
    shown = stage.run(TRAIN, "--dry-run", SUBMISSION_ID="one").stdout
    return stage, stage.run(str(link), SUBMISSION_ID="one"), shown


def submitted(stage: Stage) -> list[str]:
    (call,) = stage.calls_of("ray", "job", "submit")
    return call.words


def assert_refused(stage: Stage, finished: CompletedProcess[str], *words: str) -> None:
    """Check that the script failed with these words before it started anything."""
    assert finished.returncode == 1
    assert all(word in finished.stdout + finished.stderr for word in words), finished.stderr
    assert not stage.calls_of("ray", "start")
    assert not stage.calls_of("ray", "job", "submit")


def test_script_starts_and_stops_ray_also_through_symlink(plain):
    stage, finished, _ = plain
    assert finished.returncode == 0, finished.stderr
    assert len(stage.calls_of("ray", "start")) == 1
    assert not stage.ray_runs.exists()
    for words in (("ray", "stop"), ("ray", "job", "stop"), ("pkill",)):
        assert not stage.calls_of(*words)


def test_script_runs_the_checked_dry_run_command(plain) -> None:
    stage, _, shown = plain
    start, submit = (shlex.split(part.replace("\\\n", "")) for part in shown.split("\n", 1)[1].split("\n\n"))
    assert (stage.calls_of("ray", "start")[0].words, submitted(stage)) == (start[4:-1], submit[1:])
    (check,) = stage.calls_of("python3", "-m", "strands_rollout.cli", "doctor")
    assert check.stdin is not None
    assert shlex.split(check.stdin.replace("\\\n", "")) == submit[submit.index("--") + 1 :]


def test_running_ray_gets_wandb_key_in_removed_file(with_ray: Stage) -> None:
    finished = with_ray.run(TRAIN, WANDB_API_KEY="hush", WANDB_BASE_URL="https://wandb.mine:8080/x")
    assert finished.returncode == 0, finished.stderr
    assert "using the running Ray at http://127.0.0.1:8265; it keeps running after the job" in finished.stderr
    assert not with_ray.calls_of("ray", "start")
    assert with_ray.ray_runs.read_text() == "another's"
    assert not with_ray.calls_of("ray", "stop")
    (call,) = with_ray.calls_of("ray", "job", "submit")
    assert call.runtime_env is not None
    assert (call.netrc, call.netrc_mode) == ("machine wandb.mine\n  login user\n  password hush\n", "0o600")
    assert not Path(call.runtime_env["NETRC"]).exists()
    assert call.runtime_env["WANDB_BASE_URL"] == "https://wandb.mine:8080/x"
    assert call.runtime_env["PYTHONPATH"].startswith(str(with_ray.slime.parent / "Megatron-LM"))
    assert "hush" not in with_ray.all_arguments


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "WANDB_KEY"])
def test_own_ray_gets_wandb_key_from_environment(stage, name) -> None:
    finished = stage.run(TRAIN, **{name: "hush"}, FAKE_JOB_STATUS="3")
    assert finished.returncode == 3
    assert not stage.ray_runs.exists()
    assert stage.calls_of("ray", "start")[0].key == "hush"
    assert "--use-wandb" in submitted(stage)
    assert "hush" not in stage.all_arguments + finished.stdout + finished.stderr


def test_wandb_without_key_is_refused(stage: Stage) -> None:
    assert_refused(stage, stage.run(TRAIN, "--use-wandb"), "USE_WANDB is 1, but there is no key")
    (stage.root.parent / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password hush\n")
    assert stage.run(TRAIN, "--use-wandb").returncode == 0


@pytest.mark.parametrize(
    ("sent", "whose"),
    [(signal.SIGTERM, "own"), (signal.SIGINT, "own"), (signal.SIGHUP, "own"), (signal.SIGTERM, "another's")],
)
def test_terminated_script_stops_its_job_and_ray_only(stage, sent, whose) -> None:
    if whose == "another's":
        stage.ray_runs.write_text(whose)
    with stage.start(TRAIN, SUBMISSION_ID="mine", FAKE_LONG_JOB="1") as process:
        deadline = time.monotonic() + 60
        while not (stage.root.parent / "job-runs").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, sent) if sent != signal.SIGTERM else process.send_signal(sent)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + sent, output
    (stop,) = stage.calls_of("ray", "job", "stop")
    assert (stop.words[-1], stage.ray_runs.exists()) == ("mine", whose == "another's")


def test_failed_ray_start_is_an_error_and_is_cleaned_up(stage: Stage) -> None:
    finished = stage.run(TRAIN, FAKE_RAY_FAILS="1")
    assert (finished.returncode, "error: Ray did not start: no free port" in finished.stderr) == (1, True)
    assert not stage.calls_of("ray", "job", "submit")
    assert (stage.run(TRAIN, FAKE_RAY_IN_BACKGROUND="1").returncode, len(stage.calls_of("ray", "stop"))) == (0, 1)
    assert not stage.ray_runs.exists()


def test_ray_address_without_ray_is_an_error(stage: Stage) -> None:
    finished = stage.run(TRAIN, RAY_ADDRESS="10.0.0.1")
    assert_refused(stage, finished, "no Ray accepts jobs at http://10.0.0.1:8265, the address of RAY_ADDRESS=10.0.0.1")


@pytest.mark.slow  # waits for 20 s
def test_ray_without_dashboard_is_an_error(with_ray: Stage) -> None:
    finished = with_ray.run(TRAIN, FAKE_DASHBOARD="0")
    assert_refused(with_ray, finished, "a Ray runs here, but accepts no jobs at http://127.0.0.1:8265")


def test_ray_with_another_job_is_left_running(stage: Stage) -> None:
    finished = stage.run(TRAIN, FAKE_OTHER_JOB="1")
    assert finished.returncode == 0
    assert "leaving the Ray of this script running, because another job uses it" in finished.stderr
    os.kill(int(stage.ray_runs.read_text()), signal.SIGTERM)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("models/Qwen3-8B/config.json", "the model is missing: .* bash scripts/prepare_model.sh --model Qwen/Qwen3-8B"),
        ("data/dapo-math-17k.jsonl", "the training data is missing: .* python3 data_prep/dapo_math_17k.py --out"),
        ("configs/math_code.yaml", "the agent's configuration is missing"),
        ("data/gsm8k-test.jsonl", "the evaluation data is missing: .* data_prep/gsm8k.py --split test --out"),
        ("data/mine.jsonl", "the evaluation data is missing: .* docs/evaluation.md explains how to create data sets"),
    ],
)
def test_missing_file_is_reported_before_start(stage, missing, words) -> None:
    (stage.root / missing).unlink(missing_ok=True)
    finished = stage.run(TRAIN, EVAL_SETS=f"aime-2024,{Path(missing).stem}")
    assert_refused(stage, finished)
    assert re.search(words, finished.stderr), finished.stderr


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SLIME_DIR": "/nowhere"}, "SLIME_DIR is /nowhere, which has no train.py"),
        ({"SLIME_DIR": ""}, "the slime on PyPI is an unrelated package"),
        ({"FAKE_GPUS": "2"}, "found 2 GPUs (nvidia-smi -L); expected at least NUM_GPUS=8"),
        ({"FAKE_NOT_INSTALLED": "1"}, "python3 can't import strands_rollout; install it: python3 -m pip install -e"),
        ({"FAKE_CHECK_STATUS": "1"}, "math_code.yaml can't be used, see above"),
        ({"PATH": "without ray"}, "'ray' is not on the PATH"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_late_failures_are_refused_before_start(stage, environment, words) -> None:
    if "PATH" in environment:
        (stage.root.parent / "bin" / "ray").unlink()
        environment = {}
    assert_refused(stage, stage.run(TRAIN, **environment), words)


def test_eval_of_missing_checkpoint_is_refused(with_ray: Stage) -> None:
    absent = "a checkpoint in Megatron's format is missing: /runs/none/latest_checkpointed_iteration.txt"
    assert_refused(with_ray, with_ray.run("eval_aime.sh", LOAD="/runs/none"), absent)
    saved = with_ray.root / "run"
    (saved / "iter_0000019").mkdir(parents=True)
    (saved / "latest_checkpointed_iteration.txt").write_text("19")
    refused = with_ray.run("eval_aime.sh", LOAD=str(saved), CKPT_STEP="20")
    assert_refused(with_ray, refused, "iter_0000020. LOAD has: iter_0000019\n")
    (saved / "iter_0000019").rename(saved / "release")
    assert_refused(with_ray, with_ray.run("eval_aime.sh", LOAD=str(saved), CKPT_STEP="20"), "LOAD has: release\n")
    (saved / "release").rmdir()
    assert_refused(with_ray, with_ray.run("eval_aime.sh", LOAD=str(saved), CKPT_STEP="20"), "LOAD has: no checkpoint\n")
    (saved / "iter_0000019").mkdir()
    assert with_ray.run("eval_aime.sh", LOAD=str(saved), CKPT_STEP="19").returncode == 0


@pytest.mark.end_to_end
def test_typo_in_argument_or_configuration_starts_nothing(stage: Stage) -> None:
    stage.use_real_python()
    finished = stage.run(TRAIN, "--", "--rollout-temprature", "0.7", "--attention-dropuot", "0.1")
    said = "the arguments for slime have errors, see above; nothing was started"
    assert_refused(stage, finished, said, "--rollout-temperature", "--attention-dropout")

    (stage.root / "configs/math_code.yaml").write_text("strands_rollout: {max_tool_iteration: 3}")
    assert_refused(stage, stage.run(TRAIN), "did you mean 'max_tool_iterations'?")


@pytest.mark.end_to_end
def test_fan_out_is_refused_with_log_passrate(with_ray) -> None:
    with_ray.use_real_python()
    (with_ray.root / "configs/math_code.yaml").write_text("strands_rollout: {fan_out: true}")
    refused = with_ray.run(TRAIN)
    assert_refused(with_ray, refused, "slime's pass rates don't support fan-out; set LOG_PASSRATE=0")
    finished = with_ray.run(TRAIN, LOG_PASSRATE="0")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert len(with_ray.calls_of("ray", "job", "submit")) == 1


def test_model_of_another_family_gets_its_sizes(stage: Stage) -> None:
    (stage.root / "scripts/foo.sh").write_text(OWN_SCRIPT)
    finished = stage.run("foo.sh")
    assert_refused(stage, finished, "prepare_model.sh --model OWNER/Foo-14B --slime-model qwen3-8B\n")
    assert "--rollout-num-gpus-per-engine 4" in stage.run("foo.sh", "--dry-run").stdout
    assert stage.run("foo.sh", "--dry-run", SLIME_MODEL="foo-14B").returncode == 1
    finished = stage.run("eval_aime.sh", "--model", "foo/Foo-14B", "--slime-model=qwen3-8B")
    assert_refused(stage, finished, "prepare_model.sh --model foo/Foo-14B --slime-model qwen3-8B\n")
