"""Asks the parsers of the slime, Megatron-LM, SGLang and router that are installed, in a child process.

What can't be imported there is taken from the recorded list, and the table's sources say so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from strands_rollout.errors import ConfigError
from strands_rollout.flag_check import probe
from strands_rollout.flag_check.flag import Flag
from strands_rollout.flag_check.flag_table import FlagTable, Source, read_record, recorded_sources, recorded_table

LIMIT_S: Final = 180.0
_LONGEST_NOTE: Final = 160


def find_slime(named: Path | None) -> Path | None:
    """The checkout of slime: the named one, else SLIME_DIR's, else that of the importable slime.

    Raises:
        ConfigError: A checkout was named that is none.
    """
    wanted = named or (Path(os.environ["SLIME_DIR"]) if os.environ.get("SLIME_DIR") else None)
    if wanted is not None:
        if not _is_slime(wanted):
            raise ConfigError(
                f"got slime at {wanted}; expected a checkout of THUDM/slime, which has {probe.MAIN_ARGUMENTS}"
            )
        return wanted
    try:
        spec = importlib.util.find_spec("slime")
    except (ImportError, ValueError):
        return None
    folders = [Path(folder).parent for folder in (spec.submodule_search_locations or [])] if spec else []
    return next((folder for folder in folders if _is_slime(folder)), None)


def _is_slime(folder: Path) -> bool:
    # the slime of PyPI is another package of the same name
    return (folder / probe.MAIN_ARGUMENTS).is_file() and (folder / probe.SGLANG_ARGUMENTS).is_file()


def ask(
    slime_dir: Path, megatron_dir: Path | None = None, *, python: str = sys.executable, limit_s: float = LIMIT_S
) -> dict[str, Any]:
    """The probe's answer for a checkout.

    Args:
        slime_dir: slime's checkout.
        megatron_dir: Megatron-LM's; otherwise MEGATRON_DIR's, the one beside slime's, or the importable one.
        python: The Python that has SGLang and what Megatron-LM imports.
        limit_s: How long it may take.

    Raises:
        ConfigError: The probe failed or took longer than `limit_s` seconds.
    """
    megatron = megatron_dir or os.environ.get("MEGATRON_DIR") or slime_dir.resolve().parent / "Megatron-LM"
    paths = [str(megatron), str(slime_dir), os.environ.get("PYTHONPATH")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONHASHSEED": "0",  # some choices are lists made of sets
    }
    try:
        done = subprocess.run(  # noqa: S603 - our own file, with the Python that runs this
            [python, "-W", "ignore", probe.__file__, str(slime_dir)],
            capture_output=True, text=True, timeout=limit_s, check=False, env=environment, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        raise ConfigError(f"its parsers did not answer within {limit_s:g} s") from e
    except OSError as e:
        raise ConfigError(f"its parsers could not be asked: {e}") from e
    if done.returncode != 0:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise ConfigError(f"its parsers could not be asked: {reason}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def table_of(slime_dir: Path | None, megatron_dir: Path | None = None, *, limit_s: float = LIMIT_S) -> FlagTable:
    """The flags of what is installed, and of the recorded list where that can't be asked."""
    record = read_record()
    if slime_dir is None:
        return recorded_table(record, "no slime is importable")
    try:
        answer = ask(slime_dir, megatron_dir, limit_s=limit_s)
    except ConfigError as e:
        return recorded_table(record, _short(str(e)))
    return mixed_table(answer, record, slime_dir)


def mixed_table(answer: Mapping[str, Any], record: Mapping[str, Any], slime_dir: Path) -> FlagTable:
    """The flags of the probe's answer, with the recorded ones of each system that could not be asked."""
    failed: Mapping[str, str] = answer["failed"]
    missing = [flag for flag in map(Flag.read, record["flags"]) if flag.system in failed]
    theirs = {(name, flag.parser) for flag in missing for name in flag.names}
    # where Megatron-LM declares a flag too, slime changes its default only
    asked = [
        flag for flag in map(Flag.read, answer["flags"]) if not {(name, flag.parser) for name in flag.names} & theirs
    ]
    versions = {"slime": str(slime_dir), "megatron": "the importable one", **answer["versions"]}
    recorded = {source.system: source for source in recorded_sources(record, {k: _short(v) for k, v in failed.items()})}
    return FlagTable(
        [*asked, *missing],
        left_out=record["left_out"] if "sglang" in failed else answer["left_out"],
        abbreviating=answer["abbreviating"],
        sources=[
            source if system in failed else Source(system, "parser", versions.get(system) or "version unknown")
            for system, source in recorded.items()
        ],
    )


def _short(note: str) -> str:
    return note if len(note) <= _LONGEST_NOTE else f"{note[:_LONGEST_NOTE]}..."
