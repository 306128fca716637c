"""The shell scripts: what they install and when, what they run, and what they say without a usable Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
# a Python that logs its arguments; `-m venv DIR` makes DIR with it and a command that prints its own arguments
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$PYTHON_LOG"
case "$*" in
  "-c "*) exec "$REAL_PYTHON" "$@" ;;
  "--version") echo "Python 3.12.0" ;;
  "-m pip --version") [[ -e "$(dirname "$0")/strands-rollout" ]] ;;
  "-m venv "*)
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    printf '#!/usr/bin/env bash\\necho "strands-rollout $*"\\n' >"$3/bin/strands-rollout"
    chmod +x "$3/bin/strands-rollout"
    ;;
  "-m pytest"*) echo "pytest ${*:3}" ;;
esac
"""


@dataclass(frozen=True)
class Checkout:
    """A copy of the scripts with a Python that only logs."""

    root: Path

    @property
    def log(self) -> list[str]:
        log = self.root / "python.log"
        return log.read_text().splitlines() if log.exists() else []

    @property
    def installs(self) -> list[str]:
        return [line for line in self.log if "pip install" in line]

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        given = {
            "PYTHON": str(self.root / "fake python"),
            "PYTHON_LOG": str(self.root / "python.log"),
            "REAL_PYTHON": sys.executable,
            **environment,
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("STRANDS_ROLLOUT_")}
        return subprocess.run(
            ["bash", str(self.root / "scripts" / script), *arguments],
            env={**inherited, **given},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "a check out"
    (root / "scripts").mkdir(parents=True)
    for script in (REPOSITORY / "scripts").glob("*.sh"):
        shutil.copy(script, root / "scripts")
    (root / "pyproject.toml").write_text("[project]\n")
    python = root / "fake python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return Checkout(root)


def test_the_demo_makes_its_environment_installs_without_extras_and_passes_arguments_on(checkout: Checkout) -> None:
    finished = checkout.run("demo.sh", "--samples", "8", "--help")
    assert finished.stdout == "strands-rollout demo --samples 8 --help\n"
    assert (checkout.root / ".venv-demo").is_dir()
    (install,) = checkout.installs
    assert install.endswith(f"--editable {checkout.root}")


def test_the_second_run_installs_nothing_and_a_changed_pyproject_installs_again(checkout: Checkout) -> None:
    checkout.run("demo.sh")
    second = checkout.run("demo.sh")
    assert second.stderr == ""
    assert len(checkout.installs) == 1
    (checkout.root / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    checkout.run("demo.sh")
    assert len(checkout.installs) == 2
    assert len([line for line in checkout.log if "-m venv" in line]) == 1


def test_an_installation_that_failed_is_tried_again(checkout: Checkout) -> None:
    python = checkout.root / "fake python"
    python.write_text(FAKE_PYTHON.replace('"-m pytest"*)', '"-m pip install"*) exit 1 ;;\n  "-m pytest"*)'))
    assert checkout.run("demo.sh").returncode != 0
    assert checkout.run("demo.sh").returncode != 0
    assert len(checkout.installs) == 2


def test_the_demos_environment_can_be_elsewhere(checkout: Checkout, tmp_path: Path) -> None:
    finished = checkout.run("demo.sh", STRANDS_ROLLOUT_VENV=str(tmp_path / "else where"))
    assert finished.returncode == 0
    assert (tmp_path / "else where" / "bin" / "python").exists()
    assert not (checkout.root / ".venv-demo").exists()


def test_the_tests_run_in_an_environment_with_the_dev_extra(checkout: Checkout) -> None:
    finished = checkout.run("test.sh", "-k", "two words")
    assert finished.stdout == "pytest -k two words\n"
    assert checkout.installs[0].endswith(f"--editable {checkout.root}[dev]")


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
    assert "usage: bash scripts/check.sh [--tests]" in finished.stderr


@pytest.mark.parametrize("script", ["scripts/demo.sh", "scripts/test.sh", "scripts/check.sh", ".ci/run"])
def test_scripts_stop_at_the_first_error_and_pass_shellcheck(script: str) -> None:
    assert "\nset -euo pipefail\n" in (REPOSITORY / script).read_text()
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("needs shellcheck, which the dev extra installs")
    found = subprocess.run([shellcheck, "--external-sources", script], cwd=REPOSITORY, capture_output=True, check=False)
    assert found.stdout.decode() == ""


def test_ci_runs_the_checks_the_readmes_test_command_and_the_demo() -> None:
    text = (REPOSITORY / ".ci" / "run").read_text()
    for command in ("bash scripts/check.sh\n", "bash scripts/test.sh ", "bash scripts/demo.sh "):
        assert f"\n{command}" in text
