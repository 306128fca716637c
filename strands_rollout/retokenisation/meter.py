"""What text would have cost: how the tokens of episodes drift when their text is encoded again, and of what kind.

Two ways to lose tokens are measured: each turn encoded by itself, and the whole conversation as one text, as a trainer
does that is handed text. Knows episodes, a tokenizer and its template; the arithmetic is `drift`'s.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar

from strands_rollout.drift import (
    Placed,
    decoded,
    encoded_again,
    first_difference,
    off_policy_from,
    token_bytes,
    unlike,
    unlike_tokens,
)
from strands_rollout.errors import TemplateError
from strands_rollout.finished_sample import FinishedSample, kept
from strands_rollout.retokenisation.render_mismatch import Mismatch, RenderCheck
from strands_rollout.retokenisation.sampled_episode import SampledEpisode
from strands_rollout.retokenisation.turn_reading import TurnReading
from strands_rollout.tool_parsers import AUTO

T = TypeVar("T")

CLASSES: Final = ("assistant text", "tool call", "whitespace", "special tokens", "template")
MAX_SAMPLES: Final = 64
"""Samples of a step that are measured."""
MAX_TOKENS: Final = 2**18
"""Tokens of a step, prompts included, in the samples that are measured; about."""
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
        number: Its place among those that are measured, or in its dump, from 0.
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
    def counts(self) -> dict[str, int | None]:
        """In few numbers, None for what was not looked at."""
        return {
            "sampled_tokens": self.sampled_tokens,
            "turn_drift": self.turn_drift,
            "text_drift": self.text_drift,
            "off_policy": self.off_policy,
            "mismatched_tokens": None if self.mismatches is None else self.mismatched_tokens,
        }

    @property
    def is_drifted(self) -> bool:
        """Whether a sampled token drifts, turn by turn or in the whole text."""
        return bool(self.turn_drift or self.text_drift)

    @property
    def mismatched_tokens(self) -> int:
        """Context tokens that are not the template's."""
        return sum(found.tokens for found in self.mismatches or [])


@dataclass(frozen=True, slots=True)
class DriftTotals:
    """What was measured of all episodes.

    Attributes:
        episodes: How many were measured.
        drifted_episodes: Those in which a sampled token drifts, turn by turn or in the whole text.
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
        self._seen: dict[int, bool] = {}
        self._checks: dict[str, RenderCheck | None] = {}
        self.template_fault: str | None = None

    def measure(self, episode: SampledEpisode, number: int = 0) -> EpisodeDrift:
        """All of one episode; `number` is its place among others."""
        tokens, turns = episode.tokens, episode.turns
        again = encoded_again(tokens, self._tokenizer)
        lost = _lost(*unlike(tokens, again, self._tokenizer, self._bytes_of))
        lost_sampled = _within(lost, turns)
        check = self._check_for(episode)
        classes = Counter({"template": len(lost) - lost_sampled})
        for start, end in turns:
            classes += self._classes_of(tokens[start:end], None if check is None else check.reading)
        first = first_difference(tokens, again)
        return EpisodeDrift(
            number=number,
            index=getattr(episode.sample, "index", None),
            sampled_tokens=sum(end - start for start, end in turns),
            turn_drift=classes.total() - classes["template"],
            text_drift=lost_sampled,
            off_policy=off_policy_from(first, turns),
            classes={name: classes[name] for name in CLASSES},
            first=None if first is None else self._divergence(episode, again, first),
            mismatches=None if check is None else list(check.mismatches(episode)),
        )

    def _check_for(self, episode: SampledEpisode) -> RenderCheck | None:
        kwargs = self._kwargs_of(episode)
        key = repr(sorted(kwargs.items()))
        if key not in self._checks:
            try:
                self._checks[key] = RenderCheck(TurnReading(self._tokenizer, kwargs, self._tool_parser))
            except TemplateError as e:
                self._checks[key], self.template_fault = None, str(e)
        return self._checks[key]

    def _kwargs_of(self, episode: SampledEpisode) -> dict[str, Any]:
        """What the template was rendered with: as the episode tells, else what the sample and the caller say."""
        told = episode.facts.get("template_kwargs")
        if isinstance(told, Mapping):
            return dict(told)
        return {**(getattr(episode.sample, "apply_chat_template_kwargs", None) or {}), **self._template_kwargs}

    def _classes_of(self, ids: Sequence[int], reading: TurnReading | None) -> Counter[str]:
        """The drifted tokens of a turn by kind; without a template all of its words are text."""
        sampled, again = unlike_tokens(ids, self._tokenizer, self._bytes_of)
        drifted = _lost(sampled, again)
        if not drifted:
            return Counter()
        again_places = [placed[0] for placed in again]
        prose = None if reading is None else reading.prose(ids)
        found: Counter[str] = Counter()
        for at in drifted:
            place, *_, token = sampled[at]
            covering = again[max(0, bisect_right(again_places, place) - 1)][-1] if again else token
            found[self._class_of({token, covering}, token, place, prose)] += 1
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
        if not self._is_seen(token):
            return "whitespace"
        is_prose = prose is None or any(begin <= place < end for begin, end in prose)
        return "assistant text" if is_prose else "tool call"

    def _divergence(self, episode: SampledEpisode, again: Sequence[int], position: int) -> Divergence:
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

    def _is_seen(self, token: int) -> bool:
        """Whether a token is more than whitespace."""
        if token not in self._seen:
            self._seen[token] = bool(self._text([token]).strip())
        return self._seen[token]

    def _text(self, ids: Sequence[int]) -> str:
        return decoded(ids, self._tokenizer)


def measure_some(samples: Sequence[FinishedSample], meter: DriftMeter) -> list[EpisodeDrift]:
    """The drift of some samples of a step, evenly spread, always of the same ones: a trainer waits for it.

    At most `MAX_SAMPLES` and about `MAX_TOKENS` are measured. A sample whose facts don't say what was sampled, or with
    what is no token id, is left out.
    """
    episodes = [episode for sample in samples if (episode := SampledEpisode.of(sample)) is not None]
    tokens = sum(len(episode.sample.tokens) for episode in episodes)
    most = max(1, MAX_TOKENS * len(episodes) // max(tokens, 1))
    found = [
        kept("drift", functools.partial(meter.measure, episode, number), of_sample=True)
        for number, episode in enumerate(evenly_spread(episodes, min(most, MAX_SAMPLES)))
    ]
    return [drift for drift in found if drift is not None]


def evenly_spread(items: Sequence[T], most: int = MAX_SAMPLES) -> list[T]:
    """At most so many of these, always the same ones."""
    count = min(len(items), most)
    return [items[position * len(items) // count] for position in range(count)]


def _lost(sampled: Sequence[Placed], again: Sequence[Placed]) -> list[int]:
    """Which of these are not among the others, in ascending order."""
    found = set(again)
    return [at for at, placed in enumerate(sampled) if placed not in found]


def _within(positions: Iterable[int], turns: Sequence[tuple[int, int]]) -> int:
    starts = [start for start, _ in turns]
    return sum(bool(at := bisect_right(starts, position)) and position < turns[at - 1][1] for position in positions)


def totals_of(drifts: Iterable[EpisodeDrift]) -> DriftTotals:
    """The sums of these."""
    measured = list(drifts)
    drifted = sum(drift.is_drifted for drift in measured)
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
