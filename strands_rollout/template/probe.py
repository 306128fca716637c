"""Probes a chat template once: where an assistant's turn ends, and whether conversations only ever grow.

Prompts that grow turn by turn are compared with whole ones, token by token. A template that rewrites what it rendered
before, outside the assistant's own turns, is refused: the policy would have read other tokens than the trainer sees.
What lies inside those turns is the policy's own and may differ, which is noted: words that a template leaves out or
rewrites later, and the tags of reasoning that open a turn.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strands_rollout.errors import TemplateDifferenceError, TemplateError
from strands_rollout.template.messages import ChatMessage
from strands_rollout.template.render import Messages, TemplateRenderer, Tools, TurnEnds, TurnRenderer
from strands_rollout.template.tokens import TokenEncoder, shared_length

_PARAMETERS: Final = {
    "type": "object",
    "properties": {"x": {"type": "string", "description": "An x."}},
    "required": ["x"],
}
_FUNCTION: Final = {"name": "probe", "description": "probed-tool-description", "parameters": _PARAMETERS}
TOOLS: Final[list[dict[str, Any]]] = [{"type": "function", "function": _FUNCTION}]
# what a generation prompt may open a turn with, and a template write otherwise later
_REASONING_TAGS: Final = re.compile(r"(?:\s|</?think>|\[/?THINK\])*\Z")
_SYSTEM: Final[ChatMessage] = {"role": "system", "content": "Be brief."}
_RESULT: Final = "probed-tool-result"
_CALL: Final = "call00001"
_OTHER_CALL: Final = "call00002"


def user(text: str) -> ChatMessage:
    """A user's turn."""
    return {"role": "user", "content": text}


def tool(call_id: str, text: str) -> ChatMessage:
    """The result of a call."""
    return {"role": "tool", "name": _tool_name(call_id), "tool_call_id": call_id, "content": text}


def _tool_name(call_id: str) -> str:
    """Another tool for each digit that ids end with."""
    return f"probe_{call_id[-1]}"


def assistant(index: int, *call_ids: str) -> ChatMessage:
    """The assistant's turn of this index: words, and calls, with marks in both.

    Call ids have 9 letters and digits, which some templates want.
    """
    message: ChatMessage = {"role": "assistant", "content": mark(index)}
    calls = [
        {
            "type": "function",
            "id": call_id,
            "function": {"name": _tool_name(call_id), "arguments": {"x": mark(index, call_id)}},
        }
        for call_id in call_ids
    ]
    return message | {"tool_calls": calls} if calls else message


def mark(index: int, call_id: str | None = None) -> str:
    """What stands in a turn's words, or in the arguments of one of its calls."""
    return f"probed-answer-{index}-end" if call_id is None else f"probed-argument-{index}-{call_id}-end"


def span_of_answer(rendered: str, index: int, call_ids: Sequence[str] = ()) -> tuple[int, int]:
    """Where the first mark of the assistant's turn of this index begins, and its last one ends.

    Of a turn with calls, a template may leave words or calls out.

    Raises:
        TemplateError: Words or calls of it are shown several times, or nothing of it is.
    """
    marks = [mark(index), *(mark(index, call_id) for call_id in call_ids)]
    counts = {part: rendered.count(part) for part in marks}
    shown = [part for part, count in counts.items() if count]
    if not shown or any(counts[part] > 1 for part in shown):
        what = "a call's arguments" if counts[marks[0]] == 1 else "an assistant message's content"
        raise TemplateError(
            f"the chat template renders {what} {max(counts.values())} times; expected exactly once, since earlier "
            "turns stay as they were sampled."
        )
    places = [(rendered.index(part), part) for part in shown]
    return min(places)[0], max(begin + len(part) for begin, part in places)


