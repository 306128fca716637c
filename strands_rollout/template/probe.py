"""Probes a chat template once: where an assistant's turn ends, and whether conversations only ever grow.

A template that rewrites what it rendered before, outside the assistant's own turns, is refused: the policy would have
read other tokens than the trainer sees. What it leaves out of the assistant's turns, or rewrites there, is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strands_rollout.append_check import check_append_only, check_encoding
from strands_rollout.chat_messages import ChatMessage
from strands_rollout.errors import TemplateError
from strands_rollout.probe_conversation import (
    MIXED_TURNS,
    PARALLEL_TURNS,
    TOOL_TURNS,
    TOOLS,
    USER_TURNS,
    assistant,
    mark,
    shared_length,
    span_of_answer,
    tool,
    tool_name,
    user,
)
from strands_rollout.template_rendering import TemplateRenderer
from strands_rollout.turn_rendering import TurnEnds, TurnRenderer

_RESULT: Final = "probed-tool-result"
_CALL: Final = "call00001"
# as Kimi's templates write a call: its name is in its id alone
_ID_WITH_NAME: Final = "functions.probe:0"
_OTHER_CALL: Final = "call00002"


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """An assistant's turn with one call and nothing else, as a template writes it.

    Attributes:
        turn: Text from the generation prompt to the end of the turn; "" where the template writes no calls.
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
        ends: How it ends the assistant's turns.
        opens_reasoning: Whether the generation prompt ends inside an open `<think>`.
        tools_error: Why the template can't be used with tools; None if it can.
        user_turns_error: Why a conversation with tools can't have a second user's turn; None if it can.
        system_error: Why a conversation can't begin with a system message; None if it can.
        written_call: How it writes a call.
        notes: What it does to the assistant's own turns, in words, which changes nothing here.
    """

    ends: TurnEnds
    opens_reasoning: bool
    tools_error: str | None
    user_turns_error: str | None
    system_error: str | None
    written_call: WrittenCall
    notes: tuple[str, ...]


def probe(template: TemplateRenderer) -> ProbedTemplate:
    """Examine a template.

    Raises:
        TemplateError: It fails, or is not append-only; a `TemplateDifferenceError` where tokens differ.
    """
    end_of_turn = find_end_of_turn(template)
    tools_error = next((fault for _, fault in tool_faults(template) if fault), None)
    ends = TurnEnds(end_of_turn, end_of_turn)
    if tools_error is None:
        try:
            ends = find_ends(template, end_of_turn)
        except TemplateError as e:
            tools_error = str(e)
    check_encoding(template, with_tools=tools_error is None)
    turns = TurnRenderer(template, ends)
    check_append_only(template, turns, "user turns", USER_TURNS)
    tools_error = tools_error or _results_fault(template, turns)
    return ProbedTemplate(
        ends,
        opens_reasoning(template),
        tools_error,
        None if tools_error else user_turns_fault(template, turns),
        system_fault(template, turns, with_tools=tools_error is None),
        find_written_call(template, ends),
        () if tools_error else tuple(note for _, note in turn_notes(template, ends) if note),
    )


def opens_reasoning(template: TemplateRenderer) -> bool:
    """Whether the generation prompt ends inside an open `<think>`."""
    opening = template.render([user("question")])
    return opening.rfind("<think>") > opening.rfind("</think>")


def find_written_call(template: TemplateRenderer, ends: TurnEnds) -> WrittenCall:
    """How a template writes a call."""
    question, name, arguments = "probed-question", "probe", {"x": "probed-argument"}
    for call_id in (_ID_WITH_NAME, _CALL):
        call = {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            prompt = template.render([user(question)], TOOLS)
            whole = template.render([user(question), answer], TOOLS, generation_prompt=False)
        except TemplateError:
            continue
        break
    else:
        return WrittenCall("", name, arguments)
    # what follows the question: the generation prompt, which both begin with, then the turn
    prompt, whole = (rendered.rpartition(question)[2] for rendered in (prompt, whole))
    shared = shared_length(prompt, whole)
    if shared < len(prompt):  # a prompt that opens reasoning: the turn may begin with another tag
        shared = max(prompt.rfind(end, 0, shared) for end in (">", "\n")) + 1
    return WrittenCall(whole[shared:].partition(ends.calls)[0], name, arguments)


def tool_faults(template: TemplateRenderer) -> Iterator[tuple[str, str | None]]:
    """What tools need of a template: each rule, and why it does not hold; ends where nothing more can be told."""
    try:
        rendered = template.render([user("question"), assistant(0, _CALL), tool(_CALL, _RESULT)], TOOLS)
    except TemplateError as e:
        yield "renders tools", str(e)
        return
    shows_tools = TOOLS[0]["function"]["description"] in rendered
    yield "renders tools", None if shows_tools else "it does not show the tools to the model"
    shown = rendered.count(_RESULT)
    yield "renders results", None if shown == 1 else f"it shows a tool's result {shown} times, not once"


def turn_notes(template: TemplateRenderer, ends: TurnEnds) -> Iterator[tuple[str, str | None]]:
    """What a template that is used with tools does to the assistant's own turns, which stay as they were sampled."""
    rendered = template.render([user("question"), assistant(0, _CALL), tool(_CALL, _RESULT)], TOOLS)
    drops = "the template leaves out what an assistant says beside its calls; here it stays, as it was sampled"
    yield "text beside calls", None if mark(0) in rendered else drops
    opens = "these open what follows: the template has no token that closes a turn"
    closes = "with calls by another token than without"
    how = closes if _closes_turns(template) else opens
    words = f"a turn ends with {ends.answer}, and with {ends.calls} where calls were made: {how}"
    yield "end of a turn with calls", None if ends.calls == ends.answer else words
    singly = "the template does not write several calls of a turn; results are shown as each is after a call alone"
    yield "several calls", singly if ends.one_by_one else None


