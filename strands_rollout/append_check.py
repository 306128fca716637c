"""Whether conversations only ever grow: prompts that grow turn by turn are held against whole ones, token by token.

What lies inside the assistant's turns is the policy's own and may differ: words that a template leaves out or rewrites
later, and the tags of reasoning that open a turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from strands_rollout.chat_messages import ChatMessage
from strands_rollout.errors import TemplateDifferenceError, TemplateError
from strands_rollout.probe_conversation import TOOLS, assistant, calls_before, shared_length, span_of_answer, user
from strands_rollout.template_rendering import TemplateRenderer
from strands_rollout.token_encoder import TokenEncoder
from strands_rollout.turn_rendering import TurnRenderer

# what a generation prompt may open a turn with, and a template write otherwise later
_REASONING_TAGS: Final = re.compile(r"(?:\s|</?think>|\[/?THINK\])*\Z")
_SYSTEM: Final[ChatMessage] = {"role": "system", "content": "Be brief."}


def check_append_only(
    template: TemplateRenderer,
    turns: TurnRenderer,
    kind: str,
    conversation: Sequence[Sequence[ChatMessage]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    with_system: bool = False,
) -> None:
    """The prompts that grow turn by turn must be what the template makes of the whole conversation.

    Args:
        template: Examined.
        turns: Renders what is new.
        kind: Of the conversation, in words.
        conversation: The messages before each answer of the assistant.
        tools: Shown in it.
        with_system: Whether it begins with a system message.

    Raises:
        TemplateError: They are not; a `TemplateDifferenceError` where tokens differ.
    """
    calls = [calls_before(turn) for turn in conversation]
    head = [_SYSTEM] if with_system else []
    messages: list[ChatMessage] = [*head]
    for index, turn in enumerate(conversation):
        messages += [assistant(index - 1, *calls[index])] if index else []
        messages += turn
    whole = template.render(messages, tools)
    begin = 0
    for index, turn in enumerate(conversation):
        grown = turns.render(turn, tools) if index else template.render([*head, *turn], tools)
        is_last = index + 1 == len(conversation)
        first, last = (len(whole), 0) if is_last else span_of_answer(whole, index, calls[index + 1])
        stands = whole[begin:first]
        if not _is_same(grown, stands, is_last=is_last):
            encoder = template.encoder
            reason = f"the chat template is not append-only for {kind}: turn {index + 1} renders differently later on"
            require_equal(encoder, encoder.encode_rendered(stands), encoder.encode_rendered(grown), reason)
        if not is_last:
            begin = _end_of_turn(whole, last, turns, kind, has_calls=bool(calls[index + 1]))


def check_encoding(template: TemplateRenderer, *, with_tools: bool) -> None:
    """Our ids of a rendered prompt must equal the tokenizer's own.

    Raises:
        TemplateError: They don't.
    """
    tools = TOOLS if with_tools else ()
    text = "Zwölf Boxkämpfer jagen Viktor.  1,234\n\n\tx = 3;  "
    messages = [_SYSTEM, user(text)]
    try:
        rendered = template.render(messages, tools)
    except TemplateError:  # a template may know no system role
        rendered = template.render(messages[1:], tools)
    require_equal(
        template.encoder,
        template.encoder.encode_rendered(rendered),
        template.encoder.encode_trusted(rendered),
        "the tokenizer does not encode the text between control tokens piece by piece",
    )


def require_equal(encoder: TokenEncoder, got: Sequence[int], expected: Sequence[int], reason: str) -> None:
    """Raise a TemplateDifferenceError that names the first differing token, unless there is none."""
    if list(got) == list(expected):
        return
    index = next(
        (i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]),
        min(len(got), len(expected)),
    )
    raise TemplateDifferenceError(
        f"{reason}; first differing token at position {index}: got {_shown(encoder, got, index)}, expected "
        f"{_shown(encoder, expected, index)} after {encoder.decode(expected[max(0, index - 8) : index])!r}.",
        got=list(got),
        expected=list(expected),
        position=index,
    )


def _is_same(grown: str, stands: str, *, is_last: bool) -> bool:
    """Whether new text stands later on as it was, but for what belongs to the assistant's turn after it.

    Args:
        grown: As it was read, with the generation prompt.
        stands: In the whole conversation, up to the first words of the next turn.
        is_last: Whether the conversation ends there, so that no such words follow.
    """
    at = shared_length(grown, stands)
    opened = max(grown.rfind("<", 0, at), grown.rfind("[", 0, at))
    if opened >= 0 and at < len(grown) and not re.search(r"[>\]\s]", grown[opened:at]):
        at = opened  # both are in a tag, which begins alike
    rest = stands[at:] if is_last else ""
    return _REASONING_TAGS.match(grown, at) is not None and _REASONING_TAGS.match(rest) is not None


def _end_of_turn(whole: str, start: int, turns: TurnRenderer, kind: str, *, has_calls: bool) -> int:
    end = turns.ends.calls if has_calls else turns.ends.answer
    at = whole.find(end, start)
    if at < 0:
        raise TemplateError(f"the chat template is not append-only for {kind}: it leaves out {end!r} later on")
    return at


def _shown(encoder: TokenEncoder, ids: Sequence[int], index: int) -> str:
    return f"{ids[index]} {encoder.decode(ids[index : index + 1])!r}" if index < len(ids) else "the end"
