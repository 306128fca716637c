"""Reads what `generate` has written into a sample's metadata; knows nothing of how it came there.

Takes any object for a sample: foreign metadata, None and absent keys read as no facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

FACTS_KEY: Final = "strands_rollout"


def episode_facts(sample: object) -> Mapping[str, Any]:
    """The facts of the sample's episode; empty for a foreign sample."""
    metadata = getattr(sample, "metadata", None)
    facts = metadata.get(FACTS_KEY) if isinstance(metadata, Mapping) else None
    return facts if isinstance(facts, Mapping) else {}


def fan_out_part(sample: object) -> int | None:
    """Which of its fan-out's siblings the sample is, the main agent being 0; None for a sample of no fan-out."""
    fan_out = episode_facts(sample).get("fan_out")
    part = fan_out.get("part") if isinstance(fan_out, Mapping) else None
    return part if isinstance(part, int) else None
