"""New messages -> new token ids: renders a tokenizer's chat template incrementally and token-exactly.

Only what is new is ever rendered: the first prompt once, later the text between the last sampled token and the next
generation prompt. The template is probed when this is built (see `template_probe`). Knows nothing of engines or agents.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jinja2 import TemplateError as JinjaError

from strands_rollout.chat_messages import ChatMessage
from strands_rollout.errors import TemplateError
from strands_rollout.template_probe import ProbedTemplate, probe
from strands_rollout.token_encoder import TokenEncoder

ANSWER_MARK: Final = "strands-rollout-answer"
_ENCODERS: weakref.WeakKeyDictionary[Any, TokenEncoder] = weakref.WeakKeyDictionary()
# what was found, by template and its arguments: each sample builds a ChatTemplate, on the event loop
_PROBES: weakref.WeakKeyDictionary[Any, dict[str, ProbedTemplate]] = weakref.WeakKeyDictionary()


class ChatTemplate:
    """A tokenizer's chat template, for conversations that only grow.

    Attributes:
        encoder: The tokenizer's encoder; shared between the templates of one tokenizer.
        end_of_turn_id: The control token that closes an assistant turn.
        opens_reasoning: Whether the generation prompt ends inside an open `<think>`.
    """

    def __init__(self, tokenizer: Any, **template_kwargs: Any) -> None:  # noqa: ANN401 - any fast tokenizer
        """Probe the template of `tokenizer`.

        Args:
            tokenizer: A Hugging Face fast tokenizer with a chat template.
            **template_kwargs: Handed to the template at each rendering, e.g. `enable_thinking=False`.

        Raises:
            TemplateError: There is no template, it fails, or it is not append-only; the message names the first token
                that differs.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template; expected one in its "
                "tokenizer_config.json or chat_template.jinja. Use the tokenizer of an instruction-tuned model, or set "
                "tokenizer.chat_template."
            )
        self._tokenizer = tokenizer
        self._kwargs = template_kwargs
        self.encoder = _encoder_of(tokenizer)
        probes = _PROBES.setdefault(tokenizer, {})
        key = repr((tokenizer.chat_template, sorted(template_kwargs.items())))
        if key not in probes:
            probes[key] = probe(self)
        found = probes[key]
        self._end_of_turn = found.end_of_turn
        self.end_of_turn_id = found.end_of_turn_id
        self.opens_reasoning = found.opens_reasoning
        self._tools_error = found.tools_error

    def prompt_ids(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of a whole conversation and the generation prompt after it.

        Equal to `tokenizer.apply_chat_template(..., add_generation_prompt=True)` except that no text of a message or
        tool makes a control token.

        Raises:
            TemplateError: The template refuses the messages, or can't be used with tools.
        """
        if tools and self._tools_error is not None:
            raise TemplateError(
                f"the chat template can't be used with tools: {self._tools_error}. Use a model that was trained to "
                "call tools, or give the agent none."
            )
        return self.encoder.encode_rendered(self.render(messages, tools))

    def turn_ids(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = (), *, last_id: int | None
    ) -> list[int]:
        """Ids between the last sampled token and the next generation prompt.

        Args:
            messages: The new messages: tool results in the order of their calls, user turns; not empty.
            tools: The tools of the first prompt.
            last_id: The last sampled token. If it is not the template's end of turn (a stop string, a length stop), the
                missing close comes first.

        Raises:
            TemplateError: The template refuses the messages.
        """
        ids = self.encoder.encode_rendered(self.render_turn(messages, tools))
        return ids[1:] if last_id == self.end_of_turn_id else ids

    def is_rendered(self, text: str) -> bool:
        """Whether a text looks like a prompt that this template made: it opens like one and holds a closed turn."""
        opening = self.encoder.first_control(self.render(_BASE))
        return opening is not None and text.lstrip().startswith(opening) and self._end_of_turn in text

    def render_turn(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The (escaped) text from an assistant turn's close to the next generation prompt."""
        rendered = self.render([*_BASE, _answer_before(messages), *messages], tools)
        tail = rendered[rendered.rindex(ANSWER_MARK) + len(ANSWER_MARK) :]
        return tail[tail.index(self._end_of_turn) :]

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The (escaped) text of messages, with the generation prompt."""
        try:
            rendered = self._tokenizer.apply_chat_template(
                [self._escaped(message) for message in messages],
                tools=[self._escaped(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **self._kwargs,
            )
        except (JinjaError, TypeError, ValueError, KeyError, AttributeError) as e:
            roles = [message["role"] for message in messages]
            raise TemplateError(f"the chat template fails on messages of roles {roles}: {type(e).__name__}: {e}") from e
        return str(rendered)

    def _escaped(self, value: Any) -> Any:  # noqa: ANN401 - any JSON value
        if isinstance(value, str):
            return self.encoder.escape(value)
        if isinstance(value, Mapping):
            return {key: self._escaped(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._escaped(item) for item in value]
        return value


_BASE: Final[list[ChatMessage]] = [{"role": "user", "content": "question"}]


def _answer_before(messages: Sequence[ChatMessage]) -> ChatMessage:
    """The assistant turn before new messages that are rendered alone: it made the calls that they answer."""
    answer: ChatMessage = {"role": "assistant", "content": ANSWER_MARK}
    calls = []
    for message in messages:
        if message["role"] != "tool":
            break
        function = {"name": message.get("name", "tool"), "arguments": {}}
        calls.append({"type": "function", "id": message.get("tool_call_id", "call"), "function": function})
    return answer | {"tool_calls": calls} if calls else answer


def _encoder_of(tokenizer: Any) -> TokenEncoder:  # noqa: ANN401 - any Hugging Face fast tokenizer
    encoder = _ENCODERS.get(tokenizer)
    if encoder is None:
        encoder = _ENCODERS[tokenizer] = TokenEncoder(tokenizer)
    return encoder
