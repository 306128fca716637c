"""`check-template`: does a tokenizer's chat template keep the rules that token-exact conversations need?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from strands_rollout.diagnostics import Finding, error, good, skipped, warning
from strands_rollout.errors import ConfigError, RolloutError, TemplateDifferenceError, TemplateError, foreign_code
from strands_rollout.files import MAX_JSON_BYTES, Json, read_regular
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer
from strands_rollout.template import probe
from strands_rollout.template.chat_template import renderer_of
from strands_rollout.template.messages import ChatMessage
from strands_rollout.template.render import TemplateRenderer, TurnEnds, TurnRenderer
from strands_rollout.tool_parsers import AUTO, ToolCall, format_of_call, get_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OWN: Final = 'give it one that only appends: chat_template_kwargs={"chat_template": ...}'
_NO_TOOLS: Final = "use a model that was trained to call tools, set tools: [], or use a template of your own"
_PARSER: Final = "set tool_parser (--tool-parser) to auto, or to the name of the model's own format"
_WINDOW: Final = 8
_REASONING: Final = "probed-reasoning"
_USER_TURN: Final[ChatMessage] = {"role": "user", "content": "question"}
_TOOL_RESULT: Final[ChatMessage] = {"role": "tool", "name": "probe", "tool_call_id": "call00001", "content": "1"}
_CALL: Final = {"type": "function", "id": "call00001", "function": {"name": "probe", "arguments": {"x": "1"}}}


def load_tokenizer_folder(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder.

    Raises:
        ConfigError: It can't be loaded; the message names the file.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; expected one with a tokenizer.json")
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json; expected a fast tokenizer, which tells control tokens apart"
        )
    try:
        orjson.loads(read_regular(file, MAX_JSON_BYTES))
    except (OSError, orjson.JSONDecodeError) as e:
        raise ConfigError(f"{file} can't be read: {e}") from e
    with foreign_code("tokenizers raises plain Exceptions, transformers what its parts raise") as outcome:
        return load_tokenizer(str(folder))
    fault = outcome.error
    if isinstance(fault, RolloutError):
        raise fault
    raise ConfigError(f"the tokenizer of {folder} can't be loaded: {type(fault).__name__}: {fault}") from fault


def read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, or of an id on the hub; a ConfigError where it can't be loaded."""
    return load_tokenizer_folder(Path(name)) if Path(name).exists() else load_tokenizer(name)


