"""Which rows to keep: repeated problems, problems with several labels, and rows that can't be used.

Of rows with the same problem and an equal label the first is kept. Where the labels of a problem differ, the one that
more than half of its rows give is kept; where there is none, the problem is left out. Either way each label that loses
is reported. When duplicates are kept, conflicts are reported only.

Data sets have millions of rows, so that of each only its number and its label are held.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import orjson

from preparation.instruction import without_instruction, without_instructions
from preparation.labels import Label, Labels
from preparation.rows import Chat, RowError, identity_of, problem_of, to_chat


@dataclass(slots=True, eq=False)
class _Pair:
    """A problem with one of its labels: the numbers of the rows that have both, ascending."""

    label: Label
    rows: array[int]


@dataclass(frozen=True, slots=True)
class Rejection:
    """So many rows, of which this is the first, are left out: for the "prompt", the "label" or a "conflict"."""

    row: int
    times: int
    kind: str
    reason: str


@dataclass(slots=True)
class Choice:
    """What becomes of all rows.

    `kept` are to be written, ascending; `repeated` counts rows that repeat one that was looked at; `conflicts` counts
    problems with several labels, and `undecided` those of them that are left out.
    """

    kept: list[int] = field(default_factory=list)
    repeated: int = 0
    rejections: list[Rejection] = field(default_factory=list)
    conflicts: int = 0
    undecided: int = 0

    def reject(self, pair: _Pair, kind: str, reason: str, *, keep_duplicates: bool = False) -> None:
        """Leave a pair's rows out."""
        times = len(pair.rows) if keep_duplicates else 1
        self.repeated += len(pair.rows) - times
        self.rejections.append(Rejection(pair.rows[0], times, kind, reason))


class Survey:
    """Reads all rows once and then decides."""

    def __init__(self) -> None:
        self._labels = Labels()
        self._by_prompt: dict[bytes, int] = {}
        self._by_problem: dict[bytes, int] = {}
        self._reasons: dict[int, str] = {}
        self._pairs: dict[int, dict[Label, array[int]]] = {}  # rows by problem and label
        self._row_labels: list[Label] = []

    def __len__(self) -> int:
        return len(self._row_labels)

    def add(self, prompts: Iterable[object], labels: Iterable[object]) -> None:
        """Take the next rows."""
        for prompt, label in zip(prompts, labels, strict=True):
            problem, read = self._problem_of(prompt), self._labels.label_of(label)
            self._pairs.setdefault(problem, {}).setdefault(read, array("q")).append(len(self))
            self._row_labels.append(read)

    def label_of(self, row: int) -> str:
        """The normalised label of a row."""
        return self._row_labels[row].text

    def decide(self, *, keep_duplicates: bool) -> Choice:
        """Check the labels and choose the rows."""
        self._labels.check()
        choice = Choice()
        for problem, by_label in self._pairs.items():
            pairs = [_Pair(label, rows) for label, rows in by_label.items()]  # by their first rows
            usable = self._usable(problem, pairs, choice, keep_duplicates=keep_duplicates)
            if len(usable) > 1:
                usable = self._settle(usable, choice, keep_duplicates=keep_duplicates)
            for pair in usable:
                rows = pair.rows if keep_duplicates else pair.rows[:1]
                choice.kept.extend(rows)
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
        number = self._by_prompt[said] = self._by_problem.setdefault(problem, len(self._by_problem))
        if reason:
            self._reasons[number] = reason
        return number

    def _usable(self, problem: int, pairs: list[_Pair], choice: Choice, *, keep_duplicates: bool) -> list[_Pair]:
        """The pairs that can be used, those with equal labels joined."""
        usable: list[_Pair] = []
        for pair in pairs:
            prompt_reason, label_reason = self._reasons.get(problem, ""), pair.label.reason
            if prompt_reason or label_reason:
                kind = "prompt" if prompt_reason else "label"
                choice.reject(pair, kind, prompt_reason or label_reason, keep_duplicates=keep_duplicates)
                continue
            equal = next((other for other in usable if pair.label.equals(other.label)), None)
            if equal is None:
                usable.append(pair)
            else:
                equal.rows = array("q", sorted(equal.rows + pair.rows))
        return usable

    def _settle(self, pairs: list[_Pair], choice: Choice, *, keep_duplicates: bool) -> list[_Pair]:
        """The pairs of a problem that stay, when its labels differ."""
        choice.conflicts += 1
        if keep_duplicates:
            return pairs
        total = sum(len(pair.rows) for pair in pairs)
        winners = [pair for pair in pairs if 2 * len(pair.rows) > total]
        choice.undecided += not winners
        votes = ", ".join(f"{pair.label.text!r} {len(pair.rows)}x" for pair in pairs)
        verdict = f"{winners[0].label.text!r} is kept" if winners else "none has more than half"
        for pair in pairs:
            if pair not in winners:
                choice.reject(pair, "conflict", f"the problem has several labels: {votes}; {verdict}")
        return winners


def _asking(chat: Chat) -> Chat:
    """The chat, if it asks something.

    Raises:
        RowError: It is only an instruction.
    """
    if not without_instruction(problem_of(chat))[0].strip():
        raise RowError("prompt: got nothing but an answer instruction")
    return chat


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()
