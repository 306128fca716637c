"""How many GPUs there are, by the driver's own tool."""

from __future__ import annotations

from typing import Final

from strands_rollout.doctor.finding import Finding, error, good, warning
from strands_rollout.doctor.outside_command import Answer, ask
from strands_rollout.doctor.question import TRAINING_GPUS, Question

LIMIT_S: Final = 10.0
_QUERY: Final = ("nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader,nounits")
_NO_GPU: Final = "training needs 8, an evaluation against a server elsewhere none"
_DRIVER: Final = "for training, use a machine with GPUs whose nvidia-smi works; a container: docker run --gpus all"


def check_gpus(question: Question, limit_s: float = LIMIT_S) -> list[Finding]:
    """How many GPUs there are, of which memory; fewer than are wanted is an error.

    Args:
        question: How many there must be, and whose PATH and CUDA_VISIBLE_DEVICES count.
        limit_s: Seconds that nvidia-smi gets.
    """
    try:
        wanted = _wanted(question)
    except ValueError:
        found = f"NUM_GPUS is {question.env['NUM_GPUS']!r}; expected a whole number"
        return [error("gpus", found, "export NUM_GPUS=8, or unset it")]
    answer = ask(*_QUERY, env=question.env, limit_s=limit_s)
    if answer is None or not answer.ok:
        return [_none(wanted, _why_none(answer, limit_s))]
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]
    gpus = [row for row in rows if len(row) == len(_QUERY[1].partition("=")[2].split(","))]
    if not gpus:
        return [_none(wanted, f"nvidia-smi lists no GPU: {answer.words}")]
    count, hidden = _visible(len(gpus), question.env.get("CUDA_VISIBLE_DEVICES"))
    kinds = ", ".join(sorted({f"{name} with {_gib(memory)}" for _, name, memory, _ in gpus}))
    found = f"{count} GPUs{hidden}: {kinds}; driver {gpus[0][3]}"
    if wanted is not None and count < wanted:
        return [
            error(
                "gpus",
                f"{found}; {wanted} were asked for",
                f"use a machine with {wanted}; or NUM_GPUS={count}, as --gpus {count}",
            )
        ]
    return [good("gpus", found)]


def _none(wanted: int | None, why: str) -> Finding:
    make = error if wanted else warning
    asked = f"; {wanted} were asked for" if wanted else ""
    return make("gpus", f"no GPU here: {why}{asked}; {_NO_GPU}", _DRIVER)


def _why_none(answer: Answer | None, limit_s: float) -> str:
    if answer is None:
        return "no nvidia-smi on the PATH"
    if answer.exit_code is None:
        return f"nvidia-smi did not answer within {limit_s:g} s: the driver hangs"
    return f"nvidia-smi failed: {answer.words}"


def _wanted(question: Question) -> int | None:
    """How many there must be: none are needed here for training on a cluster that RAY_ADDRESS names."""
    if question.gpus is not None:
        return question.gpus
    if question.env.get("RAY_ADDRESS"):
        return None
    if question.env.get("NUM_GPUS"):
        return int(question.env["NUM_GPUS"])
    return TRAINING_GPUS if question.training else None


def _visible(count: int, chosen: str | None) -> tuple[int, str]:
    """How many are left, and a note, where CUDA_VISIBLE_DEVICES hides some: all from the first that is not there."""
    if chosen is None:
        return count, ""
    left = 0
    for name in (part.strip() for part in chosen.split(",")):
        if not name or (name.lstrip("-").isdecimal() and not 0 <= int(name) < count):
            break
        left += 1  # a UUID is taken for one that is there
    return min(count, left), f" of {count} (CUDA_VISIBLE_DEVICES={chosen})"


def _gib(mib: str) -> str:
    return f"{int(mib) / 1024:.0f} GiB" if mib.isdecimal() else f"memory {mib}"
