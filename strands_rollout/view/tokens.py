"""Kinds of a sample's tokens, the turns that sampled them, and the rules that most turns of a dump keep.

All is read without trust: a dump is looked at when something is wrong with it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from strands_rollout.dump import DumpRecord
from strands_rollout.samples import finite, run_metric
from strands_rollout.template.tokens import unlike_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTROL: Final = re.compile(
    rb"<(?:\||\xef\xbd\x9c).+(?:\||\xef\xbd\x9c)>|</?(?:[a-z]+_[a-z_]+|think|arg_key)>|\[/?[A-Z_]{3,}\]"
)
_LEAST_SHARE: Final = 0.5
# of the turns, for a token that ends some and stands inside of none: families end turns with calls by one of their own
_LEAST_ENDS: Final = 0.1


class TurnSpan(NamedTuple):
    """Neighboring tokens that one turn sampled with one weight version; positions count from the prompt's first."""

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
        spans: Sampled tokens, in order; by the mask where the episode's facts don't say.
        spans_recorded: True where the facts say so.
    """

    ids: list[int]
    prompt_length: int
    loss_mask: list[int]
    logprobs: list[float]
    spans: list[TurnSpan]
    spans_recorded: bool

    @classmethod
    def of(cls, record: DumpRecord) -> TokenLists:
        """Read a record's lists."""
        values = record.values
        ids, length = _list(values.get("tokens"), int), values.get("response_length")
        prompt_length = min(max(len(ids) - (length if isinstance(length, int) else 0), 0), len(ids))
        given = values.get("loss_mask")
        mask = [1] * (len(ids) - prompt_length) if given is None else _list(given, int)
        recorded = _recorded_spans(record, len(ids))
        spans = recorded if recorded is not None else _masked_spans(mask, prompt_length, values.get("weight_versions"))
        logprobs = _list(values.get("rollout_log_probs"), float)
        return cls(ids, prompt_length, mask, logprobs, spans, recorded is not None)

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
    """Tell "prompt", "context", "trained", "failed", "removed", "stale", "masked" and "unknown" tokens apart.

    "masked" is sampled and not trained for no reason that the sample gives, "unknown" has no mask.
    """
    kinds = ["prompt"] * lists.prompt_length + ["context"] * (len(lists.ids) - lists.prompt_length)
    is_removed = bool(record.values.get("remove_sample"))
    reasons = {
        "failed": record.values.get("status") == "failed",
        "removed": is_removed,
        "stale": record.facts.stale_tokens,
    }
    dropped = next((reason for reason, holds in reasons.items() if holds), "masked")
    for span in lists.spans if lists.spans_recorded else ():
        kinds[span.start : span.end] = [dropped] * (span.end - span.start)
    for position in range(lists.prompt_length, len(kinds)):
        place = position - lists.prompt_length
        if place >= len(lists.loss_mask):
            kinds[position] = "unknown"
        elif lists.loss_mask[place]:
            kinds[position] = "removed" if is_removed else "trained"
        elif not lists.spans_recorded and dropped != "masked":
            kinds[position] = dropped
    return kinds


def runs(kinds: Sequence[Any]) -> list[tuple[Any, int, int]]:
    """Join neighbors of one kind: the kind, its first position, and its end."""
    found, start = [], 0
    for kind, group in groupby(kinds):
        end = start + len(list(group))
        found.append((kind, start, end))
        start = end
    return found


def _list(value: object, kind: type) -> list[Any]:
    if not isinstance(value, list):
        return []
    return value if set(map(type, value)) <= {kind} else [kind(finite(item) or 0) for item in value]


def _recorded_spans(record: DumpRecord, count: int) -> list[TurnSpan] | None:
    """Read the facts' spans, where all of them are within the sample's tokens."""
    found = [TurnSpan(turn, start, end, _named(*version)) for turn, start, end, *version in record.facts.spans or ()]
    return found if found and all(0 <= span.start <= span.end <= count for span in found) else None


def _named(version: object = None) -> str | None:
    return None if version is None else str(version)


