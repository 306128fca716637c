"""Which rows to keep: repeated problems, problems with several labels, and rows that can't be used.

Knows every row by three numbers only, so that millions fit; must not know files.

Of rows with the same problem and an equal label the first is kept. Where the labels of a problem differ, the one that
more than half of its rows give is kept; where there is none, the problem is left out. Either way each label that loses
is reported. When duplicates are kept, conflicts are reported only.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import orjson

from preparation.chat import Chat, identity_of, problem_of, to_chat
from preparation.errors import RowError
from preparation.instruction import without_instruction, without_instructions
from preparation.label_differences import LabelDifferences
from preparation.labels import Labels

_DIGEST_BYTES: Final = 16


@dataclass(slots=True, eq=False)
class Pair:
    """A problem with one of its labels.

    Attributes:
        rows: Numbers of the rows that have both, ascending.
        label: The label's number.
    """

    rows: Any
    label: int


@dataclass(frozen=True, slots=True)
class Rejection:
    """Rows that are left out for a reason.

    Attributes:
        row: The first of them.
        times: How many they are.
        kind: "prompt", "label" or "conflict".
        reason: In words.
    """

    row: int
    times: int
    kind: str
    reason: str


@dataclass(slots=True)
class Choice:
    """What becomes of all rows.

    Attributes:
        kept: Numbers of the rows to write, ascending.
        repeated: How many rows repeat one that was looked at.
        rejections: Those that are left out for another reason.
        conflicts: Problems with several labels.
        undecided: Those of them that are left out.
    """

    kept: list[int] = field(default_factory=list)
    repeated: int = 0
    rejections: list[Rejection] = field(default_factory=list)
    conflicts: int = 0
    undecided: int = 0

    @property
    def looked_at(self) -> int:
        """Rows that were kept or rejected: all but the repeated ones."""
        return len(self.kept) + sum(rejection.times for rejection in self.rejections)


class Survey:
    """Reads all rows once and then decides."""

    def __init__(self) -> None:
        self.labels = Labels()
        self.differences = LabelDifferences()
        self._by_prompt: dict[bytes, int] = {}
        self._by_problem: dict[bytes, int] = {}
        self._reasons: dict[int, str] = {}
        self._row_problems = array("q")
        self._row_labels = array("q")

    def __len__(self) -> int:
        return len(self._row_problems)

    def add(self, prompts: Iterable[object], labels: Iterable[object]) -> None:
        """Take the next rows."""
        for prompt, label in zip(prompts, labels, strict=True):
            self._row_problems.append(self._problem_of(prompt))
            self._row_labels.append(self.labels.number_of(label))

    def label_of(self, row: int) -> str:
        """The normalised label of a row."""
        return self.labels.text(self._row_labels[row])

    def decide(self, *, keep_duplicates: bool) -> Choice:
        """Check the labels and choose the rows."""
        self.labels.check()
        choice = Choice()
        for problem, pairs in self._problems():
            usable = self._usable(problem, pairs, choice, keep_duplicates=keep_duplicates)
            if len(usable) > 1:
                usable = self._settle(usable, choice, keep_duplicates=keep_duplicates)
            for pair in usable:
                rows = pair.rows if keep_duplicates else pair.rows[:1]
                choice.kept.extend(int(row) for row in rows)
                choice.repeated += len(pair.rows) - len(rows)
        choice.kept.sort()
        choice.rejections.sort(key=lambda rejection: rejection.row)
        return choice

    def _problem_of(self, prompt: object) -> int:
        """A number; rows that say the same but for spacing and instructions share it."""
        said = _digest(orjson.dumps(prompt, default=str))
        known = self._by_prompt.get(said)
        if known is not None:
            return known
        reason = ""
        try:
            problem = _digest(identity_of(_asking(without_instructions(to_chat(prompt))[0])).encode())
        except RowError as e:
            problem, reason = said, str(e)
        number = self._by_problem.setdefault(problem, len(self._by_problem))
        if reason:
            self._reasons[number] = reason
        self._by_prompt[said] = number
        return number

    def _problems(self) -> Iterator[tuple[int, list[Pair]]]:
        """Each problem with its labels, as they were written."""
        problems = np.frombuffer(self._row_problems, dtype=np.int64)
        labels = np.frombuffer(self._row_labels, dtype=np.int64)
        order = np.lexsort((labels, problems))  # stable: rows of a pair stay in their order
        edges = np.flatnonzero((np.diff(problems[order]) != 0) | (np.diff(labels[order]) != 0)) + 1
        current, pairs = -1, list[Pair]()
        for rows in np.split(order, edges) if len(order) else ():
            problem = int(problems[rows[0]])
            if pairs and problem != current:
                yield current, pairs
                pairs = []
            current = problem
            pairs.append(Pair(rows, int(labels[rows[0]])))
        if pairs:
            yield current, pairs

    def _usable(self, problem: int, pairs: list[Pair], choice: Choice, *, keep_duplicates: bool) -> list[Pair]:
        """The pairs that can be used, those with equal labels joined."""
        usable: list[Pair] = []
        for pair in sorted(pairs, key=lambda pair: int(pair.rows[0])):
            prompt_reason, label_reason = self._reasons.get(problem, ""), self.labels.reason(pair.label)
            if prompt_reason or label_reason:
                kind = "prompt" if prompt_reason else "label"
                _reject(pair, kind, prompt_reason or label_reason, choice, keep_duplicates=keep_duplicates)
                continue
            equal = next((other for other in usable if self.labels.are_equal(pair.label, other.label)), None)
            if equal is None:
                usable.append(pair)
            else:
                equal.rows = np.sort(np.concatenate([equal.rows, pair.rows]))
        return usable

    def _settle(self, pairs: list[Pair], choice: Choice, *, keep_duplicates: bool) -> list[Pair]:
        """The pairs of a problem that stay, when its labels differ."""
        choice.conflicts += 1
        if keep_duplicates:
            return pairs
        total = sum(len(pair.rows) for pair in pairs)
        winners = [pair for pair in pairs if 2 * len(pair.rows) > total]
        choice.undecided += not winners
        votes = ", ".join(f"{self.labels.text(pair.label)!r} {len(pair.rows)}x" for pair in pairs)
        verdict = f"{self.labels.text(winners[0].label)!r} is kept" if winners else "none has more than half"
        for pair in pairs:
            if pair not in winners:
                _reject(pair, "conflict", f"the problem has several labels: {votes}; {verdict}", choice)
        return winners


def _reject(pair: Pair, kind: str, reason: str, choice: Choice, *, keep_duplicates: bool = False) -> None:
    times = len(pair.rows) if keep_duplicates else 1
    choice.repeated += len(pair.rows) - times
    choice.rejections.append(Rejection(int(pair.rows[0]), times, kind, reason))


def _asking(chat: Chat) -> Chat:
    """The chat, if it asks something.

    Raises:
        RowError: It is only an instruction.
    """
    if not without_instruction(problem_of(chat))[0].strip():
        raise RowError("prompt: got nothing but an answer instruction")
    return chat


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
