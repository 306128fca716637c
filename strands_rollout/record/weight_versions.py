"""Weight versions: the weights that sampled each token, and their staleness.

slime's trainer counts its updates from 0 at each start of a run, so versions can be compared only within one numbering.
Each driver process has a numbering, which its episode workers share.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

NOT_COMPARABLE: Final = math.inf
"""Staleness of weights from before a restart, which is above every limit."""


@dataclass(slots=True)
class WeightSpan:
    """Consecutive sampled tokens of one turn and one weight version.

    Attributes:
        version: The engine's name of the version; None if the engine reports none.
        start: Index of the first token in `Trajectory.token_ids`.
        end: Index after the last token.
        numbering: The version's numbering, see `KnownVersions`; "" if it is not known.
    """

    version: str | None
    start: int
    end: int
    numbering: str = ""


class KnownVersions:
    """The weight versions that engines reported to this process and its episode workers.

    Attributes:
        newest: The largest version that is a number; None before the first such version.
        on_newer: Called by `note` whenever `newest` has changed.
    """

    def __init__(self) -> None:
        self.newest: int | None = None
        self.on_newer: Callable[[], object] = lambda: None
        self._numbering = ""

    @property
    def numbering(self) -> str:
        """Id of the numbering: this process's own, or its driver's in an episode worker."""
        self._numbering = self._numbering or uuid.uuid4().hex[:12]
        return self._numbering

    def use_numbering(self, numbering: str) -> None:
        """Use the driver's numbering instead of this process's own."""
        self._numbering = numbering

    def note(self, version: object) -> None:
        """If the version is a number and newer than `newest`, update `newest` and call `on_newer`."""
        number = _number_of(version)
        if number is not None and (self.newest is None or number > self.newest):
            self.newest = number
            self.on_newer()


KNOWN_VERSIONS: Final = KnownVersions()
"""The versions that this process knows; all of its engines are assumed to get the weights of one training run."""


@dataclass(frozen=True, slots=True)
class LastWeights:
    """The weights that sampled the last tokens of a sample.

    Attributes:
        version: The last version that is a number; None if there is none.
        numbering: The version's numbering; None if the sample has no numbering, which means this process's own.
    """

    version: int | None
    numbering: str | None = None

    @classmethod
    def of(cls, versions: Sequence[str | None], numberings: object = None) -> LastWeights:
        """Return the last weights of a sample, given its versions and numberings in the order of its tokens."""
        numbers = [number for number in map(_number_of, versions) if number is not None]
        last = numberings[-1] if isinstance(numberings, list) and numberings else None
        return cls(numbers[-1] if numbers else None, str(last) if last else None)


def sample_staleness(samples: Sequence[LastWeights], known: KnownVersions = KNOWN_VERSIONS) -> list[float | None]:
    """Return how many versions each sample's last weights are behind the newest known version.

    The newest known version is the largest version in `samples` and in all answers that this process knows of. The
    trainer may have a newer version, so the true staleness may be larger, but never smaller.

    Returns:
        One value per sample: its staleness; None for a sample without a version that is a number; `NOT_COMPARABLE` for
        a sample from before a restart. If no version of this process's numbering is known, for example in training on
        saved samples, each numbering has its own newest version.
    """
    newest: dict[str, int] = {} if known.newest is None else {known.numbering: known.newest}
    numberings = [last.numbering or known.numbering for last in samples]
    for last, numbering in zip(samples, numberings, strict=True):
        if last.version is not None:
            newest[numbering] = max(last.version, newest.get(numbering, 0))
    has_own_versions = known.numbering in newest

    def staleness(last: LastWeights, numbering: str) -> float | None:
        if last.version is None:
            return None
        if has_own_versions and numbering != known.numbering:
            return NOT_COMPARABLE
        return newest[numbering] - last.version

    return list(map(staleness, samples, numberings))


def distinct_versions(spans: Iterable[WeightSpan]) -> list[str | None]:
    """Return the versions in the order of their first tokens."""
    return list(dict.fromkeys(span.version for span in spans))


def distinct_numberings(spans: Iterable[WeightSpan]) -> list[str]:
    """Return the numberings in the order of their first tokens; several if a restart interrupted the sample."""
    return list(dict.fromkeys(span.numbering for span in spans))


def stale_spans(spans: Sequence[WeightSpan], max_staleness: int) -> list[WeightSpan]:
    """Return the spans whose weights are more than `max_staleness` versions older than the weights of the last span.

    If all versions are whole numbers, such as slime's, they are subtracted; otherwise, versions are counted in their
    order of appearance. A span whose numbering differs from the last span's is always returned.

    Args:
        spans: The spans, in the order of their tokens.
        max_staleness: Spans of at most this staleness are left out; 0 leaves out only the spans of the last version.
    """
    numbering = spans[-1].numbering if spans else ""
    staleness = _staleness_by_version([span for span in spans if span.numbering == numbering])
    return [span for span in spans if span.numbering != numbering or staleness[span.version] > max_staleness]


def _staleness_by_version(spans: Sequence[WeightSpan]) -> dict[str | None, int]:
    """Map each version of one numbering to the number of versions from it to the last span's version."""
    versions = distinct_versions(spans)
    numbers = {version: number for version in versions if (number := _number_of(version)) is not None}
    if len(numbers) == len(versions):
        return {version: numbers[spans[-1].version] - number for version, number in numbers.items()}
    last = versions.index(spans[-1].version)
    return {version: last - position for position, version in enumerate(versions)}


def _number_of(version: object) -> int | None:
    text = str(version)
    return int(text) if text.isdecimal() else None