def read_object(file: Path) -> dict[str, Json]:
    """The JSON object of a file; empty where there is none."""
    try:
        value = orjson.loads(read_regular(file, MAX_JSON_BYTES))
    except (OSError, orjson.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def check_template(
    name: str, tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None = None, tool_parser: str = AUTO
) -> list[Finding]:
    """Try each rule on the template of a tokenizer of that folder or id, or on another template in its place.

    Calls must be read by `tool_parser`, whichever fits for "auto".
    """
    rule = "template"
    try:
        template = renderer_of(tokenizer, {} if chat_template is None else {"chat_template": chat_template})
        rule = "end of turn"
        end_of_turn = probe.find_end_of_turn(template)
    except TemplateError as e:
        return [error(rule, str(e), _OWN)]
    tool_findings = [
        good(rule, "yes") if fault is None else error(rule, fault, _NO_TOOLS)
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
    system_fault = probe.system_fault(template, turns, with_tools=with_tools)
    return [
        _end_of_turn(Path(name), tokenizer, template, ends),
        _tried("encoding", template, lambda: probe.check_encoding(template, with_tools=with_tools)),
        _appends("user turns", template, turns, probe.USER_TURNS),
        *tool_findings,
        *_tool_rules(template, turns, with_tools=with_tools),
        _needed_by_some("system message", system_fault, "set system_prompt to an empty text"),
        _calls(template, ends, tool_parser),
        _reasoning(template, tokenizer),
    ]


def _end_of_turn(
    folder: Path, tokenizer: PreTrainedTokenizerBase, template: TemplateRenderer, ends: TurnEnds
) -> Finding:
    """Whether a generation stops where a turn ends: engines stop at the ids of three places."""
    places = {
        "tokenizer_config.json": tokenizer.eos_token_id,
        "generation_config.json": read_object(folder / "generation_config.json").get("eos_token_id"),
        "config.json": read_object(folder / "config.json").get("eos_token_id"),
    }
    stops = {name: ids if isinstance(ids, list) else [ids] for name, ids in places.items() if ids is not None}
    shown = ", ".join(f"{ids} in {name}" for name, ids in stops.items()) or "none"
    known = {token for ids in stops.values() for token in ids}
    ids = {template.encoder.encode_trusted(end)[0]: end for end in (ends.answer, ends.calls)}
    for token, end in ids.items():
        if token not in known:
            turn = f"a turn ends with id {token}, {end!r}"
            remedy = f'add {token} to "eos_token_id" in {folder / "generation_config.json"}'
            found = f"{turn}, but the end-of-sequence ids are {shown}: turns would not stop there"
            return error("end of turn", found, remedy)
    names = " and ".join(f"id {token}, {end!r}," for token, end in ids.items())
    return good("end of turn", f"{names} ends a generation: {shown}")


def _tool_rules(template: TemplateRenderer, turns: TurnRenderer, *, with_tools: bool) -> Iterator[Finding]:
    """How results are appended, and what becomes of the assistant's own turns, which breaks nothing."""
    conversations = {"tool results": probe.TOOL_TURNS, "several calls": probe.PARALLEL_TURNS}
    if not with_tools:
        yield from (skipped(rule, "the template can't be used with tools") for rule in conversations)
        return
    notes = dict(probe.turn_notes(template, turns.ends))
    for rule in ("text beside calls", "end of a turn with calls"):
        yield good(rule, notes[rule] or "yes")
    for rule, conversation in conversations.items():
        note = notes.get(rule)
        yield good(rule, note) if note else _appends(rule, template, turns, conversation, tools=probe.TOOLS)
    fault = probe.user_turns_fault(template, turns)
    yield _needed_by_some("user turns with tools", fault, "let conversations with tools have one user's turn")


def _needed_by_some(rule: str, fault: str | None, remedy: str) -> Finding:
    """A rule that only some conversations need; they are refused where it does not hold."""
    if fault is None:
        return good(rule, "append-only")
    return warning(rule, f"{fault} Such conversations are refused.", f"{remedy}, or {_OWN}")


def _appends(
    rule: str, template: TemplateRenderer, turns: TurnRenderer, parts: Sequence[Sequence[ChatMessage]], **tools: Json
) -> Finding:
    return _tried(rule, template, lambda: probe.check_append_only(template, turns, rule, parts, **tools))


def _tried(rule: str, template: TemplateRenderer, check: Callable[[], None]) -> Finding:
    """What a check of the probe finds; where tokens differ, with both renderings around the first difference."""
    try:
        check()
    except TemplateDifferenceError as e:
        around = {}
        for side, ids in (("got", e.got), ("expected", e.expected)):
            part = ids[max(0, e.position - _WINDOW) : e.position + _WINDOW]
            around[side] = {"ids": part, "text": template.encoder.decode(part)}
        shown = "".join(f"\n  {side:<8} {part['ids']} {part['text']!r}" for side, part in around.items())
        facts = {f"{rule.replace(' ', '_')}_difference": {"position": e.position, **around}}
        return Finding(rule, "error", f"{e}{shown}", _OWN, facts)
    except TemplateError as e:
        return error(rule, str(e), _OWN)
    return good(rule, "append-only" if rule != "encoding" else "the tokenizer's own ids, piece by piece")


def _calls(template: TemplateRenderer, ends: TurnEnds, tool_parser: str) -> Finding:
    """Which parser reads the call that the template writes."""
    call = probe.find_written_call(template, ends)
    try:
        name = format_of_call(call.turn, call.name, call.arguments) if tool_parser == AUTO else tool_parser
        read = [segment for segment in get_parser(name).parse(call.turn) if isinstance(segment, ToolCall)]
    except ConfigError as e:
        return error("calls", str(e), _PARSER)
    if [(segment.name, segment.arguments) for segment in read] != [(call.name, dict(call.arguments))]:
        return error("calls", f"{name!r} does not read the call in {call.turn!r}", _PARSER)
    return good("calls", f"written as {call.turn!r}; tool_parser {name!r} reads them", tool_parser=name)


def _reasoning(template: TemplateRenderer, tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Rollouts keep what was sampled in any case; a chat endpoint shows the policy what its template keeps."""
    opens = probe.opens_reasoning(template)
    with_thinking, without = (
        tokenizer.apply_chat_template(
            [_USER_TURN], tokenize=False, add_generation_prompt=True, enable_thinking=on, **template.kwargs
        )
        for on in (True, False)
    )
    if with_thinking == without:
        opening = f"enable_thinking changes nothing{', answers begin inside <think>' if opens else ''}"
    elif opens:
        opening = "answers begin inside <think>, unless enable_thinking is false"
    else:
        opening = "enable_thinking: false leaves thinking out"
    kept = {"after a tool result": _keeps(template, _TOOL_RESULT), "after a user turn": _keeps(template, _USER_TURN)}
    shown = ", ".join(f"{what} {when}" for when, what in kept.items())
    words = f"{opening}; an earlier turn's is {shown}"
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
