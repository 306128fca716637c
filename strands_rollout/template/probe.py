"""Probe a chat template once: find how it ends turns, opens reasoning and writes calls; check that it is append-only.

Prompts that grow turn by turn are compared with whole prompts, token by token. A template is refused if it later
changes text outside the assistant's turns. Otherwise, the trainer would see tokens that the policy has not read. Text
inside these turns is sampled by the policy, so the template's version of it is not used. Differences there are
accepted: the template may later leave out or rewrite text, and the generation prompt may add text after the assistant's
header. `turn_notes` describes some of these differences for the log.
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
# the parts that differ between an opening tag and its closing tag
_SIDES: Final = re.compile(r"start|end|open|close|[\W_]")
_SYSTEM: Final[ChatMessage] = {"role": "system", "content": "Be brief."}
_RESULT: Final = "probed-tool-result"
_CALL: Final = "call00001"
_OTHER_CALL: Final = "call00002"


def user(text: str) -> ChatMessage:
    """Make a user turn."""
    return {"role": "user", "content": text}


def tool(call_id: str, text: str) -> ChatMessage:
    """Make the result of a call."""
    return {"role": "tool", "name": _tool_name(call_id), "tool_call_id": call_id, "content": text}


def _tool_name(call_id: str) -> str:
    """Return a call's tool name. It ends with the last digit of the call's id, so that parallel calls differ."""
    return f"probe_{call_id[-1]}"


def assistant(index: int, *call_ids: str, silent: bool = False) -> ChatMessage:
    """Make the assistant's turn with this index: text and calls, each with a mark.

    Args:
        index: Number of the turn, part of its marks.
        call_ids: Ids of the calls. Some templates require 9 letters and digits.
        silent: Leave out the text if there are calls.
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
    """Return the mark for a turn's text or, with `call_id`, for the arguments of that call."""
    return f"probed-answer-{index}-end" if call_id is None else f"probed-argument-{index}-{call_id}-end"


def span_of_answer(rendered: str, index: int, call_ids: Sequence[str] = ()) -> tuple[int, int]:
    """Return the span from the first to the last mark of an assistant's turn.

    A template may leave out the text or the calls of a turn with calls.

    Raises:
        TemplateError: The text or a call is rendered several times, or nothing of the turn is rendered.
    """
    marks = [mark(index), *(mark(index, call_id) for call_id in call_ids)]
    counts = {part: rendered.count(part) for part in marks}
    shown = [part for part, count in counts.items() if count]
    if not shown or any(counts[part] > 1 for part in shown):
        what = "a call's arguments" if counts[marks[0]] == 1 else "an assistant message's content"
        raise TemplateError(
            f"the chat template renders {what} {max(counts.values())} times; expected exactly once, since the sampled "
            "tokens of an earlier turn are kept in one place"
        )
    spans = [(rendered.index(part), part) for part in shown]
    return min(spans)[0], max(begin + len(part) for begin, part in spans)


# probed conversations: for each answer of the assistant, the new messages before it
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


