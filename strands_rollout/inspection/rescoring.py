"""Saved samples scored again with another reward: what it gives, beside what they had.

Knows dumps and rewards; nothing of what is printed.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from strands_rollout.dump import DumpRecord, read_dump
from strands_rollout.errors import DumpError
from strands_rollout.inspection.reward_call import RewardCall

_AT_ONCE: Final = 200
_UNSCORED: Final = frozenset({"aborted", "pending"})
_EQUAL_WITHIN: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Rescored:
    """One sample with its new reward.

    Attributes:
        number: Its place in the dump, from 0.
        record: With the new reward; with the old one where there is none.
        old: The old reward's number; None where it had none.
        new: The new one's; None where it was not scored, or failed.
        error: Why it could not be scored, in words; None where it was, or has no answer to score.
    """

    number: int
    record: DumpRecord
    old: float | None
    new: float | None
    error: str | None

    @property
    def is_changed(self) -> bool:
        """Whether both rewards have a number, and another."""
        return self.old is not None and self.new is not None and abs(self.new - self.old) > _EQUAL_WITHIN


async def rescore(path: Path, reward: RewardCall) -> AsyncIterator[Rescored]:
    """Score the samples of a dump again, in order; those that were aborted keep what they have, as in slime.

    Args:
        path: Of the dump.
        reward: Sees each sample as slime's reward does, with no reward of its own.

    Raises:
        DumpError: See `read_dump`; or there is no sample.
    """
    number = 0
    for records in _together(read_dump(path)):
        for found in await _scored(records, number, reward):
            yield found
        number += len(records)
    if not number:
        raise DumpError(f"{path} holds no sample; expected one or more")


def _together(records: Iterable[DumpRecord]) -> Iterator[list[DumpRecord]]:
    """Some at a time; neighbours of one group, and of one rollout, as a fan-out's siblings are, stay together."""
    found: list[DumpRecord] = []
    for record in records:
        if len(found) >= _AT_ONCE and not any(_share(found[-1], record, key) for key in ("rollout_id", "group_index")):
            yield found
            found = []
        found.append(record)
    if found:
        yield found


def _share(one: DumpRecord, other: DumpRecord, key: str) -> bool:
    return one.values.get(key) is not None and one.values.get(key) == other.values.get(key)


async def _scored(records: Sequence[DumpRecord], first: int, reward: RewardCall) -> list[Rescored]:
    asked = [at for at, record in enumerate(records) if record.values.get("status") not in _UNSCORED]
    # copies: what a reward does to a sample is not to be in the new dump
    values = [copy.deepcopy({**records[at].values, "reward": None}) for at in asked]
    samples = [replace(records[at], values=own).to_sample() for at, own in zip(asked, values, strict=True)]
    answers = dict(zip(asked, await reward.rewards(samples), strict=True))
    return [
        _beside(first + at, record, answers[at], reward) if at in answers else _as_it_was(first + at, record, reward)
        for at, record in enumerate(records)
    ]


def _as_it_was(number: int, record: DumpRecord, reward: RewardCall) -> Rescored:
    return Rescored(number, record, reward.number(record.values.get("reward")), None, None)


def _beside(number: int, record: DumpRecord, answer: Any, reward: RewardCall) -> Rescored:  # noqa: ANN401
    old = reward.number(record.values.get("reward"))
    if isinstance(answer, Exception):
        return Rescored(number, record, old, None, f"{type(answer).__name__}: {answer}")
    new = reward.number(answer)
    if new is None:
        return Rescored(number, record, old, None, f"got the reward {answer!r:.200}; expected {reward.expected()}")
    return Rescored(number, replace(record, values={**record.values, "reward": answer}), old, new, None)


@dataclass(frozen=True, slots=True)
class RewardChange:
    """What another reward changed in a dump.

    Attributes:
        samples: How many there are.
        scored: Those that have a new reward.
        failed: Those for which the reward raised, or gave no number.
        compared: Those with an old and a new number; the following are of these.
        changed: Those with another number.
        raised: Those with a higher one.
        lowered: Those with a lower one.
        old_mean: Mean of the old numbers; None where nothing was compared.
        new_mean: Mean of the new numbers; None likewise.
        correlation: Pearson's, of old and new; None where there are fewer than two, or either are all alike.
    """

    samples: int
    scored: int
    failed: int
    compared: int
    changed: int
    raised: int
    lowered: int
    old_mean: float | None
    new_mean: float | None
    correlation: float | None

    @classmethod
    def of(cls, found: Sequence[Rescored]) -> RewardChange:
        """Of these samples."""
        pairs = [(one.old, one.new) for one in found if one.old is not None and one.new is not None]
        old, new = ([pair[side] for pair in pairs] for side in (0, 1))
        changed = [one for one in found if one.is_changed]
        raised = sum((one.new or 0.0) > (one.old or 0.0) for one in changed)
        varies = len(pairs) > 1 and np.ptp(old) > 0 and np.ptp(new) > 0
        return cls(
            samples=len(found),
            scored=sum(one.new is not None for one in found),
            failed=sum(one.error is not None for one in found),
            compared=len(pairs),
            changed=len(changed),
            raised=raised,
            lowered=len(changed) - raised,
            old_mean=float(np.mean(old)) if old else None,
            new_mean=float(np.mean(new)) if new else None,
            correlation=float(np.corrcoef(old, new)[0, 1]) if varies else None,
        )
