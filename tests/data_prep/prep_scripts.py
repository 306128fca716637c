"""Runs the scripts of data_prep as a user does: in a process of its own, from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DATA_PREP = Path(__file__).parents[2] / "data_prep"


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    path = os.pathsep.join(
        filter(None, [more.pop("PYTHONPATH", ""), str(Path(__file__).parent), str(DATA_PREP.parent)])
    )
    return {**inherited, "PYTHONPATH": path, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", **more}


def start_script(script: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(DATA_PREP / script), *arguments],
        cwd="/",
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_script(script: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    with start_script(script, *arguments, **more) as process:
        stdout, stderr = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
