"""Is there room where a run writes: checkpoints, models, data, temporary files, shared memory?

Sizes are of Qwen3-8B: 8.2e9 parameters are 16.4 GB in bf16, as downloaded and again as converted for Megatron; a save
with the optimizer's state (bf16 weights, fp32 weights and two fp32 moments) holds 14 bytes a parameter, 115 GB.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strands_rollout.doctor.finding import Finding, error, good, warning
from strands_rollout.doctor.question import MODEL_NAME, Question

_GB: Final = 1e9
SHM: Final = Path("/dev/shm")  # noqa: S108 - NCCL's and Ray's own place
SHM_GB: Final = 8.0
_SHM_REMEDY: Final = "start the container with --shm-size=64g, or with --ipc=host"


@dataclass(frozen=True, slots=True)
class Place:
    """A folder that a run writes to.

    Attributes:
        what: It holds.
        path: It need not exist yet.
        enough_gb: With less free, a run may fill it: a warning.
        least_gb: With less, it will not get far: an error.
        remedy: How to have it elsewhere, or to have more.
    """

    what: str
    path: Path
    enough_gb: float
    least_gb: float
    remedy: str


def places_of(question: Question) -> list[Place]:
    """Where runs write by default, and how much they need there."""
    models = question.model_dir
    ready = question.model.is_dir() and question.converted_model.is_dir()
    temporary = Path(question.env.get("TMPDIR") or tempfile.gettempdir())
    return [
        # two saves of 115 GB, the newer one beside the one that it replaces
        Place("checkpoints", question.checkpoint_dir, 250, 5, "free some, or set SAVE_DIR to a larger disk"),
        Place("models", models, 0 if ready else 40, 0 if ready else 2, "free some, or set MODEL_DIR to a larger disk"),
        Place("data", question.data_dir, 1, 0.1, "free some, or set DATA_DIR to a larger disk"),
        # Ray's logs and what it spills of its objects
        Place("temporary files", temporary, 20, 1, "free some, or set TMPDIR to a larger disk"),
    ]


def check_disk(places: Sequence[Place]) -> list[Finding]:
    """Whether each place has room; one line for all that have, and one for each that has not."""
    findings = [_check_place(place) for place in places]
    roomy = [pair for pair in zip(places, findings, strict=True) if pair[1].status == "ok"]
    fine = "; ".join(f"{place.what}: {finding.found}" for place, finding in roomy)
    faults = [finding for finding in findings if finding.status != "ok"]
    return [good("disk", fine), *faults] if fine else faults


def check_shared_memory(path: Path = SHM, enough_gb: float = SHM_GB) -> list[Finding]:
    """Whether shared memory is large enough for NCCL and Ray; Docker's default is 64 MB.

    Args:
        path: Where it is mounted.
        enough_gb: With less, a warning.
    """
    if not path.is_dir():
        return [good("shared memory", f"no {path} on this system")]
    size_gb = shutil.disk_usage(path).total / _GB
    found = f"{size_gb:.1f} GB at {path}"
    if size_gb < enough_gb:
        return [warning("shared memory", f"{found}; NCCL and Ray want {enough_gb:g} GB", _SHM_REMEDY)]
    return [good("shared memory", found)]


def _check_place(place: Place) -> Finding:
    name = f"disk: {place.what}"
    existing = next(folder for folder in (place.path.absolute(), *place.path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        return error(name, f"{existing} is a file, {place.path} can't be made", place.remedy)
    if os.statvfs(existing).f_flag & os.ST_RDONLY or not os.access(existing, os.W_OK):
        return error(name, f"{existing} can't be written to", place.remedy)
    free_gb = shutil.disk_usage(existing).free / _GB
    found = f"{free_gb:.0f} GB free at {place.path}"
    if free_gb < place.least_gb:
        return error(name, f"{found}; expected {place.least_gb:g} GB at the very least", place.remedy)
    if free_gb < place.enough_gb:
        return warning(name, f"{found}; {MODEL_NAME} needs up to {place.enough_gb:g} GB there", place.remedy)
    return good(name, found)
