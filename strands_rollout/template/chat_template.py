"""Render a tokenizer's chat template incrementally and token-exactly: new messages to new token ids.

Only new messages are rendered: the first prompt, and later the text after the last sampled token, through the next
generation prompt. A `ChatTemplate` probes its template when it is made (see `probe`).

Most templates insert tool results unchanged. `ChatTemplate` tests this with texts that templates might treat specially.
If the template passes the test, tool results are encoded but not rendered: a `TurnShape` has the constant ids and the
texts around each result.
"""

from __future__ import annotations

import ast
import logging
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment
from jinja2 import TemplateError as JinjaError

from strands_rollout.errors import TemplateError
from strands_rollout.template.messages import ChatMessage
from strands_rollout.template.probe import ProbedTemplate, probe, write_calls
from strands_rollout.template.render import (
    Messages,
    TemplateRenderer,
    Tools,
    TurnRenderer,
    split_calls,
    template_advice,
)
from strands_rollout.template.tokens import TokenEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
_ENCODERS: weakref.WeakKeyDictionary[Any, TokenEncoder] = weakref.WeakKeyDictionary()
# tokenizer -> template and its arguments -> state. Each sample builds a ChatTemplate on the event loop, so building
# one must be fast
_SHARED_STATES: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], _SharedState]] = weakref.WeakKeyDictionary()
# limits of the caches: number of prompts (the samples of a group share one), tokens of a cached prompt, number of turn
# shapes, and number of a tokenizer's `_SharedState`s
_MAX_PROMPTS: Final = 64
_MAX_PROMPT_TOKENS: Final = 8192
_MAX_SHAPES: Final = 256
_MAX_KWARGS: Final = 16
_TOOL_RESULT_KEYS: Final = frozenset({"role", "name", "tool_call_id", "content"})
_BASE: Final[list[ChatMessage]] = [{"role": "user", "content": "question"}]
_BASE_WITH_IMAGE: Final[list[ChatMessage]] = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "question"}]}
]
_MARK: Final = "tool-result-{}-of-the-shape"
_MARKS: Final = re.compile(r"tool-result-(\d+)-of-the-shape")
# a template with more string literals is not tested, but always rendered: the test would take too long
_MAX_LITERALS: Final = 16
_PLAIN_TEXTS: Final = ("", "\n x\t\n", '{"a": "\\"<b>1 & 2</b>\\" \'é\' 例"}')
# Jinja's tokens before or after a string literal that is compared, assigned or passed to a function
_TOKENS_BEFORE_LITERAL: Final = ("(", "[", "{", ",", "=", "==", "!=", "in", "eq", "ne", "equalto", "sameas")
_TOKENS_AFTER_LITERAL: Final = ("in", "not", "==", "!=", ":")
_MAX_TRIED_CHARS: Final = 10_000
_TEXTS: Final = (
    *_PLAIN_TEXTS,
    " ",
    "a\r\n\r\nb\n",
    "0",
    "-1.5",
    "None",
    "true",
    "[]",
    "\\n %s {} {{ x }} {% if %}",
    "777",
    "X",
    *("Ab. \n" * lines for lines in (4, 12, 40, 130, 400)),
    "x" * _MAX_TRIED_CHARS,
)


@dataclass(slots=True)
class _SharedState:
    """Probe results and caches, shared by all `ChatTemplate`s of the same tokenizer, template and arguments."""

    probed: ProbedTemplate
    end_of_turn_id: int
    end_of_calls_id: int
    opening: str | None  # the first control token of a prompt
    prompts: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # by messages and tools as text
    shapes: dict[tuple[int, str], TurnShape | None] = field(default_factory=dict)  # by number of results, and tools
    # (number of results, with tools?) -> the test's result: True if the template inserts the results unchanged
    keeps_results: dict[tuple[int, bool], bool] = field(default_factory=dict)


