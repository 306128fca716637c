"""Weight versions: which weights sampled which tokens, and how old those are beside the newest that are known.

slime's trainer counts its updates from 0 whenever a run is started, so that a version means something only beside
others of the same numbering. A numbering is that of one driver process; its episode workers share it.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

NOT_COMPARABLE: Final = math.inf
"""Staleness beyond every limit: of weights from before a restart."""


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Sampled tokens of one weight version.

    Attributes:
        version: As the engine names it; None where it does not.
        start: Index in `Trajectory.token_ids` of the first one.
        end: Index after the last one.
        numbering: The version's; see `KnownVersions`. "" where that is not known.
    """

    version: str | None
    start: int
    end: int
    numbering: str = ""


class KnownVersions:
    """Weight versions that engines have named to this process and to its episode workers.

    Attributes:
        newest: The largest that is a number; None before any.
        on_newer: Called in the thread of the answer that names a newer one.
    """

    def __init__(self) -> None:
        self.newest: int | None = None
        self.on_newer: Callable[[], object] = lambda: None
        self._numbering = ""

    @property
    def numbering(self) -> str:
        """The id of the run's numbering: this process's own, or that of the driver whose worker it is."""
        self._numbering = self._numbering or uuid.uuid4().hex[:12]
        return self._numbering

    def share(self, numbering: str) -> None:
        """Take over the driver's numbering."""
        self._numbering = numbering

    def note(self, version: object) -> None:
        """Remember a version, if it is a number and the newest so far."""
        number = _number_of(version)
        if number is not None and (self.newest is None or number > self.newest):
            self.newest = number
            self.on_newer()


KNOWN_VERSIONS: Final = KnownVersions()
"""Those of this process, whose engines all get the weights of one training run."""


@dataclass(frozen=True, slots=True)
class LastWeights:
    """The weights that sampled the end of a sample.

    Attributes:
        version: The last one that is a number; None without any.
        numbering: Its numbering; None where the sample doesn't say, which is then this process's.
    """

    version: int | None
    numbering: str | None = None

    @classmethod
    def of(cls, versions: Sequence[str | None], numberings: object = None) -> LastWeights:
        """Those of a sample with these versions, and numberings, in the order of its tokens."""
        numbers = [number for number in map(_number_of, versions) if number is not None]
        last = numberings[-1] if isinstance(numberings, list) and numberings else None
        return cls(numbers[-1] if numbers else None, str(last) if last else None)


def sample_staleness(samples: Sequence[LastWeights], known: KnownVersions = KNOWN_VERSIONS) -> list[float | None]:
    """How many versions each sample's last weights are behind the newest that is known.

    The trainer's own version is not known here; the newest is that of these samples and of all answers: the true
    staleness may be larger, never smaller.

    Returns:
        None for a sample without a version that is a number, and `NOT_COMPARABLE` for one from before a restart. Where
        this process knows no version at all, as when it trains on saved samples, each numbering counts by itself.
    """
    newest: dict[str, int] = {} if known.newest is None else {known.numbering: known.newest}
    numberings = [one.numbering or known.numbering for one in samples]
    for one, numbering in zip(samples, numberings, strict=True):
        if one.version is not None:
            newest[numbering] = max(one.version, newest.get(numbering, 0))
    is_current = known.numbering in newest
    return [
        None
        if one.version is None
        else NOT_COMPARABLE
        if is_current and numbering != known.numbering
        else newest[numbering] - one.version
        for one, numbering in zip(samples, numberings, strict=True)
    ]


def distinct_versions(spans: Iterable[WeightSpan]) -> list[str | None]:
    """The versions in the order of their first tokens."""
    return list(dict.fromkeys(span.version for span in spans))


def distinct_numberings(spans: Iterable[WeightSpan]) -> list[str]:
    """The numberings of the versions, in the order of their first tokens: several of a sample that saw a restart."""
    return list(dict.fromkeys(span.numbering for span in spans))


def stale_spans(spans: Sequence[WeightSpan], max_staleness: int) -> list[WeightSpan]:
    """The spans whose weights are more than `max_staleness` versions older than those of the last span.

    Versions that are whole numbers, as slime numbers them, are subtracted; others are counted as they appear. Those of
    another numbering than the last span's are older than any.

    Args:
        spans: In order.
        max_staleness: 0 keeps the last version alone.
    """
    numbering = spans[-1].numbering if spans else ""
    ages = _ages([span for span in spans if span.numbering == numbering])
    return [span for span in spans if span.numbering != numbering or ages[span.version] > max_staleness]


def _ages(spans: Sequence[WeightSpan]) -> dict[str | None, int]:
    """Versions before the last span's, for each version of one numbering."""
    versions = distinct_versions(spans)
    numbers = {version: number for version in versions if (number := _number_of(version)) is not None}
    if len(numbers) == len(versions):
        return {version: numbers[spans[-1].version] - number for version, number in numbers.items()}
    last = versions.index(spans[-1].version)
    return {version: last - position for position, version in enumerate(versions)}


def _number_of(version: object) -> int | None:
    text = str(version)
    return int(text) if text.isdecimal() else None
