"""Rewards of a user's own, by dotted path."""

from __future__ import annotations

import asyncio
import sys
from typing import Any


async def is_exactly(args: Any, sample: Any) -> dict[str, Any]:
    """An async one that returns a dict."""
    return {"value": float(sample.response == f"It is {sample.label}."), "acc": 0.5}


def length(args: Any, sample: Any) -> int:
    """A sync one that returns a number."""
    return len(sample.response)


def has_a_four(args: Any, sample: Any) -> bool:
    """One that says yes or no."""
    return "4" in sample.response


def raising(args: Any, sample: Any) -> float:
    """One that fails for some samples."""
    if sample.label == "13":
        raise ValueError("unlucky")
    return 1.0


def wants_config(args: Any, sample: Any) -> float:
    """One that reads the settings."""
    return float(args.strands_rollout["max_tool_iterations"] == 3)


def of_a_known_source(args: Any, sample: Any) -> float:
    """One that reads the row's metadata."""
    return float(sample.metadata["source"] == "mine")


no_function = 3


def text(args: Any, sample: Any) -> str:
    """One that returns no number."""
    return "good"


async def of_a_group(args: Any, samples: list[Any], **kwargs: Any) -> list[float]:
    """One for slime's --group-rm."""
    return [float(len(samples)) for _ in samples]


def one_for_a_group(args: Any, samples: list[Any]) -> float:
    """One that forgets that it was asked for each."""
    return 1.0


def destroying(args: Any, sample: Any) -> float:
    """One that changes the sample."""
    sample.tokens.clear()
    sample.metadata.clear()
    return 1.0


def coloured(args: Any, sample: Any) -> float:
    """One whose error holds what a terminal obeys."""
    raise ValueError("\x1b[31mred")


def exiting(args: Any, sample: Any) -> float:
    """One that would end the process."""
    sys.exit(f"no {sample.label}")


async def cancelled(args: Any, sample: Any) -> float:
    """One that is cancelled by itself."""
    raise asyncio.CancelledError
