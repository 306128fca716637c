"""Find a Python that has strands-sglang, which needs a newer Python than this package does.

If this environment lacks strands-sglang, it is installed into an environment of its own.
"""

import functools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from strands_rollout.errors import RolloutError

PEER: Final = "strands-sglang"
PEER_ENVIRONMENT: Final = Path(__file__).resolve().parents[1] / ".venv-peer"
_EXTRA: Final = "bench"
_OLDEST_PYTHON: Final = (3, 12)
_PYTHON_NAMES: Final = ("python3.12", "python3.13")
_INSTALL: Final = 'source scripts/environment.sh && prepare_environment "$1" "$2"'


class MissingPeerError(RolloutError):
    """strands-sglang can't be measured; the message is the reason, in one line."""


@functools.cache
def peer_python() -> str:
    """Return a Python that has strands-sglang: this one, or the Python of `.venv-peer`, which is created if needed.

    Raises:
        MissingPeerError: There is no Python 3.12 or newer, or the installation failed.
    """
    if sys.version_info >= _OLDEST_PYTHON and find_spec("strands_sglang") is not None:
        return sys.executable
    python = PEER_ENVIRONMENT / "bin" / "python"
    creator = str(python) if python.exists() else find_python()
    if creator is None:
        raise MissingPeerError(
            f"it needs Python {'.'.join(map(str, _OLDEST_PYTHON))} or newer, and none was found; name one: "
            "PYTHON=/path/to/python"
        )
    lines = []
    with subprocess.Popen(
        ["bash", "-c", _INSTALL, "bash", str(PEER_ENVIRONMENT), _EXTRA],  # noqa: S607 - the user's bash
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHON": creator},
        cwd=PEER_ENVIRONMENT.parent,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            lines.append(line.strip())
    if process.returncode != 0:
        error = next((line for line in lines if line.lower().startswith("error")), (lines or ["no output"])[-1])
        raise MissingPeerError(f"it can't be installed into {PEER_ENVIRONMENT.name}: {error}")
    return str(python)


def peer_versions() -> dict[str, str]:
    """Return the versions of strands-sglang, Strands and Python in the environment of `peer_python`.

    Raises:
        MissingPeerError: There is no such Python.
    """
    code = (
        "import json, platform\n"
        "from importlib.metadata import version\n"
        f"found = {{name: version(name) for name in ({PEER!r}, 'strands-agents')}}\n"
        "print(json.dumps({**found, 'python': platform.python_version()}))"
    )
    done = subprocess.run([peer_python(), "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def find_python() -> str | None:
    """Return the first Python that strands-sglang supports; None if there is none.

    If `PYTHON` is set, try only that Python, else the Pythons on the PATH and of pyenv.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    installed = [str(path) for name in _PYTHON_NAMES for path in pyenv.glob(f"*/bin/{name}")]
    named = os.environ.get("PYTHON")
    return next(filter(_is_supported, [named] if named else [*_PYTHON_NAMES, *installed]), None)


def _is_supported(python: str) -> bool:
    code = f"import sys, venv; sys.exit(sys.version_info < {_OLDEST_PYTHON})"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
