"""Finds a checkout of THUDM/slime, and what has moved in it from one release to another."""

import importlib.util
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]

# What is not in `slime.utils` in releases up to 0.3.1, whose `slime.observability` does not exist yet.
_BEFORE = {"rollout_metrics.log_rollout_data": "slime.ray.rollout._log_rollout_data"}


def find_slime() -> Path | None:
    """The folder that holds THUDM's package `slime`: `SLIME_PATH`, else where `import slime` would find it."""
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
    """Whether a folder is THUDM's package: the one of PyPI, and this file's own folder, have the same name."""
    return (package / "rollout" / "sglang_rollout.py").is_file()


def observability(path: str) -> Any:
    """A module of `slime.observability`, or a name in one, wherever this slime has it."""
    try:
        return pkgutil.resolve_name(f"slime.observability.{path}")
    except (ImportError, AttributeError):
        place = _BEFORE.get(path, f"slime.utils.{path}")
    return pkgutil.resolve_name(place)


def run_beside_slimes_tests(package: Path, program: str) -> None:
    """Run Python where slime, its own tests and this package can be imported; it must succeed."""
    folders = [package, package / "tests", REPOSITORY]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def eval_sends_all_parameters() -> bool:
    """Whether slime's evaluation heeds a data set's own stop, min_new_tokens and the like: up to 0.3.1 it does not."""
    from slime.rollout import sglang_rollout

    return "dataset_cfg.min_new_tokens" in inspect.getsource(sglang_rollout)
