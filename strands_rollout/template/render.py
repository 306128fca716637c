"""Messages -> the text that a tokenizer's chat template makes of them, with all of their own text escaped.

`TemplateRenderer` renders whole conversations; `TurnRenderer` renders the text between the policy's turn and the next
generation prompt. New messages are rendered after a short conversation whose last turn stands for the policy's: it has
as many calls, with the same names and ids, and nothing else of it. What the template makes of an assistant's words is
therefore never seen: the policy's turns stay as they were sampled.
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
SHIPPED: Final = {
    "deepseek_r1_tools": ("tool▁sep", "```json"),
    "deepseek_v3_1_tools": ("tool▁sep",),
    "hermes_tools": ("<|im_start|>tool", "<tool_call>"),
}
"""The templates beside this file, by name, with what the text of those has in whose place they can stand."""
_SANDBOX: Final = " transformers lets no template change a list or a mapping: use the model's own, if this is another"


class TemplateRenderer:
    """A tokenizer's chat template with its arguments.

    Attributes:
        encoder: Of the tokenizer; escapes, and encodes what was rendered.
        source: The template itself, whatever the tokenizer gets later; a text, or templates by name. A template of
            this package is given by its name.
        kwargs: Handed to the template at each rendering.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encoder: TokenEncoder, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.encoder = encoder
        given = kwargs.get("chat_template") or tokenizer.chat_template
        self.source: Any = _shipped(given) if isinstance(given, str) and given in SHIPPED else given
        self.kwargs = {**kwargs, **({"chat_template": self.source} if kwargs.get("chat_template") else {})}
        self._looked_for: dict[tuple[str, str], bool] = {}

    def render(
        self, messages: Messages, tools: Tools = (), *, escaped: bool = True, generation_prompt: bool = True
    ) -> str:
        """The text of messages, at least one, and of what opens the next turn, where that is asked for.

        A template that fails on the arguments of calls as they are is given them as JSON text, or as objects. With
        `escaped`, control tokens in the messages' own text are hidden, also from the template.

        Raises:
            TemplateError: The template refuses the messages.
        """
        try:
            return self._rendered(messages, tools, escaped=escaped, generation_prompt=generation_prompt)
        except TemplateError:
            for form in (_as_text, _as_object):
                shown = [_with_arguments(message, form) for message in messages]
                if shown != list(messages):
                    with contextlib.suppress(TemplateError):
                        return self._rendered(shown, tools, escaped=escaped, generation_prompt=generation_prompt)
            raise

    def _rendered(self, messages: Messages, tools: Tools, *, escaped: bool, generation_prompt: bool) -> str:
        if not escaped:
            return self._applied(messages, tools, generation_prompt=generation_prompt)
        words: set[str] = set()
        rendered = self._applied(*self._escaped(messages, tools, words), generation_prompt=generation_prompt)
        if not any(token in rendered for word in words for token in self.encoder.tokens_of_word(word)):
            return rendered
        # a template that writes a tag around a name, as in "<" + name + ">", makes a token of the name "think": such
        # names are kept apart from it, unless the template then shows another text, since it compares with them
        try:
            apart = self._applied(*self._escaped(messages, tools, None), generation_prompt=generation_prompt)
        except TemplateError:
            return rendered
        return apart if self.encoder.unescape(apart) == self.encoder.unescape(rendered) else rendered

    @cached_property
    def _takes_xml_tools(self) -> bool:
        """Whether it shows tools by no other name than `xml_tools`, as SmolLM3's does."""
        if "xml_tools" not in str(self.source):
            return False
        shown = "probed-tool-description"
        function = {"name": "probe", "description": shown, "parameters": {"type": "object", "properties": {}}}
        given = {"tools": [{"type": "function", "function": function}]}
        return shown not in self._tried([_QUESTION], generation_prompt=True, **given)

    def _applied(self, messages: Messages, tools: Tools, *, generation_prompt: bool) -> str:
        given = {"tools": list(tools) or None} | ({"xml_tools": list(tools)} if tools and self._takes_xml_tools else {})
        try:
            return self._tried(messages, generation_prompt=generation_prompt, **given)
        except TemplateError:
            if tools:
                raise
            with contextlib.suppress(TemplateError):  # some templates want a list, if of no tools
                return self._tried(messages, generation_prompt=generation_prompt, tools=[])
            raise

    def _tried(self, messages: Messages, *, generation_prompt: bool, **tools: list[Any] | None) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **tools | self.kwargs | ({"chat_template": self.source} if isinstance(self.source, str) else {}),
            )
        except (JinjaError, TypeError, ValueError, KeyError, AttributeError) as e:
            roles = [message.get("role") for message in messages]
            why = f"{type(e).__name__}: {e}{_SANDBOX if isinstance(e, SecurityError) else ''}"
            raise TemplateError(f"the chat template fails on messages of roles {roles}: {why}") from e
        return str(rendered)

    def _escaped(self, messages: Messages, tools: Tools, words: set[str] | None) -> tuple[list[Any], list[Any]]:
        """All texts of messages and tools escaped, but for the reasoning tags of the assistant's words.

        `words` gets the texts that are the word of a control token; where it is None, these are kept apart.
        """

        def shown(value: object) -> Json:
            if isinstance(value, str):
                if words is not None and self.encoder.tokens_of_word(value):
                    words.add(value)
                return self.encoder.escape(value, apart=words is None)
            if type(value) is int:
                return self.encoder.escape_number(value)
            if isinstance(value, Mapping):
                return {shown(key): shown(item) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return tuple(map(shown, value)) if isinstance(value, tuple) else [shown(item) for item in value]
            return value

        chat = [{shown(key): shown(item) for key, item in message.items() if key != "role"} for message in messages]
        for message, one in zip(messages, chat, strict=True):
            if "role" in message:  # many a template makes a token of its word
                one["role"] = self.encoder.escape(str(message["role"]))
            if message.get("role") == "assistant" and isinstance(message.get("content"), str):
                one["content"] = self._shown_words(message["content"], shown)
        return chat, [shown(tool) for tool in tools]

    def _shown_words(self, text: str, shown: Callable[[str], str]) -> str:
        """An assistant's words, escaped; the tags around the reasoning that they begin with are left for the template.

        A template may leave reasoning out, which it finds by these tags. Of words with other tags than one such pair it
        is shown the closing ones, where it looks for them.
        """
        for opening, closing in self.encoder.tag_pairs:
            begin, closes, answer = text.partition(closing)
            before, opens, reasoning = begin.rpartition(opening)
            if not closes:
                continue
            is_one_pair = not before.strip() and opening not in answer and closing not in answer
            if is_one_pair and self._knows_reasoning(opens, closing):
                return shown(before) + opens + shown(reasoning) + closing + shown(answer)
            if self._knows_reasoning("", closing):
                return closing.join(map(shown, text.split(closing)))
        return shown(text)

    def _knows_reasoning(self, opening: str, closing: str) -> bool:
        """Whether reasoning between these tags is known as such: by their name, or since the template looks for them.

        The opening one is "" where the generation prompt has it.
        """
        if opening and "think" in closing.casefold():
            return True
        if (opening, closing) not in self._looked_for:
            words = f"{opening}probed-reasoning{closing}probed-words"
            question: ChatMessage = {"role": "user", "content": "probed-question"}
            try:
                rendered = self._applied(
                    [question, {"role": "assistant", "content": words}, question], (), generation_prompt=True
                )
            except TemplateError:
                rendered = words
            self._looked_for[opening, closing] = words not in rendered
        return self._looked_for[opening, closing]


@cache
def _shipped(name: str) -> str:
    return Path(__file__).with_name(f"{name}.jinja").read_text(encoding="utf-8")


def own_template(source: object = "") -> str:
    """What helps where a template can't be used: another one, by name if this package has it for such a template."""
    fits = (name for name, parts in SHIPPED.items() if all(part in str(source) for part in parts))
    name = next(fits, None)
    given = "...}" if name is None else f'"{name}"}}, which this package has'
    return f'give the tokenizer a template that only appends: chat_template_kwargs={{"chat_template": {given}'


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
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """How a template ends the assistant's turns; texts of control tokens.

    Attributes:
        answer: Ends a turn without calls, before a user's.
        calls: Ends a turn with calls, before their results. Where a template has no token that closes a turn, this and
            `answer` open what follows.
        one_by_one: Whether a turn with several calls is not written with all of them, so that each result has to be
            rendered after a turn with its own call alone.
        silent: Whether what stands for a turn with calls has no words, since they are shown behind the results.
    """

    answer: str
    calls: str
    one_by_one: bool = False
    silent: bool = False


@dataclass(frozen=True, slots=True)
class TurnRenderer:
    """Renders new messages by a template whose ends are known."""

    template: TemplateRenderer
    ends: TurnEnds

    def render(
        self, messages: Messages, tools: Tools = (), *, after: Messages = (), generation_prompt: bool = True
    ) -> str:
        """The (escaped) text from the end of the assistant's turn, that token included, to the next generation prompt.

        The new messages are tool results in the order of their calls, and user turns; `after` are messages before the
        assistant's turn, a question if none are given.

        Raises:
            TemplateError: The template refuses the messages, or does not end the turn.
        """
        before = after or [_QUESTION]
        results = sum(1 for _ in takewhile(_is_result, messages)) if self.ends.one_by_one else 0
        alone = max(results - 1, 0)  # the last result has what follows it
        parts = [self._after_turn([message], tools, before, generation_prompt=False) for message in messages[:alone]]
        parts.append(self._after_turn(messages[alone:], tools, before, generation_prompt=generation_prompt))
        return parts[0] + "".join(part.removeprefix(self.ends.calls) for part in parts[1:])

    def _after_turn(self, messages: Messages, tools: Tools, before: Messages, *, generation_prompt: bool) -> str:
        mark = _MARK
        while mark in str(tools) or mark in str(messages):
            mark += "-"  # untrusted text may hold it
        # what stands for the policy's turn made the calls that are answered; its last mark is close to its end
        calls = [
            {
                "type": "function",
                "id": message.get("tool_call_id", "call"),
                "function": {"name": message.get("name", "tool"), "arguments": {"x": mark}},
            }
            for message in takewhile(_is_result, messages)
        ]
        words = "" if calls and self.ends.silent else mark
        turn: ChatMessage = {"role": "assistant", "content": words, **({"tool_calls": calls} if calls else {})}
        rendered = self.template.render([*before, turn, *messages], tools, generation_prompt=generation_prompt)
        end = self.ends.calls if calls else self.ends.answer
        at = rendered.find(end, rendered.rfind(mark) + len(mark)) if mark in rendered else -1
        if at < 0:
            raise TemplateError(f"the chat template does not end an assistant's turn with {end}, as it did when probed")
        return rendered[at:]


def one_call_each(messages: Messages) -> list[ChatMessage]:
    """The same conversation with a turn for each call, for templates that write no turn with several.

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
            said = {"role": "assistant", "content": ""} if number else message
            found += [{**said, "tool_calls": [call]}, *results[number : number + 1]]
        found += results[len(calls) :]
    return found


def _is_result(message: ChatMessage) -> bool:
    return bool(message["role"] == "tool")
