"""Find THUDM's slime and names that moved between its releases, and run programs beside its tests."""

import importlib.util
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]

# names outside of `slime.utils` in releases up to 0.3.1, which lack `slime.observability`
_BEFORE = {"rollout_metrics.log_rollout_data": "slime.ray.rollout._log_rollout_data"}


def find_slime() -> Path | None:
    """Return the folder that holds THUDM's package `slime`; None if there is none.

    It is `SLIME_PATH` if that is set, else the folder where `import slime` finds the package.
    """
    if os.environ.get("SLIME_PATH"):
        root = Path(os.environ["SLIME_PATH"]).resolve()
        return root if _is_slime(root / "slime") else None
    try:
        spec = importlib.util.find_spec("slime")
    except (ImportError, ValueError):
        return None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return next((folder.parent for folder in folders if _is_slime(folder)), None)


def _is_slime(package: Path) -> bool:
    """Return whether a folder is THUDM's package: PyPI's slime, and this file's folder, have the same name."""
    return (package / "rollout" / "sglang_rollout.py").is_file()


def observability(path: str) -> Any:
    """Return a module of `slime.observability`, or a name in one, wherever this slime has it."""
    try:
        return pkgutil.resolve_name(f"slime.observability.{path}")
    except (ImportError, AttributeError):
        place = _BEFORE.get(path, f"slime.utils.{path}")
    return pkgutil.resolve_name(place)


def run_beside_slimes_tests(package: Path, program: str) -> None:
    """Run a program with slime, slime's tests and this package importable; the test fails if the program fails."""
    folders = [package, package / "tests", REPOSITORY]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def eval_sends_all_parameters() -> bool:
    """Return whether slime's evaluation uses all sampling parameters of a data set, such as `stop`: after 0.3.1."""
    from slime.rollout import sglang_rollout

    return "dataset_cfg.min_new_tokens" in inspect.getsource(sglang_rollout)
