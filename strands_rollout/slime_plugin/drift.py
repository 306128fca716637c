"""Measure drift (tokens that training on text changes) and mismatch (context that differs from the template's).

Drift is measured in two ways: each turn is encoded again by itself, and the whole conversation is encoded again as one
text, as by a trainer that gets text.

Mismatch is context whose tokens differ from the chat template's rendering. To find it, the context between two turns is
cut into control tokens and the texts between them. Both must match the template's rendering of the results of the
earlier turn's calls and of any user turns that follow. The contents of these messages may be any text, so no record of
the conversation is needed. The tokens of each text must equal the tokenizer's encoding of it. A sample does not hold
its tools and system prompt. Therefore, only two things are checked in its prompt: the encoding of the texts, and the
end (question and generation prompt).
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from strands_rollout import tool_parsers as parsers
from strands_rollout.errors import ConfigError, TemplateError
from strands_rollout.files.json_codec import Json
from strands_rollout.samples import (
    EpisodeFacts,
    FinishedSample,
    SampleLike,
    fan_out_part,
    run_metric,
)
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.template.messages import ChatMessage
from strands_rollout.template.probe import TOOLS
from strands_rollout.template.tokens import (
    PlacedToken,
    decode_ids,
    differing_tokens,
    reencode,
    shared_length,
    token_bytes,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLASSES: Final = ("assistant text", "tool call", "whitespace", "special tokens", "template")
MAX_SAMPLES: Final = 64  # measured samples of a step
MAX_TOKENS: Final = 2**18  # measured tokens of a step, prompts included; approximate
_DIVERGENCE_TOKENS: Final = 8  # number of tokens shown before and after a divergence
# placeholders for unknown texts in messages that the template renders
_PLACEHOLDER: Final = "probed-{}-of-{}"
_PLACEHOLDER_ID: Final = "Probed{:03d}"  # 9 letters and digits, which some templates require
_PLACEHOLDERS: Final = re.compile(r"probed-[a-z]+-of-\d+|Probed\d{3,}")
_SHOWN_TOKENS: Final = 12  # number of tokens of a mismatch that are shown, from the first differing token on
_MAX_USER_TURNS: Final = 2  # consecutive user turns that are tried after a turn of the policy
_CALLS: Final = (parsers.ToolCall, parsers.ParseFailure)
_COUNTS: Final = ("sampled_tokens", "turn_drift", "text_drift", "off_policy")  # counts of an EpisodeDrift

T = TypeVar("T")
Piece: TypeAlias = int | str
"""A control token's id, or a text between two of them."""


@dataclass(frozen=True, slots=True)
class SampledEpisode:
    """A sample with at least one turn of the policy.

    Attributes:
        turns: The start and the end of each turn in the tokens; at least one turn, none empty.
    """

    sample: SampleLike
    facts: EpisodeFacts
    turns: Sequence[tuple[int, int]]

    @property
    def tokens(self) -> list[int]:
        """The tokens of prompt and response."""
        return list(self.sample.tokens)


class TurnReader:
    """Reader that finds tool calls and prose in the turns of a policy.

    The parser is None if `tool_parser` is "auto" and no known format of calls, or more than one, fits the template.

    Raises:
        TemplateError: The template can't be used token-exactly.
        ConfigError: No parser has the name `tool_parser`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any], tool_parser: str = parsers.AUTO
    ) -> None:
        self.template = ChatTemplate(tokenizer, **template_kwargs)
        self.parser: parsers.ToolParser | None = None
        call = self.template.example_call
        self._tags = frozenset(self.template.encoder.encode_trusted(call.turn)) - self.template.end_ids
        if tool_parser != parsers.AUTO:
            self.parser = parsers.get_parser(tool_parser)
            return
        with suppress(ConfigError):  # an agent without tools needs no parser
            self.parser = parsers.get_parser(parsers.detect_format(*call))

    def count_calls(self, ids: Sequence[int]) -> int | None:
        """Return the number of a turn's calls, malformed calls included; None if there is no parser."""
        if self.parser is None:
            return None
        return sum(isinstance(segment, _CALLS) for segment in self._segments(ids))

    def prose(self, ids: Sequence[int]) -> list[tuple[int, int]] | None:
        """Return the characters (start, end) of each piece of prose in a turn's text; None if no call is found."""
        segments = self._segments(ids)
        if not any(isinstance(segment, _CALLS) for segment in segments):
            return None
        text, at, found = self.template.encoder.decode(ids), 0, []
        for segment in segments:
            if isinstance(segment, parsers.Text | parsers.Reasoning) and (begin := text.find(segment.text, at)) >= 0:
                at = begin + len(segment.text)
                found.append((begin, at))
        return found

    def _segments(self, ids: Sequence[int]) -> list[parsers.Segment]:
        if self.parser is None:
            return []
        encoder = self.template.encoder
        # drop the token that ended the turn. If a stop string ended the turn, the last token may close a call, and is
        # kept
        without_end = ids[:-1] if ids and encoder.is_control(ids[-1]) and ids[-1] not in self._tags else ids
        return self.parser.segments(encoder.decode(without_end), in_reasoning=self.template.opens_reasoning)