def _results_fault(template: TemplateRenderer, turns: TurnRenderer) -> str | None:
    """Why conversations with tools don't only grow."""
    conversation = TOOL_TURNS if turns.ends.one_by_one else PARALLEL_TURNS
    try:
        check_append_only(template, turns, "tool results", conversation, tools=TOOLS)
    except TemplateError as e:
        return str(e)
    return None


def user_turns_fault(template: TemplateRenderer, turns: TurnRenderer) -> str | None:
    """Why a conversation with tools can't have a second user's turn."""
    try:
        check_append_only(template, turns, "user turns in a conversation with tools", MIXED_TURNS, tools=TOOLS)
    except TemplateError as e:
        return str(e)
    return None


def system_fault(template: TemplateRenderer, turns: TurnRenderer, *, with_tools: bool) -> str | None:
    """Why a conversation can't begin with a system message."""
    kinds = [(USER_TURNS[:2], ()), *([(TOOL_TURNS, TOOLS)] if with_tools else [])]
    for conversation, tools in kinds:
        try:
            template.render([{"role": "system", "content": "x"}, *conversation[0]], tools)
        except TemplateError:  # a template that knows no system role says so itself
            return None
        try:
            check_append_only(template, turns, "system messages", conversation, tools=tools, with_system=True)
        except TemplateError as e:
            return str(e)
    return None


def find_end_of_turn(template: TemplateRenderer) -> str:
    """Text of the token that ends an assistant's turn without calls.

    Raises:
        TemplateError: It is no control token, or an assistant's words are not shown once.
    """
    turn = [user("question"), assistant(0)]
    followed = template.render([*turn, user("next")])
    followed = followed[span_of_answer(followed, 0)[1] :]
    encoder = template.encoder
    ids = encoder.encode_rendered(followed)
    if not ids or not encoder.is_control(ids[0]):
        got = encoder.decode(ids[:1])
        raise TemplateError(
            f"the chat template closes an assistant turn with the token {got!r}; expected a control token (an added "
            "token of the tokenizer), since a turn's end must be one exact token."
        )
    own = _own_controls(template, turn, followed) if _closes_turns(template) else []
    return own[-1] if own else encoder.decode(ids[:1])


