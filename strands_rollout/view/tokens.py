"""Classify a sample's tokens by kind and turn, infer the rules that most turns of a dump follow, and mark drift.

Nothing in a dump is trusted: people look at dumps when something is wrong.
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
from strands_rollout.samples import finite_number, run_metric
from strands_rollout.template.tokens import differing_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTROL: Final = re.compile(
    rb"<(?:\||\xef\xbd\x9c).+(?:\||\xef\xbd\x9c)>|</?(?:[a-z]+_[a-z_]+|think|arg_key)>|\[/?[A-Z_]{3,}\]"
)
_MAJORITY: Final = 0.5
# an end-of-turn token ends at least this share of turns: some families have a separate token for turns with calls
_MIN_END_SHARE: Final = 0.1


class TurnSpan(NamedTuple):
    """Adjacent tokens of one turn and one weight version; positions count from the prompt's first token."""

    turn: int
    start: int
    end: int
    version: str | None


@dataclass(frozen=True, slots=True)
class TokenLists:
    """The token lists of a dump's record; a value that is not a list is read as an empty list.

    Attributes:
        ids: Ids of prompt plus response.
        prompt_length: Tokens of the prompt, at least 0.
        loss_mask: One value per response token in a valid sample; all 1 if the sample has no mask, as in slime.
        logprobs: One value per response token in a valid sample; empty if the sample has none.
        spans: Sampled tokens, in order: the episode's spans, else the tokens trained by the mask.
        spans_recorded: True if the episode's facts have the spans.
    """

    ids: list[int]
    prompt_length: int
    loss_mask: list[int]
    logprobs: list[float]
    spans: list[TurnSpan]
    spans_recorded: bool

    @classmethod
    def from_record(cls, record: DumpRecord) -> TokenLists:
        """Read the lists of a dump's record."""
        values = record.values
        ids, length = _list_of(values.get("tokens"), int), values.get("response_length")
        prompt_length = min(max(len(ids) - (length if isinstance(length, int) else 0), 0), len(ids))
        recorded_mask = values.get("loss_mask")
        mask = [1] * (len(ids) - prompt_length) if recorded_mask is None else _list_of(recorded_mask, int)
        recorded = _recorded_spans(record, len(ids))
        spans = recorded if recorded is not None else _masked_spans(mask, prompt_length, values.get("weight_versions"))
        logprobs = _list_of(values.get("rollout_log_probs"), float)
        return cls(ids, prompt_length, mask, logprobs, spans, recorded is not None)

    @property
    def turns(self) -> list[tuple[int, int]]:
        """Start and end of each turn, in order."""
        return [
            (spans[0].start, spans[-1].end)
            for _, group in groupby(self.spans, key=lambda span: span.turn)
            if (spans := list(group))
        ]

    @property
    def contexts(self) -> list[tuple[int, int]]:
        """Start and end of each context between turns."""
        turns = self.turns
        return [(end, start) for (_, end), (start, _) in pairwise(turns) if start > end]


