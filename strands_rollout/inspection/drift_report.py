"""What text would have cost: how the tokens of saved episodes drift when their text is encoded again, and of what kind.

Two ways to lose tokens are measured: each turn encoded by itself, and the whole conversation as one text, as a trainer
does that is handed text. Knows episodes, a tokenizer and its template; the arithmetic is `drift`'s and `retokenised`'s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from strands_rollout.drift import drifted_places, encoded_again, off_policy_from, placed_tokens, token_bytes
from strands_rollout.errors import TemplateError
from strands_rollout.inspection.render_mismatch import Mismatch, RenderCheck
from strands_rollout.inspection.saved_episode import SavedEpisode
from strands_rollout.inspection.turn_reading import TurnReading
from strands_rollout.tool_parsers import AUTO
from strands_rollout.train.retokenised import retokenise

CLASSES: Final = ("assistant text", "tool call", "whitespace", "special tokens", "template")
_SHOWN_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that the whole text, encoded again, has otherwise.

    Attributes:
        position: Its index in the sample's tokens.
        turn: The policy's turn that it is in, from 0; None in what it read.
        before: Text of the tokens before it.
        got: Ids from there on, as they were.
        got_texts: Each one's text.
        again: Ids from there on, of the text encoded again.
        again_texts: Each one's text.
    """

    position: int
    turn: int | None
    before: str
    got: list[int]
    got_texts: list[str]
    again: list[int]
    again_texts: list[str]


@dataclass(frozen=True, slots=True)
class EpisodeDrift:
    """What was measured of one episode.

    Attributes:
        number: Its place in the dump, from 0.
        index: The sample's own.
        sampled_tokens: Tokens that the policy wrote.
        turn_drift: Of these, how many would differ, had each turn been encoded again by itself.
        text_drift: How many would, had the whole conversation been.
        off_policy: Sampled tokens from the first difference of the whole text on: the policy never wrote them after
            what then stands before them.
        classes: Drifted tokens by kind: of the turns, and as "template" those of the context in the whole text.
        first: The whole text's first difference; None where there is none.
        mismatches: Context that is not what the template renders; None where that was not looked at.
    """

    number: int
    index: int | None
    sampled_tokens: int
    turn_drift: int
    text_drift: int
    off_policy: int
    classes: dict[str, int]
    first: Divergence | None
    mismatches: list[Mismatch] | None

    @property
    def mismatched_tokens(self) -> int:
        """Context tokens that are not the template's."""
        return sum(found.tokens for found in self.mismatches or [])


@dataclass(frozen=True, slots=True)
class DriftTotals:
    """What was measured of all episodes.

    Attributes:
        episodes: How many were measured.
        drifted_episodes: Those in which any token drifts, turn by turn or in the whole text.
        drifted_share: Of the episodes, 0 to 1.
        sampled_tokens: Tokens that the policies wrote.
        turn_drift: See `EpisodeDrift`, as the following.
        text_drift: Sum.
        off_policy: Sum.
        off_policy_share: Of the sampled tokens, 0 to 1.
        classes: Sums by kind.
        mismatched_episodes: Those whose context is not the template's; None where nothing was looked at.
        mismatched_tokens: Sum; None likewise.
    """

    episodes: int
    drifted_episodes: int
    drifted_share: float
    sampled_tokens: int
    turn_drift: int
    text_drift: int
    off_policy: int
    off_policy_share: float
    classes: dict[str, int] = field(default_factory=dict)
    mismatched_episodes: int | None = None
    mismatched_tokens: int | None = None


