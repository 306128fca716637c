"""The token-in/token-out check of the fake SGLang.

Each request of an episode must extend the input and output of the latest answered request, or repeat the episode's
previous or first request. Tests also compare an episode's sample with the recorded token ids.
"""

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Episode:
    """Token ids of an episode that the engine has read or sampled, and the weight versions that sampled them."""

    first: list[int]  # the first request's ids
    last_input: list[int]  # the last request's ids
    sequence: list[int]  # the latest answered request's ids and its output; before an answer, the first request's ids
    # the weight version that sampled each id of the sequence; None for an id of the context
    versions: list[str | None] = field(default_factory=list)
    restarts: int = 0  # number of times that the episode began again after tokens had been sampled

    @property
    def sampled_length(self) -> int:
        """Number of the episode's tokens that the engine sampled."""
        return sum(version is not None for version in self.versions)

    def deliver(self, ids: Sequence[int], versions: Sequence[str]) -> None:
        """Record the answer to the episode's last request."""
        known = self.versions[: len(self.last_input)]
        self.versions = [*known, *[None] * (len(self.last_input) - len(known)), *versions]
        self.sequence = [*self.last_input, *ids]


class Episodes:
    """The episodes of one fake server, by key.

    Attributes:
        violations: Messages for requests that neither extend the latest answered request and its output nor repeat the
            previous or the first request, and for ids outside the vocabulary.
        dropped: Messages for requests that were repeated after an answer with tokens. A client that never received
            that answer has no choice, so this is not a violation.
    """

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Episode] = {}
        self._anonymous = itertools.count()
        self.violations: list[str] = []
        self.dropped: list[str] = []

    def __getitem__(self, key: Hashable) -> Episode:
        return self._by_key[key]

    def __iter__(self) -> Iterator[Episode]:
        return iter(self._by_key.values())

    def enter(self, key: Hashable | None, ids: list[int], number: int) -> Episode:
        """Check a request's ids against its episode, and return the episode; without a key, find it by the ids."""
        if key is None:
            key = self._extended_by(ids)
        episode = self._by_key.get(key)
        if episode is None:
            episode = self._by_key[key] = Episode(ids, ids, ids)
        elif ids == episode.first:
            self._note_dropped(episode, ids, number)
            restarts = episode.restarts + (episode.sampled_length > 0)
            episode = self._by_key[key] = Episode(ids, ids, ids, restarts=restarts)
        elif ids == episode.last_input and ids != episode.sequence:
            self._note_dropped(episode, ids, number)
        elif ids[: len(episode.sequence)] != episode.sequence:
            self.violations.append(
                f"request {number}: its {len(ids)} ids don't extend the {len(episode.sequence)} ids of the latest "
                f"answered request and its output; they differ from position "
                f"{_shared_length(ids, episode.sequence)} on"
            )
        episode.last_input = ids
        return episode

    def _note_dropped(self, episode: Episode, ids: list[int], number: int) -> None:
        count = len(episode.sequence) - len(ids)
        if ids == episode.last_input and count > 0:
            self.dropped.append(f"request {number} repeats the previous request, whose answer had {count} tokens")

    def _extended_by(self, ids: list[int]) -> Hashable:
        """Return the key of the episode to which a request belongs: `ids` extend the episode's first request.

        Of several such episodes, take the one that shares the most leading ids; if there is none, return a new key.
        """
        began = [k for k, e in self._by_key.items() if ids != e.first and ids[: len(e.first)] == e.first]
        if not began:
            return ("episode", next(self._anonymous))
        return max(reversed(began), key=lambda k: _shared_length(ids, self._by_key[k].sequence))


def _shared_length(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
