"""One sample as the page shows it: a row of the list, and the details that are read when it is opened.

Knows records, plain values and what the other parts of the viewer find; nothing of HTML.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strands_rollout.drift import token_bytes
from strands_rollout.dump import DumpRecord, TokenTexts
from strands_rollout.dump.record import FACTS_KEY, without_secrets
from strands_rollout.episode_times import steps_of, sums_of
from strands_rollout.finished_sample import finite, kept
from strands_rollout.sandbox.capped_output import shorten
from strands_rollout.view.drift_marks import DriftMark, drift_marks
from strands_rollout.view.problems import Problem, find_problems, reward_key
from strands_rollout.view.talk import conversation
from strands_rollout.view.token_runs import TokenLists, runs, token_kinds
from strands_rollout.view.turn_habits import TurnHabits

_DROPPED: Final = frozenset({"failed", "removed", "stale", "masked"})
_PREVIEW_CHARS: Final = 160
_MOST_TEXT_CHARS: Final = 20_000


class Retokeniser:
    """Encodes turns again, and gives the texts of tokens.

    Args:
        tokenizer: The policy's, a Hugging Face fast tokenizer.

    Attributes:
        texts: Bytes of its ids.
        controls: Ids of its added tokens.
    """

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401
        self.texts: Mapping[int, bytes] = TokenTexts(tokenizer)
        self.controls = frozenset(tokenizer.get_added_vocab().values())
        self._tokenizer = tokenizer
        self._bytes_of = token_bytes(tokenizer)

    def marks(self, lists: TokenLists) -> list[DriftMark] | None:
        """Of all turns, in order, at places from the sample's first token; None where ids are not the tokenizer's."""
        return kept("drift", lambda: self._marks(lists), of_sample=True)

    def _marks(self, lists: TokenLists) -> list[DriftMark]:
        return [
            DriftMark(start + mark.start, start + mark.end, mark.instead)
            for start, end in lists.turns
            for mark in drift_marks(lists.ids[start:end], self._tokenizer, self._bytes_of)
        ]


@dataclass(frozen=True, slots=True)
class SampleView:
    """A sample's row and details, as values of JSON."""

    row: dict[str, Any]
    detail: dict[str, Any]


def view_sample(record: DumpRecord, habits: TurnHabits, retokeniser: Retokeniser | None) -> SampleView:
    """Make them.

    Args:
        record: One sample.
        habits: Of its dump.
        retokeniser: None for no marks of drift, and no texts but the record's.
    """
    lists = TokenLists.of(record)
    kinds = token_kinds(record, lists)
    marks = retokeniser.marks(lists) if retokeniser is not None and record.has_tokens else None
    problems = find_problems(record, lists, habits)
    row = _row(record, lists, kinds, marks, problems)
    texts = _texts(record, lists, marks, retokeniser)
    return SampleView(row, _detail(record, lists, kinds, marks, problems, texts))


def _row(
    record: DumpRecord,
    lists: TokenLists,
    kinds: Sequence[str],
    marks: Sequence[DriftMark] | None,
    problems: Sequence[Problem],
) -> dict[str, Any]:
    values, facts = record.values, record.facts
    return {
        "index": values.get("index"),
        "group": _group(values),
        "part": _part(facts),
        "status": _text(values.get("status")),
        "stop": _text(facts.get("stop_reason")),
        "reward": _reward(record),
        "turns": finite(facts.get("turns")) if "turns" in facts else len(lists.turns),
        "calls": finite(facts.get("tool_calls")),
        "errors": finite(facts.get("tool_errors")),
        "length": finite(values.get("response_length")),
        "trained": kinds.count("trained"),
        "dropped": sum(kind in _DROPPED for kind in kinds),
        "drift": None if marks is None else sum(mark.end - mark.start for mark in marks),
        "problems": list(dict.fromkeys(problem.kind for problem in problems)),
        "times": sums_of(facts),
        "versions": sorted({span.version for span in lists.spans if span.version is not None}),
        "asked": shorten(_question(values.get("prompt")), _PREVIEW_CHARS),
        "final": shorten(_text(facts.get("final_text") or values.get("response")), _PREVIEW_CHARS),
        "label": shorten(_text(values.get("label")), _PREVIEW_CHARS),
        "where": record.where,
        "source": record.source,
    }


