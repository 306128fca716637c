"""What most turns of a dump end with, and how most contexts open the next one: the template, seen from its tokens.

Knows token lists of many samples; no tokenizer. What the most do is taken as the rule, and a rule that most contexts
break is no rule: a dump whose template is of another kind is then not judged by it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

from strands_rollout.dump import DumpRecord
from strands_rollout.view.token_runs import TokenLists

T = TypeVar("T", bound=Hashable)

_CONTROL: Final = re.compile(
    rb"<(?:\||\xef\xbd\x9c).+(?:\||\xef\xbd\x9c)>|</?(?:[a-z]+_[a-z_]+|think|arg_key)>|\[/?[A-Z_]{3,}\]"
)
_LEAST_SHARE: Final = 0.5
# of the turns, for a token that ends some and stands inside of none: families end turns with calls by one of their own
_LEAST_ENDS: Final = 0.1
_MOST_CONTEXTS: Final = 1000


@dataclass(frozen=True, slots=True)
class TurnHabits:
    """The rules that most of a dump keeps; None, or empty, for none.

    Attributes:
        ends_of_turn: The tokens that close a turn.
        opening: The token that begins each message, and the one that makes it the policy's.
        sampled_controls: Control tokens that the policy writes and most contexts lack, such as a call's.
    """

    ends_of_turn: frozenset[int] = frozenset()
    opening: tuple[int, int] | None = None
    sampled_controls: frozenset[int] = frozenset()

    def forged(self, context: list[int]) -> Iterator[int]:
        """Places in a context where a control token stands that a template would not write there.

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


@dataclass(slots=True)
class HabitCounter:
    """Counts what the samples of a dump do.

    Attributes:
        controls: Ids of control tokens; None where only the texts of tokens tell.
    """

    controls: frozenset[int] | None = None
    _known: set[int] = field(default_factory=set)
    _looks: set[int] = field(default_factory=set)
    _ends: Counter[int] = field(default_factory=Counter)
    _inside: Counter[int] = field(default_factory=Counter)
    _openings: Counter[tuple[int, int]] = field(default_factory=Counter)
    _contexts: list[list[int]] = field(default_factory=list)
    _sampled: set[int] = field(default_factory=set)

    def count(self, record: DumpRecord) -> None:
        """Count one sample."""
        if self.controls is None:
            new = [(token, text) for token, text in record.token_texts.items() if token not in self._known]
            self._known.update(token for token, _ in new)
            self._looks |= control_ids(new)
        lists = TokenLists.of(record)
        controls = self._looks if self.controls is None else self.controls
        for start, end in lists.turns:
            if end > start:
                self._ends[lists.ids[end - 1]] += 1
                self._inside.update(controls.intersection(lists.ids[start : end - 1]))
                self._sampled.update(controls.intersection(lists.ids[start:end]))
        for start, end in lists.contexts:
            context = lists.ids[start:end]
            opening = next((p for p in range(len(context) - 2, -1, -1) if context[p] in controls), None)
            if opening is not None:
                self._openings[context[opening], context[opening + 1]] += 1
            if len(self._contexts) < _MOST_CONTEXTS:
                self._contexts.append(context)

    def habits(self) -> TurnHabits:
        """The rules that most of them keep."""
        ends, opening = self._ends_of_turn(), _most(self._openings)
        templates = Counter(token for context in self._contexts for token in set(context))
        common = {token for token, count in templates.items() if count > _LEAST_SHARE * len(self._contexts)}
        found = TurnHabits(ends, opening, frozenset(self._sampled - common - ends))
        broken = sum(any(found.forged(context)) for context in self._contexts)
        if broken > _LEAST_SHARE * len(self._contexts):
            return TurnHabits(ends)
        return found

    def _ends_of_turn(self) -> frozenset[int]:
        """The control tokens that end turns and stand inside of few; none where they end less than half of all."""
        least = _LEAST_ENDS * self._ends.total()
        looks = self._looks if self.controls is None else self.controls
        ends = {token for token, count in self._ends.items() if count >= least and token in looks}
        ends = {token for token in ends if self._inside[token] <= self._ends[token]}
        covered = sum(self._ends[token] for token in ends)
        return frozenset(ends) if covered > _LEAST_SHARE * self._ends.total() else frozenset()


def _most(counts: Counter[T]) -> T | None:
    """The commonest, where more than half agree."""
    for most, count in counts.most_common(1):
        return most if count > _LEAST_SHARE * counts.total() else None
    return None


def is_control(text: bytes) -> bool:
    """Whether a token's text looks like a control token's."""
    return _CONTROL.fullmatch(text) is not None


def control_ids(texts: Iterable[tuple[int, bytes]]) -> frozenset[int]:
    """Ids that look like control tokens of the known families; markup such as `<br>` is none."""
    return frozenset(token for token, text in texts if is_control(text))
