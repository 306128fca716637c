"""`eval_aime.sh --watch`: one evaluation for each new checkpoint of a run, in the run's own wandb run."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launch_stage import Call, Stage, make_stage, value_of

EVAL = "eval_aime.sh"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = make_stage(tmp_path)
    stage.provide_files()
    stage.ray_runs.write_text("another's")
    return stage


def save(folder: Path, step: int) -> None:
    """Save a checkpoint as Megatron does; the tracker file is written last."""
    (folder / f"iter_{step:07d}").mkdir(parents=True)
    (folder / f"iter_{step:07d}" / "weights.distcp").write_text(str(step))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))


def submitted(stage: Stage) -> list[Call]:
    return stage.calls_of("ray", "job", "submit")


def test_watch_evaluates_the_newest_checkpoint_once(stage: Stage) -> None:
    run = stage.root / "a run"
    save(run, 19)
    save(run, 39)
    watch = ["--watch", str(run), "--watch-until=39", "--eval-samples", "2"]
    finished = stage.run(EVAL, *watch, "--", "--seed", "7")
    assert finished.returncode == 0, finished.stderr
    (call,) = submitted(stage)
    assert value_of(call.words, "--load") == f"{run}/evaluations/held-39"
    assert (value_of(call.words, "--ckpt-step"), value_of(call.words, "--n-samples-per-eval-prompt")) == ("39", "2")
    assert call.words[-2:] == ["--seed", "7"]
    assert call.runtime_env is not None
    assert call.runtime_env["STRANDS_ROLLOUT_EVAL_STEP"] == "39"
    assert sorted(path.name for path in (run / "evaluations").iterdir()) == ["step-39"]
    assert (run / "iter_0000039" / "weights.distcp").read_text() == "39"
    again = stage.run(EVAL, *watch)
    assert (again.returncode, len(submitted(stage))) == (0, 1)


def test_watch_logs_to_the_trainings_wandb_run(stage: Stage) -> None:
    run = stage.root / "run"
    save(run, 19)
    (run / "wandb-run-id").write_text("abc")
    finished = stage.run(EVAL, "--watch", str(run), "--watch-until", "19", WANDB_API_KEY="hush")
    assert finished.returncode == 0, finished.stderr
    (call,) = submitted(stage)
    assert call.runtime_env is not None
    names = ("WANDB_RUN_ID", "WANDB_PROJECT", "STRANDS_ROLLOUT_EVAL_SHARED", "STRANDS_ROLLOUT_EVAL_STEP")
    assert [call.runtime_env[name] for name in names] == ["abc", "strands-rollout", "1", "19"]
    assert "--use-wandb" not in call.words
    assert call.netrc is not None
    assert "hush" in call.netrc
    assert "hush" not in stage.all_arguments


def test_watch_of_a_training_without_wandb_has_a_run_of_its_own(stage: Stage) -> None:
    run = stage.root / "run"
    save(run, 19)
    stage.run(EVAL, "--watch", str(run), "--watch-until", "19", WANDB_API_KEY="hush")
    (call,) = submitted(stage)
    assert call.runtime_env is not None
    assert call.runtime_env["WANDB_RUN_ID"] == (run / "evaluations/wandb-run-id").read_text() != ""
    assert call.runtime_env["STRANDS_ROLLOUT_EVAL_SHARED"] == "0"


def test_async_training_keeps_its_wandb_run_when_it_resumes(stage: Stage) -> None:
    ids = set()
    for _ in range(2):
        finished = stage.run("strands_qwen3_8b_async.sh", SAVE_DIR=str(stage.root / "run"), WANDB_API_KEY="hush")
        assert finished.returncode == 0, finished.stderr
        environment = submitted(stage)[-1].runtime_env
        assert environment is not None
        assert environment["WANDB_RESUME"] == "allow"
        ids.add(environment["WANDB_RUN_ID"])
    assert ids == {(stage.root / "run/wandb-run-id").read_text()}
    assert len(ids.pop()) == 12


def test_watch_skips_a_checkpoint_that_fails_twice(stage: Stage) -> None:
    run = stage.root / "run"
    save(run, 19)
    finished = stage.run(EVAL, "--watch", str(run), "--watch-until", "19", FAKE_JOB_STATUS="3")
    assert (finished.returncode, len(submitted(stage))) == (1, 2)
    assert "the evaluation of step 19 failed twice (exit status 3) and is skipped" in finished.stderr
    assert (run / "evaluations/step-19").read_text() == "failed\n"


def test_watch_until_needs_watch(stage: Stage) -> None:
    finished = stage.run(EVAL, "--watch-until", "19", "--dry-run")
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "got WATCH_UNTIL without WATCH; expected both" in finished.stderr


def test_terminated_watch_stops_its_evaluation(stage: Stage) -> None:
    run = stage.root / "run"
    save(run, 19)
    with stage.start(EVAL, "--watch", str(run), FAKE_LONG_JOB="1") as process:
        deadline = time.monotonic() + 60
        while not (stage.root.parent / "job-runs").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert len(stage.calls_of("ray", "job", "stop")) == 1
    assert list((run / "evaluations").iterdir()) == []


def test_watch_dry_run_starts_nothing(stage: Stage) -> None:
    run = stage.root / "run"
    save(run, 19)
    before = stage.files()
    finished = stage.run(EVAL, "--dry-run", "--watch", str(run))
    assert (finished.returncode, finished.stderr, stage.files()) == (0, "", before)
    assert f"# for each new checkpoint of {run}\n" in finished.stdout
    assert "--ckpt-step 19" in finished.stdout
    assert stage.run(EVAL, "--watch", str(stage.root / "none")).returncode == 1


def put_command(stage: Stage, name: str, body: str) -> None:
    path = stage.root.parent / "bin" / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@contextmanager
def watching(stage: Stage, run: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start a watching script in the background, and end it even if the test fails."""
    with stage.start(EVAL, "--watch", str(run), **environment) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_watch_counts_failures_of_each_checkpoint(stage: Stage) -> None:
    run = stage.root / "run"
    save(run, 19)
    # the run saves step 39 while the evaluation of step 19 fails; the evaluation of step 39 fails once
    put_command(
        stage,
        "sleep",
        f"""[[ -e '{run}/iter_0000039' ]] && touch '{run}/slept' && exec /bin/sleep 0.02
        mkdir '{run}/iter_0000039' && echo 39 >'{run}/latest_checkpointed_iteration.txt'""",
    )
    ray = (stage.root.parent / "bin/ray").read_text()
    running = f"number = 3 if not pathlib.Path('{run}/slept').exists() else 0\n"
    put_body = ray.replace('if words[:2] == ["job", "status"]:', running + 'if words[:2] == ["job", "status"]:')
    (stage.root.parent / "bin/ray").write_text(put_body)
    finished = stage.run(EVAL, "--watch", str(run), "--watch-until", "39")
    assert finished.returncode == 0, finished.stderr
    assert [value_of(call.words, "--ckpt-step") for call in submitted(stage)] == ["19", "39", "39"]
    assert "failed twice" not in finished.stderr
    assert {path.name: path.read_text() for path in (run / "evaluations").iterdir()} == {"step-39": ""}


