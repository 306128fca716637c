"""The launch scripts as they run, with fakes of Ray and the rest: what is started, what is stopped, what is said."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launch_stage import Stage, set_stage

TRAIN = "strands_qwen3_8b.sh"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = set_stage(tmp_path)
    stage.provide_files()
    return stage


@pytest.fixture
def with_ray(stage: Stage) -> Stage:
    """A Ray that somebody else started."""
    stage.ray_runs.write_text("somebody's")
    return stage


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


def submitted(stage: Stage) -> list[str]:
    (call,) = stage.calls_of("ray", "job", "submit")
    return call.words


def all_words(stage: Stage) -> str:
    return "\n".join(" ".join([call.name, *call.words]) for call in stage.calls)


def test_what_is_run_is_what_a_dry_run_prints(stage: Stage) -> None:
    shown = stage.run(TRAIN, "--dry-run", SUBMISSION_ID="one").stdout
    assert stage.run(TRAIN, SUBMISSION_ID="one").returncode == 0
    start, submit = (shlex.split(part.replace("\\\n", "")) for part in shown.split("\n", 1)[1].split("\n\n"))
    assert stage.calls_of("ray", "start")[0].words == start[4:-1]
    assert submitted(stage) == submit[1:]


def test_ray_is_started_where_none_runs_and_stopped_afterwards(stage: Stage) -> None:
    finished = stage.run(TRAIN)
    assert finished.returncode == 0, finished.stderr
    assert len(stage.calls_of("ray", "start")) == 1
    assert not stage.ray_runs.exists()
    assert not stage.calls_of("ray", "stop")
    assert not stage.calls_of("ray", "job", "stop")
    assert not stage.calls_of("pkill")


def test_a_ray_that_runs_is_used_and_left_alone(with_ray: Stage) -> None:
    finished = with_ray.run(TRAIN)
    assert finished.returncode == 0, finished.stderr
    assert "using the Ray at http://127.0.0.1:8265, and leaving it as it is" in finished.stderr
    assert not with_ray.calls_of("ray", "start")
    assert with_ray.ray_runs.read_text() == "somebody's"
    assert not with_ray.calls_of("ray", "stop")


def test_the_jobs_status_is_the_scripts_and_ray_is_stopped_all_the_same(stage: Stage) -> None:
    assert stage.run(TRAIN, FAKE_JOB_STATUS="3").returncode == 3
    assert not stage.ray_runs.exists()


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_script_that_is_ended_stops_its_job_and_its_ray(stage: Stage, sent: signal.Signals, status: int) -> None:
    with stage.start(TRAIN, SUBMISSION_ID="mine", FAKE_LONG_JOB="1") as process:
        wait_for(stage.root.parent / "job-runs")
        os.killpg(process.pid, sent) if sent != signal.SIGTERM else process.send_signal(sent)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == status, output
    (stop,) = stage.calls_of("ray", "job", "stop")
    assert stop.words[-1] == "mine"
    assert not stage.ray_runs.exists()


def test_a_script_that_is_ended_leaves_somebody_elses_ray_alone(with_ray: Stage) -> None:
    with with_ray.start(TRAIN, SUBMISSION_ID="mine", FAKE_LONG_JOB="1") as process:
        wait_for(with_ray.root.parent / "job-runs")
        process.terminate()
        process.communicate(timeout=60)
    assert len(with_ray.calls_of("ray", "job", "stop")) == 1
    assert with_ray.ray_runs.exists()


def test_a_ray_that_goes_into_the_background_is_stopped_too(stage: Stage) -> None:
    assert stage.run(TRAIN, FAKE_RAY_IN_BACKGROUND="1").returncode == 0
    assert len(stage.calls_of("ray", "stop")) == 1
    assert not stage.ray_runs.exists()


def test_a_ray_that_does_not_start_is_told_of(stage: Stage) -> None:
    finished = stage.run(TRAIN, FAKE_RAY_FAILS="1")
    assert finished.returncode == 1
    assert "error: Ray did not start: no free port" in finished.stderr
    assert not stage.calls_of("ray", "job", "submit")


@pytest.mark.parametrize("address", ["http://10.0.0.1:8265", "10.0.0.1:6379", "10.0.0.1", "ray://10.0.0.1:10001"])
def test_an_address_of_ray_names_the_place_that_takes_jobs(with_ray: Stage, address: str) -> None:
    assert with_ray.run(TRAIN, RAY_ADDRESS=address, NUM_NODES="4").returncode == 0
    words = submitted(with_ray)
    assert "--address=http://10.0.0.1:8265" in words
    assert words[words.index("--actor-num-nodes") + 1] == "4"


def test_an_address_where_no_ray_answers_is_an_error_and_none_is_started(stage: Stage) -> None:
    finished = stage.run(TRAIN, RAY_ADDRESS="10.0.0.1")
    assert finished.returncode == 1
    assert "no Ray takes jobs at http://10.0.0.1:8265, which RAY_ADDRESS=10.0.0.1 names" in finished.stderr
    assert not stage.calls_of("ray", "start")


@pytest.mark.slow  # it waits for 20 s
def test_a_ray_without_its_dashboard_is_an_error_and_no_second_one_is_started(with_ray: Stage) -> None:
    finished = with_ray.run(TRAIN, FAKE_DASHBOARD="0")
    assert finished.returncode == 1
    assert "a Ray runs here, but takes no jobs at http://127.0.0.1:8265" in finished.stderr
    assert not with_ray.calls_of("ray", "start")


def test_several_nodes_without_a_ray_are_told_how_to_start_one(stage: Stage) -> None:
    finished = stage.run(TRAIN, NUM_NODES="2")
    assert finished.returncode == 1
    assert "ray start --head --num-gpus 8" in finished.stderr
    assert "ray start --address=FIRST:6379" in finished.stderr


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "WANDB_KEY"])
def test_wandbs_key_reaches_an_own_ray_by_the_environment_and_no_command_line(stage: Stage, name: str) -> None:
    finished = stage.run(TRAIN, **{name: "hush"})
    assert finished.returncode == 0
    assert stage.calls_of("ray", "start")[0].key == "hush"
    assert "--use-wandb" in submitted(stage)
    assert "hush" not in all_words(stage) + finished.stdout + finished.stderr


def test_wandbs_key_reaches_another_ray_in_a_file_that_is_removed(with_ray: Stage) -> None:
    with_ray.run(TRAIN, WANDB_API_KEY="hush", WANDB_BASE_URL="https://wandb.mine:8080/x")
    (call,) = with_ray.calls_of("ray", "job", "submit")
    assert call.runtime_env is not None
    assert call.netrc == "machine wandb.mine\n  login user\n  password hush\n"
    assert call.netrc_mode == "0o600"
    assert not Path(call.runtime_env["NETRC"]).exists()
    assert call.runtime_env["WANDB_BASE_URL"] == "https://wandb.mine:8080/x"
    assert call.runtime_env["PYTHONPATH"].startswith(str(with_ray.slime.parent / "Megatron-LM"))
    assert "hush" not in all_words(with_ray)


def test_wandb_without_a_key_is_refused_before_anything_starts(stage: Stage) -> None:
    finished = stage.run(TRAIN, "--use-wandb")
    assert finished.returncode == 1
    assert "USE_WANDB is 1, but no key is at hand" in finished.stderr
    assert not stage.calls_of("ray")
    (stage.root.parent / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password hush\n")
    assert stage.run(TRAIN, "--use-wandb").returncode == 0


@pytest.mark.parametrize("script", ["strands_qwen3_8b", "strands_qwen3_4b", "strands_qwen3_8b_async", "eval_aime"])
def test_every_script_runs_whatever_the_others_settings_are(stage: Stage, script: str) -> None:
    if script == "strands_qwen3_4b":
        stage.provide_files(model="Qwen3-4B")
    others = {"EVAL_CONFIG": "/nowhere.yaml"} if "async" in script else {}
    others |= {"PROMPT_DATA": "/nowhere.jsonl"} if script == "eval_aime" else {}
    finished = stage.run(f"{script}.sh", **others)
    assert finished.returncode == 0, finished.stderr
    assert "--log-passrate" in submitted(stage)


def test_a_connection_that_ends_does_not_end_the_job(stage: Stage) -> None:
    finished = stage.run(TRAIN, FAKE_CONNECTION_ENDS="1")
    assert finished.returncode == 0
    assert len(stage.calls_of("ray", "job", "logs")) == 1
    assert not stage.calls_of("ray", "job", "stop")


def test_a_ray_that_dies_under_a_job_is_a_failure(with_ray: Stage) -> None:
    finished = with_ray.run(TRAIN, FAKE_RAY_DIES="1")
    assert finished.returncode == 1
    assert "Ray no longer tells of the job" in finished.stderr


def test_a_ray_on_which_another_job_runs_is_left(stage: Stage) -> None:
    finished = stage.run(TRAIN, FAKE_OTHER_JOB="1")
    assert finished.returncode == 0
    assert "leaving the Ray that was started, since another job runs on it" in finished.stderr
    assert stage.ray_runs.exists()
    os.kill(int(stage.ray_runs.read_text()), signal.SIGTERM)


def test_fan_out_is_refused_with_slimes_pass_rates(stage: Stage) -> None:
    stage.use_real_python()
    (stage.root / "configs/math_code.yaml").write_text("strands_rollout: {fan_out: true}")
    finished = stage.run(TRAIN)
    assert finished.returncode == 1
    assert "slime's pass rates take no fan-out; set LOG_PASSRATE=0" in finished.stderr
    assert stage.run(TRAIN, LOG_PASSRATE="0").returncode == 0


def test_a_script_may_be_called_through_a_link(with_ray: Stage) -> None:
    link = with_ray.root.parent / "train.sh"
    link.symlink_to(with_ray.root / "scripts" / TRAIN)
    finished = subprocess.run(
        ["bash", str(link), "--dry-run"], env=with_ray.environment(), capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr


def test_without_a_key_wandb_is_off(stage: Stage) -> None:
    stage.run(TRAIN)
    assert not [word for word in submitted(stage) if word.startswith(("--use-wandb", "--wandb"))]


def test_wandb_can_be_left_off_with_a_key_and_used_offline_without_one(with_ray: Stage) -> None:
    with_ray.run(TRAIN, WANDB_API_KEY="hush", USE_WANDB="0")
    with_ray.run(TRAIN, WANDB_MODE="offline")
    off, offline = (call.words for call in with_ray.calls_of("ray", "job", "submit"))
    assert "--use-wandb" not in off
    assert "--use-wandb" in offline
    assert '"WANDB_MODE": "offline"' in " ".join(offline)


def test_a_run_goes_on_from_where_it_saves(with_ray: Stage) -> None:
    with_ray.run(TRAIN)
    words = submitted(with_ray)
    assert words[words.index("--load") + 1] == words[words.index("--save") + 1]


def test_no_real_run_goes_on_from_a_smoke_run(with_ray: Stage) -> None:
    with_ray.run(TRAIN, "--smoke", SAVE_DIR="/runs/one")
    with_ray.run(TRAIN, SAVE_DIR="/runs/one")
    smoke, real = (call.words for call in with_ray.calls_of("ray", "job", "submit"))
    assert "--load" not in smoke
    assert smoke[smoke.index("--save") + 1] == "/runs/one-smoke"
    assert real[real.index("--load") + 1] == "/runs/one"
    assert smoke[smoke.index("--num-rollout") + 1] == "2"
    assert "--dynamic-sampling-filter-path" not in smoke


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("models/Qwen3-8B/config.json", "the model is missing: .* bash scripts/prepare_model.sh --model Qwen/Qwen3-8B"),
        ("models/Qwen3-8B_torch_dist/latest_checkpointed_iteration.txt", "in Megatron's format is missing"),
        ("data/dapo-math-17k.jsonl", "the training data is missing: .* python3 data_prep/dapo_math_17k.py --out"),
        ("data/aime-2024.jsonl", "the evaluation data is missing: .* python3 data_prep/aime_2024.py --out"),
        ("configs/math_code.yaml", "the agent's configuration is missing"),
    ],
)
def test_a_missing_file_is_told_of_with_its_remedy_before_anything_starts(
    stage: Stage, missing: str, words: str
) -> None:
    (stage.root / missing).unlink()
    finished = stage.run(TRAIN)
    assert finished.returncode == 1
    assert subprocess.run(["grep", "-qE", words], input=finished.stderr, text=True).returncode == 0, finished.stderr
    assert not stage.calls_of("ray")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SLIME_DIR": "/nowhere"}, "SLIME_DIR is /nowhere, which has no train.py"),
        ({"SLIME_DIR": ""}, "the slime of PyPI is an unrelated package"),
        ({"FAKE_GPUS": "2"}, "found 2 GPUs (nvidia-smi -L), expected NUM_GPUS=8"),
        ({"FAKE_NOT_INSTALLED": "1"}, "python3 can't import strands_rollout; install it: python3 -m pip install -e"),
        ({"FAKE_CHECK_STATUS": "1"}, "math_code.yaml can't be used, see above"),
        ({"EVAL_CONFIG": "/nowhere.yaml"}, "the evaluation's configuration is missing: /nowhere.yaml"),
    ],
)
def test_what_would_fail_minutes_later_is_refused_at_once(
    stage: Stage, environment: dict[str, str], words: str
) -> None:
    finished = stage.run(TRAIN, **environment)
    assert finished.returncode == 1
    assert words in finished.stderr
    assert not stage.calls_of("ray")


def test_the_arguments_are_checked_before_anything_starts(stage: Stage) -> None:
    stage.run(TRAIN, "--", "--lr", "2e-6")
    (check,) = stage.calls_of("python3", "-m", "strands_rollout.cli", "doctor")
    assert check.stdin is not None
    assert shlex.split(check.stdin.replace("\\\n", "")) == submitted(stage)[submitted(stage).index("--") + 1 :]


def test_an_evaluation_of_a_checkpoint_that_is_not_there_is_refused(stage: Stage) -> None:
    finished = stage.run("eval_aime.sh", LOAD="/runs/none")
    assert (
        "a checkpoint in Megatron's format is missing: /runs/none/latest_checkpointed_iteration.txt" in finished.stderr
    )
    (stage.root / "run" / "iter_0000019").mkdir(parents=True)
    (stage.root / "run" / "latest_checkpointed_iteration.txt").write_text("19")
    finished = stage.run("eval_aime.sh", LOAD=str(stage.root / "run"), CKPT_STEP="20")
    assert "iter_0000020. There are: iter_0000019" in finished.stderr
    assert not stage.calls_of("ray")
    assert stage.run("eval_aime.sh", LOAD=str(stage.root / "run"), CKPT_STEP="19").returncode == 0


def test_without_ray_the_script_says_where_it_is(stage: Stage) -> None:
    (stage.root.parent / "bin" / "ray").unlink()
    finished = stage.run(TRAIN)
    assert finished.returncode == 1
    assert "no 'ray' on the PATH" in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--", "--rollout-temprature", "0.7"], "--rollout-temperature"),
        (["--", "--attention-dropuot", "0.1"], "--attention-dropout"),
    ],
    ids=["slime's", "Megatron's"],
)
def test_a_typo_in_an_argument_of_slime_starts_nothing(stage: Stage, arguments: list[str], words: str) -> None:
    stage.use_real_python()
    finished = stage.run(TRAIN, *arguments)
    assert finished.returncode == 1
    assert words in finished.stdout + finished.stderr
    assert "an argument is not slime's, see above; nothing was started" in finished.stderr
    assert not stage.calls_of("ray")


def test_a_typo_in_the_configuration_starts_nothing(stage: Stage) -> None:
    stage.use_real_python()
    (stage.root / "configs/math_code.yaml").write_text("strands_rollout: {max_tool_iteration: 3}")
    finished = stage.run(TRAIN)
    assert finished.returncode == 1
    assert "did you mean 'max_tool_iterations'?" in finished.stderr
    assert not stage.calls_of("ray")


def test_all_is_well_with_the_real_checks(stage: Stage) -> None:
    stage.use_real_python()
    finished = stage.run(TRAIN)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert len(stage.calls_of("ray", "job", "submit")) == 1
