"""A copy of the shell scripts in a temporary folder, with a fake Python that logs its arguments.

The fake Python only pretends to install packages and to run tests.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# `-c` and `-m real_engines.` run in the real Python;
# `-m venv DIR` creates DIR with this fake Python and a `strands-rollout` that prints its arguments
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$PYTHON_LOG"
case "$*" in
  "-c "* | "-m real_engines."*) exec "$REAL_PYTHON" "$@" ;;
  "--version") echo "Python 3.12.0" ;;
  "-m pip --version") [[ -e "$(dirname "$0")/strands-rollout" ]] ;;
  "-m venv "*)
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    printf '#!/usr/bin/env bash\\necho "strands-rollout $*"\\n' >"$3/bin/strands-rollout"
    chmod +x "$3/bin/strands-rollout"
    ;;
  "-m pip install "*)
    while [[ -n "${MINUTES:-}" && "$(wc -l <"$MINUTES")" -lt 3 ]]; do /bin/sleep 0.02; done
    exit "${PIP_STATUS:-0}"
    ;;
  "-m pytest"*) echo "pytest ${*:3}" ;;
esac
"""


@dataclass(frozen=True)
class Checkout:
    """A copy of the scripts with the fake Python."""

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


def copy_scripts(root: Path) -> Checkout:
    (root / "scripts").mkdir(parents=True)
    for script in (REPOSITORY / "scripts").glob("*.sh"):
        shutil.copy(script, root / "scripts")
    shutil.copytree(REPOSITORY / "scripts/real_engines", root / "scripts/real_engines")
    (root / "pyproject.toml").write_text("[project]\n")
    python = root / "fake python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return Checkout(root)
