"""Context tokens against what the chat template makes of the same conversation: they must be the same, token for token.

What was read between two turns is cut at its control tokens. They must be those that the template puts around the
results of so many calls, or around a user's turn, and each text between them must be encoded as the tokenizer encodes
it. The results' own texts are taken from the tokens, so that no record of the conversation is needed. Of the prompt,
whose tools and system text no sample tells, the texts are checked, and how it ends: question and generation prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeAlias

from strands_rollout.chat_messages import ChatMessage
from strands_rollout.episode_facts import fan_out_part
from strands_rollout.errors import TemplateError
from strands_rollout.probe_conversation import TOOLS
from strands_rollout.retokenisation.sampled_episode import SampledEpisode
from strands_rollout.retokenisation.turn_reading import TurnReading

_ANY: Final = "probed-{}-of-{}"
_ANY_ID: Final = "Probed{:03d}"  # of 9 letters and digits, as some templates want it
_ANYS: Final = re.compile(r"probed-[a-z]+-of-\d+|Probed\d{3,}")
_SHOWN_TOKENS: Final = 12
_MOST_USERS: Final = 2

Piece: TypeAlias = int | str
"""A control token's id, or a text between two of them."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A stretch of context that is not what the template renders.

    Attributes:
        position: Index in the sample's tokens of the first one that differs.
        tokens: How many of the context's tokens differ; 1 where some only lack.
        got: Text from there on.
        expected: What the template makes there.
    """

    position: int
    tokens: int
    got: str
    expected: str


class RenderCheck:
    """Checks episodes of one policy.

    Attributes:
        reading: Of the policy's turns; its template is the one that is held against the tokens.
    """

    def __init__(self, reading: TurnReading) -> None:
        self.reading = reading
        self._template, self._encoder = reading.template, reading.template.encoder
        self._shapes: dict[tuple[int, int], list[Piece] | None] = {}

    def mismatches(self, episode: SampledEpisode) -> Iterator[Mismatch]:
        """What differs, at most one for each stretch of context, in order."""
        tokens, turns = episode.tokens, list(episode.turns)
        # the template writes an image as one token, of which the processor makes many: then only texts can be compared
        has_images = getattr(episode.sample, "multimodal_train_inputs", None) is not None
        for number, (start, end) in enumerate(episode.contexts):
            if has_images:
                found = self._wrongly_encoded(tokens[start:end])
            elif number == 0:
                found = self._in_prompt(tokens[:end], episode)
            else:
                found = self._between(tokens[start:end], tokens[turns[number - 1][0] : start])
            if found is not None:
                at, count, expected = found
                got = self._encoder.decode(tokens[start + at : min(end, start + at + _SHOWN_TOKENS)])
                yield Mismatch(start + at, max(count, 1), got, expected)  # where tokens only lack, none differs

    def _between(self, context: Sequence[int], turn: Sequence[int]) -> tuple[int, int, str] | None:
        """The first place that differs, how many tokens do, and what was expected."""
        faults = []
        for results, users in self._possible_messages(turn):
            shape = self._shape(results, users)
            if shape is None:  # the template can't be asked, e.g. for the form of a call's id
                continue
            faults.append(self._unlike(context, shape[1:] if turn[-1] == shape[0] else shape))
        if faults and None not in faults:
            return faults[0]
        return self._wrongly_encoded(context)

    def _possible_messages(self, turn: Sequence[int]) -> list[tuple[int, int]]:
        """How many tool results, and user's turns behind them, may follow a turn; none where it can't be told."""
        calls = self.reading.calls(turn)
        if calls is None:
            return []
        # a turn that was cut by length is not searched for calls
        counts = [calls] if turn[-1] in self._template.end_ids else [calls, 0]
        return [(count, users) for count in counts for users in range(0 if count else 1, _MOST_USERS + 1)]

    def _in_prompt(self, context: Sequence[int], episode: SampledEpisode) -> tuple[int, int, str] | None:
        if not _begins_with_its_row(episode):
            return self._wrongly_encoded(context)
        question = _last_user_text(getattr(episode.sample, "prompt", None))
        expected = self._ending(_ANY.format("question", 0) if question is None else question)
        ends = self._split(context)[-len(expected) :]
        at = len(context) - sum(len(ids) for ids in ends)
        found = self._unlike(context[at:], expected, begins_anyhow=True)
        if found is not None:
            return at + found[0], found[1], found[2]
        return self._wrongly_encoded(context)

    def _unlike(
        self, context: Sequence[int], expected: Sequence[Piece], *, begins_anyhow: bool = False
    ) -> tuple[int, int, str] | None:
        """Where the context leaves the template's control tokens and constant texts.

        Args:
            context: Token ids.
            expected: Pieces of the template.
            begins_anyhow: Whether more may stand in the first piece, before what is expected.
        """
        at, split = 0, self._split(context)
        for number, piece in enumerate(expected):
            ids = split[number] if number < len(split) else []
            if not self._fits(ids, piece, begins_anyhow=begins_anyhow and number == 0):
                shown = self._encoder.decode([piece]) if isinstance(piece, int) else _ANYS.sub("...", piece)
                return at, len(context) - at, shown
            at += len(ids)
        return None if at == len(context) else (at, len(context) - at, "the policy's turn")

    def _fits(self, ids: Sequence[int], piece: Piece, *, begins_anyhow: bool) -> bool:
        if isinstance(piece, int):
            return list(ids) == [piece]
        if any(map(self._encoder.is_control, ids)):
            return False
        parts = [self._encoder.unescape(part) for part in _ANYS.split(piece)]
        return _has_in_order(self._encoder.decode(ids), ["", *parts] if begins_anyhow else parts)

    def _wrongly_encoded(self, context: Sequence[int]) -> tuple[int, int, str] | None:
        """The first text between control tokens whose tokens are not the tokenizer's own."""
        at, count, first, shown = 0, 0, None, ""
        for ids in self._split(context):
            if not self._encoder.is_control(ids[0]):
                own = self._encoder.encode_plain(self._encoder.decode(ids))
                if own != ids:
                    same = next((n for n, pair in enumerate(zip(ids, own, strict=False)) if pair[0] != pair[1]), 0)
                    count += _differing(ids, own)
                    if first is None:
                        first, shown = at + same, f"tokens {own[same : same + _SHOWN_TOKENS]}"
            at += len(ids)
        return None if first is None else (first, count, shown)

    def _split(self, context: Sequence[int]) -> list[list[int]]:
        """The context cut at its control tokens, each alone."""
        found: list[list[int]] = []
        for token in context:
            if self._encoder.is_control(token) or not found or self._encoder.is_control(found[-1][0]):
                found.append([])
            found[-1].append(token)
        return found

    def _shape(self, calls: int, users: int) -> list[Piece] | None:
        """What the template makes of so many results and user's turns, from the end of the assistant's turn on."""
        if (calls, users) not in self._shapes:
            messages: list[ChatMessage] = [
                {
                    "role": "tool",
                    "name": _ANY.format("name", number),
                    "tool_call_id": _ANY_ID.format(number),
                    "content": _ANY.format("result", number),
                }
                for number in range(calls)
            ]
            messages += [{"role": "user", "content": _ANY.format("question", number)} for number in range(users)]
            try:
                self._shapes[calls, users] = self._pieces_of(self._template.render_turn(messages))
            except TemplateError:
                self._shapes[calls, users] = None
        return self._shapes[calls, users]

    def _ending(self, question: str) -> list[Piece]:
        """How a prompt ends: the text that holds the question, and what follows it."""
        marked = self._shape(0, 1) or []
        place = next((n for n, piece in enumerate(marked) if isinstance(piece, str) and _ANYS.search(piece)), 0)
        ending = self._pieces_of(self._template.render_turn([{"role": "user", "content": question}]))[place:]
        first = ending[0] if ending else 0
        if isinstance(first, str) and self._shows_tools_with_question:
            ending[0] = first[len(_ANYS.split(str(marked[place]))[0]) :]
        return ending

    @cached_property
    def _shows_tools_with_question(self) -> bool:
        """Whether tools stand between what opens the first user's turn and its words."""
        question: ChatMessage = {"role": "user", "content": _ANY.format("question", 0)}
        try:
            shown = self._pieces_of(self._template.render([question], TOOLS))
        except TemplateError:  # it shows none
            return False
        alone = self._shape(0, 1) or []
        texts = [next((p for p in pieces if isinstance(p, str) and _ANYS.search(p)), "") for pieces in (shown, alone)]
        return not texts[0].endswith(texts[1])

    def _pieces_of(self, rendered: str) -> list[Piece]:
        return list(self._encoder.pieces(rendered))


def _begins_with_its_row(episode: SampledEpisode) -> bool:
    """Whether the prompt is the row's: not of a sub-agent, nor of a history that was rewritten."""
    segments = episode.facts.get("segments")
    return fan_out_part(episode.sample) in (None, 0) and (not isinstance(segments, int) or segments <= 1)


def _has_in_order(text: str, parts: Sequence[str]) -> bool:
    """Whether a text is these parts with anything between them; in time linear in the text."""
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


def _last_user_text(prompt: Any) -> str | None:  # noqa: ANN401 - a row's
    """The question that ends a prompt, where it is plain text."""
    if isinstance(prompt, str):
        return prompt or None
    last = prompt[-1] if isinstance(prompt, list) and prompt else {}
    content = last.get("content") if last.get("role") == "user" else None
    return content if isinstance(content, str) else None


def _differing(got: Sequence[int], own: Sequence[int]) -> int:
    """Tokens between the common beginning and the common end; at least one."""
    shorter = min(len(got), len(own))
    begin = next((n for n in range(shorter) if got[n] != own[n]), shorter)
    end = next((n for n in range(shorter - begin) if got[-1 - n] != own[-1 - n]), shorter - begin)
    return max(len(got) - begin - end, 1)