def _detail(
    record: DumpRecord,
    lists: TokenLists,
    kinds: Sequence[str],
    marks: Sequence[DriftMark] | None,
    problems: Sequence[Problem],
    texts: Mapping[int, bytes],
) -> dict[str, Any]:
    values = record.values
    given = values.get("metadata")
    metadata = without_secrets(given) if isinstance(given, Mapping) else {}
    facts = metadata.pop(FACTS_KEY, None) if record.facts else {}
    facts = {name: value for name, value in facts.items() if name not in ("spans", "resume", "final_text", "requests")}
    return {
        "ids": lists.ids,
        "prompt": lists.prompt_length,
        "kinds": [list(run) for run in runs(kinds)],
        "mask": [[int(bool(kind)), start, end] for kind, start, end in runs(lists.loss_mask)],
        "logprobs": _thousandths(lists.logprobs),
        "spans": [[span.turn, span.start, span.end, span.version] for span in lists.spans],
        "drift": None if marks is None else [[mark.start, mark.end, mark.instead] for mark in marks],
        "problems": [[found.kind, found.text, found.start, found.end] for found in problems],
        "talk": [[start, _plain(parts)] for start, parts in conversation(lists, texts, record.facts)],
        "steps": [[step.kind, step.at_s, step.s, step.turn, step.call] for step in steps_of(record.facts)],
        "texts": {str(token): _text_or_bytes(text) for token, text in texts.items()},
        "messages": _plain(values.get("prompt")),
        "response": _text(values.get("response")) if not texts or not lists.ids else "",
        "reward": _plain(values.get("reward")),
        "label": _plain(values.get("label")),
        "facts": _plain(facts),
        "metadata": _plain(metadata),
    }


def _texts(
    record: DumpRecord, lists: TokenLists, marks: Sequence[DriftMark] | None, retokeniser: Retokeniser | None
) -> Mapping[int, bytes]:
    if retokeniser is None:
        return record.token_texts
    ids = {*lists.ids, *(token for mark in marks or () for token in mark.instead)}
    return {token: retokeniser.texts[token] for token in sorted(ids) if token in retokeniser.texts}


def _reward(record: DumpRecord) -> float | None:
    reward, key = record.values.get("reward"), reward_key(record)
    value = reward.get(key) if key is not None and isinstance(reward, Mapping) else reward
    return float(value) if isinstance(value, bool) else finite(value)


def _group(values: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """The group in slime; of an evaluation, which has none, the problem: its samples are to be seen side by side."""
    metadata = values.get("metadata")
    asked = metadata.get("eval") if isinstance(metadata, Mapping) else None
    if values.get("group_index") is None and isinstance(asked, Mapping):
        return f"{_text(asked.get('data_set'))}/{_text(asked.get('problem'))}"
    return values.get("group_index")


def _part(facts: Mapping[str, Any]) -> str:
    """Which of a fan-out's samples it is, in words; "" of a sample that is a rollout of its own."""
    part = facts.get("fan_out")
    told = part if isinstance(part, Mapping) else {}
    number, count = told.get("part"), told.get("of")
    if not isinstance(number, int) or not isinstance(count, int) or count < 2:
        return ""
    return f"{_text(told.get('kind'))}, {number + 1} of {count}"


def _question(prompt: Any) -> str:  # noqa: ANN401 - a row's prompt
    """The last thing that a user said, or the text."""
    if not isinstance(prompt, list):
        return _text(prompt)
    said = [
        message.get("content") for message in prompt if isinstance(message, Mapping) and message.get("role") == "user"
    ]
    if said and isinstance(said[-1], list):
        return " ".join(_words_of(part) for part in said[-1])
    return _text(said[-1]) if said else ""


def _words_of(part: Any) -> str:  # noqa: ANN401 - a part of a message
    if isinstance(part, Mapping):
        return _text(part["text"]) if "text" in part else f"[{_text(part.get('type') or next(iter(part), ''))}]"
    return _text(part)


def _text(value: Any) -> str:  # noqa: ANN401
    if value is None:
        return ""
    return str(_plain(value)) if isinstance(value, str) else json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a sample holds
    """The value as JSON has it, for people: what has no form there as Python writes it, long texts shortened."""
    if isinstance(value, str):
        return shorten(value, _MOST_TEXT_CHARS).encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int):
        return value
    return value if finite(value) is not None else repr(value)[:_PREVIEW_CHARS]


def _thousandths(logprobs: Sequence[float]) -> list[float | None]:
    if math.isfinite(sum(logprobs)):
        return [round(value, 3) for value in logprobs]
    return [None if finite(value) is None else round(value, 3) for value in logprobs]


def _text_or_bytes(text: bytes) -> str | list[int]:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return list(text)