USER_TURNS: Final = ([user("first")], [user("second")], [user("third\n")])
TOOL_TURNS: Final = ([user("first")], [tool("call00001", "one")], [tool("call00002", "2")])
PARALLEL_TURNS: Final = (
    [user("first")],
    [tool("call00001", "one")],
    [tool("call00002", "2"), tool("call00003", "")],
    [tool("call00004", "4")],
)
MIXED_TURNS: Final = (
    [user("first")],
    [tool("call00001", "one")],
    [user("second")],
    [tool("call00002", "2")],
    [tool("call00003", "3")],
    [user("third")],
)
"""Messages before each answer of the assistant."""


def check_append_only(
    template: TemplateRenderer,
    turns: TurnRenderer,
    kind: str,
    conversation: Sequence[Messages],
    *,
    tools: Tools = (),
    with_system: bool = False,
) -> None:
    """Check that prompts which grow turn by turn are what the template makes of the whole conversation.

    `conversation` has the messages before each answer of the assistant; `kind` names it in errors.

    Raises:
        TemplateError: They are not; a `TemplateDifferenceError` where tokens differ.
    """
    calls = [[message["tool_call_id"] for message in turn if message["role"] == "tool"] for turn in conversation]
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
            end = turns.ends.calls if calls[index + 1] else turns.ends.answer
            begin = whole.find(end, last)
            if begin < 0:
                raise TemplateError(f"the chat template is not append-only for {kind}: it leaves out {end!r} later on")


def check_encoding(template: TemplateRenderer, *, with_tools: bool) -> None:
    """Check that the encoder's ids of a rendered prompt are the tokenizer's own.

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
    index = shared_length(got, expected)
    raise TemplateDifferenceError(
        f"{reason}; first differing token at position {index}: got {_shown(encoder, got, index)}, expected "
        f"{_shown(encoder, expected, index)} after {encoder.decode(expected[max(0, index - 8) : index])!r}.",
        got=list(got),
        expected=list(expected),
        position=index,
    )


def _is_same(grown: str, stands: str, *, is_last: bool) -> bool:
    """Whether new text stands later on as it was, but for what belongs to the assistant's turn after it.

    `grown` has the generation prompt; `stands` ends before the first words of the next turn, which the last one lacks.
    """
    at = shared_length(grown, stands)
    opened = max(grown.rfind("<", 0, at), grown.rfind("[", 0, at))
    if opened >= 0 and at < len(grown) and not re.search(r"[>\]\s]", grown[opened:at]):
        at = opened  # both are in a tag, which begins alike
    rest = stands[at:] if is_last else ""
    return _REASONING_TAGS.match(grown, at) is not None and _REASONING_TAGS.match(rest) is not None


def _shown(encoder: TokenEncoder, ids: Sequence[int], index: int) -> str:
    return f"{ids[index]} {encoder.decode(ids[index : index + 1])!r}" if index < len(ids) else "the end"


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """An assistant's turn with one call and nothing else, as a template writes it."""

    turn: str
    """From the generation prompt to the end of the turn; "" where the template writes no calls."""
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
        notes: What it does to the assistant's own turns, which changes nothing here; for the log.
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
    conversation = TOOL_TURNS if ends.one_by_one else PARALLEL_TURNS
    tools_error = tools_error or _fault(template, turns, "tool results", conversation, TOOLS)
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
    name, arguments = "probe", {"x": "probed-argument"}
    return WrittenCall(written_calls(template, ends, [(name, arguments)]), name, arguments)