@dataclass(frozen=True, slots=True)
class _Difference:
    """The first difference between a stretch of context and the expected context.

    Attributes:
        at: Index of the first differing token in the stretch.
        tokens: Number of differing tokens in the stretch. If the stretch departs from the template's text, all its
            tokens from `at` on count. If tokens are only missing, the number is 0.
        expected: What is expected at that place, for a report; see `Mismatch.expected`.
    """

    at: int
    tokens: int
    expected: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A stretch of context that differs from what the template renders.

    Attributes:
        position: The index of the first differing token in the sample's tokens.
        tokens: Number of differing context tokens. If the stretch departs from the template's text, all its tokens from
            `position` on count. If tokens are only missing, the number is 1.
        got: The text of at most `_SHOWN_TOKENS` tokens from `position` on; empty if tokens are missing at the end.
        expected: What is expected there, for a report: the text that the template renders. If the context should have
            ended, "the policy's turn". If only the encoding of a text differs, the text's token ids.
    """

    position: int
    tokens: int
    got: str
    expected: str


class RenderCheck:
    """Comparison of the contexts in one policy's episodes with what the policy's template renders."""

    def __init__(self, reader: TurnReader) -> None:
        self.reader = reader
        self._template, self._encoder = reader.template, reader.template.encoder
        self._renderings: dict[tuple[int, int], list[Piece] | None] = {}

    def mismatches(self, episode: SampledEpisode) -> Iterator[Mismatch]:
        """Yield mismatches by position, at most one in the prompt and one in each context between two turns."""
        tokens, turns = episode.tokens, list(episode.turns)
        contexts = zip([0, *(end for _, end in turns)], (start for start, _ in turns), strict=False)
        # The rendering is unknown if the sample has images (the template writes one token for an image, the processor
        # many) or transient texts of plugins. Then only the encoding of the texts can be checked.
        has_images = getattr(episode.sample, "multimodal_train_inputs", None) is not None
        is_rendering_unknown = has_images or episode.facts.transient_texts
        for number, (start, end) in enumerate(contexts):
            if is_rendering_unknown:
                found = self._encoding_difference(tokens[start:end])
            elif number == 0:
                found = self._prompt_difference(tokens[:end], episode)
            else:
                found = self._turn_difference(tokens[start:end], tokens[turns[number - 1][0] : start])
            if found is not None:
                at = start + found.at
                got = self._encoder.decode(tokens[at : min(end, at + _SHOWN_TOKENS)])
                yield Mismatch(at, max(found.tokens, 1), got, found.expected)  # 0 if tokens are only missing

    def _turn_difference(self, context: Sequence[int], turn: Sequence[int]) -> _Difference | None:
        """Compare the context after a turn with each rendering that is possible there."""
        differences = []
        for results, users in self._possible_messages(turn):
            pieces = self._render_pieces(results, users)
            if pieces is None:  # the template refuses such messages, for example because of the placeholder id
                continue
            differences.append(self._template_difference(context, pieces[1:] if turn[-1] == pieces[0] else pieces))
        if differences and None not in differences:
            return differences[0]
        return self._encoding_difference(context)

    def _possible_messages(self, turn: Sequence[int]) -> list[tuple[int, int]]:
        """Return the pairs (number of tool results, number of user turns after them) that may follow a turn."""
        calls = self.reader.count_calls(turn)
        if calls is None:
            return []
        # a turn that was cut by length may not have been parsed for calls
        counts = [calls] if turn[-1] in self._template.end_ids else [calls, 0]
        return [(count, users) for count in counts for users in range(0 if count else 1, _MAX_USER_TURNS + 1)]

    def _prompt_difference(self, context: Sequence[int], episode: SampledEpisode) -> _Difference | None:
        """Compare the end of the prompt (the context before the first turn) with the rendering of the row's question.

        If the question is unknown, any text may be in its place.
        """
        is_rewritten = (episode.facts.segments or 1) > 1
        if is_rewritten or fan_out_part(episode.sample) not in (None, 0):  # the prompt is not the row's
            return self._encoding_difference(context)
        question = episode.facts.question
        if question is None:
            question = _last_user_text(getattr(episode.sample, "prompt", None))
        expected = self._render_prompt_end(_PLACEHOLDER.format("question", 0) if question is None else question)
        at = len(context) - sum(map(len, self._split(context)[-len(expected) :]))
        if found := self._template_difference(context[at:], expected, has_free_start=True):
            return replace(found, at=at + found.at)
        return self._encoding_difference(context)

    def _template_difference(
        self, context: Sequence[int], expected: Sequence[Piece], *, has_free_start: bool = False
    ) -> _Difference | None:
        """Find the first difference from `expected`; `has_free_start` allows any text before the first piece."""
        at, place, split = 0, 0, self._split(context)
        for number, piece in enumerate(expected):
            ids = split[place] if place < len(split) else []
            if ids and isinstance(piece, str) and self._encoder.is_control(ids[0]):
                ids = []  # the text is empty here
            if not self._matches_piece(ids, piece, has_free_start=has_free_start and number == 0):
                shown = self._encoder.decode([piece]) if isinstance(piece, int) else _PLACEHOLDERS.sub("...", piece)
                return _Difference(at, len(context) - at, shown)
            at, place = at + len(ids), place + bool(ids)
        return None if at == len(context) else _Difference(at, len(context) - at, "the policy's turn")

    def _matches_piece(self, ids: Sequence[int], piece: Piece, *, has_free_start: bool) -> bool:
        """Return whether the ids are the piece's control token, or its text with any text in place of placeholders."""
        if isinstance(piece, int):
            return list(ids) == [piece]
        if any(map(self._encoder.is_control, ids)):
            return False
        parts = [self._encoder.unescape(part) for part in _PLACEHOLDERS.split(piece)]
        return _consists_of(self._encoder.decode(ids), ["", *parts] if has_free_start else parts)

    def _encoding_difference(self, context: Sequence[int]) -> _Difference | None:
        """Find the first text between control tokens that the tokenizer would encode differently, or return None.

        The result counts the differing tokens of all such texts.
        """
        at, count, first, shown = 0, 0, None, ""
        for ids in self._split(context):
            if not self._encoder.is_control(ids[0]):
                encoded = self._encoder.encode_plain(self._encoder.decode(ids))
                if encoded != ids:
                    shared = min(shared_length(ids, encoded), len(ids) - 1)
                    count += _count_differing(ids, encoded)
                    if first is None:
                        first, shown = at + shared, f"tokens {encoded[shared : shared + _SHOWN_TOKENS]}"
            at += len(ids)
        return None if first is None else _Difference(first, count, shown)

    def _split(self, context: Sequence[int]) -> list[list[int]]:
        """Cut the context into texts and control tokens; each control token is a part of its own."""
        found: list[list[int]] = []
        for token in context:
            if self._encoder.is_control(token) or not found or self._encoder.is_control(found[-1][0]):
                found.append([])
            found[-1].append(token)
        return found

    def _render_pieces(self, calls: int, users: int) -> list[Piece] | None:
        """Render `calls` tool results and `users` user turns, from the end of the assistant's turn on.

        Returns:
            The pieces of the rendering, in which placeholders stand for the messages' texts; None if the template can't
            render the messages.
        """
        if (calls, users) not in self._renderings:
            messages: list[ChatMessage] = []
            for number in range(calls):
                name, content = _PLACEHOLDER.format("name", number), _PLACEHOLDER.format("result", number)
                messages += [
                    {"role": "tool", "name": name, "tool_call_id": _PLACEHOLDER_ID.format(number), "content": content}
                ]
            messages += [
                {"role": "user", "content": _PLACEHOLDER.format("question", number)} for number in range(users)
            ]
            self._renderings[calls, users] = None
            with suppress(TemplateError):
                self._renderings[calls, users] = list(self._encoder.pieces(self._template.render_turn(messages)))
        return self._renderings[calls, users]

    def _render_prompt_end(self, question: str) -> list[Piece]:
        """Render the end of a prompt: the text that holds the question, and all pieces after it."""
        marked = self._render_pieces(0, 1) or []
        place = next((n for n, piece in enumerate(marked) if isinstance(piece, str) and _PLACEHOLDERS.search(piece)), 0)
        ending = list(self._encoder.pieces(self._template.render_turn([{"role": "user", "content": question}])))[place:]
        first = ending[0] if ending else 0
        if isinstance(first, str) and self._shows_tools_with_question:
            ending[0] = first[len(_PLACEHOLDERS.split(str(marked[place]))[0]) :]
        return ending

    @cached_property
    def _shows_tools_with_question(self) -> bool:
        """True if the template shows the tools in the first user turn, before the user's text."""
        question: ChatMessage = {"role": "user", "content": _PLACEHOLDER.format("question", 0)}
        try:
            shown = list(self._encoder.pieces(self._template.render([question], TOOLS)))
        except TemplateError:  # the template shows no tools
            return False
        alone = self._render_pieces(0, 1) or []
        texts = [
            next((p for p in pieces if isinstance(p, str) and _PLACEHOLDERS.search(p)), "") for pieces in (shown, alone)
        ]
        return not texts[0].endswith(texts[1])


