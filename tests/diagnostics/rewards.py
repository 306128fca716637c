"""Rewards of a user's own, by dotted path."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

no_function = 3


async def is_exactly(args: Any, sample: Any) -> dict[str, Any]:
    return {"value": float(sample.response == f"It is {sample.label}."), "acc": 0.5}


def length(args: Any, sample: Any) -> int:
    return len(sample.response)


def has_a_four(args: Any, sample: Any) -> bool:
    return "4" in sample.response


def raising(args: Any, sample: Any) -> float:
    if sample.label == "13":
        raise ValueError("unlucky")
    return 1.0


def wants_config(args: Any, sample: Any) -> float:
    return float(args.strands_rollout["max_tool_iterations"] == 3)


def of_a_known_source(args: Any, sample: Any) -> float:
    return float(sample.metadata["source"] == "mine")


def text(args: Any, sample: Any) -> str:
    return "good"


async def of_a_group(args: Any, samples: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(samples)) for _ in samples]


def one_for_a_group(args: Any, samples: list[Any]) -> float:
    return 1.0


def destroying(args: Any, sample: Any) -> float:
    sample.tokens.clear()
    sample.metadata.clear()
    return 1.0


def coloured(args: Any, sample: Any) -> float:
    raise ValueError("\x1b[31mred")


def exiting(args: Any, sample: Any) -> float:
    sys.exit(f"no {sample.label}")


async def cancelled(args: Any, sample: Any) -> float:
    raise asyncio.CancelledError
