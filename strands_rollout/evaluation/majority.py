"""What a majority of a problem's samples answered, in whatever notation. Pure, and whatever order the samples are in.

Knows answers as the grader cut them out, and its comparison; nothing of samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from strands_rollout.grading.comparison import compare
from strands_rollout.grading.dapo_score import NO_ANSWER

_NO_ANSWERS: Final = frozenset({"", NO_ANSWER})


@dataclass(frozen=True, slots=True)
class Ballot:
    """One sample's vote.

    Attributes:
        answer: As the grader cut it out; "" for none, which is no vote.
        is_right: The grader's verdict.
    """

    answer: str
    is_right: bool


@dataclass(frozen=True, slots=True)
class Majority:
    """The outcome of a vote.

    Attributes:
        answers: The answers with most votes, each in its most frequent notation; several in a tie, none without votes.
        score: 1.0 if the right one won; its share of a tie; else 0.0.
    """

    answers: tuple[str, ...]
    score: float


def majority_of(ballots: Iterable[Ballot]) -> Majority:
    """Count the votes of one problem.

    Answers that the grader's comparison calls equal without algebra are one: 1/2 and 0.5. So are all right answers,
    which equal the label. A tie is split: n winners with the right one among them score 1/n, which is what drawing one
    by lot would score on average.
    """
    votes = [ballot for ballot in ballots if has_answer(ballot.answer)]
    right = Counter(ballot.answer for ballot in votes if ballot.is_right)
    wrong = Counter(ballot.answer for ballot in votes if not ballot.is_right)
    groups = ([right] if right else []) + _equal_answers(wrong)
    most = max((group.total() for group in groups), default=0)
    winners = [group for group in groups if group.total() == most]
    score = 1 / len(winners) if right and winners[0] is right else 0.0
    return Majority(tuple(sorted(map(_spelling, winners))), score)


def has_answer(answer: str) -> bool:
    """Whether the grader found an answer at all."""
    return answer.strip() not in _NO_ANSWERS


def _equal_answers(votes: Counter[str]) -> list[Counter[str]]:
    """The votes by answer; one that equals answers of two groups makes them one."""
    groups: list[Counter[str]] = []
    for answer in votes:
        equal = [group for group in groups if any(_is_equal(answer, other) for other in group)]
        groups = [group for group in groups if group not in equal]
        groups.append(Counter({answer: votes[answer]}))
        for group in equal:
            groups[-1].update(group)
    return groups


def _is_equal(first: str, second: str) -> bool:
    """Either may be the label: the comparison is not symmetric."""
    return bool(compare(first, second).equal or compare(second, first).equal)


def _spelling(group: Counter[str]) -> str:
    spellings: Sequence[str] = sorted(group, key=lambda answer: (-group[answer], len(answer), answer))
    return spellings[0]
