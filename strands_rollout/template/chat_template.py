"""New messages -> new token ids: renders a tokenizer's chat template incrementally and token-exactly.

Only what is new is ever rendered: the first prompt, later the text between the last sampled token and the next
generation prompt. Where a template puts tools' results into the turn as they are, which is tried out once with texts
that it could treat otherwise, even that is not rendered: such a turn has a `TurnShape`, constant ids and the texts
around each result. The template is probed when this is built (see `probe`).
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
from strands_rollout.template.probe import ProbedTemplate, probe, written_calls
from strands_rollout.template.render import Messages, TemplateRenderer, Tools, TurnRenderer, one_call_each, own_template
from strands_rollout.template.tokens import TokenEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
_ENCODERS: weakref.WeakKeyDictionary[Any, TokenEncoder] = weakref.WeakKeyDictionary()
# what was found, by template and its arguments: each sample builds a ChatTemplate, on the event loop
_FOUND: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], _Found]] = weakref.WeakKeyDictionary()
# of one template: prompts that the samples of a group share, shapes by numbers of results and sets of tools
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
# above this a template is rendered each time: trying it out would take longer than it saves
_MAX_CONDITIONS: Final = 16
_PLAIN_TEXTS: Final = ("", "\n x\t\n", '{"a": "\\"<b>1 & 2</b>\\" \'é\' 例"}')
# what stands beside a text that a template compares with
_BEFORE: Final = ("(", "[", "{", ",", "=", "==", "!=", "in", "eq", "ne", "equalto", "sameas")
_AFTER: Final = ("in", "not", "==", "!=", ":")
_LONGEST_TRIED: Final = 10_000
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
    "x" * _LONGEST_TRIED,
)


@dataclass(slots=True)
class _Found:
    """What all templates with the same arguments share."""

    probed: ProbedTemplate
    opening: str | None  # the control token that a prompt begins with
    prompts: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # by messages and tools as text
    shapes: dict[tuple[int, str], TurnShape | None] = field(default_factory=dict)  # by number of results, and tools
    # whether the template shows so many tool results as they are, by their number, with tools or without
    tried_out: dict[tuple[int, bool], bool] = field(default_factory=dict)


class ChatTemplate:
    """A tokenizer's chat template, for conversations that only grow.

    Attributes:
        encoder: The tokenizer's encoder; shared between the templates of one tokenizer.
        end_of_turn_id: The control token that ends an assistant's turn without calls.
        end_of_calls_id: The one that ends a turn with calls; mostly the same.
        end_ids: Both of them.
        opens_reasoning: Whether the generation prompt ends inside reasoning, which it has opened.
        written_call: How the template writes a call.
        processor: What makes tokens of images: the Hugging Face processor of the model, or the folder or hub id of one,
            which is loaded when the first image occurs; None where there are to be none.
    """

    processor: Any = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase, **template_kwargs: object) -> None:
        """Probe the template of `tokenizer`.

        Args:
            tokenizer: A Hugging Face fast tokenizer with a chat template.
            **template_kwargs: Handed to the template at each rendering, e.g. `enable_thinking=False`.

        Raises:
            TemplateError: There is no template, it fails, or it is not append-only; the message names the first token
                that differs.
        """
        self._tokenizer = tokenizer
        self._renderer = renderer_of(tokenizer, template_kwargs)
        self._template, self.encoder = self._renderer.source, self._renderer.encoder
        self._found = self._find()
        probed = self._found.probed
        self._turns = TurnRenderer(self._renderer, probed.ends)
        ends = [self.encoder.encode_trusted(end)[0] for end in (probed.ends.answer, probed.ends.calls)]
        self.end_of_turn_id, self.end_of_calls_id = ends
        self.end_ids = frozenset(ends)
        self.opens_reasoning = probed.opens_reasoning
        self.written_call = probed.written_call
        self._last: tuple[object, list[int]] = (None, [])
        self._last_tools: tuple[Tools, str] = ((), "")

    def _find(self) -> _Found:
        template = self._template
        key = (template if isinstance(template, str) else repr(template), repr(sorted(self._renderer.kwargs.items())))
        known = _FOUND.setdefault(self._tokenizer, {})
        found = known.get(key)
        if found is None:
            if len(known) >= _MAX_KWARGS:  # arguments may differ from sample to sample
                known.clear()
            try:
                probed = probe(self._renderer)
            except TemplateError as e:
                e.args = (f"{str(e).rstrip('.')}. Use another model, or {own_template(template)}.",)
                raise
            found = known[key] = _Found(probed, self.encoder.first_control(self.render(_BASE)))
            if found.probed.notes:
                logger.info("chat template: %s", "; ".join(found.probed.notes))
        return found

    def prompt_ids(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """Ids of a whole conversation and the generation prompt after it.

        Equal to `tokenizer.apply_chat_template(..., add_generation_prompt=True)` except that no text of a message or
        tool makes a control token.

        Raises:
            TemplateError: The template refuses the messages, or can't be used with tools, or with a system message.
        """
        tools_error, system_error = self._found.probed.tools_error, self._found.probed.system_error
        if tools and tools_error is not None:
            raise TemplateError(
                f"the chat template can't be used with tools: {tools_error.rstrip('.')}. Use a model that was "
                f"trained to call tools, give the agent none, or {own_template(self._template)}."
            )
        if system_error is not None and messages[0]["role"] == "system":
            raise TemplateError(
                f"the chat template can't be used with a system message: {system_error} Leave it out: system_prompt: "
                f'"", or {own_template(self._template)}.'
            )
        try:
            return self._whole_prompt(messages, tools)
        except TemplateError:
            singly = one_call_each(messages)
            if not self._turns.ends.one_by_one or len(singly) == len(messages):
                raise
            return self._whole_prompt(singly, tools)  # some templates refuse a turn with several calls

    def _whole_prompt(self, messages: Messages, tools: Tools) -> list[int]:
        # unlike JSON, repr tells a tuple from a list and 1 from "1" as a key, and takes any key
        key = (repr(messages), repr(tools))
        prompts = self._found.prompts
        last = self._last  # read once: another thread may set it
        ids = last[1] if last[0] == key else prompts.get(key)
        if ids is None:
            ids = self.encoder.encode_rendered(self.render(messages, tools))
            if len(ids) <= _MAX_PROMPT_TOKENS and is_timeless(self._template):
                if len(prompts) >= _MAX_PROMPTS:
                    prompts.clear()
                prompts[key] = ids
        self._last = (key, ids)
        return list(ids)

    def turn_ids(self, messages: Messages, tools: Tools = (), *, last_id: int | None) -> list[int]:
        """Ids between the last sampled token and the next generation prompt.

        Args:
            messages: The new messages: tool results in the order of their calls, user turns; not empty.
            tools: The tools of the first prompt.
            last_id: The last sampled token. If it is not the token that ends such a turn in the template (a stop
                string, a length stop, another of the model's stop tokens), that one comes first.

        Raises:
            TemplateError: The template refuses the messages, or user turns in a conversation with tools.
        """
        error = self._found.probed.user_turns_error
        if tools and error is not None and any(message["role"] == "user" for message in messages):
            raise TemplateError(
                f"the chat template can't be used with tools and more than one user's turn: {error} Let conversations "
                f"have one, or {own_template(self._template)}."
            )
        shape = self._shape(messages, tools)
        if shape is None:
            rendered = self.render_turn(messages, tools)
            self._refuse_counted_images(messages, tools, rendered)
            key: object = rendered
        else:
            key = (shape, results := [message["content"] for message in messages])
        last = self._last  # what is sent was counted before: it is not encoded a second time in turn
        if last[0] != key:
            encoder = self.encoder
            ids = encoder.encode_rendered(rendered) if shape is None else shape.ids(results, encoder.encode_plain)
            last = self._last = (key, ids)
        return last[1][1:] if last_id == last[1][0] else list(last[1])

    def is_rendered(self, text: str) -> bool:
        """Whether a text looks like a prompt that this template made: it opens like one and holds a closed turn."""
        opening = self._found.opening
        return opening is not None and text.lstrip().startswith(opening) and self._found.probed.ends.answer in text

    def render_turn(self, messages: Messages, tools: Tools = (), *, after: Messages = ()) -> str:
        """The (escaped) text from an assistant turn's end to the next generation prompt; see `TurnRenderer.render`."""
        return self._turns.render(messages, tools, after=after)

    def written_turn(self, text: str, calls: Sequence[tuple[str, Mapping[str, Any]]] = ()) -> tuple[str, int]:
        """A policy's turn of a text and calls, each a name and arguments, as the template writes calls; and its end.

        Reasoning that the generation prompt has opened is closed first, unless the text does so.

        Raises:
            TemplateError: The template writes no calls.
        """
        probed, end_id = self._found.probed, self.end_of_calls_id if calls else self.end_of_turn_id
        ends, lead = probed.ends, probed.lead
        text = text.removesuffix(ends.answer)
        closed = lead if self.opens_reasoning and lead.strip().partition(">")[0] not in text else ""
        turns = [[call] for call in calls] if ends.one_by_one else [calls] if calls else []
        written = [written_calls(self._renderer, ends, turn).removeprefix(lead).lstrip() for turn in turns]
        if not all(written):
            raise TemplateError("the chat template writes no calls; give the turn as a text, as the policy writes it")
        return closed + "\n".join([text] * bool(text) + written), end_id

    def render(self, messages: Messages, tools: Tools = ()) -> str:
        """The (escaped) text of messages, with the generation prompt."""
        return self._renderer.render(messages, tools)

    def _refuse_counted_images(self, messages: Messages, tools: Tools, rendered: str) -> None:
        if all(isinstance(message["content"], str) for message in messages):
            return
        if self.render_turn(messages, tools, after=_BASE_WITH_IMAGE) != rendered:
            raise TemplateError(
                "the chat template shows an image otherwise where there was one before; expected turns that don't "
                "depend on earlier ones. Leave template arguments that number images (add_vision_id) out."
            )

    def _shape(self, messages: Messages, tools: Tools) -> TurnShape | None:
        """The shape of these new messages, where they are tool results and the template has one for them."""
        for message in messages:
            content = message["content"]
            if message["role"] != "tool" or message.keys() != _TOOL_RESULT_KEYS or isinstance(content, list):
                return None  # a user's turn, or images, too
            if len(content) > _LONGEST_TRIED:
                return None  # a template may cut what is longer than all that it was tried out with
        last = self._last_tools  # one read of each: threads share all of this
        if tools and last[0] is not tools:
            last = self._last_tools = (tools, repr(tools))
        shapes, key = self._found.shapes, (len(messages), last[1] if tools else "")
        try:
            return shapes[key]
        except KeyError:
            shape, tried_out, kind = None, self._found.tried_out, (len(messages), bool(tools))
        if tried_out.get(kind) is not False:
            texts = _PLAIN_TEXTS if kind in tried_out else telling_texts(self._template)
            if texts is not None:
                shape = shape_of(lambda turn: self.render_turn(turn, tools), len(messages), self.encoder, texts)
            tried_out.setdefault(kind, shape is not None)
        if len(shapes) >= _MAX_SHAPES:
            shapes.clear()
        shapes[key] = shape
        return shape


def renderer_of(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> TemplateRenderer:
    """The template of a tokenizer as it is, not probed.

    Raises:
        TemplateError: There is none, or the tokenizer is no fast one.
    """
    if isinstance(tokenizer, str):
        expected = f"transformers.AutoTokenizer.from_pretrained({tokenizer!r})"
        raise TemplateError(f"got the name {tokenizer!r} as tokenizer; expected a loaded one: {expected}")
    if not (template_kwargs.get("chat_template") or getattr(tokenizer, "chat_template", None)):
        raise TemplateError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template; expected one in its "
            "tokenizer_config.json or chat_template.jinja. Use the tokenizer of an instruction-tuned model, or set "
            "tokenizer.chat_template."
        )
    encoder = _ENCODERS.get(tokenizer)
    if encoder is None:
        encoder = _ENCODERS[tokenizer] = TokenEncoder(tokenizer)
    return TemplateRenderer(tokenizer, encoder, template_kwargs)


@dataclass(frozen=True, slots=True)
class TurnShape:
    """A turn of so many tool results: constant ids and the text after them, in which numbers stand for the results.

    `end` are the ids after the last text.
    """

    parts: tuple[tuple[list[int], list[str | int]], ...]
    end: list[int]

    def ids(self, results: Sequence[str], encode: Callable[[str], list[int]]) -> list[int]:
        """Ids of the turn with these results."""
        found: list[int] = []
        for ids, text in self.parts:
            found += ids
            found += encode(_filled(text, results))
        return found + self.end


def shape_of(
    render: Callable[[Messages], str], count: int, encoder: TokenEncoder, texts: Sequence[str]
) -> TurnShape | None:
    """The shape of turns of `count` tool results; None where the template looks at them, or changes them.

    `render` makes the text from the assistant's close to the next generation prompt; it is tried out with these
    texts as results, and as names and ids of calls.
    """
    if not encoder.cuts_are_plain:
        return None
    try:
        rendered = render(_messages([_MARK.format(index) for index in range(count)], 0))
        if [int(index) for index in _MARKS.findall(rendered)] != list(range(count)):
            return None
        parts = _split(encoder.unescape(rendered))
        for number, results in enumerate(_batches(texts, count), start=1):
            if encoder.unescape(render(_messages(results, number))) != _filled(parts, results):
                return None
    except TemplateError:  # the template refuses what it was tried out with
        return None
    return _shape(rendered, encoder)


def _split(text: str) -> list[str | int]:
    """The texts around the results, with the numbers of the results between them."""
    return [int(part) if at % 2 else part for at, part in enumerate(_MARKS.split(text))]


def _filled(parts: Sequence[str | int], results: Sequence[str]) -> str:
    return "".join([results[part] if isinstance(part, int) else part for part in parts])


def _shape(rendered: str, encoder: TokenEncoder) -> TurnShape:
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


def _messages(results: Sequence[str], number: int) -> list[ChatMessage]:
    """Results under names and ids that differ from trial to trial, for a template that looks at them has no shape."""
    ids = [f"{result or 'call'}_{number}_{index}" for index, result in enumerate(results)]
    return [
        {"role": "tool", "name": result or f"tool{number}", "tool_call_id": call_id, "content": result}
        for call_id, result in zip(ids, results, strict=True)
    ]


def _batches(texts: Sequence[str], count: int) -> Iterator[list[str]]:
    """All texts, `count` at a time; of several results each text is two in turn."""
    in_turn = iter([text for text in texts for _ in range(2)] if count > 1 else texts)
    while batch := list(islice(in_turn, count)):
        yield batch + [""] * (count - len(batch))


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


def _conditions(source: str) -> list[str]:
    """The texts that a template compares with, gives names, or calls something with."""
    tokens = [(kind, value) for _, kind, value in Environment(autoescape=True).lex(source) if kind != "whitespace"]
    found = {
        str(ast.literal_eval(value)): None
        for (_, before), (kind, value), (_, after) in zip(tokens, tokens[1:], tokens[2:], strict=False)
        if kind == "string" and (before in _BEFORE or after in _AFTER)
    }
    return list(found)


def is_timeless(source: object) -> bool:
    """Whether what a template shows can't change with the time."""
    return isinstance(source, str) and "strftime_now" not in source
