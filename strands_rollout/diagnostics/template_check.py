"""What a chat template does, rule by rule: where it appends, where it rewrites, who reads its calls, what ends a turn.

The rules are those that a rollout's template must keep; here each is tried by itself, so that a template which is
refused shows all of its faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from strands_rollout.diagnostics.diagnosis import Finding, error, good, skipped, warning
from strands_rollout.diagnostics.run_files import check_end_of_turn, load_tokenizer_folder, thinking_words
from strands_rollout.errors import ConfigError, TemplateDifferenceError, TemplateError
from strands_rollout.files import Json
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer
from strands_rollout.template import probe
from strands_rollout.template.chat_template import renderer_of
from strands_rollout.template.messages import ChatMessage
from strands_rollout.template.render import TemplateRenderer, TurnEnds, TurnRenderer
from strands_rollout.template.tokens import TokenEncoder
from strands_rollout.tool_parsers import AUTO, ToolCall, format_of_call, get_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OWN: Final = 'give it one that only appends: chat_template_kwargs={"chat_template": ...}'
_OTHER_MODEL: Final = "use a model that was trained to call tools, one without tools, or a template of your own"
_WINDOW: Final = 8
_REASONING: Final = "probed-reasoning"
_USER_TURN: Final[ChatMessage] = {"role": "user", "content": "question"}
_TOOL_RESULT: Final[ChatMessage] = {"role": "tool", "name": "probe", "tool_call_id": "call00001", "content": "1"}
_CALL: Final = {"type": "function", "id": "call00001", "function": {"name": "probe", "arguments": {"x": "1"}}}


def read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, or of an id on the hub; a ConfigError where it can't be loaded."""
    return load_tokenizer_folder(Path(name)) if Path(name).exists() else load_tokenizer(name)


def check_template(
    name: str, tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None = None, tool_parser: str = AUTO
) -> list[Finding]:
    """Try each rule on the template of a tokenizer of that folder or id, or on another one in its place.

    Calls must be read by `tool_parser`, whichever fits for "auto".
    """
    rule = "template"
    try:
        template = renderer_of(tokenizer, {} if chat_template is None else {"chat_template": chat_template})
        rule = "end of turn"
        end_of_turn = probe.find_end_of_turn(template)
    except TemplateError as e:
        return [_broken(rule, e, None)]
    tool_findings = [
        good(rule, "yes") if fault is None else error(rule, fault, _OTHER_MODEL)
        for rule, fault in probe.tool_faults(template)
    ]
    with_tools = all(finding.status == "ok" for finding in tool_findings)
    ends = TurnEnds(end_of_turn, end_of_turn)
    if len(tool_findings) > 1:  # else tools are not rendered
        try:
            ends = probe.find_ends(template, end_of_turn)
        except TemplateError as e:
            tool_findings.append(error("end of a turn with calls", str(e), _OWN))
            with_tools = False
    turns = TurnRenderer(template, ends)
    end_ids = [template.encoder.encode_trusted(end)[0] for end in dict.fromkeys((ends.answer, ends.calls))]
    system_fault = probe.system_fault(template, turns, with_tools=with_tools)
    return [
        *check_end_of_turn(Path(name), tokenizer, *end_ids),
        _tried("encoding", template, lambda: probe.check_encoding(template, with_tools=with_tools)),
        _appends("user turns", template, turns, probe.USER_TURNS),
        *tool_findings,
        *_tool_rules(template, turns, with_tools=with_tools),
        _partly("system message", system_fault, "set system_prompt to an empty text"),
        _calls(template, ends, tool_parser),
        _reasoning(template, tokenizer),
    ]


def _tool_rules(template: TemplateRenderer, turns: TurnRenderer, *, with_tools: bool) -> Iterator[Finding]:
    """How results are appended, and what becomes of the assistant's own turns, which breaks nothing."""
    notes = dict(probe.turn_notes(template, turns.ends)) if with_tools else {}
    for rule in ("text beside calls", "end of a turn with calls"):
        if with_tools:
            yield good(rule, notes[rule] or "yes")
    for rule, conversation in (("tool results", probe.TOOL_TURNS), ("several calls", probe.PARALLEL_TURNS)):
        if not with_tools:
            yield skipped(rule, "the template can't be used with tools")
        elif notes.get(rule):
            yield good(rule, str(notes[rule]))
        else:
            yield _appends(rule, template, turns, conversation, tools=probe.TOOLS)
    if with_tools:
        fault = probe.user_turns_fault(template, turns)
        yield _partly("user turns with tools", fault, "let conversations with tools have one user's turn")


