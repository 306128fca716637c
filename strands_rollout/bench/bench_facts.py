"""What figures can't be read without: versions, the machine, the command line, the tokenizer."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from strands_rollout.bench.bench_options import SHIPPED_TOKENIZER_DIR
from strands_rollout.bench.processor_cores import client_and_engine_core, usable_cores

_PACKAGES: Final = (
    "strands-rollout",
    "strands-agents",
    "strands-sglang",
    "openai",
    "httpx",
    "httpx-aiohttp",
    "aiohttp",
    "orjson",
    "tokenizers",
    "transformers",
)


def run_facts(tokenizer_dir: Path, vocab_size: int) -> dict[str, Any]:
    """The facts of a run, as JSON.

    Args:
        tokenizer_dir: Only its name is told.
        vocab_size: Of the tokenizer.
    """
    name = "shipped" if tokenizer_dir == SHIPPED_TOKENIZER_DIR else tokenizer_dir.name
    client, engine = client_and_engine_core()
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": len(usable_cores()) or os.cpu_count(),
            "client_core": client,
            "engine_core": engine,
            "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        },
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "tokenizer": {"name": name, "vocab_size": vocab_size},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
