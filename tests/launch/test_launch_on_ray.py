"""A launch script's job on the real Ray: on its own Ray, or on one that runs already."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_stage import REPOSITORY
from processes import is_running

pytestmark = [
    pytest.mark.skipif(shutil.which("ray", path=str(Path(sys.executable).parent)) is None, reason="needs ray[default]"),
    pytest.mark.timeout(900),
]
SCRIPT = f"""
set -euo pipefail
source {REPOSITORY}/scripts/slime_launch.sh
read_options "$@"
setting NUM_GPUS 1 "GPUs" count
setting NUM_NODES 1 "nodes" count
setting CODE "pass" "what the job runs"
setting SAVE_DIR "$LAUNCH_MARK/run" "where the run saves" path
wandb_settings
ray_settings
end_of_settings "A job." "job.sh"
job_environment=('TEXT=a "b" \\c')
ray_job try-out python3 -c "$CODE"
"""
SHOW = 'import os; print("SEEN", os.environ["TEXT"], "".join(reversed(os.environ.get("WANDB_API_KEY", ""))))'
READ = 'import os; print("SEEN", "".join(reversed(open(os.environ["NETRC"]).read().split()[-1])))'
HUSH = "hush-4711-hush"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Write `job.sh`; return an environment without this run's Ray and wandb variables, but with LAUNCH_MARK."""
    (tmp_path / "job.sh").write_text(SCRIPT)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    base = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "WANDB_"))}
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    return {**base, **quiet, "PATH": path, "LAUNCH_MARK": str(tmp_path)}


def marked_processes(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"LAUNCH_MARK={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return [pid for pid in found if is_running(pid)]


def run(environment: dict[str, str], code: str, **given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", f"{environment['LAUNCH_MARK']}/job.sh", f"--code={code}"],
        env={**environment, **given},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def answers(environment: dict[str, str], *words: str) -> str:
    command = ["ray", "job", *words, "--address=http://127.0.0.1:8265"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300).stdout


@pytest.fixture
def running_ray(environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    command = ["ray", "start", "--head", "--block", "--num-cpus=1", "--disable-usage-stats"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as ray:
        try:
            deadline = time.monotonic() + 120
            while "[" not in answers(environment, "list"):
                assert time.monotonic() < deadline
                assert ray.poll() is None
                time.sleep(0.5)
            yield ray
        finally:
            ray.terminate()
            ray.wait(60)


def test_script_starts_and_stops_its_own_ray(environment: dict[str, str]) -> None:
    finished = run(environment, f"{SHOW}; raise SystemExit(3)", WANDB_API_KEY=HUSH)
    assert f'SEEN a "b" \\c {HUSH[::-1]}' in finished.stdout, finished.stderr
    assert finished.returncode == 1, "the exit status of Ray for a failed job"
    deadline = time.monotonic() + 30
    while marked_processes(environment["LAUNCH_MARK"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert marked_processes(environment["LAUNCH_MARK"]) == []


def test_script_leaves_running_ray_and_stops_its_job(
    environment: dict[str, str], running_ray: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    finished = run(environment, READ, WANDB_API_KEY=HUSH)
    assert f"SEEN {HUSH[::-1]}" in finished.stdout, finished.stderr
    assert finished.returncode == 0
    logs = Path("/tmp/ray/session_latest").resolve()
    assert not [path for path in logs.rglob("*") if path.is_file() and HUSH.encode() in path.read_bytes()]
    assert HUSH not in answers(environment, "list")
    assert "SUCCEEDED" in answers(environment, "list")
    begun = tmp_path / "begun"
    code = f"import pathlib, time; pathlib.Path({json.dumps(str(begun))}).touch(); time.sleep(600)"
    command = ["bash", str(tmp_path / "job.sh"), f"--code={code}", "--submission-id=mine"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as script:
        deadline = time.monotonic() + 120
        while not begun.exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        script.send_signal(signal.SIGTERM)
        assert script.wait(120) == 143
    assert "was stopped" in answers(environment, "status", "mine")
    assert running_ray.poll() is None
