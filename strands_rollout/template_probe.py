"""Probes a chat template once: where an assistant turn ends, and whether conversations only ever grow.

A template that rewrites what it rendered before, outside the assistant's own text, is refused: the policy would have
read other tokens than the trainer sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from strands_rollout.chat_messages import ChatMessage
from strands_rollout.errors import TemplateError

if TYPE_CHECKING:
    from strands_rollout.chat_template import ChatTemplate
    from strands_rollout.token_encoder import TokenEncoder


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """An assistant's turn with one call and nothing else, as a template writes it.

    Attributes:
        turn: Text from the generation prompt to the end of the turn or later; "" where the template writes no calls.
        name: The called tool.
        arguments: The call's arguments.
    """

    turn: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProbedTemplate:
    """What the probe found.

    Attributes:
        end_of_turn: Text of the control token that closes an assistant turn.
        end_of_turn_id: Its id.
        opens_reasoning: Whether the generation prompt ends inside an open `<think>`.
        tools_error: Why the template can't be used with tools; None if it can.
        written_call: How it writes a call.
    """

    end_of_turn: str
    end_of_turn_id: int
    opens_reasoning: bool
    tools_error: str | None
    written_call: WrittenCall


_TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": "probe",
            "description": "probed-tool-description",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string", "description": "An x."}},
                "required": ["x"],
            },
        },
    }
]


def _mark(index: int) -> str:
    return f"probed-answer-{index}-end"


def _assistant(index: int, *call_ids: str) -> ChatMessage:
    message: ChatMessage = {"role": "assistant", "content": _mark(index)}
    calls = [
        {"type": "function", "id": call_id, "function": {"name": "probe", "arguments": {"x": "1"}}}
        for call_id in call_ids
    ]
    return message | {"tool_calls": calls} if calls else message


def _user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def _tool(call_id: str, text: str) -> ChatMessage:
    return {"role": "tool", "name": "probe", "tool_call_id": call_id, "content": text}


def probe(template: ChatTemplate) -> ProbedTemplate:
    """Examine a template; see `ChatTemplate` for what is raised."""
    end_of_turn, end_of_turn_id = _end_of_turn(template)
    opening = template.render([_user("question")])
    opens_reasoning = opening.rfind("<think>") > opening.rfind("</think>")
    tools_error = _tools_error(template, end_of_turn)
    _check_encoding(template, () if tools_error else _TOOLS)
    _check_append_only(
        template, end_of_turn, "user turns", [[_user("first")], [_user("second")], [_user("third\n")]], ()
    )
    if tools_error is None:
        turns = [
            [_user("first")],
            [_tool("call00001", "one")],
            [_user("second")],
            [_tool("call00002", "2"), _tool("call00003", "")],
        ]
        _check_append_only(template, end_of_turn, "tool results", turns, _TOOLS)
    return ProbedTemplate(
        end_of_turn, end_of_turn_id, opens_reasoning, tools_error, _written_call(template, end_of_turn)
    )


def _written_call(template: ChatTemplate, end_of_turn: str) -> WrittenCall:
    question, name, arguments = "probed-question", "probe", {"x": "probed-argument"}
    call = {"type": "function", "id": "call00001", "function": {"name": name, "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        prompt, whole = (template.render([_user(question), *rest], _TOOLS) for rest in ([], [answer]))
    except TemplateError:
        return WrittenCall("", name, arguments)
    # what follows the question: the generation prompt, which both begin with, then the turn
    prompt, whole = (rendered.rpartition(question)[2] for rendered in (prompt, whole))
    shared = next((at for at, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(prompt))
    if shared < len(prompt):  # a prompt that opens reasoning: the turn may begin with another tag
        shared = max(prompt.rfind(mark, 0, shared) for mark in (">", "\n")) + 1
    return WrittenCall(whole[shared:].partition(end_of_turn)[0], name, arguments)


def _tools_error(template: ChatTemplate, end_of_turn: str) -> str | None:
    result = "probed-tool-result"
    try:
        rendered = template.render([_user("question"), _assistant(0, "call00001"), _tool("call00001", result)], _TOOLS)
    except TemplateError as e:
        return str(e)
    if _TOOLS[0]["function"]["description"] not in rendered:
        return "it does not show the tools to the model"
    if rendered.count(result) != 1:
        return f"it shows a tool's result {rendered.count(result)} times, not once"
    before, _, answer = rendered.partition(result)[0].rpartition(_mark(0))
    if not before:
        return "it leaves out what an assistant says beside its calls"
    return (
        None if end_of_turn in answer else f"it closes an assistant's turn with calls otherwise than with {end_of_turn}"
    )


def _end_of_turn(template: ChatTemplate) -> tuple[str, int]:
    rendered = template.render([_user("question"), _assistant(0), _user("next")])
    encoder = template.encoder
    ids = encoder.encode_rendered(_after(rendered, _mark(0), "an assistant message's content"))
    if not ids or not encoder.is_control(ids[0]):
        got = encoder.decode(ids[:1])
        raise TemplateError(
            f"the chat template closes an assistant turn with the token {got!r}; expected a control token (an added "
            "token of the tokenizer), since a turn's end must be one exact token."
        )
    return encoder.decode(ids[:1]), ids[0]


def _check_encoding(template: ChatTemplate, tools: Sequence[Mapping[str, Any]]) -> None:
    """Our ids of a rendered prompt must equal the tokenizer's own."""
    text = "Zwölf Boxkämpfer jagen Viktor.  1,234\n\n\tx = 3;  "
    messages = [{"role": "system", "content": "Be brief."}, _user(text)]
    try:
        rendered = template.render(messages, tools)
    except TemplateError:  # a template may know no system role
        rendered = template.render(messages[1:], tools)
    expected = template.encoder.encode_trusted(rendered)
    _require_equal(
        template.encoder,
        template.encoder.encode_rendered(rendered),
        expected,
        "the tokenizer does not encode the text between control tokens piece by piece",
    )