def _partly(rule: str, fault: str | None, remedy: str) -> Finding:
    """A rule that not every conversation needs; those that do are refused when they come to it."""
    if fault is None:
        return good(rule, "append-only")
    return warning(rule, f"{fault} Such conversations are refused.", f"{remedy}, or {_OWN}")


def _appends(
    rule: str, template: TemplateRenderer, turns: TurnRenderer, parts: Sequence[Sequence[ChatMessage]], **tools: Json
) -> Finding:
    return _tried(rule, template, lambda: probe.check_append_only(template, turns, rule, parts, **tools))


def _tried(rule: str, template: TemplateRenderer, check: Callable[[], None]) -> Finding:
    try:
        check()
    except TemplateError as e:
        return _broken(rule, e, template.encoder)
    return good(rule, "append-only" if rule != "encoding" else "the tokenizer's own ids, piece by piece")


def _broken(rule: str, fault: TemplateError, encoder: TokenEncoder | None) -> Finding:
    if encoder is None or not isinstance(fault, TemplateDifferenceError):
        return error(rule, str(fault), _OWN)
    around = {}
    for side, ids in (("got", fault.got), ("expected", fault.expected)):
        part = ids[max(0, fault.position - _WINDOW) : fault.position + _WINDOW]
        around[side] = {"ids": part, "text": encoder.decode(part)}
    shown = "".join(f"\n  {side:<8} {part['ids']} {part['text']!r}" for side, part in around.items())
    facts = {f"{rule.replace(' ', '_')}_difference": {"position": fault.position, **around}}
    return Finding(rule, "error", f"{fault}{shown}", _OWN, facts)


def _calls(template: TemplateRenderer, ends: TurnEnds, tool_parser: str) -> Finding:
    """Who reads the call that the template writes."""
    call = probe.find_written_call(template, ends)
    if tool_parser == AUTO:
        try:
            tool_parser = format_of_call(call.turn, call.name, call.arguments)
        except ConfigError as e:
            return error("calls", str(e), "name the model's format with --tool-parser")
    read = [segment for segment in get_parser(tool_parser).parse(call.turn) if isinstance(segment, ToolCall)]
    if [(segment.name, segment.arguments) for segment in read] != [(call.name, dict(call.arguments))]:
        return error("calls", f"{tool_parser!r} does not read the call in {call.turn!r}", "leave --tool-parser out")
    words = f"written as {call.turn!r}; tool_parser {tool_parser!r} reads them"
    return good("calls", words, tool_parser=tool_parser)


def _reasoning(template: TemplateRenderer, tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Rollouts keep what was sampled in any case; a chat endpoint shows the policy what its template keeps."""
    opens = probe.opens_reasoning(template)
    kept = {"after a tool result": _keeps(template, _TOOL_RESULT), "after a user turn": _keeps(template, _USER_TURN)}
    said = ", ".join(f"{word} {when}" for when, word in kept.items())
    opening = thinking_words(tokenizer, opens_reasoning=opens, **template.kwargs)
    words = f"{opening}; an earlier turn's is {said}"
    return good("reasoning", words, opens_reasoning=opens, earlier_reasoning=kept)


def _keeps(template: TemplateRenderer, following: ChatMessage) -> str:
    """What becomes of a turn's reasoning, given by its own key or within the text, before a message."""
    calls = {"tool_calls": [_CALL]} if following["role"] == "tool" else {}
    for text in (
        {"content": "answer", "reasoning_content": _REASONING},
        {"content": f"<think>\n{_REASONING}\n</think>\n\nanswer"},
    ):
        try:
            rendered = template.render([_USER_TURN, {"role": "assistant", **text, **calls}, following], escaped=False)
        except TemplateError:
            return "refused"
        if _REASONING in rendered:
            return "kept"
    return "dropped"
