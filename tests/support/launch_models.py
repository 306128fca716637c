"""The rows of scripts/launch/models.sh, and the commands of the launch scripts as flags."""

import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_KEYS = ["hub", "source", "nodes", "gpus", "tp", "pp", "first", "last", "cp", "ep", "tokens", "engine", "memory"]
_KEYS += ["offload", "parser", "weights", "further"]
_KEYS += ["estimator", "clip", "clip_high", "environment", "gpu_gb", "fp8"]
_KEYS += ["conversion_nodes", "conversion_gpus", "conversion"]


def model_rows() -> dict[str, dict[str, str]]:
    """Return the rows as bash reads them, by name."""
    shown = " ".join(f'"$model_{key}"' for key in _KEYS)
    program = f"""repository="$0"; fail() {{ exit 1; }}; source "$0/scripts/launch/models.sh"
        for name in $(model_names); do model_row "$name"; printf '%s|' "$name" {shown} | tr '\\n' ' '; echo; done"""
    command = ["bash", "-euc", program, str(REPOSITORY)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        name: dict(zip(_KEYS, values, strict=True))
        for name, *values in (line.split("|")[:-1] for line in printed.splitlines())
    }


def training_command(
    *arguments: str, scripts: Path = REPOSITORY / "scripts", script: str = "train.sh", **environment: str
) -> str:
    """Return what a launch script prints in a dry run, with `hermes` as the tool parser unless another one is given."""
    base = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        ["bash", str(scripts / script), *arguments, "--dry-run"],
        env={**base, "MASTER_ADDR": "10.0.0.1", "TOOL_PARSER": "hermes", "SLIME_DIR": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def words_of(shown: str) -> list[str]:
    """Return the words of a printed command after its train.py or train_async.py."""
    words = shlex.split(shown.replace("\\\n", " "), comments=False)
    (program,) = [place for place, word in enumerate(words) if word.endswith(("/train.py", "/train_async.py"))]
    return words[program + 1 :]


def flags_of(words: list[str]) -> dict[str, str]:
    """Return the flags with their values; the last occurrence of a flag counts."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            values = found[word] = []
        else:
            values.append(word)
    return {flag: " ".join(values) for flag, values in found.items()}


def number(flags: Mapping[str, str], flag: str, default: int = 1) -> int:
    return int(flags.get(flag, default))
