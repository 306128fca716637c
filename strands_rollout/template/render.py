"""Render messages with a tokenizer's chat template; escape control tokens in the messages' own text.

`TemplateRenderer` renders whole conversations; `TurnRenderer` renders the text from the end of the policy's turn
through the next generation prompt. `TurnRenderer` renders the new messages after a short conversation that ends with a
placeholder for the policy's turn. The placeholder has a call for each tool result, with its name and id, but other
text. Thus the template never rewrites the policy's turns, which stay as they were sampled.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError as JinjaError
from jinja2.exceptions import SecurityError

from strands_rollout.errors import TemplateError
from strands_rollout.files.json_codec import Json
from strands_rollout.template.messages import ChatMessage
from strands_rollout.template.tokens import TokenEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[ChatMessage]
Tools = Sequence[Mapping[str, Any]]
_MARK: Final = "strands-rollout-answer"
_QUESTION: Final[ChatMessage] = {"role": "user", "content": "question"}
SHIPPED_TEMPLATES: Final = {
    "deepseek_r1_tools": ("tool▁sep", "```json"),
    "deepseek_v3_1_tools": ("tool▁sep",),
    "hermes_tools": ("<|im_start|>tool", "<tool_call>"),
}
"""Name of a template in this folder -> texts in each template that it can replace."""
_SANDBOX_ADVICE: Final = (
    " transformers forbids templates to change a list or mapping: use the model's own template instead"
)


class TemplateRenderer:
    """Renderer of conversations, with a tokenizer's chat template and fixed arguments.

    Attributes:
        encoder: The tokenizer's encoder, which escapes texts and encodes rendered texts.
        source: The template: a text, or a mapping of names to templates. Later changes of the tokenizer don't affect
            it. The argument `chat_template` may be the name of a template of this package.
        kwargs: Arguments for each rendering.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encoder: TokenEncoder, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.encoder = encoder
        requested = kwargs.get("chat_template") or tokenizer.chat_template
        self.source: Any = (
            _read_shipped(requested) if isinstance(requested, str) and requested in SHIPPED_TEMPLATES else requested
        )
        self.kwargs = {**kwargs, **({"chat_template": self.source} if kwargs.get("chat_template") else {})}
        self._handled_tags: dict[tuple[str, str], bool] = {}

    def render(
        self, messages: Messages, tools: Tools = (), *, escaped: bool = True, generation_prompt: bool = True
    ) -> str:
        """Render messages, and the generation prompt if requested.

        If the template fails, rendering is repeated with the calls' arguments as JSON text, and then as objects.

        Args:
            messages: At least one message.
            tools: The tools' specifications.
            escaped: Escape the texts of messages and tools, so that the template sees no control tokens in them except
                reasoning tags in an assistant's content.
            generation_prompt: Append the text that opens the assistant's turn.

        Raises:
            TemplateError: The template refuses the messages.
        """
        try:
            return self._render(messages, tools, escaped=escaped, generation_prompt=generation_prompt)
        except TemplateError:
            for form in (_as_text, _as_object):
                converted = [_with_arguments(message, form) for message in messages]
                if converted != list(messages):
                    with contextlib.suppress(TemplateError):
                        return self._render(converted, tools, escaped=escaped, generation_prompt=generation_prompt)
            raise

    def _render(self, messages: Messages, tools: Tools, *, escaped: bool, generation_prompt: bool) -> str:
        if not escaped:
            return self._apply(messages, tools, generation_prompt=generation_prompt)
        words: set[str] = set()
        rendered = self._apply(*self._escape(messages, tools, words), generation_prompt=generation_prompt)
        if not any(token in rendered for word in words for token in self.encoder.tokens_of_word(word)):
            return rendered
        # if a template puts a name into a tag, as in "<" + name + ">", the name "think" becomes a token. An escape
        # before the name prevents that. But the escape may change the rendered text, for example if the template
        # compares the name with a constant. Then the escape is not used
        try:
            separated = self._apply(*self._escape(messages, tools, None), generation_prompt=generation_prompt)
        except TemplateError:
            return rendered
        return separated if self.encoder.unescape(separated) == self.encoder.unescape(rendered) else rendered

    @cached_property
    def _takes_xml_tools(self) -> bool:
        """True if the template reads tools from the variable `xml_tools` only, as SmolLM3's does."""
        if "xml_tools" not in str(self.source):
            return False
        description = "probed-tool-description"
        function = {"name": "probe", "description": description, "parameters": {"type": "object", "properties": {}}}
        tools = {"tools": [{"type": "function", "function": function}]}
        return description not in self._apply_once([_QUESTION], generation_prompt=True, **tools)

    def _apply(self, messages: Messages, tools: Tools, *, generation_prompt: bool) -> str:
        arguments = {"tools": list(tools) or None}
        arguments |= {"xml_tools": list(tools)} if tools and self._takes_xml_tools else {}
        try:
            return self._apply_once(messages, generation_prompt=generation_prompt, **arguments)
        except TemplateError:
            if tools:
                raise
            with contextlib.suppress(TemplateError):  # some templates need a list even if there are no tools
                return self._apply_once(messages, generation_prompt=generation_prompt, tools=[])
            raise

    def _apply_once(self, messages: Messages, *, generation_prompt: bool, **tools: list[Any] | None) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **tools | self.kwargs | ({"chat_template": self.source} if isinstance(self.source, str) else {}),
            )
        except (JinjaError, TypeError, ValueError, KeyError, AttributeError) as e:
            roles = [message.get("role") for message in messages]
            reason = f"{type(e).__name__}: {e}{_SANDBOX_ADVICE if isinstance(e, SecurityError) else ''}"
            raise TemplateError(f"the chat template fails on messages of roles {roles}: {reason}") from e
        return str(rendered)

    def _escape(self, messages: Messages, tools: Tools, words: set[str] | None) -> tuple[list[Any], list[Any]]:
        """Escape all texts of messages and tools, except for reasoning tags in the assistant's content.

        `words` receives the texts that are the word of a control token, such as "think". If it is None, an escape is
        put before each of these texts instead.
        """

        def escape(value: object) -> Json:
            if isinstance(value, str):
                if words is not None and self.encoder.tokens_of_word(value):
                    words.add(value)
                return self.encoder.escape(value, apart=words is None)
            if type(value) is int:
                return self.encoder.escape_number(value)
            if isinstance(value, Mapping):
                return {escape(key): escape(item) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return tuple(map(escape, value)) if isinstance(value, tuple) else [escape(item) for item in value]
            return value

        chat = [{escape(key): escape(item) for key, item in message.items() if key != "role"} for message in messages]
        for message, escaped in zip(messages, chat, strict=True):
            if "role" in message:  # not `apart`: many templates put the role into a control token, such as <|user|>
                escaped["role"] = self.encoder.escape(str(message["role"]))
            if message.get("role") == "assistant" and isinstance(message.get("content"), str):
                escaped["content"] = self._escape_content(message["content"], escape)
        return chat, [escape(tool) for tool in tools]

    def _escape_content(self, text: str, escape: Callable[[str], str]) -> str:
        """Escape an assistant's content, except for the tags around reasoning at its beginning.

        A template recognizes reasoning by these tags, and may omit the reasoning. If the content has more tags, or text
        before the opening tag, only closing tags stay unescaped, and only if the template handles them.
        """
        for opening, closing in self.encoder.tag_pairs:
            begin, closes, answer = text.partition(closing)
            before, opens, reasoning = begin.rpartition(opening)
            if not closes:
                continue
            is_one_pair = not before.strip() and opening not in answer and closing not in answer
            if is_one_pair and self._are_reasoning_tags(opens, closing):
                return escape(before) + opens + escape(reasoning) + closing + escape(answer)
            if self._are_reasoning_tags("", closing):
                return closing.join(map(escape, text.split(closing)))
        return escape(text)

    def _are_reasoning_tags(self, opening: str, closing: str) -> bool:
        """Return whether these tags enclose reasoning: they are named "think", or the template changes text in them.

        If `opening` is "", the closing tag is tested alone, since the generation prompt may contain the opening tag.
        """
        if opening and "think" in closing.casefold():
            return True
        if (opening, closing) not in self._handled_tags:
            content = f"{opening}probed-reasoning{closing}probed-words"
            question: ChatMessage = {"role": "user", "content": "probed-question"}
            try:
                rendered = self._apply(
                    [question, {"role": "assistant", "content": content}, question], (), generation_prompt=True
                )
            except TemplateError:
                rendered = content
            self._handled_tags[opening, closing] = content not in rendered
        return self._handled_tags[opening, closing]


@cache
def _read_shipped(name: str) -> str:
    return Path(__file__).with_name(f"{name}.jinja").read_text(encoding="utf-8")


def template_advice(source: object = "") -> str:
    """Return advice to use another chat template; name a template of this package if one can replace `source`.

    Args:
        source: The chat template in use; "" to name no template.
    """
    fits = (name for name, parts in SHIPPED_TEMPLATES.items() if all(part in str(source) for part in parts))
    name = next(fits, None)
    value = "...}" if name is None else f'"{name}"}}, which this package has'
    return f'use a template that only appends: chat_template_kwargs={{"chat_template": {value}'


def _with_arguments(message: ChatMessage, form: Callable[[Any], Any]) -> ChatMessage:
    calls = [
        call | {"function": call["function"] | {"arguments": form(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return message | {"tool_calls": calls} if calls else message


def _as_text(arguments: object) -> Json:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments


def _as_object(arguments: object) -> Json:
    try:
        decoded = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """Texts of the control tokens that end the assistant's turns in a template.

    Attributes:
        answer: Ends a turn without calls, before a user turn.
        calls: Ends a turn with calls, before their results. Some templates have no token that closes a turn. Then
            `answer` and `calls` are the tokens that open the next part.
        one_by_one: True if the template can't write a turn with several calls. Then each result must be rendered after
            a turn with only its own call.
        silent: True if the template moves a turn's text behind results. Then the placeholder for a turn with calls must
            have no text.
    """

    answer: str
    calls: str
    one_by_one: bool = False
    silent: bool = False


@dataclass(frozen=True, slots=True)
class TurnRenderer:
    """Renderer of the messages that follow an assistant turn, for a template whose `TurnEnds` are known."""

    template: TemplateRenderer
    ends: TurnEnds

    def render(
        self, messages: Messages, tools: Tools = (), *, after: Messages = (), generation_prompt: bool = True
    ) -> str:
        """Render the (escaped) text from the assistant's end-of-turn token through the next generation prompt.

        Args:
            messages: The new messages: tool results in the order of their calls, and user turns.
            tools: The tools of the first prompt.
            after: Messages before the assistant's turn; a placeholder question if empty.
            generation_prompt: Append the text that opens the assistant's turn.

        Raises:
            TemplateError: The template refuses the messages, or does not end the turn.
        """
        before = after or [_QUESTION]
        results = sum(1 for _ in takewhile(_is_result, messages)) if self.ends.one_by_one else 0
        alone = max(results - 1, 0)  # the last result is rendered with the messages after it
        parts = [self._after_turn([message], tools, before, generation_prompt=False) for message in messages[:alone]]
        parts.append(self._after_turn(messages[alone:], tools, before, generation_prompt=generation_prompt))
        return parts[0] + "".join(part.removeprefix(self.ends.calls) for part in parts[1:])

    def _after_turn(self, messages: Messages, tools: Tools, before: Messages, *, generation_prompt: bool) -> str:
        mark = _MARK
        while mark in str(tools) or mark in str(messages):
            mark += "-"  # untrusted text may contain the mark
        # the placeholder for the policy's turn has the answered calls; the end of the turn follows its last mark
        calls = [
            {
                "type": "function",
                "id": message.get("tool_call_id", "call"),
                "function": {"name": message.get("name", "tool"), "arguments": {"x": mark}},
            }
            for message in takewhile(_is_result, messages)
        ]
        content = "" if calls and self.ends.silent else mark
        turn: ChatMessage = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        rendered = self.template.render([*before, turn, *messages], tools, generation_prompt=generation_prompt)
        end = self.ends.calls if calls else self.ends.answer
        at = rendered.find(end, rendered.rfind(mark) + len(mark)) if mark in rendered else -1
        if at < 0:
            raise TemplateError(f"the chat template does not end this assistant turn with {end!r}, unlike probed turns")
        return rendered[at:]


def split_calls(messages: Messages) -> list[ChatMessage]:
    """Split turns with several calls into turns with one call each, for templates that can't write several calls.

    Tool results must be in the order of their calls.
    """
    found: list[ChatMessage] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(message)
            continue
        results = list(takewhile(_is_result, messages[position:]))
        position += len(results)
        for number, call in enumerate(calls):
            turn = {"role": "assistant", "content": ""} if number else message
            found += [{**turn, "tool_calls": [call]}, *results[number : number + 1]]
        found += results[len(calls) :]
    return found


def _is_result(message: ChatMessage) -> bool:
    return bool(message["role"] == "tool")
