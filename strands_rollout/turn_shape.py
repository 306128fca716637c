"""The turn that tool results make, without rendering it again: constant ids, and the texts around each result.

Only for templates that put a tool's result into the turn as it is, which is tried out with texts that a template could
treat otherwise. Knows rendered text and its encoder; nothing of models or budgets.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from jinja2 import Environment
from jinja2 import TemplateError as JinjaError

from strands_rollout.chat_messages import ChatMessage
from strands_rollout.errors import TemplateError
from strands_rollout.token_encoder import TokenEncoder

RenderTurn = Callable[[Sequence[ChatMessage]], str]
"""Tool messages -> the (escaped) text from the assistant's close to the next generation prompt."""

_MARK: Final = "tool-result-{}-of-the-shape"
_MARKS: Final = re.compile(r"tool-result-(\d+)-of-the-shape")
# above this a template is rendered each time: trying it out would take longer than it saves
_MAX_CONDITIONS: Final = 16
PLAIN_TEXTS: Final = ("", "\n x\t\n", '{"a": "\\"<b>1 & 2</b>\\" \'é\' 例"}')
# what stands beside a text that a template compares with
_BEFORE: Final = ("(", "[", "{", ",", "=", "==", "!=", "in", "eq", "ne", "equalto", "sameas")
_AFTER: Final = ("in", "not", "==", "!=", ":")
LONGEST_TRIED: Final = 10_000
_TEXTS: Final = (
    *PLAIN_TEXTS,
    " ",
    "a\r\n\r\nb\n",
    "0",
    "-1.5",
    "None",
    "true",
    "[]",
    "\\n %s {} {{ x }} {% if %}",
    "7" * 3,
    "X",
    *("Ab. \n" * lines for lines in (4, 12, 40, 130, 400)),
    "x" * LONGEST_TRIED,
)


@dataclass(frozen=True, slots=True)
class TurnShape:
    """A turn of so many tool results.

    Attributes:
        parts: In order, constant ids and the text after them, in which numbers stand for the results.
        end: The ids after the last text.
    """

    parts: tuple[tuple[list[int], list[str | int]], ...]
    end: list[int]

    def ids(self, results: Sequence[str], encode: Callable[[str], list[int]]) -> list[int]:
        """Ids of the turn with these results."""
        found: list[int] = []
        for ids, text in self.parts:
            found += ids
            found += encode("".join([results[part] if isinstance(part, int) else part for part in text]))
        return found + self.end


def shape_of(render: RenderTurn, count: int, encoder: TokenEncoder, texts: Sequence[str]) -> TurnShape | None:
    """The shape of turns of `count` tool results; None where the template looks at them, or changes them.

    Args:
        render: The template.
        count: At least 1.
        encoder: Of the template's tokenizer.
        texts: The results that it is tried out with; also as names and ids of calls.
    """
    if not encoder.cuts_are_plain:
        return None
    try:
        rendered = render(_messages([_MARK.format(index) for index in range(count)], 0))
        if [int(index) for index in _MARKS.findall(rendered)] != list(range(count)):
            return None
        for number, results in enumerate(_batches(texts, count), start=1):
            if render(_messages(results, number)) != _filled(rendered, [encoder.escape(result) for result in results]):
                return None
    except TemplateError:  # the template refuses what it was tried out with
        return None
    return _shape(rendered, encoder)


def is_timeless(source: object) -> bool:
    """Whether what a template shows can't change with the time."""
    return isinstance(source, str) and "strftime_now" not in source


def telling_texts(source: object) -> list[str] | None:
    """Results that a template could treat in a way of their own; None where there are too many.

    Args:
        source: The template's own text, whose conditions are among them; or whatever else a tokenizer holds.
    """
    if not isinstance(source, str) or not is_timeless(source):
        return None
    try:
        conditions = _conditions(source)
    except (JinjaError, ValueError, SyntaxError):
        return None
    if len(conditions) > _MAX_CONDITIONS:
        return None
    around = [begin + "x" + end for begin in conditions for end in conditions]
    return [*_TEXTS, *conditions, *(text + "x" for text in conditions), *("x" + text for text in conditions), *around]


def _filled(rendered: str, results: Sequence[str]) -> str:
    return _MARKS.sub(lambda mark: results[int(mark[1])], rendered)


def _shape(rendered: str, encoder: TokenEncoder) -> TurnShape:
    parts: list[tuple[list[int], list[str | int]]] = []
    ids: list[int] = []
    for piece in encoder.pieces(rendered):
        if isinstance(piece, int):
            ids.append(piece)
        elif _MARKS.search(piece):
            # split by a pattern with one group: texts and the numbers of the results in turn
            split = enumerate(_MARKS.split(piece))
            parts.append((ids, [int(part) if index % 2 else encoder.unescape(part) for index, part in split]))
            ids = []
        else:
            ids += encoder.encode_plain(encoder.unescape(piece))
    return TurnShape(tuple(parts), ids)


def _messages(results: Sequence[str], number: int) -> list[ChatMessage]:
    """Results under names and ids that differ from trial to trial, for a template that looks at them has no shape."""
    return [
        {
            "role": "tool",
            "name": result or f"tool{number}",
            "tool_call_id": f"{result or 'call'}_{number}_{index}",
            "content": result,
        }
        for index, result in enumerate(results)
    ]


def _batches(texts: Sequence[str], count: int) -> Iterator[list[str]]:
    """All texts, `count` at a time; of several results each text is two in turn."""
    in_turn = iter([text for text in texts for _ in range(2)] if count > 1 else texts)
    while batch := list(islice(in_turn, count)):
        yield batch + [""] * (count - len(batch))


def _conditions(source: str) -> list[str]:
    """The texts that a template compares with, gives names, or calls something with."""
    tokens = [(kind, value) for _, kind, value in Environment(autoescape=True).lex(source) if kind != "whitespace"]
    found = {
        str(ast.literal_eval(value)): None
        for (_, before), (kind, value), (_, after) in zip(tokens, tokens[1:], tokens[2:], strict=False)
        if kind == "string" and (before in _BEFORE or after in _AFTER)
    }
    return list(found)