def _consists_of(text: str, parts: Sequence[str]) -> bool:
    """Return whether a text consists of the parts, in order, with any texts between them; takes linear time."""
    first, *others = parts
    if not others:
        return text == first
    if not text.startswith(first):
        return False
    at = len(first)
    for part in others[:-1]:
        begin = text.find(part, at)
        if begin < 0:
            return False
        at = begin + len(part)
    return len(text) - at >= len(others[-1]) and text.endswith(others[-1])


def _last_user_text(prompt: Json) -> str | None:
    if isinstance(prompt, str):
        return prompt or None
    last = prompt[-1] if isinstance(prompt, list) and prompt else {}
    content = last.get("content") if last.get("role") == "user" else None
    return content if isinstance(content, str) else None


def _count_differing(got: Sequence[int], expected: Sequence[int]) -> int:
    """Count the tokens of `got` between the common beginning and the common end; at least 1."""
    begin = shared_length(got, expected)
    end = shared_length(got[begin:][::-1], expected[begin:][::-1])
    return max(len(got) - begin - end, 1)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs when the whole text is encoded again.

    Attributes:
        position: The token's index in the sample's tokens.
        turn: The number of the policy's turn that contains the token, from 0; None if the token is context.
        before: The text of the last `_DIVERGENCE_TOKENS` tokens before `position`, or of all if there are fewer.
        got: At most `_DIVERGENCE_TOKENS` ids of the sample, from `position` on.
        got_texts: The text of each id in `got`.
        again: At most `_DIVERGENCE_TOKENS` ids of the text encoded again, from the same position on.
        again_texts: The text of each id in `again`.
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
    """The drift and the mismatches of one episode.

    Attributes:
        number: The episode's position among the measured episodes, or in its dump, from 0.
        index: The sample's own index.
        sampled_tokens: Number of sampled tokens.
        turn_drift: Number of sampled tokens that differ after each turn is encoded again by itself.
        text_drift: Number of sampled tokens that differ after the whole conversation is encoded again.
        off_policy: Number of sampled tokens at and after the first difference in the whole text. A trainer that gets
            text would train these tokens after a history other than the policy's.
        classes: Numbers of drifted tokens by kind. "template" counts context tokens that differ after the whole text is
            encoded again. The other kinds count sampled tokens that differ after each turn is encoded again by itself.
        first: The first difference of the whole text; None if nothing differs.
        mismatches: Context that differs from the template's rendering; None if it was not compared.
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
        """All counts by name; `mismatched_tokens` is None if no context was compared."""
        mismatched = None if self.mismatches is None else self.mismatched_tokens
        return {**{name: getattr(self, name) for name in _COUNTS}, "mismatched_tokens": mismatched}

    @property
    def is_drifted(self) -> bool:
        """True if a sampled token drifts, turn by turn or in the whole text."""
        return bool(self.turn_drift or self.text_drift)

    @property
    def mismatched_tokens(self) -> int:
        """Number of context tokens that differ from the template's rendering; also 0 without a comparison."""
        return sum(found.tokens for found in self.mismatches or [])


