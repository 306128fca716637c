"""Probes a chat template once: where an assistant turn ends, and whether conversations only ever grow.

A template that rewrites what it rendered before, outside the assistant's own text, is refused: the policy would have
read other tokens than the trainer sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strands_rollout.chat_messages import ChatMessage
from strands_rollout.errors import TemplateDifferenceError, TemplateError
from strands_rollout.template_rendering import TemplateRenderer
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


USER_TURNS: Final = ([_user("first")], [_user("second")], [_user("third\n")])
_CALLED: Final = ([_user("first")], [_tool("call00001", "one")], [_user("second")])
TOOL_TURNS: Final = (*_CALLED, [_tool("call00002", "2")])
PARALLEL_TURNS: Final = (*_CALLED, [_tool("call00002", "2"), _tool("call00003", "")])


def probe(template: TemplateRenderer) -> ProbedTemplate:
    """Examine a template.

    Raises:
        TemplateError: It fails, or is not append-only; a `TemplateDifferenceError` where tokens differ.
    """
    end_of_turn, end_of_turn_id = find_end_of_turn(template)
    tools_error = next((fault for _, fault in tool_faults(template, end_of_turn) if fault), None)
    check_encoding(template, with_tools=tools_error is None)
    check_append_only(template, end_of_turn, "user turns", USER_TURNS)
    if tools_error is None:
        check_append_only(template, end_of_turn, "tool results", PARALLEL_TURNS)
    call = find_written_call(template, end_of_turn)
    return ProbedTemplate(end_of_turn, end_of_turn_id, opens_reasoning(template), tools_error, call)


def opens_reasoning(template: TemplateRenderer) -> bool:
    """Whether the generation prompt ends inside an open `<think>`."""
    opening = template.render([_user("question")])
    return opening.rfind("<think>") > opening.rfind("</think>")


def find_written_call(template: TemplateRenderer, end_of_turn: str) -> WrittenCall:
    """How a template writes a call."""
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


def tool_faults(template: TemplateRenderer, end_of_turn: str) -> Iterator[tuple[str, str | None]]:
    """What tools need of a template: each rule, and why it does not hold; ends where nothing more can be told."""
    result = "probed-tool-result"
    try:
        rendered = template.render([_user("question"), _assistant(0, "call00001"), _tool("call00001", result)], _TOOLS)
    except TemplateError as e:
        yield "renders tools", str(e)
        return
    shows_tools = _TOOLS[0]["function"]["description"] in rendered
    yield "renders tools", None if shows_tools else "it does not show the tools to the model"
    shown = rendered.count(result)
    yield "renders results", None if shown == 1 else f"it shows a tool's result {shown} times, not once"
    before, _, answer = rendered.partition(result)[0].rpartition(_mark(0))
    yield "text beside calls", None if before else "it leaves out what an assistant says beside its calls"
    otherwise = f"it closes an assistant's turn with calls otherwise than with {end_of_turn}"
    yield "end of a turn with calls", None if end_of_turn in answer else otherwise


def find_end_of_turn(template: TemplateRenderer) -> tuple[str, int]:
    """Text and id of the token that closes an assistant's turn.

    Raises:
        TemplateError: It is no control token, or an assistant's words are not shown once.
    """
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


def check_encoding(template: TemplateRenderer, *, with_tools: bool) -> None:
    """Our ids of a rendered prompt must equal the tokenizer's own.

    Raises:
        TemplateError: They don't.
    """
    tools = _TOOLS if with_tools else ()
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


def check_append_only(
    template: TemplateRenderer, end_of_turn: str, kind: str, turns: Sequence[Sequence[ChatMessage]]
) -> None:
    """The prompts that grow turn by turn must be what the template makes of the whole conversation.

    What lies inside the assistant's turns is the policy's own (reasoning that a template drops, an empty think block
    that a generation prompt opens) and may differ.

    Args:
        template: Examined.
        end_of_turn: What closes an assistant's turn.
        kind: Of the conversation, in words.
        turns: The messages before each answer of the assistant.

    Raises:
        TemplateError: They are not.
    """
    tools = _TOOLS if any(message["role"] == "tool" for turn in turns for message in turn) else ()
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
    template: TemplateRenderer, turn: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], end_of_turn: str
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
    raise TemplateDifferenceError(
        f"{reason}; first differing token at position {index}: got {_shown(encoder, got, index)}, expected "
        f"{_shown(encoder, expected, index)} after {encoder.decode(expected[max(0, index - 8) : index])!r}.",
        got=list(got),
        expected=list(expected),
        position=index,
    )


def _shown(encoder: TokenEncoder, ids: Sequence[int], index: int) -> str:
    return f"{ids[index]} {encoder.decode(ids[index : index + 1])!r}" if index < len(ids) else "the end"