def _check_append_only(
    template: ChatTemplate,
    end_of_turn: str,
    kind: str,
    turns: Sequence[Sequence[ChatMessage]],
    tools: Sequence[Mapping[str, Any]],
) -> None:
    """The prompts that grow turn by turn must be what the template makes of the whole conversation.

    What lies inside the assistant's turns is the policy's own (reasoning that a template drops, an empty think block
    that a generation prompt opens) and may differ.
    """
    conversation: list[ChatMessage] = []
    for index, turn in enumerate(turns):
        calls = [message["tool_call_id"] for message in turn if message["role"] == "tool"]
        conversation += [_assistant(index - 1, *calls)] if index else []
        conversation += turn
    whole = template.render(conversation, tools)
    for index, turn in enumerate(turns):
        grown = template.render(turn, tools) if index == 0 else _grown(template, turn, tools, end_of_turn)
        begin = whole if index == 0 else _after(whole, _mark(index - 1), "an earlier assistant message")
        begin = _from(begin, end_of_turn, kind) if index else begin
        stands = begin[: -len(_from(begin, _mark(index), kind))] if index + 1 < len(turns) else begin
        if grown.startswith(stands) or stands.startswith(grown):
            continue
        encoder = template.encoder
        reason = f"the chat template is not append-only for {kind}: turn {index + 1} renders differently later on"
        _require_equal(encoder, encoder.encode_rendered(stands), encoder.encode_rendered(grown), reason)


def _grown(
    template: ChatTemplate, turn: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], end_of_turn: str
) -> str:
    calls = [message["tool_call_id"] for message in turn if message["role"] == "tool"]
    rendered = template.render([_user("question"), _assistant(0, *calls), *turn], tools)
    tail = _after(rendered, _mark(0), "an assistant message's content")
    return _from(tail, end_of_turn, "new messages")


def _from(rendered: str, part: str, kind: str) -> str:
    """The text from a part on."""
    if part not in rendered:
        raise TemplateError(f"the chat template is not append-only for {kind}: it leaves out {part!r} later on")
    return rendered[rendered.index(part) :]


def _after(rendered: str, mark: str, what: str) -> str:
    if rendered.count(mark) != 1:
        raise TemplateError(
            f"the chat template renders {what} {rendered.count(mark)} times; expected exactly once, since earlier "
            "turns stay as they were sampled."
        )
    return rendered[rendered.index(mark) + len(mark) :]


def _require_equal(encoder: TokenEncoder, got: Sequence[int], expected: Sequence[int], reason: str) -> None:
    if list(got) == list(expected):
        return
    index = next(
        (i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]),
        min(len(got), len(expected)),
    )
    raise TemplateError(
        f"{reason}; first differing token at position {index}: got {_shown(encoder, got, index)}, expected "
        f"{_shown(encoder, expected, index)} after {encoder.decode(expected[max(0, index - 8) : index])!r}."
    )


def _shown(encoder: TokenEncoder, ids: Sequence[int], index: int) -> str:
    return f"{ids[index]} {encoder.decode(ids[index : index + 1])!r}" if index < len(ids) else "the end"
