"""Probes a chat template once: where an assistant's turn ends, and whether conversations only ever grow.

Prompts that grow turn by turn are compared with whole ones, token by token. A template that rewrites what it rendered
before, outside the assistant's own turns, is refused: the policy would have read other tokens than the trainer sees.
What lies inside those turns is the policy's own and may differ, which is noted: words that a template leaves out or
rewrites later, and what a generation prompt opens a turn with, after the assistant's header.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

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
_TAG: Final = re.compile(r"<[^<>]*>|\[[^\[\]\s]*\]")
_CLOSING: Final = re.compile(r"\W*/|\W*(?:end|close)|<[^|]*\|>", re.IGNORECASE)
# what a closing tag differs in from the one that it closes
_SIDES: Final = re.compile(r"start|end|open|close|[\W_]")
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


def assistant(index: int, *call_ids: str, silent: bool = False) -> ChatMessage:
    """The assistant's turn of this index: words, and calls, with marks in both; `silent` has no words beside calls.

    Call ids have 9 letters and digits, which some templates want.
    """
    message: ChatMessage = {"role": "assistant", "content": "" if silent and call_ids else mark(index)}
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
        messages += [assistant(index - 1, *calls[index], silent=turns.ends.silent)] if index else []
        messages += turn
    whole = template.render(messages, tools)
    begin = 0
    for index, turn in enumerate(conversation):
        rendered = partial(turns.render, turn, tools) if index else partial(template.render, [*head, *turn], tools)
        grown = rendered()
        is_last = index + 1 == len(conversation)
        first, last = (len(whole), 0) if is_last else span_of_answer(whole, index, calls[index + 1])
        stands = whole[begin:first]
        kept = grown == stands if is_last else stands.startswith(grown)
        if not kept and (is_last or not _opens_turn(template, grown, stands, rendered(generation_prompt=False))):
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


def _opens_turn(template: TemplateRenderer, grown: str, stands: str, bare: str) -> bool:
    """Whether all that does not stand later on is what the generation prompt opens the assistant's turn with.

    That begins with a tag, after the header, if the turn has one. `grown` has the generation prompt, which `bare`
    lacks; `stands` ends before the first words of the next turn.
    """
    at = _departure(grown, stands)
    left, is_replaced = grown[at:], _TAG.search(stands, at) is not None
    prompt, question = (template.render([user("question")], generation_prompt=asked) for asked in (True, False))
    after_question = prompt.rpartition("question")[2]
    if prompt == question:  # written unasked: what follows the end of the question and is never written later
        ended = template.encoder.first_control(after_question.removesuffix(left))
        is_prompt = after_question.endswith(left) and ended is not None and not is_replaced
    else:
        header = template.encoder.first_control(prompt.removeprefix(question))
        has_header = header is None or header not in left or not is_replaced
        is_prompt = grown.startswith(bare) and at >= len(bare) and has_header
    return is_prompt and (not left.strip() or _TAG.match(left.strip()) is not None)


def _departure(prompt: str, turn: str) -> int:
    """Where a turn stops to be what the prompt is: before a tag, where both have one there that begins alike."""
    at = shared_length(prompt, turn)
    opened = max(prompt.rfind("<", 0, at), prompt.rfind("[", 0, at))
    is_within = opened >= 0 and at < len(prompt) and not re.search(r"[>\]\s]", prompt[opened:at])
    return opened if is_within else at


def _shown(encoder: TokenEncoder, ids: Sequence[int], index: int) -> str:
    return f"{ids[index]} {encoder.decode(ids[index : index + 1])!r}" if index < len(ids) else "the end"


class CallTurn(NamedTuple):
    """An assistant's turn with one call and nothing else, as a template writes it."""

    turn: str
    """From the generation prompt to the end of the turn; "" where the template writes no calls."""
    name: str
    arguments: Mapping[str, Any]
    shown: str = ""
    """Where it writes none, what may tell their format: a prompt that shows a tool, and all control tokens."""


@dataclass(frozen=True, slots=True)
class ProbedTemplate:
    """What the probe found.

    Attributes:
        ends: How it ends the assistant's turns.
        opens_reasoning: Whether the generation prompt ends inside reasoning, which it has opened.
        lead: What is written between the generation prompt and an answer's words, where reasoning is closed there.
        tools_error: Why the template can't be used with tools; None if it can.
        user_turns_error: Why a conversation with tools can't have a second user's turn; None if it can.
        system_error: Why a conversation can't begin with a system message; None if it can.
        written_call: How it writes a call.
        notes: What it does to the assistant's own turns, which changes nothing here; for the log.
    """

    ends: TurnEnds
    opens_reasoning: bool
    lead: str
    tools_error: str | None
    user_turns_error: str | None
    system_error: str | None
    written_call: CallTurn
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
        *find_lead(template),
        tools_error,
        None if tools_error else user_turns_fault(template, turns),
        system_fault(template, turns, with_tools=tools_error is None),
        find_written_call(template, ends),
        () if tools_error else tuple(note for _, note in turn_notes(template, ends) if note),
    )