class ChatTemplate:
    """A tokenizer's chat template, for conversations that only grow.

    Attributes:
        encoder: The tokenizer's encoder, shared by all templates of that tokenizer.
        end_of_turn_id: The control token that ends an assistant's turn without calls.
        end_of_calls_id: The control token that ends a turn with calls; usually the same as `end_of_turn_id`.
        end_ids: Both end tokens.
        opens_reasoning: True if the generation prompt opens reasoning and does not close it.
        example_call: An example of a call as the template writes it.
        processor: The model's Hugging Face processor, which converts images to tokens; or the folder or hub id to load
            it from at the first image. None to refuse images.
    """

    processor: Any = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase, **template_kwargs: object) -> None:
        """Probe the template of `tokenizer`.

        Args:
            tokenizer: A Hugging Face fast tokenizer with a chat template.
            **template_kwargs: Arguments for each rendering of the template, such as `enable_thinking=False`.

        Raises:
            TemplateError: The tokenizer is not a fast tokenizer, has no template, or does not keep control tokens and
                text apart; or the template fails or is not append-only even without tools and system messages. If
                tokens differ, the message names the first differing token.
        """
        self._tokenizer = tokenizer
        self._renderer = make_renderer(tokenizer, template_kwargs)
        self._template, self.encoder = self._renderer.source, self._renderer.encoder
        self._shared = shared = self._probe_once()
        probed = shared.probed
        self._turns = TurnRenderer(self._renderer, probed.ends)
        self.end_of_turn_id, self.end_of_calls_id = shared.end_of_turn_id, shared.end_of_calls_id
        self.end_ids = frozenset((shared.end_of_turn_id, shared.end_of_calls_id))
        self.opens_reasoning = probed.opens_reasoning
        self.example_call = probed.example_call
        self._last: tuple[object, list[int]] = (None, [])
        self._last_tools: tuple[Tools, str] = ((), "")

    def _probe_once(self) -> _SharedState:
        template = self._template
        key = (template if isinstance(template, str) else repr(template), repr(sorted(self._renderer.kwargs.items())))
        known = _SHARED_STATES.setdefault(self._tokenizer, {})
        found = known.get(key)
        if found is None:
            if len(known) >= _MAX_KWARGS:  # each sample may have template arguments of its own
                known.clear()
            try:
                probed = probe(self._renderer)
            except TemplateError as e:
                e.args = (f"{str(e).rstrip('.')}. Use another model, or {template_advice(template)}",)
                raise
            found = known[key] = _SharedState(
                probed,
                end_of_turn_id=self.encoder.encode_trusted(probed.ends.answer)[0],
                end_of_calls_id=self.encoder.encode_trusted(probed.ends.calls)[0],
                opening=self.encoder.first_control(self.render(_BASE)),
            )
            if found.probed.notes:
                logger.info("chat template: %s", "; ".join(found.probed.notes))
        return found

    def prompt_ids(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """Return the ids of a whole conversation and of the generation prompt after it.

        The ids equal `tokenizer.apply_chat_template(..., add_generation_prompt=True)`, with one exception.
        Text of messages and tools never becomes a control token, except for reasoning tags in an assistant's content.

        Raises:
            TemplateError: The template refuses the messages, or can't be used with tools or with a system message.
        """
        tools_error, system_error = self._shared.probed.tools_error, self._shared.probed.system_error
        if tools and tools_error is not None:
            raise TemplateError(
                f"the chat template can't be used with tools: {tools_error.rstrip('.')}. Use a model that was "
                f"trained to call tools, remove the agent's tools, or {template_advice(self._template)}"
            )
        if system_error is not None and messages[0]["role"] == "system":
            raise TemplateError(
                f"the chat template can't be used with a system message: {system_error.rstrip('.')}. Set system_prompt "
                f'to "", or {template_advice(self._template)}'
            )
        try:
            return self._whole_prompt(messages, tools)
        except TemplateError:
            split = split_calls(messages)
            if not self._turns.ends.one_by_one or len(split) == len(messages):
                raise
            return self._whole_prompt(split, tools)  # the template may refuse turns with several calls

    def _whole_prompt(self, messages: Messages, tools: Tools) -> list[int]:
        # repr, unlike JSON, distinguishes tuples from lists and the keys 1 and "1", and accepts any key
        key = (repr(messages), repr(tools))
        prompts = self._shared.prompts
        last = self._last  # read once: another thread may replace it
        ids = last[1] if last[0] == key else prompts.get(key)
        if ids is None:
            ids = self.encoder.encode_rendered(self.render(messages, tools))
            if len(ids) <= _MAX_PROMPT_TOKENS and is_time_independent(self._template):
                if len(prompts) >= _MAX_PROMPTS:
                    prompts.clear()
                prompts[key] = ids
        self._last = (key, ids)
        return list(ids)

    def turn_ids(self, messages: Messages, tools: Tools = (), *, last_id: int | None) -> list[int]:
        """Return the ids between the last sampled token and the next turn's first token.

        Args:
            messages: The new messages, at least one: tool results in the order of their calls, and user turns.
            tools: The tools of the first prompt.
            last_id: The last sampled token. Usually, the template ends the policy's turn with this token, and the ids
                begin after that token. If a stop string, the length limit, or another stop token of the model ended the
                turn, the ids begin with the template's end token.

        Raises:
            TemplateError: The template refuses the messages, or user turns in a conversation with tools; or it renders
                an image differently after an earlier image.
        """
        error = self._shared.probed.user_turns_error
        if tools and error is not None and any(message["role"] == "user" for message in messages):
            raise TemplateError(
                f"the chat template can't be used with tools and more than one user turn: {error.rstrip('.')}. Limit "
                f"conversations to one user turn, or {template_advice(self._template)}"
            )
        shape = self._find_shape(messages, tools)
        if shape is None:
            rendered = self.render_turn(messages, tools)
            self._check_image_numbering(messages, tools, rendered)
            key: object = rendered
        else:
            key = (shape, results := [message["content"] for message in messages])
        last = self._last  # callers first count the tokens of a turn and then send them: the second call reuses them
        if last[0] != key:
            encoder = self.encoder
            ids = encoder.encode_rendered(rendered) if shape is None else shape.ids(results, encoder.encode_plain)
            last = self._last = (key, ids)
        return last[1][1:] if last_id == last[1][0] else list(last[1])

    def looks_rendered(self, text: str) -> bool:
        """Return whether a text looks rendered by this template: it begins like a prompt, and has the end of a turn."""
        opening = self._shared.opening
        return opening is not None and text.lstrip().startswith(opening) and self._shared.probed.ends.answer in text

    def render_turn(self, messages: Messages, tools: Tools = (), *, after: Messages = ()) -> str:
        """Render the (escaped) text from an assistant turn's end through the next generation prompt.

        For the arguments see `TurnRenderer.render`.
        """
        return self._turns.render(messages, tools, after=after)

    def write_turn(self, text: str, calls: Sequence[tuple[str, Mapping[str, Any]]] = ()) -> tuple[str, int]:
        """Write a policy's turn as the template would; return the text without the end token, and that token's id.

        If the generation prompt opens reasoning and the text does not close it, the turn begins with the closing tag.

        Args:
            text: The turn's text.
            calls: Name and arguments of each call.

        Raises:
            TemplateError: The template can't write calls.
        """
        probed, end_id = self._shared.probed, self.end_of_calls_id if calls else self.end_of_turn_id
        ends, lead = probed.ends, probed.lead
        text = text.removesuffix(ends.answer)
        closed = lead if self.opens_reasoning and lead.strip().partition(">")[0] not in text else ""
        turns = [[call] for call in calls] if ends.one_by_one else [calls] if calls else []
        written = [write_calls(self._renderer, ends, turn).removeprefix(lead).lstrip() for turn in turns]
        if not all(written):
            raise TemplateError("the chat template can't render tool calls")
        return closed + "\n".join([text] * bool(text) + written), end_id

    def render(self, messages: Messages, tools: Tools = ()) -> str:
        """Render the (escaped) text of messages and the generation prompt."""
        return self._renderer.render(messages, tools)

    def _check_image_numbering(self, messages: Messages, tools: Tools, rendered: str) -> None:
        if all(isinstance(message["content"], str) for message in messages):
            return
        if self.render_turn(messages, tools, after=_BASE_WITH_IMAGE) != rendered:
            raise TemplateError(
                "the chat template renders an image differently after an earlier image; expected turns that don't "
                "depend on earlier ones. Remove template arguments that number images (add_vision_id)"
            )

    def _find_shape(self, messages: Messages, tools: Tools) -> TurnShape | None:
        """Return the shape of a turn with these messages; None if the turn must be rendered."""
        for message in messages:
            content = message["content"]
            if message["role"] != "tool" or message.keys() != _TOOL_RESULT_KEYS or isinstance(content, list):
                return None  # a user turn, or images
            if len(content) > _MAX_TRIED_CHARS:
                return None  # the template may truncate texts that are longer than the tested texts
        last = self._last_tools  # read once: threads share this object
        if tools and last[0] is not tools:
            last = self._last_tools = (tools, repr(tools))
        shapes, key = self._shared.shapes, (len(messages), last[1] if tools else "")
        try:
            return shapes[key]
        except KeyError:
            shape, keeps_results, kind = None, self._shared.keeps_results, (len(messages), bool(tools))
        if keeps_results.get(kind) is not False:
            texts = _PLAIN_TEXTS if kind in keeps_results else trial_texts(self._template)
            if texts is not None:
                shape = find_turn_shape(lambda turn: self.render_turn(turn, tools), len(messages), self.encoder, texts)
            keeps_results.setdefault(kind, shape is not None)
        if len(shapes) >= _MAX_SHAPES:
            shapes.clear()
        shapes[key] = shape
        return shape


def make_renderer(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> TemplateRenderer:
    """Make a renderer of a tokenizer's template, without probing it.

    Raises:
        TemplateError: `tokenizer` is a name, has no chat template, is not a fast tokenizer, or encodes ordinary text to
            control tokens.
    """
    if isinstance(tokenizer, str):
        expected = f"transformers.AutoTokenizer.from_pretrained({tokenizer!r})"
        raise TemplateError(f"got the name {tokenizer!r} as tokenizer; expected a tokenizer object: {expected}")
    if not (template_kwargs.get("chat_template") or getattr(tokenizer, "chat_template", None)):
        raise TemplateError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template; expected one in its "
            "tokenizer_config.json or chat_template.jinja. Use the tokenizer of an instruction-tuned model, or set "
            "tokenizer.chat_template"
        )
    encoder = _ENCODERS.get(tokenizer)
    if encoder is None:
        encoder = _ENCODERS[tokenizer] = TokenEncoder(tokenizer)
    return TemplateRenderer(tokenizer, encoder, template_kwargs)


@dataclass(frozen=True, slots=True)
class TurnShape:
    """A turn of a fixed number of tool results, in which only the results' texts vary.

    Attributes:
        parts: Pairs of constant ids and the text after them. The text is a list of strings and ints; an int is the
            index of a result to insert.
        end: Constant ids after the last text.
    """

    parts: tuple[tuple[list[int], list[str | int]], ...]
    end: list[int]

    def ids(self, results: Sequence[str], encode: Callable[[str], list[int]]) -> list[int]:
        """Return the ids of the turn with these results."""
        found: list[int] = []
        for ids, text in self.parts:
            found += ids
            found += encode(_fill(text, results))
        return found + self.end


def find_turn_shape(
    render: Callable[[Messages], str], count: int, encoder: TokenEncoder, texts: Sequence[str]
) -> TurnShape | None:
    """Find the shape of turns with `count` tool results.

    Args:
        render: Renders new messages, from the end of the assistant's turn through the next generation prompt.
        count: Number of tool results.
        encoder: The tokenizer's encoder.
        texts: Texts to try as results, and as names and ids of calls.

    Returns:
        The shape. None if the template changes or refuses results, the text around the results depends on the results,
        or a control token swallows the white space next to it.
    """
    if not encoder.keeps_white_space:
        return None
    try:
        rendered = render(_tool_messages([_MARK.format(index) for index in range(count)], 0))
        if [int(index) for index in _MARKS.findall(rendered)] != list(range(count)):
            return None
        parts = _split(encoder.unescape(rendered))
        for number, results in enumerate(_batches(texts, count), start=1):
            if encoder.unescape(render(_tool_messages(results, number))) != _fill(parts, results):
                return None
    except TemplateError:  # the template refuses one of the texts
        return None
    return _build_shape(rendered, encoder)


def _split(text: str) -> list[str | int]:
    """Split a text at the marks of results; return the texts between them, and the results' indices."""
    return [int(part) if at % 2 else part for at, part in enumerate(_MARKS.split(text))]


def _fill(parts: Sequence[str | int], results: Sequence[str]) -> str:
    return "".join([results[part] if isinstance(part, int) else part for part in parts])


def _build_shape(rendered: str, encoder: TokenEncoder) -> TurnShape:
    parts: list[tuple[list[int], list[str | int]]] = []
    ids: list[int] = []
    for piece in encoder.pieces(rendered):
        if isinstance(piece, int):
            ids.append(piece)
        elif _MARKS.search(piece):
            split = _split(piece)
            parts.append((ids, [encoder.unescape(part) if isinstance(part, str) else part for part in split]))
            ids = []
        else:
            ids += encoder.encode_plain(encoder.unescape(piece))
    return TurnShape(tuple(parts), ids)


def _tool_messages(results: Sequence[str], number: int) -> list[ChatMessage]:
    """Make messages with these results; names and ids differ in each trial.

    Thus, a template that shows names or ids gets no shape.
    """
    ids = [f"{result or 'call'}_{number}_{index}" for index, result in enumerate(results)]
    return [
        {"role": "tool", "name": result or f"tool{number}", "tool_call_id": call_id, "content": result}
        for call_id, result in zip(ids, results, strict=True)
    ]


def _batches(texts: Sequence[str], count: int) -> Iterator[list[str]]:
    """Yield the texts in batches of `count`; if `count` is above 1, each text occurs twice in a row."""
    in_turn = iter([text for text in texts for _ in range(2)] if count > 1 else texts)
    while batch := list(islice(in_turn, count)):
        yield batch + [""] * (count - len(batch))


def trial_texts(source: object) -> list[str] | None:
    """Collect tool results that a template might treat specially; return None for a template that can't be tested.

    Args:
        source: The template's source, whose string literals are included. A template can't be tested if it is not a
            text, can't be split into Jinja's tokens, depends on the time, or has too many literals.
    """
    if not isinstance(source, str) or not is_time_independent(source):
        return None
    try:
        literals = _find_literals(source)
    except (JinjaError, ValueError, SyntaxError):
        return None
    if len(literals) > _MAX_LITERALS:
        return None
    around = [begin + "x" + end for begin in literals for end in literals]
    return [*_TEXTS, *literals, *(text + "x" for text in literals), *("x" + text for text in literals), *around]


def _find_literals(source: str) -> list[str]:
    """Find the string literals that a template compares with values, assigns, or passes to functions."""
    tokens = [(kind, value) for _, kind, value in Environment(autoescape=True).lex(source) if kind != "whitespace"]
    found = {
        str(ast.literal_eval(value)): None
        for (_, before), (kind, value), (_, after) in zip(tokens, tokens[1:], tokens[2:], strict=False)
        if kind == "string" and (before in _TOKENS_BEFORE_LITERAL or after in _TOKENS_AFTER_LITERAL)
    }
    return list(found)


def is_time_independent(source: object) -> bool:
    """Return whether a template is a text whose rendering does not depend on the current time."""
    return isinstance(source, str) and "strftime_now" not in source
