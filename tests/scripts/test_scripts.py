"""The shell scripts: what they install and when, what they run, and what they say without a usable Python."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts_checkout import FAKE_PYTHON, REPOSITORY, Checkout, check_out


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return check_out(tmp_path / "a check out")


def test_the_demo_makes_its_environment_installs_again_what_has_changed_and_passes_arguments_on(
    checkout: Checkout,
) -> None:
    finished = checkout.run("demo.sh", "--samples", "8", "--help")
    assert finished.stdout == "strands-rollout demo --samples 8 --help\n"
    assert (checkout.root / ".venv-demo").is_dir()
    (install,) = checkout.installs  # without extras
    assert install.endswith(f"--editable {checkout.root}")
    assert checkout.run("demo.sh").stderr == ""
    assert len(checkout.installs) == 1
    (checkout.root / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    checkout.run("demo.sh")
    assert len(checkout.installs) == 2
    assert len([line for line in checkout.log if "-m venv" in line]) == 1


def test_an_installation_that_failed_is_tried_again_and_fails_the_tests_that_need_it(checkout: Checkout) -> None:
    python = checkout.root / "fake python"
    python.write_text(FAKE_PYTHON.replace('"-m pytest"*)', '"-m pip install"*) exit 1 ;;\n  "-m pytest"*)'))
    assert checkout.run("demo.sh").returncode != 0
    assert checkout.run("demo.sh").returncode != 0
    assert len(checkout.installs) == 2
    finished = checkout.run("test.sh", "--real")
    assert (finished.returncode != 0, "pytest" in finished.stdout) == (True, False)


def test_the_demos_environment_can_be_elsewhere(checkout: Checkout, tmp_path: Path) -> None:
    finished = checkout.run("demo.sh", STRANDS_ROLLOUT_VENV=str(tmp_path / "else where"))
    assert finished.returncode == 0
    assert (tmp_path / "else where" / "bin" / "python").exists()
    assert not (checkout.root / ".venv-demo").exists()


def test_the_tests_run_in_an_environment_with_the_dev_extra(checkout: Checkout) -> None:
    finished = checkout.run("test.sh", "-k", "two words")
    assert finished.stdout == "pytest -k two words\n"
    assert checkout.installs[0].endswith(f"--editable {checkout.root}[dev,tools]")


def test_the_real_engines_are_installed_each_in_its_environment_before_their_tests(
    checkout: Checkout,
) -> None:
    finished = checkout.run("test.sh", "--real", "-k", "two words")
    assert finished.stdout == "pytest -m real -k two words\n"
    recipe = checkout.root / "scripts/real_engines"
    installs = [line.partition("--disable-pip-version-check ")[2] for line in checkout.installs]
    assert installs == [
        f"--requirement {recipe}/sglang.txt",
        f"--no-deps --requirement {recipe}/sglang_without_dependencies.txt",
        f"--requirement {recipe}/gateway.txt",
        f"--editable {checkout.root}[dev,tools,bench]",
    ]
    assert {path.name for path in checkout.root.glob(".venv*")} == {".venv-sglang", ".venv-gateway", ".venv-real"}


@pytest.mark.parametrize("named", ["by flag", "by environment"])
def test_a_server_of_the_users_own_is_not_installed(checkout: Checkout, named: str) -> None:
    url = "http://gpu:30000"
    flags = ["--sglang-base-url", url] if named == "by flag" else []
    finished = checkout.run("test.sh", "--real", *flags, SGLANG_BASE_URL="" if flags else url)
    assert finished.stdout == " ".join(["pytest -m real", *flags]) + "\n"
    assert not (checkout.root / ".venv-sglang").exists()


@pytest.mark.parametrize("second", ["no such folder", ".", ""])
def test_what_is_no_checkout_of_slime_is_refused_before_its_tests_are_skipped(
    checkout: Checkout, tmp_path: Path, second: str
) -> None:
    rollout = tmp_path / "slime/slime/rollout/sglang_rollout.py"
    rollout.parent.mkdir(parents=True)
    rollout.touch()
    finished = checkout.run("test.sh", "--slime", "-x", SLIME_PATH=f"{tmp_path}/slime")
    assert finished.stdout == f"\n== slime at {tmp_path}/slime\npytest -m slime -x\n"
    finished = checkout.run("test.sh", "--slime", SLIME_PATH=f"{tmp_path}/slime:{second}:{tmp_path}/slime")
    assert finished.returncode == 1
    assert f"error: SLIME_PATH names '{second}', which is no checkout of THUDM/slime" in finished.stderr
    assert "pytest" not in finished.stdout


def test_a_real_engine_is_installed_again_when_its_versions_change(checkout: Checkout) -> None:
    for _ in range(2):
        assert checkout.run("gateway.sh", "install").returncode == 0
    assert len(checkout.installs) == 1
    (checkout.root / "scripts/real_engines/gateway.txt").write_text("smg==9\n")
    checkout.run("gateway.sh", "install")
    assert len(checkout.installs) == 2


def test_without_a_usable_python_the_message_says_which_were_tried_and_what_to_do(checkout: Checkout) -> None:
    finished = checkout.run("demo.sh", PYTHON="/no/such/python")
    assert finished.returncode == 1
    assert "no Python 3.11 or newer found; tried /no/such/python" in finished.stderr
    assert "PYTHON=/path/to/python bash" in finished.stderr


def test_an_old_python_is_passed_over(checkout: Checkout) -> None:
    old = checkout.root / "python3.13"
    as_3_10 = "import sys; sys.version_info = (3, 10, 9); exec(sys.argv[1])"
    old.write_text(f'#!/usr/bin/env bash\nexec "$REAL_PYTHON" -c {as_3_10!r} "$2"\n')
    old.chmod(0o755)
    shutil.copy(checkout.root / "fake python", checkout.root / "python3.12")
    path = f"{checkout.root}{os.pathsep}{os.environ['PATH']}"
    assert checkout.run("demo.sh", PYTHON="", PATH=path).returncode == 0
    assert checkout.log, "python3.12 was used"


def test_check_refuses_what_it_does_not_know(checkout: Checkout) -> None:
    finished = checkout.run("check.sh", "--everything")
    assert finished.returncode == 2
    assert "usage: bash scripts/check.sh [--tests|--house]" in finished.stderr


SHELL = [".ci/run", ".ci/full", *(f"scripts/{name}.sh" for name in ("demo", "test", "check", "sglang_cpu", "gateway"))]


@pytest.mark.parametrize("script", SHELL)
def test_scripts_stop_at_the_first_error_and_pass_shellcheck(script: str) -> None:
    assert "\nset -euo pipefail\n" in (REPOSITORY / script).read_text()
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("needs shellcheck, which the dev extra installs")
    found = subprocess.run([shellcheck, "--external-sources", script], cwd=REPOSITORY, capture_output=True, check=False)
    assert found.stdout.decode() == ""


def test_what_grows_beyond_its_ceiling_is_told(tmp_path: Path) -> None:
    for name in ("README.md", "pyproject.toml", "docs"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    for folder, text in (("strands_rollout", "import os\n" + "\n" * 99), ("tests", "\n" * 1_000_000)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "some.py").write_text(text)
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts" / "house.py", tmp_path / "scripts")
    house = [sys.executable, "scripts/house.py"]
    grown = subprocess.run(house, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert grown.returncode == 1
    assert grown.stderr.startswith("error: tests: lines: got 1,000,000, expected at most ")
    assert grown.stderr.count("error:") == 1
    (tmp_path / "tests" / "some.py").write_text("")
    assert subprocess.run(house, cwd=tmp_path, capture_output=True, check=False).returncode == 0


def test_ci_runs_the_checks_the_readmes_test_command_and_the_demo() -> None:
    text = (REPOSITORY / ".ci" / "run").read_text()
    for command in ("check.sh\n", "test.sh ", "test.sh --real ", "demo.sh "):
        assert f"\nbash scripts/{command}" in text