def test_watch_skips_checkpoint_replaced_while_linked(stage: Stage) -> None:
    run = stage.root / "run"
    save(run, 19)
    put_command(
        stage,
        "cp",
        f"""/bin/cp "$@" && [[ ! -e '{run}/iter_0000039' ]] || exit 0
        /bin/cp -r '{run}/iter_0000019' '{run}/iter_0000039' && echo 39 >'{run}/latest_checkpointed_iteration.txt'""",
    )
    finished = stage.run(EVAL, "--watch", str(run), "--watch-until", "39")
    assert finished.returncode == 0, finished.stderr
    assert [value_of(call.words, "--load") for call in submitted(stage)] == [f"{run}/evaluations/held-39"]


def test_second_watch_is_refused_until_first_evaluation_ends(stage: Stage) -> None:
    run = stage.root / "run"
    save(run, 19)
    with watching(stage, run, FAKE_LONG_JOB="1") as process:
        wait_for(stage.root.parent / "job-runs")
        refused = stage.run(EVAL, "--watch", str(run))
        assert (refused.returncode, len(submitted(stage))) == (1, 1)
        assert f"another script watches {run}" in refused.stderr
        assert (run / "evaluations/held-19/iter_0000019/weights.distcp").exists()
        process.kill()
        process.wait()
        assert "or its evaluation still runs" in stage.run(EVAL, "--watch", str(run)).stderr
        (stage.root.parent / "job-stopped").touch()
    (run / "evaluations/held-7").mkdir()  # left by a script that was killed
    finished = stage.run(EVAL, "--watch", str(run), "--watch-until", "19")
    assert finished.returncode == 0, finished.stderr
    assert sorted(path.name for path in (run / "evaluations").iterdir()) == ["step-19"]


def test_watch_checks_arguments_before_first_checkpoint(stage: Stage) -> None:
    run = stage.root / "run"
    run.mkdir()
    for arguments, error in (
        (["--load", "elsewhere"], "got WATCH and LOAD; expected one of them"),
        (["--ckpt-step", "19"], "got WATCH and CKPT_STEP; expected one of them"),
        (["--eval-sets", "gpqa"], "the evaluation data is missing"),
        (["--tensor-parallel", "3"], "8 GPUs train; expected a multiple of"),
        (["--num-nodes", "2"], "NUM_NODES is 2; expected also RAY_ADDRESS"),
        (
            ["--watch-until", "019"],
            "got WATCH_UNTIL='019'; expected a whole number without leading zeros, and less than a billion",
        ),
    ):
        refused = stage.run(EVAL, "--watch", str(run), *arguments)
        assert refused.returncode in (1, 2)
        assert error in refused.stderr
    assert list(run.iterdir()) == []


def test_watch_of_an_empty_folder_waits_and_says_so(stage: Stage) -> None:
    run = stage.root / "run"
    run.mkdir()
    with watching(stage, run) as process:
        wait_for(run / ".watch-lock")
        assert process.stdout is not None
        assert f"waiting for the first checkpoint in {run} ..." in process.stdout.readline()
        os.kill(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert not submitted(stage)


def test_watched_runs_have_separate_samples(stage: Stage) -> None:
    for name in ("one", "two"):
        save(stage.root / name, 19)
        finished = stage.run(EVAL, "--watch", str(stage.root / name), "--watch-until", "19")
        assert finished.returncode == 0, finished.stderr
    samples = [value_of(call.words, "--save-debug-rollout-data") for call in submitted(stage)]
    assert samples == [f"{stage.root}/{name}/evaluations/samples/step-19/{{rollout_id}}.pt" for name in ("one", "two")]