def check_append_only(
    template: TemplateRenderer,
    turns: TurnRenderer,
    kind: str,
    conversation: Sequence[Messages],
    *,
    tools: Tools = (),
    with_system: bool = False,
) -> None:
    """Check that prompts grown turn by turn equal a whole rendered conversation, except in assistant turns.

    Args:
        template: Renders whole conversations.
        turns: Renders new messages.
        kind: Name of the conversation in error messages.
        conversation: For each answer of the assistant, the new messages before it.
        tools: The tools' specifications.
        with_system: Begin with a system message.

    Raises:
        TemplateError: The template fails, or the prompts differ from the rendering; a `TemplateDifferenceError` if
            tokens differ.
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
        later = whole[begin:first]
        is_kept = grown == later if is_last else later.startswith(grown)
        if not is_kept and (is_last or not _opens_turn(template, grown, later, rendered(generation_prompt=False))):
            encoder = template.encoder
            reason = f"the chat template is not append-only for {kind}: turn {index + 1} changes in later renderings"
            require_equal(encoder, encoder.encode_rendered(later), encoder.encode_rendered(grown), reason)
        if not is_last:
            end = turns.ends.calls if calls[index + 1] else turns.ends.answer
            begin = whole.find(end, last)
            if begin < 0:
                raise TemplateError(
                    f"the chat template is not append-only for {kind}: later renderings lack the end of a turn, {end!r}"
                )


def check_encoding(template: TemplateRenderer, *, with_tools: bool) -> None:
    """Check that the encoder encodes a rendered prompt to the same ids as the tokenizer itself.

    Raises:
        TemplateDifferenceError: The ids differ.
    """
    tools = TOOLS if with_tools else ()
    text = "Zwölf Boxkämpfer jagen Viktor.  1,234\n\n\tx = 3;  "
    messages = [_SYSTEM, user(text)]
    try:
        rendered = template.render(messages, tools)
    except TemplateError:  # the template may not support system messages
        rendered = template.render(messages[1:], tools)
    require_equal(
        template.encoder,
        template.encoder.encode_rendered(rendered),
        template.encoder.encode_trusted(rendered),
        "the tokenizer does not encode the text between control tokens piece by piece",
    )


def require_equal(encoder: TokenEncoder, got: Sequence[int], expected: Sequence[int], reason: str) -> None:
    """If the ids differ, raise a TemplateDifferenceError that names the first differing token."""
    if list(got) == list(expected):
        return
    index = shared_length(got, expected)
    raise TemplateDifferenceError(
        f"{reason}; first differing token at position {index}: got {_describe_token(encoder, got, index)}, expected "
        f"{_describe_token(encoder, expected, index)} after {encoder.decode(expected[max(0, index - 8) : index])!r}",
        got=list(got),
        expected=list(expected),
        position=index,
    )


def _opens_turn(template: TemplateRenderer, grown: str, later: str, bare: str) -> bool:
    """Return whether `later` lacks only text that the generation prompt adds to `grown` to open a turn.

    That text follows the turn's header, if there is a header, and begins with a tag. `grown` is the prompt of a turn,
    and `bare` is `grown` without the generation prompt. `later` is the later rendering of the same messages, up to the
    next turn's text.
    """
    at = _find_departure(grown, later)
    left, is_replaced = grown[at:], _TAG.search(later, at) is not None
    prompt, question = (
        template.render([user("question")], generation_prompt=is_prompted) for is_prompted in (True, False)
    )
    after_question = prompt.rpartition("question")[2]
    if prompt == question:  # the template always adds a generation prompt, which follows the question's end token
        ended = template.encoder.first_control(after_question.removesuffix(left))
        is_prompt = after_question.endswith(left) and ended is not None and not is_replaced
    else:
        header = template.encoder.first_control(prompt.removeprefix(question))
        has_header = header is None or header not in left or not is_replaced
        is_prompt = grown.startswith(bare) and at >= len(bare) and has_header
    return is_prompt and (not left.strip() or _TAG.match(left.strip()) is not None)


def _find_departure(prompt: str, turn: str) -> int:
    """Return the first index where `turn` differs from `prompt`, or the start of a tag around that index."""
    at = shared_length(prompt, turn)
    opened = max(prompt.rfind("<", 0, at), prompt.rfind("[", 0, at))
    is_within = opened >= 0 and at < len(prompt) and not re.search(r"[>\]\s]", prompt[opened:at])
    return opened if is_within else at


def _describe_token(encoder: TokenEncoder, ids: Sequence[int], index: int) -> str:
    return f"{ids[index]} {encoder.decode(ids[index : index + 1])!r}" if index < len(ids) else "the end"


class CallTurn(NamedTuple):
    """An assistant's turn with a single call, as a template writes it."""

    turn: str
    """Text between the generation prompt and the end of the turn; "" if the template can't write calls."""
    name: str
    arguments: Mapping[str, Any]
    shown: str = ""
    """If the template can't write calls, a hint at the format: a prompt with a tool, and all control tokens."""


@dataclass(frozen=True, slots=True)
class ProbedTemplate:
    """The results of the probe.

    Attributes:
        ends: The tokens that end the assistant's turns.
        opens_reasoning: True if the generation prompt opens reasoning and does not close it.
        lead: Text between the generation prompt and an answer's text, such as the end of empty reasoning.
        tools_error: Reason why the template can't be used with tools, or None.
        user_turns_error: Reason why a conversation with tools can't have a second user turn, or None.
        system_error: Reason why a conversation can't begin with a system message, or None. Also None if the template
            itself refuses such a message.
        example_call: An example of a call as the template writes it.
        notes: Changes that the template makes to the assistant's turns, for the log; sampled turns are not affected.
    """

    ends: TurnEnds
    opens_reasoning: bool
    lead: str
    tools_error: str | None
    user_turns_error: str | None
    system_error: str | None
    example_call: CallTurn
    notes: tuple[str, ...]


