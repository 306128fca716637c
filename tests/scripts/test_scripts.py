"""The shell scripts: installs, commands, and errors without a usable Python."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import is_running
from scripts_checkout import REPOSITORY, Checkout, copy_scripts


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return copy_scripts(tmp_path / "a check out")


def test_demo_script_prepares_environment_and_passes_arguments(checkout) -> None:
    finished = checkout.run("demo.sh", "--samples", "8", "--help")
    assert finished.stdout == "strands-rollout demo --samples 8 --help\n"
    assert (checkout.root / ".venv-demo").is_dir()
    (install,) = checkout.installs  # without extras
    assert install.endswith(f"--editable {checkout.root}")
    assert (checkout.run("demo.sh").stderr, len(checkout.installs)) == ("", 1)
    (checkout.root / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    checkout.run("demo.sh")
    assert (len(checkout.installs), len([line for line in checkout.log if "-m venv" in line])) == (2, 1)


@pytest.mark.parametrize("status", [0, 3])
def test_install_prints_progress_and_returns_pips_status(checkout, tmp_path, status: int) -> None:
    sleep, slept = tmp_path / "bin/sleep", tmp_path / "slept"
    sleep.parent.mkdir()
    slept.touch()
    sleep.write_text('#!/bin/sh\n/bin/sleep 0.02\necho "$*" >>"$MINUTES"\n')
    sleep.chmod(0o755)
    given = {"PATH": f"{sleep.parent}:{os.environ['PATH']}", "MINUTES": str(slept), "PIP_STATUS": str(status)}
    finished = checkout.run("demo.sh", **given)
    assert finished.returncode == status
    assert finished.stdout == ("" if status else "strands-rollout demo\n")
    lines = finished.stderr.splitlines()
    assert lines[2:4] == ["... still installing after 1 min", "... still installing after 2 min"]
    assert all(line.startswith("... still") for line in lines[2:])
    assert set(slept.read_text().split()) == {"60"}


def test_test_script_installs_dev_extra(checkout: Checkout) -> None:
    finished = checkout.run("test.sh", "-k", "two words")
    assert finished.stdout == "pytest -k two words\n"
    assert checkout.installs[0].endswith(f"--editable {checkout.root}[dev,tools,evals,harness,a2a]")


@pytest.mark.parametrize("second", ["no such folder", ".", ""])
def test_test_script_refuses_slime_path_without_slime(checkout, tmp_path, second) -> None:
    rollout = tmp_path / "slime/slime/rollout/sglang_rollout.py"
    rollout.parent.mkdir(parents=True)
    rollout.touch()
    finished = checkout.run("test.sh", "--slime", "-x", SLIME_PATH=f"{tmp_path}/slime")
    assert finished.stdout == f"\n== slime at {tmp_path}/slime\npytest -m slime -x\n"
    finished = checkout.run("test.sh", "--slime", SLIME_PATH=f"{tmp_path}/slime:{second}:{tmp_path}/slime")
    assert finished.returncode == 1
    assert f"error: SLIME_PATH names '{second}', which is not a checkout of THUDM/slime" in finished.stderr
    assert "pytest" not in finished.stdout


def test_scripts_without_usable_python_explain_remedy(checkout: Checkout) -> None:
    finished = checkout.run("demo.sh", PYTHON="/no/such/python")
    assert finished.returncode == 1
    assert "no Python 3.11 or newer found; tried /no/such/python" in finished.stderr
    assert "PYTHON=/path/to/python bash" in finished.stderr


@pytest.mark.parametrize("given", [{}, {"STRANDS_ROLLOUT_VENV": "/dev/null/venv"}], ids=["default", "named"])
def test_scripts_name_variable_for_unwritable_environment(checkout, given) -> None:
    (checkout.root / ".venv-demo").write_text("in the way, which stops root too")
    finished = checkout.run("demo.sh", **given)
    assert finished.returncode == 1
    assert "can't be created or written to" in finished.stderr
    assert "another folder for it in STRANDS_ROLLOUT_VENV" in finished.stderr
    assert "python3-venv" not in finished.stderr
    assert (checkout.root / ".venv-demo").is_file()


def test_stop_ends_only_started_processes(checkout: Checkout) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stranger:
        refused = checkout.run("sglang_cpu.sh", "stop", str(stranger.pid))
        assert refused.returncode == 1
        assert "expected a process id that start printed" in refused.stderr
        assert is_running(stranger.pid)
        stranger.kill()


SHELL = [
    ".ci/run",
    ".ci/full",
    *(f"scripts/{name}.sh" for name in ("demo", "test", "check", "sglang_cpu", "gateway", "gateway_clients")),
]


@pytest.mark.parametrize("script", SHELL)
def test_scripts_set_errexit_and_pass_shellcheck(script: str) -> None:
    assert "\nset -euo pipefail\n" in (REPOSITORY / script).read_text()
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("needs shellcheck, which the dev extra installs")
    found = subprocess.run([shellcheck, "--external-sources", script], cwd=REPOSITORY, capture_output=True, check=False)
    assert found.stdout.decode() == ""
