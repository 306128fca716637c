"""Which tokens of a trajectory were sampled by weights that are too old, seen from the last of its tokens.

Knows weight versions; nothing of samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from strands_rollout.trajectory import WeightSpan


def distinct_versions(spans: Sequence[WeightSpan]) -> list[str | None]:
    """The versions in the order of their first tokens."""
    return list(dict.fromkeys(span.version for span in spans))


def stale_spans(spans: Sequence[WeightSpan], max_staleness: int) -> list[WeightSpan]:
    """The spans whose weights are more than `max_staleness` versions older than those of the last span.

    Versions that are whole numbers, as slime numbers them, are subtracted; others are counted as they appear.

    Args:
        spans: In order.
        max_staleness: 0 keeps the last version alone.
    """
    ages = _ages(spans)
    return [span for span in spans if ages[span.version] > max_staleness]


def _ages(spans: Sequence[WeightSpan]) -> dict[str | None, int]:
    """Versions before the last span's, for each version."""
    versions = distinct_versions(spans)
    if not versions:
        return {}
    numbers = {version: int(version) for version in versions if version is not None and version.isdecimal()}
    if len(numbers) == len(versions):
        newest = numbers[spans[-1].version or ""]
        return {version: newest - number for version, number in numbers.items()}
    last = versions.index(spans[-1].version)
    return {version: last - position for position, version in enumerate(versions)}
