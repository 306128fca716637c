"""New messages -> new token ids: renders a tokenizer's chat template incrementally and token-exactly.

Only what is new is ever rendered: the first prompt, later the text between the last sampled token and the next
generation prompt, and that only where its shape is not known (see `turn_shape`). The template is probed when this is
built (see `template_probe`). Knows nothing of engines or agents.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from strands_rollout.chat_messages import ChatMessage
from strands_rollout.errors import TemplateError
from strands_rollout.template_probe import ProbedTemplate, probe
from strands_rollout.template_rendering import TemplateRenderer
from strands_rollout.token_encoder import TokenEncoder
from strands_rollout.turn_rendering import TurnRenderer
from strands_rollout.turn_shape import LONGEST_TRIED, PLAIN_TEXTS, TurnShape, is_timeless, shape_of, telling_texts

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


@dataclass(slots=True)
class _Found:
    """What all templates with the same arguments share.

    Attributes:
        probed: By the probe.
        opening: The control token that a prompt begins with.
        prompts: Ids of the last prompts, by their messages and tools as text.
        shapes: By number of tool results, and the tools as text.
        tried_out: Whether the template shows so many tool results as they are, by number, with tools or without.
    """

    probed: ProbedTemplate
    opening: str | None
    prompts: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    shapes: dict[tuple[int, str], TurnShape | None] = field(default_factory=dict)
    tried_out: dict[tuple[int, bool], bool] = field(default_factory=dict)


class ChatTemplate:
    """A tokenizer's chat template, for conversations that only grow.

    Attributes:
        encoder: The tokenizer's encoder; shared between the templates of one tokenizer.
        end_of_turn_id: The control token that ends an assistant's turn without calls.
        end_of_calls_id: The one that ends a turn with calls; mostly the same.
        end_ids: Both of them.
        opens_reasoning: Whether the generation prompt ends inside an open `<think>`.
        written_call: How the template writes a call.
        processor: What makes tokens of images: the Hugging Face processor of the model, or the folder or hub id of one,
            which is loaded when the first image occurs; None where there are to be none.
    """

    processor: Any = None

    def __init__(self, tokenizer: Any, **template_kwargs: Any) -> None:  # noqa: ANN401 - any fast tokenizer
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
        self._last_tools: tuple[Sequence[Mapping[str, Any]], str] = ((), "")

    def _find(self) -> _Found:
        template = self._template
        key = (template if isinstance(template, str) else repr(template), repr(sorted(self._renderer.kwargs.items())))
        known = _FOUND.setdefault(self._tokenizer, {})
        found = known.get(key)
        if found is None:
            if len(known) >= _MAX_KWARGS:  # arguments may differ from sample to sample
                known.clear()
            found = known[key] = _Found(probe(self._renderer), self.encoder.first_control(self.render(_BASE)))
            if found.probed.notes:
                logger.info("chat template: %s", "; ".join(found.probed.notes))
        return found

    def prompt_ids(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
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
                "trained to call tools, or give the agent none."
            )
        if system_error is not None and messages[0]["role"] == "system":
            raise TemplateError(
                f"the chat template can't be used with a system message: {system_error} Leave it out: system_prompt: "
                '"", or give the tokenizer a template that only appends.'
            )
        key = (_as_key(messages), _as_key(tools))
        return self._encoded_once(key, lambda: self._shared_prompt(key, messages, tools))

    def turn_ids(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = (), *, last_id: int | None
    ) -> list[int]:
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
                "have one, or give the tokenizer a template that only appends."
            )
        shape = self._shape(messages, tools)
        if shape is None:
            rendered = self.render_turn(messages, tools)
            self._refuse_counted_images(messages, tools, rendered)
            ids = self._encoded_once(rendered, lambda: self.encoder.encode_rendered(rendered))
        else:
            results = [message["content"] for message in messages]
            ids = self._encoded_once((shape, results), lambda: shape.ids(results, self.encoder.encode_plain))
        return ids[1:] if last_id == ids[0] else ids

    def is_rendered(self, text: str) -> bool:
        """Whether a text looks like a prompt that this template made: it opens like one and holds a closed turn."""
        opening = self._found.opening
        return opening is not None and text.lstrip().startswith(opening) and self._found.probed.ends.answer in text

    def render_turn(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        after: Sequence[ChatMessage] = (),
    ) -> str:
        """The (escaped) text from an assistant turn's end to the next generation prompt; see `TurnRenderer.render`."""
        return self._turns.render(messages, tools, after=after)

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The (escaped) text of messages, with the generation prompt."""
        return self._renderer.render(messages, tools)

    def _refuse_counted_images(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], rendered: str
    ) -> None:
        if all(isinstance(message["content"], str) for message in messages):
            return
        if self.render_turn(messages, tools, after=_BASE_WITH_IMAGE) != rendered:
            raise TemplateError(
                "the chat template shows an image otherwise where there was one before; expected turns that don't "
                "depend on earlier ones. Leave template arguments that number images (add_vision_id) out."
            )

    def _encoded_once(self, key: object, encode: Callable[[], list[int]]) -> list[int]:
        """A new list of what `encode` gives; it is not asked a second time in turn: what is sent was counted before."""
        last = self._last  # read once: another thread may set it
        if last[0] != key:
            last = self._last = (key, encode())
        return list(last[1])

    def _shared_prompt(
        self, key: tuple[str, str], messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        prompts = self._found.prompts
        ids = prompts.get(key)
        if ids is None:
            ids = self.encoder.encode_rendered(self.render(messages, tools))
            if len(ids) <= _MAX_PROMPT_TOKENS and is_timeless(self._template):
                if len(prompts) >= _MAX_PROMPTS:
                    prompts.clear()
                prompts[key] = ids
        return ids

    def _shape(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> TurnShape | None:
        """The shape of these new messages, where they are tool results and the template has one for them."""
        if any(message["role"] != "tool" or message.keys() != _TOOL_RESULT_KEYS for message in messages):
            return None
        contents = [message["content"] for message in messages]
        if list in map(type, contents):
            return None  # images, too
        if any(len(content) > LONGEST_TRIED for content in contents):
            return None  # a template may cut what is longer than all that it was tried out with
        last = self._last_tools  # one read of each: threads share all of this
        if tools and last[0] is not tools:
            last = self._last_tools = (tools, _as_key(tools))
        shapes, key = self._found.shapes, (len(messages), last[1] if tools else "")
        try:
            return shapes[key]
        except KeyError:
            shape = self._find_shape(len(messages), tools)
        if len(shapes) >= _MAX_SHAPES:
            shapes.clear()
        shapes[key] = shape
        return shape

    def _find_shape(self, count: int, tools: Sequence[Mapping[str, Any]]) -> TurnShape | None:
        tried_out, key = self._found.tried_out, (count, bool(tools))
        if tried_out.get(key) is False:
            return None
        texts = PLAIN_TEXTS if key in tried_out else telling_texts(self._template)
        shape = (
            None if texts is None else shape_of(lambda turn: self.render_turn(turn, tools), count, self.encoder, texts)
        )
        tried_out.setdefault(key, shape is not None)
        return shape


_BASE: Final[list[ChatMessage]] = [{"role": "user", "content": "question"}]
_BASE_WITH_IMAGE: Final[list[ChatMessage]] = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "question"}]}
]


def _as_key(value: object) -> str:
    return repr(value)  # unlike JSON it tells a tuple from a list and 1 from "1" as a key, and takes any key


def renderer_of(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> TemplateRenderer:  # noqa: ANN401
    """The template of a tokenizer as it is, not probed.

    Raises:
        TemplateError: There is none, or the tokenizer is no fast one.
    """
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