def _masked_spans(mask: Sequence[int], prompt_length: int, versions: object) -> list[TurnSpan]:
    """Take for sampled what the mask trains; slime's versions, one a request, are read where there are as many."""
    stretches = [(start, end) for kind, start, end in runs([bool(value) for value in mask]) if kind]
    named = versions if isinstance(versions, list) and len(versions) == len(stretches) else [None] * len(stretches)
    return [
        TurnSpan(turn, prompt_length + start, prompt_length + end, _named(version))
        for turn, ((start, end), version) in enumerate(zip(stretches, named, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class TurnHabits:
    """The rules that most of a dump keeps: its template, seen from its tokens; None, or empty, for none.

    What the most do is taken as the rule, and a rule that most contexts break is no rule: a dump whose template is of
    another kind is then not judged by it.

    Attributes:
        ends_of_turn: The tokens that close a turn.
        opening: The token that begins each message, and the one that makes it the policy's.
        sampled_controls: Control tokens that the policy writes and most contexts lack, such as a call's.
    """

    ends_of_turn: frozenset[int] = frozenset()
    opening: tuple[int, int] | None = None
    sampled_controls: frozenset[int] = frozenset()

    def forged(self, context: list[int]) -> Iterator[int]:
        """Yield places in a context where a control token stands that a template would not write there.

        A template closes what it opens, opens the policy's message last, and leaves the policy's own control tokens to
        the policy, but for those of the generation prompt.
        """
        if self.opening is None:
            return
        opens, policy = self.opening
        starts = [place for place, token in enumerate(context) if token == opens]
        last = starts[-1] if starts else -1
        is_open = False
        for place, token in enumerate(context):
            is_other_message = token == opens and context[place + 1 : place + 2] == [policy] and place != last
            is_policys_own = token in self.sampled_controls and place < last
            closes_nothing = token in self.ends_of_turn and not is_open and place > 0
            if is_other_message or is_policys_own or closes_nothing:
                yield place
            if token == opens:
                is_open = True
            elif token in self.ends_of_turn:
                is_open = False


def habits_of(records: Sequence[DumpRecord], controls: frozenset[int] | None = None) -> TurnHabits:
    """Learn the rules that most samples keep; `controls` are ids of control tokens, None where their texts tell."""
    if controls is None:
        texts = {token: text for record in records for token, text in record.token_texts.items()}
        controls = frozenset(token for token, text in texts.items() if is_control(text))
    readable = [run_metric("habits", partial(TokenLists.of, record), of_sample=True) for record in records]
    lists = [one for one in readable if one is not None]
    turns = [turn for one in lists for start, end in one.turns if (turn := one.ids[start:end])]
    contexts = [one.ids[start:end] for one in lists for start, end in one.contexts]
    ends = _ends_of_turn(turns, controls)
    written = Counter(token for context in contexts for token in set(context))
    common = {token for token, count in written.items() if count > _LEAST_SHARE * len(contexts)}
    sampled = frozenset(token for turn in turns for token in controls.intersection(turn)) - common - ends
    habits = TurnHabits(ends, _opening(contexts, controls), sampled)
    broken = sum(any(habits.forged(context)) for context in contexts)
    return TurnHabits(ends) if broken > _LEAST_SHARE * len(contexts) else habits


def _ends_of_turn(turns: Sequence[list[int]], controls: frozenset[int]) -> frozenset[int]:
    """Find the control tokens that end turns and stand inside of few; none where they end less than half of all."""
    ends = Counter(turn[-1] for turn in turns)
    inside = Counter(token for turn in turns for token in controls.intersection(turn[:-1]))
    found = {token for token in controls if ends[token] >= max(1, inside[token], _LEAST_ENDS * len(turns))}
    return frozenset(found) if sum(ends[token] for token in found) > _LEAST_SHARE * len(turns) else frozenset()


def _opening(contexts: Sequence[list[int]], controls: frozenset[int]) -> tuple[int, int] | None:
    """Find the last control token that another one follows, with that, where more than half of the contexts agree."""
    openings = Counter(
        next(pair for pair in reversed(list(pairwise(context))) if pair[0] in controls)
        for context in contexts
        if controls.intersection(context[:-1])
    )
    return next((found for found, count in openings.most_common(1) if count > _LEAST_SHARE * openings.total()), None)


def is_control(text: bytes) -> bool:
    """Say if a token's text looks like a control token of the known families; markup such as `<br>` does not."""
    return _CONTROL.fullmatch(text) is not None


class DriftMark(NamedTuple):
    """Tokens start..end-1 would be `instead`; `start` is `end` where tokens would only be put in."""

    start: int
    end: int
    instead: list[int]


def drift_marks(
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    bytes_of: Callable[[int], bytes],
    before: int | None = None,
) -> Iterator[DriftMark]:
    """Mark drift in one turn's ids, which follow the token `before`, in order; `bytes_of` is the tokenizer's."""
    sampled, encoded = unlike_tokens(ids, tokenizer, bytes_of, before=before)
    # what stands between tokens that both have; places ascend in both
    at_place = {placed: position for position, placed in enumerate(encoded)}
    start = encoded_start = 0
    for position, placed in enumerate(sampled):
        found = at_place.get(placed)
        if found is None:
            continue
        if position > start or found > encoded_start:
            yield DriftMark(start, position, [token for *_, token in encoded[encoded_start:found]])
        start, encoded_start = position + 1, found + 1
    if start < len(sampled) or encoded_start < len(encoded):
        yield DriftMark(start, len(sampled), [token for *_, token in encoded[encoded_start:]])
