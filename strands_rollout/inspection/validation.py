"""A data set's gold answers, row by row: which of them the reward would not count as right, and why.

Knows rows and gold answers; nothing of what is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from strands_rollout.dataset_rows import Row, each_row, json_line
from strands_rollout.errors import PromptError
from strands_rollout.grading import label_texts
from strands_rollout.inspection.gold_answers import SAYINGS, GoldAnswer, gold_refusals
from strands_rollout.inspection.reward_call import RewardCall

_AT_ONCE: Final = 500


@dataclass(frozen=True, slots=True)
class Fault:
    """A row whose gold answer does not score.

    Attributes:
        line: In its file, from 1.
        label: As the row has it; None where the row can't be read.
        reason: In words.
    """

    line: int
    label: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Validation:
    """What became of a file.

    Attributes:
        rows: How many there are.
        faults: Those whose gold answer does not score, by line.
    """

    rows: int
    faults: tuple[Fault, ...]

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        right = self.rows - len(self.faults)
        return {"ok": not self.faults, "rows": self.rows, "right": right, "faults": [asdict(f) for f in self.faults]}


async def validate(
    path: Path,
    reward: RewardCall,
    *,
    prompt_key: str = "prompt",
    label_key: str = "label",
    sayings: Sequence[str] = SAYINGS,
    on_done: Callable[[int], None] = lambda _: None,
) -> Validation:
    """Ask the reward for each row's gold answer.

    This package's reward looks at nothing but the label: equal ones are asked once.

    Args:
        path: A JSONL file.
        reward: What must give 1 or more.
        prompt_key: Where a row has its prompt.
        label_key: Where a row has its label.
        sayings: How an answer is said.
        on_done: Told how many more rows are done.

    Raises:
        PromptError: The file can't be read, or is empty.
    """
    lines = list(each_row(path, prompt_key=prompt_key, label_key=label_key))
    faults = {
        number: Fault(number, None, str(fault).removeprefix(f"{path}:{number}: "))
        for number, fault in lines
        if isinstance(fault, PromptError)
    }
    on_done(len(faults))
    groups = _asked_together([row for _, row in lines if isinstance(row, Row)], reward)
    for start in range(0, len(groups), _AT_ONCE):
        chunk = groups[start : start + _AT_ONCE]
        firsts = [rows[0] for rows in chunk]
        golds = [GoldAnswer(row.prompt, row.label, _texts(row.label, reward), row.metadata) for row in firsts]
        for rows, reason in zip(chunk, await gold_refusals(golds, reward, sayings), strict=True):
            faults |= {row.line: Fault(row.line, row.label, reason) for row in rows if reason}
            on_done(len(rows))
    return Validation(len(lines), tuple(faults[number] for number in sorted(faults)))


def _texts(label: Any, reward: RewardCall) -> tuple[str, ...]:  # noqa: ANN401
    """What answers a label; nothing answers a mapping by this package's reward, as `eval` says too."""
    return () if reward.is_own and isinstance(label, Mapping) else label_texts(label)


def _asked_together(rows: Sequence[Row], reward: RewardCall) -> list[list[Row]]:
    if not reward.is_own:
        return [[row] for row in rows]
    groups: dict[bytes, list[Row]] = {}
    for row in rows:
        groups.setdefault(json_line({"label": row.label}), []).append(row)
    return list(groups.values())