@dataclass(frozen=True, slots=True)
class DriftTotals:
    """Sums of `EpisodeDrift` over all episodes, and the shares, 0 to 1, of drifted episodes and off-policy tokens.

    `mismatched_episodes` and `mismatched_tokens` are None if no context was compared.
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
    """Measurement of the drift and mismatch in one policy's episodes.

    Args:
        tokenizer: The policy's tokenizer.
        template_kwargs: Keyword arguments for the chat template, for samples whose facts don't record any; they
            override the sample's `apply_chat_template_kwargs`.
        tool_parser: The format of the policy's calls; "auto" for the format that the template writes.
        checks_context: True to compare contexts with what the template renders.

    Attributes:
        template_fault: The last reason why the template can't be used with a sample's template arguments; None while no
            fault is known. If there is such a fault, the sample's contexts are not compared, and its tool calls count
            as text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_parser: str = parsers.AUTO,
        *,
        checks_context: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._bytes_of = token_bytes(tokenizer)
        self._control_ids = frozenset(tokenizer.added_tokens_decoder)
        self._template_kwargs = dict(template_kwargs or {})
        self._tool_parser = tool_parser
        self._checks_context = checks_context
        self._is_visible = functools.cache(lambda token: bool(decode_ids([token], tokenizer).strip()))
        self._checks: dict[str, RenderCheck | None] = {}
        self.template_fault: str | None = None

    def measure(self, episode: SampledEpisode, number: int = 0) -> EpisodeDrift:
        """Measure one episode; `number` becomes `EpisodeDrift.number`.

        Raises:
            ConfigError: No parser has the name `tool_parser`.
        """
        tokens, turns = episode.tokens, episode.turns
        again = reencode(tokens, self._tokenizer)
        lost = _lost_positions(*differing_tokens(tokens, self._tokenizer, self._bytes_of, again))
        lost_sampled = sum(bisect_left(lost, end) - bisect_left(lost, start) for start, end in turns)
        classes = Counter({"template": len(lost) - lost_sampled})
        for start, end in turns:
            classes += self._classes_of(tokens[start:end], tokens[start - 1] if start else None, episode)
        first = None if tokens == again else shared_length(tokens, again)
        check = self._check_of(episode) if self._checks_context else None
        return EpisodeDrift(
            number=number,
            index=getattr(episode.sample, "index", None),
            sampled_tokens=sum(end - start for start, end in turns),
            turn_drift=classes.total() - classes["template"],
            text_drift=lost_sampled,
            off_policy=0 if first is None else sum(max(0, end - max(start, first)) for start, end in turns),
            classes={name: classes[name] for name in CLASSES},
            first=None if first is None else self._divergence(episode, again, first),
            mismatches=None if check is None else list(check.mismatches(episode)),
        )

    def _check_of(self, episode: SampledEpisode) -> RenderCheck | None:
        """Return the check for an episode's template arguments; None if the template can't be used with them."""
        kwargs = episode.facts.template_kwargs
        if kwargs is None:  # not recorded
            kwargs_of_sample = getattr(episode.sample, "apply_chat_template_kwargs", None) or {}
            kwargs = {**kwargs_of_sample, **self._template_kwargs}
        key = repr(sorted(kwargs.items()))
        if key not in self._checks:
            try:
                self._checks[key] = RenderCheck(TurnReader(self._tokenizer, dict(kwargs), self._tool_parser))
            except TemplateError as e:
                self._checks[key], self.template_fault = None, str(e)
        return self._checks[key]

    def _classes_of(self, ids: Sequence[int], before: int | None, episode: SampledEpisode) -> Counter[str]:
        """Count the drifted tokens of a turn by kind; without a usable parser, tool calls count as text."""
        sampled, again = differing_tokens(ids, self._tokenizer, self._bytes_of, before=before)
        drifted = _lost_positions(sampled, again)
        if not drifted:
            return Counter()
        again_places = [placed[0] for placed in again]
        check = self._check_of(episode)
        prose = None if check is None else check.reader.prose(ids)
        found: Counter[str] = Counter()
        for at in drifted:
            place, *_, token = sampled[at]
            # the token that covers this place when the text is encoded again
            covering = again[max(0, bisect_right(again_places, place) - 1)][-1] if again else token
            if self._control_ids & {token, covering}:
                found["special tokens"] += 1
            elif not self._is_visible(token):
                found["whitespace"] += 1
            elif prose is None or any(begin <= place < end for begin, end in prose):
                found["assistant text"] += 1
            else:
                found["tool call"] += 1
        return found

    def _divergence(self, episode: SampledEpisode, again: Sequence[int], position: int) -> Divergence:
        tokens = episode.tokens
        got, other = (list(ids[position : position + _DIVERGENCE_TOKENS]) for ids in (tokens, again))
        inside = [number for number, (start, end) in enumerate(episode.turns) if start <= position < end]
        return Divergence(
            position=position,
            turn=inside[0] if inside else None,
            before=decode_ids(tokens[max(0, position - _DIVERGENCE_TOKENS) : position], self._tokenizer),
            got=got,
            got_texts=[decode_ids([token], self._tokenizer) for token in got],
            again=other,
            again_texts=[decode_ids([token], self._tokenizer) for token in other],
        )