def find_lead(template: TemplateRenderer) -> tuple[bool, str]:
    """Whether the generation prompt ends inside reasoning, and what is written between it and an answer's words.

    It does where a turn closes before its words what the prompt has opened, or is written without what the prompt has
    opened and not closed itself.
    """
    asks = "probed-question"
    prompt = template.render([user(asks)]).rpartition(asks)[2]
    leads, unclosed = [], []
    for messages, asked in (([user(asks), assistant(0)], False), ([user(asks), assistant(0), user("next")], True)):
        turn, shown, _ = template.render(messages, generation_prompt=asked).rpartition(mark(0))
        if not shown:
            continue
        turn = turn.rpartition(asks)[2]
        at = _departure(prompt, turn)
        closing = next(iter(_TAG.findall(turn[at:])), "")
        if _CLOSING.match(closing) and _is_open(prompt, closing):
            return True, turn[at:]
        unclosed += [tag for tag in _TAG.findall(prompt[at:])[:1] if _is_open(prompt, tag)]
        leads.append(turn[at:])
    if unclosed:
        tag = unclosed[0]
        return True, tag.replace("START", "END") if "START" in tag else f"{tag[0]}/{tag[1:]}\n\n"
    return False, leads[0] if leads else ""


def _is_open(prompt: str, tag: str) -> bool:
    """Whether the last one of a prompt's tags that open or close the same as this one opens it."""
    words = _SIDES.sub("", tag.casefold())
    tags = [one for one in _TAG.findall(prompt) if _SIDES.sub("", one.casefold()) == words]
    return bool(tags) and not _CLOSING.match(tags[-1])


def find_written_call(template: TemplateRenderer, ends: TurnEnds) -> CallTurn:
    """How a template writes a call."""
    name, arguments = "probe", {"x": "probed-argument"}
    turn, shown = written_calls(template, ends, [(name, arguments)]), ""
    if not turn:
        with suppress(TemplateError):
            shown = template.encoder.unescape(template.render([user("question")], TOOLS))
        shown += "".join(template.encoder.control_ids)
    return CallTurn(turn, name, arguments, shown)


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
    return whole[_departure(prompt, whole) :].partition(ends.calls)[0]


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
    what = "moves behind their results" if ends.silent else "leaves out"
    moved = f"the template {what} what an assistant says beside its calls; here it stays, as it was sampled"
    yield "text beside calls", moved if ends.silent or mark(0) not in rendered else None
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
    silent = followed.find(mark(0)) > followed.find(_RESULT)
    if silent:
        turn = [user("question"), assistant(0, _CALL, silent=True)]
        followed = template.render([*turn, tool(_CALL, _RESULT)], TOOLS)
    followed = followed[span_of_answer(followed, 0, [_CALL])[1] :].partition(_RESULT)[0]
    one_by_one = not _shows_together(template, followed, silent=silent)
    if one_by_one:  # then each result needs a text of its own, which ends before the generation prompt
        answered = [*turn, tool(_CALL, _RESULT)]
        prompted, bare = (template.render(answered, TOOLS, generation_prompt=asked) for asked in (True, False))
        if not prompted.startswith(bare) or prompted == bare:
            raise TemplateError("it does not write several calls of a turn, nor results without a generation prompt")
    if end_of_turn in followed:
        return TurnEnds(end_of_turn, end_of_turn, one_by_one, silent)
    own = _own_controls(template, turn, followed, [_CALL])
    ends = (_controls(template, followed)[len(own) :][:1] if not _closes_turns(template) else []) or own[-1:]
    if not ends:
        raise TemplateError("it ends an assistant's turn with calls by no control token")
    return TurnEnds(end_of_turn, ends[0], one_by_one, silent)


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


def _shows_together(template: TemplateRenderer, between: str, *, silent: bool) -> bool:
    """Whether the results of several calls of a turn are shown, each under its own tool's name if at all.

    `between` is the text between a call and its result.
    """
    calls = (_CALL, _OTHER_CALL)
    results = [tool(_CALL, _RESULT), tool(_OTHER_CALL, f"other-{_RESULT}")]
    try:
        rendered = template.render([user("question"), assistant(0, *calls, silent=silent), *results], TOOLS)
        rendered = rendered[span_of_answer(rendered, 0, calls)[1] :]
    except TemplateError:
        return False
    first, _, after = rendered.partition(_RESULT)
    second, shown, _ = after.partition(f"other-{_RESULT}")
    names = _tool_name(_CALL) in between
    return bool(shown) and (not names or (_tool_name(_CALL) in first and _tool_name(_OTHER_CALL) in second))
