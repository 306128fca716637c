"""`run_slime.sh` of a project from `strands-rollout init`, with the fakes of the launch scripts."""

import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from launch_stage import REPOSITORY, Stage, make_stage

SCRIPT = "run_slime.sh"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = make_stage(tmp_path)
    stage.provide_files()
    shutil.copy(REPOSITORY / "strands_rollout/data/project" / SCRIPT, stage.root / "scripts")
    return stage


def run(stage: Stage, *arguments: str, **environment: str) -> CompletedProcess[str]:
    return stage.run(SCRIPT, *arguments, **{"HF_CHECKPOINT": f"{stage.root}/models/Qwen3-8B", **environment})


def test_run_slime_help_and_dry_run_start_nothing(stage: Stage) -> None:
    shown = run(stage, "--lr", "3", "--help")
    assert (shown.returncode, shown.stdout.startswith("Train this folder's agent with slime")) == (0, True)
    assert "set -e" not in shown.stdout
    dry = run(stage, "--lr", "2e-6", "--dry-run", "--seed", "7")
    assert (dry.returncode, dry.stdout.split()[-4:]) == (0, ["--lr", "2e-6", "--seed", "7"])
    assert run(stage, "--dry-run", SLIME_MODEL="foo-14B").returncode == 1
    assert not stage.calls


def test_run_slime_checks_submits_and_stops_ray(stage: Stage) -> None:
    finished = run(stage, "--lr", "2e-6", PYTHONPATH="/mine", FAKE_JOB_STATUS="3")
    assert (finished.returncode, finished.stdout, finished.stderr) == (3, "", "")
    (submitted,) = stage.calls_of("ray", "job", "submit")
    assert submitted.words[-2:] == ["--lr", "2e-6"]
    assert submitted.runtime_env is not None
    assert submitted.runtime_env["PYTHONPATH"].endswith(f":{stage.root}/scripts:/mine")
    assert "--lr 2e-6" in str(stage.calls_of("strands-rollout", "doctor")[0].stdin)
    assert not stage.ray_runs.exists()
    stage.ray_runs.write_text("another's")
    assert run(stage).returncode == 0
    assert stage.ray_runs.exists()
    assert len(stage.calls_of("ray", "start")) == 1
    (stage.root.parent / "bin" / "ray").unlink()
    assert "no 'ray' on the PATH; work in" in run(stage).stderr


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"HF_CHECKPOINT": "/nowhere"}, "/nowhere or /nowhere_torch_dist is missing; make both with"),
        ({"SLIME_DIR": "/nowhere"}, "no /nowhere/scripts/models/qwen3-8B.sh; work in the image slimerl/slime"),
        ({"SLIME_MODEL": "foo-14B"}, "/scripts/models/foo-14B.sh; work in"),
        ({"FAKE_RAY_FAILS": "1"}, "no free port\nerror: Ray did not start"),
    ],
)
def test_run_slime_lists_missing_requirements(stage: Stage, environment: dict[str, str], words: str) -> None:
    finished = run(stage, **environment)
    assert finished.returncode == 1
    assert words in finished.stderr
    assert not stage.calls_of("ray", "job", "submit")