def measure_some(samples: Sequence[FinishedSample], meter: DriftMeter) -> list[EpisodeDrift]:
    """Measure at most `MAX_SAMPLES` samples of a step, evenly spread, with about `MAX_TOKENS` tokens in all.

    Samples without recorded turns, and samples whose measurement fails, are left out.
    """
    episodes = [
        SampledEpisode(sample.sample, sample.facts, turns) for sample in samples if (turns := sample.turn_bounds)
    ]
    tokens = sum(len(episode.sample.tokens) for episode in episodes)
    limit = max(1, MAX_TOKENS * len(episodes) // max(tokens, 1))
    drifts = [
        run_metric("drift", functools.partial(meter.measure, episode, number), of_sample=True)
        for number, episode in enumerate(evenly_spread(episodes, min(limit, MAX_SAMPLES)))
    ]
    return [drift for drift in drifts if drift is not None]


def evenly_spread(items: Sequence[T], limit: int = MAX_SAMPLES) -> list[T]:
    """Return at most `limit` items, evenly spread; the same items for the same input."""
    count = min(len(items), limit)
    return [items[position * len(items) // count] for position in range(count)]


def _lost_positions(tokens: Sequence[PlacedToken], again: Sequence[PlacedToken]) -> list[int]:
    """Return the ascending indices of the tokens that are missing from `again`, the new encoding of their text."""
    remaining = set(again)
    return [at for at, placed in enumerate(tokens) if placed not in remaining]


def totals_of(drifts: Iterable[EpisodeDrift]) -> DriftTotals:
    """Return the sums and shares over all measured episodes."""
    measured = list(drifts)
    drifted = sum(drift.is_drifted for drift in measured)
    sums = {name: sum(getattr(drift, name) for drift in measured) for name in _COUNTS}
    checked = [drift for drift in measured if drift.mismatches is not None]
    return DriftTotals(
        episodes=len(measured),
        drifted_episodes=drifted,
        drifted_share=drifted / max(len(measured), 1),
        **sums,
        off_policy_share=sums["off_policy"] / max(sums["sampled_tokens"], 1),
        classes={name: sum(drift.classes[name] for drift in measured) for name in CLASSES},
        mismatched_episodes=sum(bool(drift.mismatches) for drift in checked) if checked else None,
        mismatched_tokens=sum(drift.mismatched_tokens for drift in checked) if checked else None,
    )
