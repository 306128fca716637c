"""Choose the rows to keep: leave out duplicates, conflicting labels of a problem, and unusable rows.

Of rows with the same problem and an equal label, the first is kept. If a problem has different labels, the label of
more than half of its rows is kept; if there is no such label, the problem is left out. Every removed label is
reported. If duplicates are kept, conflicts are only counted.

A data set may have millions of rows, so a row is represented by its number.
"""

import hashlib
import unicodedata
from collections import Counter
from dataclasses import dataclass, field

import orjson

from preparation.instruction import without_instruction, without_instructions
from preparation.labels import Label, are_equal, label_of, rejection_reasons
from preparation.rows import Chat, RowError, to_chat

RowsByLabel = dict[Label, list[int]]


@dataclass(frozen=True, slots=True)
class Rejection:
    """Rows that are left out, all with the same problem and label.

    Attributes:
        row: The number of the first of these rows.
        times: The number of these rows, without removed duplicates.
        kind: The cause: "prompt", "label" or "conflict".
        reason: The reason, for the user.
    """

    row: int
    times: int
    kind: str
    reason: str


@dataclass(slots=True)
class Choice:
    """The decision on all rows.

    Attributes:
        keep_duplicates: True if repeated rows are kept.
        kept: The numbers of the rows to write, in ascending order.
        repeated: The number of duplicates that are left out.
        rejections: The rows that are left out for other reasons.
        conflicts: The number of problems with several labels.
        undecided: The number of these problems that are left out, since no label has a majority.
    """

    keep_duplicates: bool
    kept: list[int] = field(default_factory=list)
    repeated: int = 0
    rejections: list[Rejection] = field(default_factory=list)
    conflicts: int = 0
    undecided: int = 0

    def keep(self, rows: list[int]) -> None:
        """Keep the rows of a problem and label: all if duplicates are kept, else the first."""
        kept = rows if self.keep_duplicates else rows[:1]
        self.kept.extend(kept)
        self.repeated += len(rows) - len(kept)

    def reject(self, rows: list[int], kind: str, reason: str) -> None:
        """Leave out the rows of a problem and label."""
        times = len(rows) if self.keep_duplicates else 1
        self.repeated += len(rows) - times
        self.rejections.append(Rejection(rows[0], times, kind, reason))

    def keep_majority(self, rows: RowsByLabel) -> None:
        """Keep a problem's rows with the label of more than half of them, and reject its other rows.

        If duplicates are kept, keep all rows, and only count the conflict.
        """
        self.conflicts += len(rows) > 1
        total = sum(map(len, rows.values()))
        kept = [label for label, numbers in rows.items() if self.keep_duplicates or 2 * len(numbers) > total]
        self.undecided += not kept
        votes = ", ".join(f"{label.text!r} {len(numbers)}x" for label, numbers in rows.items())
        verdict = f"{kept[0].text!r} is kept" if kept else "none has more than half"
        for label, numbers in rows.items():
            if label in kept:
                self.keep(numbers)
            else:
                self.reject(numbers, "conflict", f"the problem has several labels: {votes}; {verdict}")


class Survey:
    """All rows of a source by problem and label."""

    def __init__(self) -> None:
        self.rows_read = 0
        self._rows: dict[bytes, RowsByLabel] = {}
        self._reasons: dict[bytes, str] = {}  # reasons why prompts can't be used, by the prompts' digests

    def add(self, prompt: object, label: object) -> None:
        """Add the next row."""
        try:
            problem = _problem_key(prompt)
        except RowError as e:
            problem = orjson.dumps(prompt, default=str)
            self._reasons[_digest(problem)] = str(e)
        self._rows.setdefault(_digest(problem), {}).setdefault(label_of(label), []).append(self.rows_read)
        self.rows_read += 1

    def decide(self, *, keep_duplicates: bool) -> Choice:
        """Check the labels, choose the rows, and return the choice."""
        counts = Counter[Label]()
        for by_label in self._rows.values():
            counts.update({label: len(rows) for label, rows in by_label.items()})
        reasons = rejection_reasons(counts)
        choice = Choice(keep_duplicates)
        for problem, by_label in self._rows.items():
            usable: RowsByLabel = {}
            for label, rows in by_label.items():
                if reason := self._reasons.get(problem):
                    choice.reject(rows, "prompt", reason)
                elif reasons[label]:
                    choice.reject(rows, "label", reasons[label])
                else:
                    equal = next((other for other in usable if are_equal(label, other)), label)
                    usable[equal] = sorted([*usable.get(equal, ()), *rows])
            if usable:
                choice.keep_majority(usable)
        choice.kept.sort()
        choice.rejections.sort(key=lambda rejection: rejection.row)
        return choice


def _problem_key(prompt: object) -> bytes:
    """Return a key that is equal for prompts that differ only in instructions, spacing and Unicode composition.

    Prompts that differ in case or in superscripts get different keys: x² is not x2.

    Raises:
        RowError: The prompt can't be used, or is only an instruction.
    """
    chat: Chat = without_instructions(to_chat(prompt))[0]
    if not without_instruction(chat[-1]["content"])[0].strip():
        raise RowError("prompt: got an answer instruction alone; expected a problem")
    texts = (f"{message['role']}\x00{message['content']}" for message in chat)
    return " ".join(unicodedata.normalize("NFC", "\x01".join(texts)).split()).encode()


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()