class DriftMeter:
    """Measures episodes of one policy.

    Attributes:
        template_fault: Why the template can't be held against the tokens, in words; None as long as it can.

    Args:
        tokenizer: The policy's.
        template_kwargs: Handed to the template at each rendering, over a sample's own.
        tool_parser: The format of the policy's calls; "auto" for the one that the template writes.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401
        template_kwargs: Mapping[str, Any] | None = None,
        tool_parser: str = AUTO,
    ) -> None:
        self._tokenizer = tokenizer
        self._bytes_of = token_bytes(tokenizer)
        self._control_ids = frozenset(tokenizer.added_tokens_decoder)
        self._template_kwargs = dict(template_kwargs or {})
        self._tool_parser = tool_parser
        self._checks: dict[str, RenderCheck | None] = {}
        self.template_fault: str | None = None

    def measure(self, episode: SavedEpisode) -> EpisodeDrift:
        """All of one episode."""
        tokens, sample = episode.tokens, episode.sample
        whole = retokenise(
            SimpleNamespace(
                tokens=tokens,
                response_length=sample.response_length,
                loss_mask=episode.sampled_mask,
                rollout_log_probs=sample.rollout_log_probs,
            ),
            self._tokenizer,
        )
        check = self._check_for(sample)
        reading = None if check is None else check.reading
        classes = Counter({"template": len(whole.lost_context)})
        for start, end in episode.turns:
            classes += self._classes_of(tokens[start:end], reading)
        first = whole.first_difference
        return EpisodeDrift(
            **episode.name,
            sampled_tokens=whole.sampled_tokens,
            turn_drift=classes.total() - classes["template"],
            text_drift=whole.drifted_tokens,
            off_policy=off_policy_from(first, episode.turns),
            classes={name: classes[name] for name in CLASSES},
            first=None if first is None else self._divergence(episode, whole.tokens, first),
            mismatches=None if check is None else list(check.mismatches(episode)),
        )

    def _check_for(self, sample: Any) -> RenderCheck | None:  # noqa: ANN401
        kwargs = {**(sample.apply_chat_template_kwargs or {}), **self._template_kwargs}
        key = repr(sorted(kwargs.items()))
        if key not in self._checks:
            try:
                self._checks[key] = RenderCheck(TurnReading(self._tokenizer, kwargs, self._tool_parser))
            except TemplateError as e:
                self._checks[key], self.template_fault = None, str(e)
        return self._checks[key]

    def _classes_of(self, ids: Sequence[int], reading: TurnReading | None) -> Counter[str]:
        """The drifted tokens of a turn by kind; without a template all of its words are text."""
        drifted = drifted_places(ids, self._tokenizer, self._bytes_of)
        if not drifted:
            return Counter()
        places = [place[0] for place in placed_tokens(ids, self._bytes_of)]
        again = encoded_again(ids, self._tokenizer)
        again_places = [place[0] for place in placed_tokens(again, self._bytes_of)]
        prose = None if reading is None else reading.prose(ids)
        found: Counter[str] = Counter()
        for at in drifted:
            covering = again[max(0, bisect_right(again_places, places[at]) - 1)] if again else ids[at]
            found[self._class_of({ids[at], covering}, ids[at], places[at], prose)] += 1
        return found

    def _class_of(self, both: Set[int], token: int, place: int, prose: Sequence[tuple[int, int]] | None) -> str:
        """The kind of one drifted token.

        Args:
            both: The token, and what stands at its place when the text is encoded again.
            token: As it was sampled.
            place: Characters of its turn before it.
            prose: Where the turn's prose is; None where all of it is.
        """
        if self._control_ids & both:
            return "special tokens"
        if not self._text([token]).strip():
            return "whitespace"
        is_prose = prose is None or any(begin <= place < end for begin, end in prose)
        return "assistant text" if is_prose else "tool call"

    def _divergence(self, episode: SavedEpisode, again: Sequence[int], position: int) -> Divergence:
        tokens = episode.tokens
        got, other = (list(ids[position : position + _SHOWN_TOKENS]) for ids in (tokens, again))
        inside = [number for number, (start, end) in enumerate(episode.turns) if start <= position < end]
        return Divergence(
            position=position,
            turn=inside[0] if inside else None,
            before=self._text(tokens[max(0, position - _SHOWN_TOKENS) : position]),
            got=got,
            got_texts=[self._text([token]) for token in got],
            again=other,
            again_texts=[self._text([token]) for token in other],
        )

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def totals_of(drifts: Iterable[EpisodeDrift]) -> DriftTotals:
    """The sums of these."""
    measured = list(drifts)
    drifted = sum(bool(drift.turn_drift or drift.text_drift) for drift in measured)
    sampled, off_policy = (sum(getattr(drift, name) for drift in measured) for name in ("sampled_tokens", "off_policy"))
    checked = [drift for drift in measured if drift.mismatches is not None]
    return DriftTotals(
        episodes=len(measured),
        drifted_episodes=drifted,
        drifted_share=drifted / max(len(measured), 1),
        sampled_tokens=sampled,
        turn_drift=sum(drift.turn_drift for drift in measured),
        text_drift=sum(drift.text_drift for drift in measured),
        off_policy=off_policy,
        off_policy_share=off_policy / max(sampled, 1),
        classes={name: sum(drift.classes[name] for drift in measured) for name in CLASSES},
        mismatched_episodes=sum(bool(drift.mismatches) for drift in checked) if checked else None,
        mismatched_tokens=sum(drift.mismatched_tokens for drift in checked) if checked else None,
    )


def as_json_value(drift: EpisodeDrift | DriftTotals) -> dict[str, Any]:
    """Its fields as JSON."""
    return asdict(drift)