def token_kinds(record: DumpRecord, lists: TokenLists) -> list[str]:
    """Return each token's kind: "prompt", "context", "trained", "failed", "removed", "stale", "masked" or "unknown".

    A "masked" token was sampled and is not trained, for a reason that the sample does not give. An "unknown" token has
    no mask.
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


def equal_runs(kinds: Sequence[Any]) -> list[tuple[Any, int, int]]:
    """Return (kind, start, end) for each run of adjacent equal kinds."""
    found, start = [], 0
    for kind, group in groupby(kinds):
        end = start + len(list(group))
        found.append((kind, start, end))
        start = end
    return found


def _list_of(value: object, kind: type) -> list[Any]:
    if not isinstance(value, list):
        return []
    return value if set(map(type, value)) <= {kind} else [kind(finite_number(item) or 0) for item in value]


def _recorded_spans(record: DumpRecord, count: int) -> list[TurnSpan] | None:
    found = [
        TurnSpan(turn, start, end, _version_text(*version)) for turn, start, end, *version in record.facts.spans or ()
    ]
    return found if found and all(0 <= span.start <= span.end <= count for span in found) else None


def _version_text(version: object = None) -> str | None:
    return None if version is None else str(version)


def _masked_spans(mask: Sequence[int], prompt_length: int, versions: object) -> list[TurnSpan]:
    """Return the trained tokens as spans, with slime's versions (one per request) if there are as many as spans."""
    runs = [(start, end) for is_trained, start, end in equal_runs([bool(value) for value in mask]) if is_trained]
    by_run = versions if isinstance(versions, list) and len(versions) == len(runs) else [None] * len(runs)
    return [
        TurnSpan(turn, prompt_length + start, prompt_length + end, _version_text(version))
        for turn, ((start, end), version) in enumerate(zip(runs, by_run, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class TurnHabits:
    """The rules that most turns and contexts of a dump follow: its chat template, inferred from tokens.

    If most contexts break the rules for contexts, these rules are left out, because they can't be the template's.

    Attributes:
        ends_of_turn: Tokens that close a turn; empty if unknown.
        opening: Token that begins each message, and the token after it in the policy's messages; None if unknown.
        sampled_controls: Control tokens that the policy writes and most contexts lack, such as the tags of calls.
    """

    ends_of_turn: frozenset[int] = frozenset()
    opening: tuple[int, int] | None = None
    sampled_controls: frozenset[int] = frozenset()

    def forged_positions(self, context: list[int]) -> Iterator[int]:
        """Yield the positions of control tokens in a context that the template would not write there.

        A template closes each message that it opens, and opens the policy's message last. Apart from the generation
        prompt, it does not write the policy's own control tokens.
        """
        if self.opening is None:
            return
        opens, policy = self.opening
        starts = [place for place, token in enumerate(context) if token == opens]
        last = starts[-1] if starts else -1
        is_open = False
        for place, token in enumerate(context):
            is_other_message = token == opens and context[place + 1 : place + 2] == [policy] and place != last
            is_sampled_control = token in self.sampled_controls and place < last
            closes_nothing = token in self.ends_of_turn and not is_open and place > 0
            if is_other_message or is_sampled_control or closes_nothing:
                yield place
            if token == opens:
                is_open = True
            elif token in self.ends_of_turn:
                is_open = False


def learn_habits(records: Sequence[DumpRecord], controls: frozenset[int] | None = None) -> TurnHabits:
    """Infer the rules that most turns and contexts of the samples follow.

    `controls` are the ids of control tokens; None infers them from the texts of tokens.
    """
    if controls is None:
        texts = {token: text for record in records for token, text in record.token_texts.items()}
        controls = frozenset(token for token, text in texts.items() if is_control(text))
    readable = [run_metric("habits", partial(TokenLists.from_record, record), of_sample=True) for record in records]
    samples = [lists for lists in readable if lists is not None]
    turns = [turn for lists in samples for start, end in lists.turns if (turn := lists.ids[start:end])]
    contexts = [lists.ids[start:end] for lists in samples for start, end in lists.contexts]
    ends = _ends_of_turn(turns, controls)
    context_counts = Counter(token for context in contexts for token in set(context))
    common = {token for token, count in context_counts.items() if count > _MAJORITY * len(contexts)}
    sampled = frozenset(token for turn in turns for token in controls.intersection(turn)) - common - ends
    habits = TurnHabits(ends, _message_opening(contexts, controls), sampled)
    broken = sum(1 for context in contexts if next(iter(habits.forged_positions(context)), None) is not None)
    return TurnHabits(ends) if broken > _MAJORITY * len(contexts) else habits


def _ends_of_turn(turns: Sequence[list[int]], controls: frozenset[int]) -> frozenset[int]:
    """Return the control tokens that together end most turns; an empty set if there are none.

    A token must end at least a tenth of the turns, and at least as many turns as have it before their last token.
    """
    ends = Counter(turn[-1] for turn in turns)
    inside = Counter(token for turn in turns for token in controls.intersection(turn[:-1]))
    found = {token for token in controls if ends[token] >= max(1, inside[token], _MIN_END_SHARE * len(turns))}
    return frozenset(found) if sum(ends[token] for token in found) > _MAJORITY * len(turns) else frozenset()


def _message_opening(contexts: Sequence[list[int]], controls: frozenset[int]) -> tuple[int, int] | None:
    """Return the two tokens that open the policy's message at the end of a context; None if contexts disagree.

    They are taken to be the last control token before the context's last token, and the token after it. More than half
    of the contexts with such a pair of tokens must have the same pair.
    """
    openings = Counter(
        next(pair for pair in reversed(list(pairwise(context))) if pair[0] in controls)
        for context in contexts
        if controls.intersection(context[:-1])
    )
    return next((found for found, count in openings.most_common(1) if count > _MAJORITY * openings.total()), None)


def is_control(text: bytes) -> bool:
    """Return whether a text looks like a control token of the known families; markup such as `<br>` does not."""
    return _CONTROL.fullmatch(text) is not None


class DriftMark(NamedTuple):
    """Tokens `start` to `end`-1 become `replacement` if encoded again; if `start` equals `end`, it is inserted."""

    start: int
    end: int
    replacement: list[int]


def drift_marks(
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    bytes_of: Callable[[int], bytes],
    before: int | None = None,
) -> Iterator[DriftMark]:
    """Encode a turn's text again; yield a mark for each part that gets other tokens, in order.

    Args:
        ids: The turn's ids.
        tokenizer: The policy's tokenizer.
        bytes_of: Returns the bytes of one of the tokenizer's ids.
        before: The token before the turn; None at the beginning of a prompt.
    """
    sampled, encoded = differing_tokens(ids, tokenizer, bytes_of, before=before)
    # tokens that both encodings share have the same order in both; each gap between them becomes a mark
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