def probe(template: TemplateRenderer) -> ProbedTemplate:
    """Probe a template; faults that occur only with tools or a system message are returned, not raised.

    Raises:
        TemplateError: Even without tools and system messages, the template fails or is not append-only; or the
            tokenizer encodes a prompt to other ids than `TokenEncoder`. It is a `TemplateDifferenceError` if tokens
            differ.
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
    tools_error = tools_error or _append_only_fault(template, turns, "tool results", conversation, TOOLS)
    return ProbedTemplate(
        ends,
        *find_lead(template),
        tools_error,
        None if tools_error else user_turns_fault(template, turns),
        system_fault(template, turns, with_tools=tools_error is None),
        find_example_call(template, ends),
        () if tools_error else tuple(note for _, note in turn_notes(template, ends) if note),
    )


def find_lead(template: TemplateRenderer) -> tuple[bool, str]:
    """Return whether the generation prompt ends inside reasoning, and the text between the prompt and an answer's text.

    The prompt ends inside reasoning if it opens a tag that is not open in a rendered turn: there, the template either
    closes the tag before the turn's text or leaves the tag out.
    """
    question = "probed-question"
    prompt = template.render([user(question)]).rpartition(question)[2]
    leads, unclosed = [], []
    for messages, generation_prompt in (
        ([user(question), assistant(0)], False),
        ([user(question), assistant(0), user("next")], True),
    ):
        turn, shown, _ = template.render(messages, generation_prompt=generation_prompt).rpartition(mark(0))
        if not shown:
            continue
        turn = turn.rpartition(question)[2]
        at = _find_departure(prompt, turn)
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
    """Return whether the prompt's last tag with the name of `tag` is an opening tag."""
    words = _SIDES.sub("", tag.casefold())
    tags = [one for one in _TAG.findall(prompt) if _SIDES.sub("", one.casefold()) == words]
    return bool(tags) and not _CLOSING.match(tags[-1])


def find_example_call(template: TemplateRenderer, ends: TurnEnds) -> CallTurn:
    """Return an example of a call as the template writes it."""
    name, arguments = "probe", {"x": "probed-argument"}
    turn, shown = write_calls(template, ends, [(name, arguments)]), ""
    if not turn:
        with suppress(TemplateError):
            shown = template.encoder.unescape(template.render([user("question")], TOOLS))
        shown += "".join(template.encoder.control_ids)
    return CallTurn(turn, name, arguments, shown)


