"""Messages -> the text that a tokenizer's chat template makes of them, with all of their own text escaped.

Knows Hugging Face's `apply_chat_template`; nothing of what a template must be like.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError as JinjaError

from strands_rollout.chat_messages import ChatMessage
from strands_rollout.errors import TemplateError
from strands_rollout.token_encoder import TokenEncoder


class TemplateRenderer:
    """A tokenizer's chat template with its arguments.

    Attributes:
        encoder: Of the tokenizer; escapes, and encodes what was rendered.
        source: The template itself, whatever the tokenizer gets later; a text, or what else a tokenizer may hold.
        kwargs: Handed to the template at each rendering.
    """

    def __init__(self, tokenizer: Any, encoder: TokenEncoder, kwargs: Mapping[str, Any]) -> None:  # noqa: ANN401
        self._tokenizer = tokenizer
        self.encoder = encoder
        self.source: Any = kwargs.get("chat_template") or tokenizer.chat_template
        self.kwargs = dict(kwargs)

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        escaped: bool = True,
        generation_prompt: bool = True,
    ) -> str:
        """The text of messages, with the generation prompt.

        A template that fails on the arguments of calls as objects is given them as JSON text, as some expect them.

        Args:
            messages: At least one.
            tools: What the model is shown.
            escaped: Hide control tokens in the messages' own text, also from the template; see `TokenEncoder.escape`.
            generation_prompt: Whether the template is asked for what opens the next turn.

        Raises:
            TemplateError: The template refuses the messages.
        """
        try:
            return self._rendered(messages, tools, escaped=escaped, generation_prompt=generation_prompt)
        except TemplateError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            as_text = [_with_arguments_as_text(message) for message in messages]
            try:
                return self._rendered(as_text, tools, escaped=escaped, generation_prompt=generation_prompt)
            except TemplateError:
                pass
            raise

    def _rendered(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        *,
        escaped: bool,
        generation_prompt: bool,
    ) -> str:
        shown = self._escaped if escaped else lambda value: value
        try:
            rendered = self._tokenizer.apply_chat_template(
                [shown(message) for message in messages],
                tools=[shown(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.kwargs | ({"chat_template": self.source} if isinstance(self.source, str) else {}),
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


def _with_arguments_as_text(message: ChatMessage) -> ChatMessage:
    calls = [
        call
        | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
        if isinstance(call["function"]["arguments"], Mapping)
        else call
        for call in message.get("tool_calls") or ()
    ]
    return message | {"tool_calls": calls} if calls else message
