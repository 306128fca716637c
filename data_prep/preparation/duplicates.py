"""Choose the rows to keep: duplicates, problems with several labels, and unusable rows are left out.

Of rows with the same problem and an equal label, the first is kept. If a problem has different labels, the label of
more than half of its rows is kept; without such a label the problem is left out. Each label that is left out is
reported. If duplicates are kept, conflicts are only counted.

Data sets have millions of rows, so a row is represented by its number.
"""

import hashlib
import unicodedata
from collections import Counter
from dataclasses import dataclass, field

import orjson

from preparation.instruction import without_instruction, without_instructions
from preparation.labels import Label, are_equal, label_of, reasons_against
from preparation.rows import Chat, RowError, to_chat

RowsByLabel = dict[Label, list[int]]


@dataclass(frozen=True, slots=True)
class Rejection:
    """A number of rows that are left out because of "prompt", "label" or "conflict"; `row` is the first."""

    row: int
    times: int
    kind: str
    reason: str


@dataclass(slots=True)
class Choice:
    """The decision on all rows.

    `kept` has the numbers of the rows to write, ascending; `repeated` counts duplicates; `conflicts` counts problems
    with several labels, and `undecided` those that are left out.
    """

    keep_duplicates: bool
    kept: list[int] = field(default_factory=list)
    repeated: int = 0
    rejections: list[Rejection] = field(default_factory=list)
    conflicts: int = 0
    undecided: int = 0

    def keep(self, rows: list[int]) -> None:
        """Keep the rows of a problem and label, or only the first."""
        some = rows if self.keep_duplicates else rows[:1]
        self.kept.extend(some)
        self.repeated += len(rows) - len(some)

    def reject(self, rows: list[int], kind: str, reason: str) -> None:
        """Leave out the rows of a problem and label."""
        times = len(rows) if self.keep_duplicates else 1
        self.repeated += len(rows) - times
        self.rejections.append(Rejection(rows[0], times, kind, reason))

    def settle(self, rows: RowsByLabel) -> None:
        """Keep the rows of the winning label of a problem."""
        self.conflicts += len(rows) > 1
        total = sum(map(len, rows.values()))
        kept = [label for label, own in rows.items() if self.keep_duplicates or 2 * len(own) > total]
        self.undecided += not kept
        votes = ", ".join(f"{label.text!r} {len(own)}x" for label, own in rows.items())
        verdict = f"{kept[0].text!r} is kept" if kept else "none has more than half"
        for label, own in rows.items():
            if label in kept:
                self.keep(own)
            else:
                self.reject(own, "conflict", f"the problem has several labels: {votes}; {verdict}")


class Survey:
    """All rows of a source by problem and label."""

    def __init__(self) -> None:
        self.rows_read = 0
        self._rows: dict[bytes, RowsByLabel] = {}
        self._reasons: dict[bytes, str] = {}  # reason why a prompt can't be used

    def add(self, prompt: object, label: object) -> None:
        """Add the next row."""
        try:
            problem = _identity(prompt)
        except RowError as e:
            problem = orjson.dumps(prompt, default=str)
            self._reasons[_digest(problem)] = str(e)
        self._rows.setdefault(_digest(problem), {}).setdefault(label_of(label), []).append(self.rows_read)
        self.rows_read += 1

    def decide(self, *, keep_duplicates: bool) -> Choice:
        """Check the labels and choose the rows."""
        counts = Counter[Label]()
        for by_label in self._rows.values():
            counts.update({label: len(rows) for label, rows in by_label.items()})
        reasons = reasons_against(counts)
        choice = Choice(keep_duplicates)
        for problem, by_label in self._rows.items():
            usable: RowsByLabel = {}
            for label, rows in by_label.items():
                if reason := self._reasons.get(problem):
                    choice.reject(rows, "prompt", reason)
                elif reasons[label]:
                    choice.reject(rows, "label", reasons[label])
                else:
                    same = next((other for other in usable if are_equal(label, other)), label)
                    usable[same] = sorted([*usable.get(same, ()), *rows])
            if usable:
                choice.settle(usable)
        choice.kept.sort()
        choice.rejections.sort(key=lambda rejection: rejection.row)
        return choice


def _identity(prompt: object) -> bytes:
    """Return a key that is equal for prompts that differ only in instructions, spacing and Unicode composition.

    Case and superscripts count: x² is not x2.

    Raises:
        RowError: The prompt can't be used, or is only an instruction.
    """
    chat: Chat = without_instructions(to_chat(prompt))[0]
    if not without_instruction(chat[-1]["content"])[0].strip():
        raise RowError("prompt: got nothing but an answer instruction")
    said = (f"{message['role']}\x00{message['content']}" for message in chat)
    return " ".join(unicodedata.normalize("NFC", "\x01".join(said)).split()).encode()


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()