def write_calls(template: TemplateRenderer, ends: TurnEnds, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Write a turn that has only these calls (names and arguments), without its end; "" if the template can't."""
    question = "probed-question"
    # Kimi's templates write a call's name only as part of its id; others require 9 letters and digits
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
    # both texts after the question begin with the generation prompt; the turn follows it in `whole`
    prompt, whole = (template.encoder.unescape(rendered).rpartition(question)[2] for rendered in (prompt, whole))
    return whole[_find_departure(prompt, whole) :].partition(ends.calls)[0]


def tool_faults(template: TemplateRenderer) -> Iterator[tuple[str, str | None]]:
    """Yield each requirement for tools with the reason why the template does not meet it, or None if it does.

    If the template raises an error, only the first requirement is yielded.
    """
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
    """Yield each topic with a note on how the template changes the assistant's turns, or None if it does not."""
    rendered = template.render([user("question"), assistant(0, _CALL), tool(_CALL, _RESULT)], TOOLS)
    moves = "moves an assistant's text behind the results of its calls"
    what = moves if ends.silent else "leaves out an assistant's text beside its calls"
    moved = f"the template {what}; sampled turns keep it"
    yield "text beside calls", moved if ends.silent or mark(0) not in rendered else None
    opens = "these tokens open the next part, since the template has no token that closes a turn"
    closes = "a turn with calls has another end token"
    how = closes if _closes_turns(template) else opens
    note = f"a turn ends with {ends.answer}, and with {ends.calls} if it has calls: {how}"
    yield "end of a turn with calls", None if ends.calls == ends.answer else note
    split = "the template can't write several calls in a turn; each result is rendered as after a single call"
    yield "several calls", split if ends.one_by_one else None


def user_turns_fault(template: TemplateRenderer, turns: TurnRenderer) -> str | None:
    """Return the reason why a conversation with tools can't have a second user turn, or None."""
    return _append_only_fault(template, turns, "user turns in a conversation with tools", MIXED_TURNS, TOOLS)


def system_fault(template: TemplateRenderer, turns: TurnRenderer, *, with_tools: bool) -> str | None:
    """Return the reason why a conversation can't begin with a system message, or None.

    Also return None if the template itself refuses such a message.
    """
    for conversation, tools in [(USER_TURNS[:2], ()), *([(TOOL_TURNS, TOOLS)] if with_tools else [])]:
        try:
            template.render([{"role": "system", "content": "x"}, *conversation[0]], tools)
        except TemplateError:  # the template refuses system messages itself, with its own error
            return None
        fault = _append_only_fault(template, turns, "system messages", conversation, tools, with_system=True)
        if fault is not None:
            return fault
    return None


def _append_only_fault(
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
    """Return the text of the token that ends an assistant's turn without calls.

    Raises:
        TemplateError: The token is not a control token, an assistant's text is not rendered exactly once, or the
            template fails.
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
            "token of the tokenizer), since a turn's end must be one exact token"
        )
    own = _own_control_tokens(template, turn, followed) if _closes_turns(template) else []
    return own[-1] if own else encoder.decode(ids[:1])


def find_ends(template: TemplateRenderer, end_of_turn: str) -> TurnEnds:
    """Find the end-of-turn tokens of a template that renders tools and results.

    Args:
        template: Renders whole conversations.
        end_of_turn: The token that ends a turn without calls.

    Raises:
        TemplateError: A turn with calls does not end with a control token, is not rendered, or has a part that is
            rendered several times; or results can be rendered neither together nor one by one.
    """
    turn = [user("question"), assistant(0, _CALL)]
    followed = template.render([*turn, tool(_CALL, _RESULT)], TOOLS)
    silent = followed.find(mark(0)) > followed.find(_RESULT)
    if silent:
        turn = [user("question"), assistant(0, _CALL, silent=True)]
        followed = template.render([*turn, tool(_CALL, _RESULT)], TOOLS)
    followed = followed[span_of_answer(followed, 0, [_CALL])[1] :].partition(_RESULT)[0]
    one_by_one = not _shows_parallel_results(template, followed, silent=silent)
    if one_by_one:  # each result is then rendered separately, which needs renderings without a generation prompt
        answered = [*turn, tool(_CALL, _RESULT)]
        prompted, bare = (
            template.render(answered, TOOLS, generation_prompt=is_prompted) for is_prompted in (True, False)
        )
        if not prompted.startswith(bare) or prompted == bare:
            raise TemplateError("it can write neither several calls in a turn nor results without a generation prompt")
    if end_of_turn in followed:
        return TurnEnds(end_of_turn, end_of_turn, one_by_one, silent)
    own = _own_control_tokens(template, turn, followed, [_CALL])
    ends = (_control_tokens(template, followed)[len(own) :][:1] if not _closes_turns(template) else []) or own[-1:]
    if not ends:
        raise TemplateError("it does not end an assistant's turn that has calls with a control token")
    return TurnEnds(end_of_turn, ends[0], one_by_one, silent)


def _own_control_tokens(
    template: TemplateRenderer, messages: Messages, followed: str, call_ids: Sequence[str] = ()
) -> list[str]:
    """Return the control tokens after the last mark that still belong to a conversation's last turn.

    `followed` is the text after the last mark in a rendering with further messages.
    """
    alone = template.render(messages, TOOLS if call_ids else (), generation_prompt=False)
    try:
        alone = alone[span_of_answer(alone, 0, call_ids)[1] :]
    except TemplateError:  # the template writes the last turn differently
        return []
    return _control_tokens(template, alone[: shared_length(followed, alone)])


def _closes_turns(template: TemplateRenderer) -> bool:
    """Return whether turns end with control tokens of their own, not with the token that opens the next part."""
    turn = [user("question"), assistant(0)]
    prompted, alone = (template.render(turn, generation_prompt=is_prompted) for is_prompted in (True, False))
    # `prompted` equals `alone` if the template always adds a generation prompt
    return prompted != alone and bool(_control_tokens(template, alone.partition(mark(0))[2]))


def _control_tokens(template: TemplateRenderer, text: str) -> list[str]:
    encoder = template.encoder
    return [encoder.decode([piece]) for piece in encoder.pieces(text) if isinstance(piece, int)]


def _shows_parallel_results(template: TemplateRenderer, between: str, *, silent: bool) -> bool:
    """Return whether the results of several calls in a turn are rendered, each with its own tool's name.

    `between` is the text between a call and its result. If it lacks the tool's name, the template renders no names, and
    only the results are checked.
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
