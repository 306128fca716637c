"""What each token of a sample is: prompt, context, trained, or sampled and dropped; and which turn sampled it.

Knows a record's values, without trust: a dump is looked at when something is wrong with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from strands_rollout.dump import DumpRecord
from strands_rollout.finished_sample import finite


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """Neighbouring tokens that one turn sampled with one weight version; positions count from the prompt's first."""

    turn: int
    start: int
    end: int
    version: str | None


@dataclass(frozen=True, slots=True)
class TokenLists:
    """A record's lists, with what is no list or of a wrong type read as absent.

    Attributes:
        ids: Prompt and response.
        prompt_length: Tokens before the response, at least 0.
        loss_mask: One per response token where nothing is wrong; all 1 where the sample has none, as slime reads it.
        logprobs: One per response token where nothing is wrong; empty where the sample has none.
        spans: What was sampled, in order; by the mask where the episode's facts don't say.
        spans_are_told: Whether the facts say so.
    """

    ids: list[int]
    prompt_length: int
    loss_mask: list[int]
    logprobs: list[float]
    spans: list[TurnSpan]
    spans_are_told: bool

    @classmethod
    def of(cls, record: DumpRecord) -> TokenLists:
        """Those of a record."""
        values = record.values
        ids = _list(values.get("tokens"), int)
        length = values.get("response_length")
        length = length if isinstance(length, int) else 0
        prompt_length = min(max(len(ids) - length, 0), len(ids))
        given = values.get("loss_mask")
        mask = [1] * (len(ids) - prompt_length) if given is None else _list(given, int)
        told = _told_spans(record, len(ids))
        spans = told if told is not None else _masked_spans(mask, prompt_length, values.get("weight_versions"))
        logprobs = _list(values.get("rollout_log_probs"), float)
        return cls(ids, prompt_length, mask, logprobs, spans, told is not None)

    @property
    def turns(self) -> list[tuple[int, int]]:
        """First token and end of each turn, in order."""
        return [
            (spans[0].start, spans[-1].end)
            for _, group in groupby(self.spans, key=lambda span: span.turn)
            if (spans := list(group))
        ]

    @property
    def contexts(self) -> list[tuple[int, int]]:
        """First token and end of what stands between turns."""
        turns = self.turns
        return [(end, start) for (_, end), (start, _) in pairwise(turns) if start > end]


def token_kinds(record: DumpRecord, lists: TokenLists) -> list[str]:
    """One of "prompt", "context", "trained", "failed", "removed", "stale", "masked" and "unknown" per token.

    "masked" is sampled and not trained for no reason that the sample gives, "unknown" has no mask.
    """
    kinds = ["prompt"] * lists.prompt_length + ["context"] * (len(lists.ids) - lists.prompt_length)
    dropped = _why_dropped(record)
    for span in lists.spans if lists.spans_are_told else ():
        kinds[span.start : span.end] = [dropped] * (span.end - span.start)
    for position in range(lists.prompt_length, len(kinds)):
        place = position - lists.prompt_length
        if place >= len(lists.loss_mask):
            kinds[position] = "unknown"
        elif lists.loss_mask[place]:
            kinds[position] = "removed" if record.values.get("remove_sample") else "trained"
        elif not lists.spans_are_told and dropped != "masked":
            kinds[position] = dropped
    return kinds


def runs(kinds: Sequence[Any]) -> list[tuple[Any, int, int]]:
    """Neighbours of one kind: the kind, its first position, and its end."""
    found, start = [], 0
    for kind, group in groupby(kinds):
        end = start + len(list(group))
        found.append((kind, start, end))
        start = end
    return found


def _why_dropped(record: DumpRecord) -> str:
    if record.values.get("status") == "failed":
        return "failed"
    if record.values.get("remove_sample"):
        return "removed"
    return "stale" if record.facts.get("stale_tokens") else "masked"


def _list(value: Any, kind: type) -> list[Any]:  # noqa: ANN401
    if not isinstance(value, list):
        return []
    return value if set(map(type, value)) <= {kind} else [kind(finite(item) or 0) for item in value]


def _told_spans(record: DumpRecord, count: int) -> list[TurnSpan] | None:
    spans = record.facts.get("spans")
    if not isinstance(spans, list) or not spans:
        return None
    found = []
    for span in spans:
        if not isinstance(span, list | tuple) or len(span) < 3 or not all(type(value) is int for value in span[:3]):
            return None
        turn, start, end = span[:3]
        if not 0 <= start <= end <= count:
            return None
        version = span[3] if len(span) > 3 else None
        found.append(TurnSpan(turn, start, end, None if version is None else str(version)))
    return found


def _masked_spans(mask: Sequence[int], prompt_length: int, versions: Any) -> list[TurnSpan]:  # noqa: ANN401
    """What the mask calls sampled; with slime's versions, one for each request, where there are as many."""
    stretches = [(start, end) for kind, start, end in runs([bool(value) for value in mask]) if kind]
    named = versions if isinstance(versions, list) and len(versions) == len(stretches) else [None] * len(stretches)
    return [
        TurnSpan(turn, prompt_length + start, prompt_length + end, None if version is None else str(version))
        for turn, ((start, end), version) in enumerate(zip(stretches, named, strict=True))
    ]