def written_calls(template: TemplateRenderer, ends: TurnEnds, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """A turn with these calls, names and arguments, and nothing else, without its end; "" where none are written."""
    question = "probed-question"
    # as Kimi's templates write a call, its name is in its id alone; others want 9 letters and digits
    for form in ("functions.{name}:{index}", "call{index:05}"):
        made = [
            {
                "type": "function",
                "id": form.format(name=name, index=index),
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
        answer = {"role": "assistant", "content": "", "tool_calls": made}
        try:
            prompt = template.render([user(question)], TOOLS)
            whole = template.render([user(question), answer], TOOLS, generation_prompt=False)
        except TemplateError:
            continue
        break
    else:
        return ""
    # what follows the question: the generation prompt, which both begin with, then the turn
    prompt, whole = (template.encoder.unescape(rendered).rpartition(question)[2] for rendered in (prompt, whole))
    shared = shared_length(prompt, whole)
    if shared < len(prompt):  # a prompt that opens reasoning: the turn may begin with another tag
        shared = max(prompt.rfind(end, 0, shared) for end in (">", "\n")) + 1
    return whole[shared:].partition(ends.calls)[0]


def tool_faults(template: TemplateRenderer) -> Iterator[tuple[str, str | None]]:
    """What tools need of a template: each rule, and why it does not hold; ends where no more can be found out."""
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


def user_turns_fault(template: TemplateRenderer, turns: TurnRenderer) -> str | None:
    """Why a conversation with tools can't have a second user's turn."""
    return _fault(template, turns, "user turns in a conversation with tools", MIXED_TURNS, TOOLS)


def system_fault(template: TemplateRenderer, turns: TurnRenderer, *, with_tools: bool) -> str | None:
    """Why a conversation can't begin with a system message."""
    for conversation, tools in [(USER_TURNS[:2], ()), *([(TOOL_TURNS, TOOLS)] if with_tools else [])]:
        try:
            template.render([{"role": "system", "content": "x"}, *conversation[0]], tools)
        except TemplateError:  # a template that knows no system role says so itself
            return None
        fault = _fault(template, turns, "system messages", conversation, tools, with_system=True)
        if fault is not None:
            return fault
    return None


def _fault(
    template: TemplateRenderer,
    turns: TurnRenderer,
    kind: str,
    conversation: Sequence[Messages],
    tools: Tools,
    *,
    with_system: bool = False,
) -> str | None:
    try:
        check_append_only(template, turns, kind, conversation, tools=tools, with_system=with_system)
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
    """How a template that shows tools and results ends turns, with calls too; `end_of_turn` is of those without.

    Raises:
        TemplateError: A turn with calls is not ended by a control token, or its calls are not shown once.
    """
    turn = [user("question"), assistant(0, _CALL)]
    followed = template.render([*turn, tool(_CALL, _RESULT)], TOOLS)
    followed = followed[span_of_answer(followed, 0, [_CALL])[1] :].partition(_RESULT)[0]
    one_by_one = not _shows_together(template, followed)
    if one_by_one:  # then each result needs a text of its own, which ends before the generation prompt
        answered = [*turn, tool(_CALL, _RESULT)]
        prompted, bare = (template.render(answered, TOOLS, generation_prompt=asked) for asked in (True, False))
        if not prompted.startswith(bare) or prompted == bare:
            raise TemplateError("it does not write several calls of a turn, nor results without a generation prompt")
    if end_of_turn in followed:
        return TurnEnds(end_of_turn, end_of_turn, one_by_one)
    own = _own_controls(template, turn, followed, [_CALL])
    ends = own[-1:] if _closes_turns(template) else _controls(template, followed)[len(own) :][:1]
    if not ends:
        raise TemplateError("it ends an assistant's turn with calls by no control token")
    return TurnEnds(end_of_turn, ends[0], one_by_one)


def _own_controls(
    template: TemplateRenderer, messages: Messages, followed: str, call_ids: Sequence[str] = ()
) -> list[str]:
    """The control tokens that belong to a conversation's last turn, after the last mark in it.

    `followed` is what stands after the mark where more messages follow; `call_ids` are of the turn's calls.
    """
    alone = template.render(messages, TOOLS if call_ids else (), generation_prompt=False)
    try:
        alone = alone[span_of_answer(alone, 0, call_ids)[1] :]
    except TemplateError:  # the last turn is written in another way
        return []
    return _controls(template, alone[: shared_length(followed, alone)])


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

    `between` is the text between a call and its result.
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
    names = _tool_name(_CALL) in between
    return bool(shown) and (not names or (_tool_name(_CALL) in first and _tool_name(_OTHER_CALL) in second))