def find_ends(template: TemplateRenderer, end_of_turn: str) -> TurnEnds:
    """How a template that shows tools and results ends turns, with calls too.

    Args:
        template: Examined.
        end_of_turn: What ends a turn without calls.

    Raises:
        TemplateError: A turn with calls is not ended by a control token, or its calls are not shown once.
    """
    turn = [user("question"), assistant(0, _CALL)]
    followed = template.render([*turn, tool(_CALL, _RESULT)], TOOLS)
    followed = followed[span_of_answer(followed, 0, [_CALL])[1] :].partition(_RESULT)[0]
    one_by_one = not _shows_together(template, followed)
    if one_by_one:
        _check_generation_prompt(template, [*turn, tool(_CALL, _RESULT)])
    if end_of_turn in followed:
        return TurnEnds(end_of_turn, end_of_turn, one_by_one)
    own = _own_controls(template, turn, followed, [_CALL])
    ends = own[-1:] if _closes_turns(template) else _controls(template, followed)[len(own) :][:1]
    if not ends:
        raise TemplateError("it ends an assistant's turn with calls by no control token")
    return TurnEnds(end_of_turn, ends[0], one_by_one)


def _own_controls(
    template: TemplateRenderer, messages: Sequence[ChatMessage], followed: str, call_ids: Sequence[str] = ()
) -> list[str]:
    """The control tokens that belong to a conversation's last turn, after the last mark in it.

    Args:
        template: Examined.
        messages: The conversation.
        followed: What stands after the mark where more messages follow.
        call_ids: Of the turn's calls.
    """
    alone = template.render(messages, TOOLS if call_ids else (), generation_prompt=False)
    try:
        alone = alone[span_of_answer(alone, 0, call_ids)[1] :]
    except TemplateError:  # the last turn is written in another way
        return []
    return _controls(template, alone[: shared_length(followed, alone)])


def _check_generation_prompt(template: TemplateRenderer, messages: Sequence[ChatMessage]) -> None:
    """Results that are shown one after the other need a text of theirs that ends before the generation prompt."""
    prompted, bare = (template.render(messages, TOOLS, generation_prompt=asked) for asked in (True, False))
    if not prompted.startswith(bare) or prompted == bare:
        raise TemplateError("it does not write several calls of a turn, nor results without a generation prompt")


def _closes_turns(template: TemplateRenderer) -> bool:
    """Whether a turn is known to be closed by tokens of its own; else what opens the next one may be what ends it."""
    turn = [user("question"), assistant(0)]
    prompted, alone = (template.render(turn, generation_prompt=asked) for asked in (True, False))
    # equal where a template opens the next turn unasked
    return prompted != alone and bool(_controls(template, alone.partition(mark(0))[2]))


def _controls(template: TemplateRenderer, text: str) -> list[str]:
    encoder = template.encoder
    return [encoder.decode([piece]) for piece in encoder.pieces(text) if isinstance(piece, int)]


def _shows_together(template: TemplateRenderer, between: str) -> bool:
    """Whether the results of several calls of a turn are shown, each under its own tool's name if at all.

    Args:
        template: Examined.
        between: The text between a call and its result.
    """
    calls = (_CALL, _OTHER_CALL)
    results = [tool(_CALL, _RESULT), tool(_OTHER_CALL, f"other-{_RESULT}")]
    try:
        rendered = template.render([user("question"), assistant(0, *calls), *results], TOOLS)
        rendered = rendered[span_of_answer(rendered, 0, calls)[1] :]
    except TemplateError:
        return False
    first, _, after = rendered.partition(_RESULT)
    second, shown, _ = after.partition(f"other-{_RESULT}")
    names = tool_name(_CALL) in between
    return bool(shown) and (not names or (tool_name(_CALL) in first and tool_name(_OTHER_CALL) in second))
