"""`check-template`: check that a chat template is append-only. Only then do conversations stay token-exact.

Also checks that generation stops at the end of a turn, and that the tool parser reads the template's calls. Each rule
is checked on a short conversation. Then random episodes are played, if requested. The new tokens of each request must
equal those from the tokenizer's own `apply_chat_template`. Earlier turns must keep their sampled tokens.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Final, TypeVar

import httpx
import numpy as np
import orjson

from strands_rollout.diagnostics import Finding, error, good, skipped, warning
from strands_rollout.errors import ConfigError, RolloutError, TemplateDifferenceError, TemplateError
from strands_rollout.files.json_codec import Json
from strands_rollout.files.json_files import MAX_JSON_BYTES
from strands_rollout.files.safe_files import read_regular
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer
from strands_rollout.template import probe
from strands_rollout.template.chat_template import ChatTemplate, make_renderer
from strands_rollout.template.messages import ChatMessage
from strands_rollout.template.render import SHIPPED_TEMPLATES, TemplateRenderer, TurnEnds, TurnRenderer, template_advice
from strands_rollout.template.tokens import TokenEncoder
from strands_rollout.tool_parsers import AUTO, ToolCall, bind_tool_specs, detect_format, get_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
_TOOLS_REMEDY: Final = "use a model that was trained to call tools, set tools: [], or "
_PARSER_REMEDY: Final = "set tool_parser (--tool-parser) to auto, or to the name of the model's own format"
_SHOWN_TOKENS: Final = 8
_REASONING: Final = "probed-reasoning"
_USER_TURN: Final[ChatMessage] = {"role": "user", "content": "question"}
_TOOL_RESULT: Final[ChatMessage] = {"role": "tool", "name": "probe", "tool_call_id": "call00001", "content": "1"}
_TOOL_CALL: Final = {"type": "function", "id": "call00001", "function": {"name": "probe", "arguments": {"x": "1"}}}


def load_tokenizer_folder(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder.

    Raises:
        ConfigError: The tokenizer can't be loaded; the message names the file or the folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; expected a folder with a tokenizer.json")
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json; expected a fast tokenizer, which keeps control tokens out of text"
        )
    try:
        orjson.loads(read_regular(file, MAX_JSON_BYTES))
    except OSError as e:
        raise ConfigError(f"can't read {file}: {e.strerror}") from e
    except orjson.JSONDecodeError as e:
        raise ConfigError(f"{file} is not valid JSON: {e}") from e
    try:
        return load_tokenizer(str(folder))
    except RolloutError:
        raise
    except Exception as e:  # `tokenizers` raises plain Exceptions; `transformers` may raise any exception
        raise ConfigError(f"the tokenizer of {folder} can't be loaded: {type(e).__name__}: {e}") from e


def read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or of a hub id; raise ConfigError if that fails."""
    return load_tokenizer_folder(Path(name)) if Path(name).exists() else load_tokenizer(name)


def read_json_object(file: Path) -> dict[str, Json]:
    """Return the JSON object in a file; empty if there is none, or if the file can't be read."""
    try:
        value = orjson.loads(read_regular(file, MAX_JSON_BYTES))
    except (OSError, orjson.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def read_template(file_or_name: Path) -> str:
    """Return the text of a template file; the name of a template of this package is returned unchanged.

    Raises:
        ConfigError: This package has no template of this name, and the file can't be read as UTF-8.
    """
    if str(file_or_name) in SHIPPED_TEMPLATES:
        return str(file_or_name)
    try:
        return file_or_name.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(
            f"can't read the template {file_or_name}: {e}; expected a UTF-8 file, or a template of this package: "
            f"{', '.join(SHIPPED_TEMPLATES)}"
        ) from e


def check_template(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: str | None = None,
    tool_parser: str = AUTO,
    episodes: int = 0,
    seed: int = 0,
) -> list[Finding]:
    """Check each rule on the tokenizer's template, or on `chat_template`, and play `episodes` random episodes.

    `tool_parser` is checked against the template's calls; "auto" stands for the parser of the detected format. `seed`
    is the seed of the first episode; the seed grows by 1 per episode. If the template can't be rendered, or has no end
    of turn, this error is the only finding. Must not be called from a running event loop.
    """
    kwargs = {} if chat_template is None else {"chat_template": chat_template}
    rule, advice = "template", template_advice(chat_template or tokenizer.chat_template)
    try:
        # some templates need a user message first
        (template := make_renderer(tokenizer, kwargs)).render([_USER_TURN])
        rule = "end of turn"
        end_of_turn = probe.find_end_of_turn(template)
    except TemplateError as e:
        return [error(rule, str(e), advice)]
    tool_findings = [
        good(rule, "yes") if fault is None else error(rule, fault, _TOOLS_REMEDY + advice)
        for rule, fault in probe.tool_faults(template)
    ]
    ends = TurnEnds(end_of_turn, end_of_turn)
    if len(tool_findings) > 1:  # otherwise the template does not render tools
        try:
            ends = probe.find_ends(template, end_of_turn)
        except TemplateError as e:
            tool_findings.append(error("end of a turn with calls", str(e), advice))
    calls, seeds = _check_calls(template, ends, tool_parser), range(seed, seed + episodes)
    return [
        _check_end_of_turn(Path(name), tokenizer, template, ends),
        *_check_rules(template, ends, tool_findings),
        calls,
        _check_reasoning(template, tokenizer),
        *([_play_random_episodes(tokenizer, kwargs, calls, ends, seeds)] if seeds else []),
    ]


def _check_rules(template: TemplateRenderer, ends: TurnEnds, tool_findings: Sequence[Finding]) -> Iterator[Finding]:
    with_tools, turns = all(finding.status == "ok" for finding in tool_findings), TurnRenderer(template, ends)
    yield _run_check("encoding", template, lambda: probe.check_encoding(template, with_tools=with_tools))
    yield _check_appends("user turns", template, turns, probe.USER_TURNS)
    yield from tool_findings
    yield from _check_tool_rules(template, turns, with_tools=with_tools)
    system_fault = probe.system_fault(template, turns, with_tools=with_tools)
    remedy = f"set system_prompt to an empty text, or {template_advice(template.source)}"
    yield _optional_rule("system message", system_fault, remedy)


def _check_end_of_turn(
    folder: Path, tokenizer: PreTrainedTokenizerBase, template: TemplateRenderer, ends: TurnEnds
) -> Finding:
    """Check that generation stops at the token that ends a turn; engines read stop ids from three files."""
    eos_ids_by_file = {
        "tokenizer_config.json": tokenizer.eos_token_id,
        "generation_config.json": read_json_object(folder / "generation_config.json").get("eos_token_id"),
        "config.json": read_json_object(folder / "config.json").get("eos_token_id"),
    }
    stops = {name: ids if isinstance(ids, list) else [ids] for name, ids in eos_ids_by_file.items() if ids is not None}
    shown = ", ".join(f"{ids} in {name}" for name, ids in stops.items()) or "none"
    stop_ids = {token for ids in stops.values() for token in ids}
    end_by_id = {template.encoder.encode_trusted(end)[0]: end for end in (ends.answer, ends.calls)}
    for token, end in end_by_id.items():
        if token not in stop_ids:
            turn = f"a turn ends with id {token}, {end!r}"
            remedy = f'add {token} to "eos_token_id" in {folder / "generation_config.json"}'
            found = f"{turn}, but the end-of-sequence ids are {shown}: turns would not stop there"
            return error("end of turn", found, remedy)
    names = " and ".join(f"id {token} ({end!r})" for token, end in end_by_id.items())
    return good("end of turn", f"generation stops at {names}; the end-of-sequence ids are {shown}")


def _check_tool_rules(template: TemplateRenderer, turns: TurnRenderer, *, with_tools: bool) -> Iterator[Finding]:
    conversations = {"tool results": probe.TOOL_TURNS, "several calls": probe.PARALLEL_TURNS}
    if not with_tools:
        yield from (skipped(rule, "the template can't be used with tools") for rule in conversations)
        return
    notes = dict(probe.turn_notes(template, turns.ends))
    for rule in ("text beside calls", "end of a turn with calls"):
        yield good(rule, notes[rule] or "yes")
    for rule, conversation in conversations.items():
        note = notes.get(rule)
        yield good(rule, note) if note else _check_appends(rule, template, turns, conversation, tools=probe.TOOLS)
    fault = probe.user_turns_fault(template, turns)
    remedy = f"give conversations with tools a single user turn, or {template_advice(template.source)}"
    yield _optional_rule("user turns with tools", fault, remedy)


def _optional_rule(rule: str, fault: str | None, remedy: str) -> Finding:
    """Return a finding about a rule that only some conversations need; a broken rule is a warning."""
    if fault is None:
        return good(rule, "append-only")
    return warning(rule, f"{fault.rstrip('.')}; such conversations are refused", remedy)


def _check_appends(
    rule: str, template: TemplateRenderer, turns: TurnRenderer, parts: Sequence[Sequence[ChatMessage]], **tools: Json
) -> Finding:
    return _run_check(rule, template, lambda: probe.check_append_only(template, turns, rule, parts, **tools))


def _run_check(rule: str, template: TemplateRenderer, check: Callable[[], object]) -> Finding:
    try:
        check()
    except TemplateDifferenceError as e:
        around = {}
        for side, ids in (("got", e.got), ("expected", e.expected)):
            part = ids[max(0, e.position - _SHOWN_TOKENS) : e.position + _SHOWN_TOKENS]
            around[side] = {"ids": part, "text": template.encoder.decode(part)}
        shown = "".join(f"\n  {side:<8} {part['ids']} {part['text']!r}" for side, part in around.items())
        facts = {f"{rule.replace(' ', '_')}_difference": {"position": e.position, **around}}
        return Finding(rule, "error", f"{e}{shown}", template_advice(template.source), facts)
    except TemplateError as e:
        return error(rule, str(e), template_advice(template.source))
    return good(rule, "append-only" if rule != "encoding" else "text between control tokens has the tokenizer's ids")


def _check_calls(template: TemplateRenderer, ends: TurnEnds, tool_parser: str) -> Finding:
    call = probe.find_example_call(template, ends)
    try:
        name = detect_format(*call) if tool_parser == AUTO else tool_parser
        parsed = [segment for segment in get_parser(name).parse(call.turn) if isinstance(segment, ToolCall)]
    except ConfigError as e:
        return error("calls", str(e), _PARSER_REMEDY)
    if [(segment.name, segment.arguments) for segment in parsed] != [(call.name, dict(call.arguments))]:
        return error("calls", f"tool_parser {name!r} does not read the call in {call.turn!r}", _PARSER_REMEDY)
    return good("calls", f"written as {call.turn!r}; tool_parser {name!r} reads them", tool_parser=name)


def _check_reasoning(template: TemplateRenderer, tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Report what the template does with reasoning; rollouts keep sampled reasoning in any case."""
    opens, _ = probe.find_lead(template)
    with_thinking, without = (
        tokenizer.apply_chat_template(
            [_USER_TURN], tokenize=False, add_generation_prompt=True, enable_thinking=on, **template.kwargs
        )
        for on in (True, False)
    )
    if with_thinking == without:
        opening = f"enable_thinking changes nothing{', and answers begin inside reasoning' if opens else ''}"
    elif opens:
        opening = "answers begin inside reasoning, unless enable_thinking is false"
    else:
        opening = "enable_thinking: false turns reasoning off"
    earlier = {
        "after a tool result": _describe_reasoning(template, _TOOL_RESULT),
        "after a user turn": _describe_reasoning(template, _USER_TURN),
    }
    shown = ", ".join(f"{fate} {when}" for when, fate in earlier.items())
    found = f"{opening}; reasoning of an earlier turn is {shown}"
    return good("reasoning", found, opens_reasoning=opens, earlier_reasoning=earlier)


def _describe_reasoning(template: TemplateRenderer, following: ChatMessage) -> str:
    """Return "kept", "dropped" or "refused": what the template does with the reasoning of a turn before `following`."""
    calls = {"tool_calls": [_TOOL_CALL]} if following["role"] == "tool" else {}
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


_RANDOM_EPISODES: Final = "random episodes"
# each turn of the policy contains this mark, in its text or in an argument, so that it can be found in a rendering
_MARK: Final = "policy-in-turn-{}-"
_TAG: Final = re.compile(r"<[^<>{}\s]{1,40}>|\[/?[A-Z_]{2,40}\]")
_TURN_TEXTS: Final = ("", "I look it up. ", "例: 1 < 2 & 3\n", 'So\n\n  {"a": 1} ')
_PARAMETERS: Final[Mapping[str, tuple[Mapping[str, Json], Sequence[Json]]]] = {
    "count": ({"type": "integer"}, (0, -17, 10**12)),
    "share": ({"type": "number", "description": 'Its "b" <b>.\n'}, (0.5, -1e-7, 3)),
    "kind": ({"type": "string", "enum": ["x > 1", "<b>", "é\n"]}, ("x > 1", "<b>", "é\n")),
    "tags": ({"type": "array", "items": {"type": "string"}}, ([], ["a", "例 \" '"])),
    "options": ({"type": "object", "properties": {"deep": {"type": ["boolean", "null"]}}}, ({}, {"deep": None})),
    "note": ({"type": "string"}, _TURN_TEXTS),
}
_TOOLS: Final = {"add": ("count", "share", "note"), "search": ("kind", "tags", "options", "note"), "now": ()}
_TEXTS: Final = (
    "",
    " ",
    "\n\n",
    "\n\nbegins",
    "ends\n\n",
    " \t padded \t ",
    "a\r\nb\n",
    "e\u0301\u200b 例",
    "👩\u200d👧 🇩🇪",
    "0",
    '{"a": ["<b>", null]}',
    "None",
    "{{ messages }}{% if x %}",
    "\\n",
    "\x00\ufffd",
    "one line " * 1200,
)


class RandomEpisode:
    """A conversation determined by a seed, played through `SGLangModel` with a scripted engine.

    The tokens sent before each turn are compared with the tokenizer's rendering of all messages. Earlier turns must
    keep their sampled tokens, and the tokens after the last turn must equal the rendering's. `tool_parser` must read
    the calls; message kinds in `refused` are left out. If `is_silent` is true, messages with calls have no text; see
    `TurnEnds`.

    Attributes:
        chat: Messages so far, as templates read them.
        contexts: New tokens sent before each turn.
        turns: Sampled tokens of each turn.
        unread: Error about the first calls that the parser does not read as the template writes them; the episode
            plays shorter calls instead. "" if there are no such calls.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        kwargs: Mapping[str, Json],
        tool_parser: str,
        *,
        refused: Collection[str] = (),
        max_calls: int = 3,
        is_silent: bool = False,
    ) -> None:
        self.chat: list[ChatMessage] = []
        self.contexts: list[list[int]] = []
        self.turns: list[list[int]] = []
        self.unread = ""
        self._history: list[Json] = []  # in Strands' form
        self._sent, self._answer = list[int](), dict[str, Json]()
        self._max_calls, self._is_silent, self._rng = max_calls, is_silent, np.random.default_rng(seed)
        engine = httpx.AsyncClient(transport=httpx.MockTransport(self._generate), base_url="http://scripted")
        self.model = SGLangModel(
            tokenizer, client=engine, tool_parser=tool_parser, chat_template_kwargs=kwargs, return_logprobs=False
        )
        self._renderer = make_renderer(tokenizer, kwargs)
        self._tags = sorted({"<think>", *_TAG.findall(str(self._renderer.source)), *tokenizer.get_added_vocab()})
        has_tools = "tools" not in refused and "calls" not in refused
        names = [str(name) for name in self._rng.permutation([*_TOOLS] if has_tools else [])]
        self._tools = [_tool_function(name) for name in names[: self._rng.integers(len(_TOOLS) + 1)]]
        self._specs = [{**tool, "inputSchema": {"json": tool["parameters"]}} for tool in self._tools]
        self._parser = bind_tool_specs(get_parser(tool_parser), self._specs)
        self._system = self._random_text() if "system messages" not in refused and self._rng.integers(2) else ""
        self._max_user_turns = 1 if self._tools and "more user turns with tools" in refused else 3

    async def play(self) -> None:
        """Play the episode.

        Raises:
            TemplateDifferenceError: The tokens that were sent differ from the template's.
            TemplateError: The template refuses messages, or the parser does not read the template's calls.
        """
        self.chat += [{"role": "system", "content": self._system}] if self._system else []
        max_rounds = 3 if any(_TOOLS[tool["name"]] for tool in self._tools) else 1
        for _ in range(self._rng.integers(self._max_user_turns) + 1):
            question = self._random_text()
            self.chat.append({"role": "user", "content": question})
            self._history.append({"role": "user", "content": [{"text": question}]})
            for count in self._rng.integers(self._max_calls, size=self._rng.integers(max_rounds)) + 1:
                await self._play_turn(count)
            await self._play_turn(0)

    async def _play_turn(self, call_count: int) -> None:
        mark, template = _MARK.format(len(self.turns)), self.model.template
        calls = [self._random_call(mark, is_last=at + 1 == call_count) for at in range(call_count)]
        try:
            message, written, end_id = self._write_turn(calls, mark)
        except TemplateError as e:  # a template may write some values in a way that no parser can read
            self.unread = self.unread or str(e)
            calls = [(name, {"note": mark} if "note" in arguments else {}) for name, arguments in calls]
            message, written, end_id = self._write_turn(calls, mark)
        # another stop token of the model, or a stop string, may end the turn too
        stop = self._choose([*[end_id] * 3, *sorted(template.end_ids), self.model.tokenizer.eos_token_id, written[-1]])
        ids = template.encoder.encode_trusted(written) + ([stop] if isinstance(stop, int) else [])
        self._answer = {"output_ids": ids, "meta_info": {"finish_reason": {"type": "stop", "matched": stop}}}
        answer = await self.model.answer(self._history, self._specs, self._system or None)
        self._compare_tokens()
        self.turns.append(ids)
        self.chat.append(message)
        uses = [block["toolUse"] for block in answer.message["content"] if "toolUse" in block]
        results = []
        for use, call in zip(uses, message.get("tool_calls", ()), strict=True):
            text, use_id = self._random_text(), use["toolUseId"]
            call["id"] = call["id"] or self.model.conversation.branch.calls.shown_ids[use_id]
            self.chat.append({"role": "tool", "name": use["name"], "tool_call_id": call["id"], "content": text})
            results.append({"toolResult": {"toolUseId": use_id, "status": "success", "content": [{"text": text}]}})
        self._history += [answer.message, *([{"role": "user", "content": results}] if results else [])]

    def _random_call(self, mark: str, *, is_last: bool) -> tuple[str, dict[str, Json]]:
        """Return a random call of a tool; if the tool has parameters, the argument `note` contains the mark.

        The tool of a turn's last call has parameters.
        """
        name = self._choose([tool["name"] for tool in self._tools if _TOOLS[tool["name"]] or not is_last])
        arguments = {key: self._choose(_PARAMETERS[key][1]) for key in _TOOLS[name] if self._rng.integers(3)}
        return name, {**arguments, "note": mark + self._choose(_TURN_TEXTS)} if _TOOLS[name] else {}

    def _write_turn(self, calls: list[tuple[str, dict[str, Json]]], mark: str) -> tuple[ChatMessage, str, int]:
        """Return a turn as a message, its sampled text and its end token's id.

        The turn has no text if the parser reads the calls only without text beside them.

        Raises:
            TemplateError: The template can't write calls, or the parser does not read them even without text.
        """
        opening, closing = getattr(self._parser, "open_reasoning", ""), getattr(self._parser, "close_reasoning", "")
        in_reasoning = self.model.template.opens_reasoning
        answer, reasoning = self._choose(_TURN_TEXTS) + mark, self._choose(("", "hm\n例")) if closing else ""
        tagged_reasoning = f"{'' if in_reasoning else opening}\n{reasoning}\n{closing}\n\n" if reasoning else ""
        for text in (tagged_reasoning + answer, ""):
            written, end_id = self.model.template.write_turn(text, calls)
            parsed = [part for part in self._parser.parse(written, in_reasoning) if isinstance(part, ToolCall)]
            if [(call.name, call.arguments) for call in parsed] == calls:
                content = "" if calls and self._is_silent else text and answer
                message: ChatMessage = {"role": "assistant", "content": content}
                message |= {"reasoning_content": reasoning} if text and reasoning else {}
                functions = [(call.written_id, {"name": call.name, "arguments": call.arguments}) for call in parsed]
                tool_calls = [{"type": "function", "id": call_id, "function": made} for call_id, made in functions]
                return message | ({"tool_calls": tool_calls} if tool_calls else {}), written, end_id
        raise TemplateError(f"tool_parser {self.model.tool_parser!r} does not read the calls {calls} in {written!r}")

    def _compare_tokens(self) -> None:
        """Compare the tokens just sent with the tokenizer's rendering, and add the newly sent tokens to `contexts`."""
        template, encoder, number = self.model.template, self.model.template.encoder, len(self.turns)
        tools = [{"type": "function", "function": tool} for tool in self._tools]
        rendered = self._renderer.render(_escape(self.chat, encoder), _escape(tools, encoder), escaped=False)
        known = [token for pair in zip(self.contexts, self.turns, strict=True) for ids in pair for token in ids]
        if known:
            end_id = template.end_of_calls_id if self.chat[-1]["role"] == "tool" else template.end_of_turn_id
            _, mark, after = rendered.rpartition(_MARK.format(number - 1))
            at = after.find(encoder.decode([end_id]))
            if not mark or at < 0:
                raise TemplateError(f"the chat template leaves out turn {number} of the policy, or its end")
            rendered = after[at:]
        # expect the tokenizer's own ids, unless a text looks like a control token
        is_plain = encoder.unescape(rendered) == rendered
        ids = encoder.encode_trusted(rendered) if is_plain else encoder.encode_rendered(rendered)
        expected = [*known, *(ids[1:] if known[-1:] == ids[:1] else ids)]
        fault = f"the tokens sent before turn {number + 1} differ from the chat template's rendering of the messages"
        probe.require_equal(encoder, self._sent, expected, fault)
        self.contexts.append(self._sent[len(known) :])

    def _generate(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":  # the scripted engine has no server info
            return httpx.Response(404)
        self._sent = orjson.loads(request.content)["input_ids"]
        return httpx.Response(200, json=self._answer)

    def _random_text(self) -> str:
        tag = self._choose(self._tags)
        return "".join(self._choose((tag, tag[1:], tag[:-1]) * 3 + _TEXTS) for _ in range(self._rng.integers(1, 4)))

    def _choose(self, options: Sequence[T]) -> T:
        return options[int(self._rng.integers(len(options)))]


def _tool_function(name: str) -> dict[str, Json]:
    properties = {key: _PARAMETERS[key][0] for key in _TOOLS[name]}
    return {"name": name, "description": f"{name}\n", "parameters": {"type": "object", "properties": properties}}


def _escape(value: Json, encoder: TokenEncoder) -> Json:
    """Return the value with all texts except roles escaped, so that they can't form control tokens."""
    if isinstance(value, Mapping):
        return {key: item if key == "role" else _escape(item, encoder) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item, encoder) for item in value]
    return encoder.escape(value) if isinstance(value, str) else value


def _play_random_episodes(
    tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Json], calls: Finding, ends: TurnEnds, seeds: range
) -> Finding:
    """Play an episode for each seed up to the first fault; `calls` is the finding on the tool parser."""
    variants, parser = [{**kwargs, "enable_thinking": on} for on in (True, False)], calls.facts.get("tool_parser")
    try:
        template, other = (ChatTemplate(tokenizer, **variant) for variant in variants)
    except TemplateError as e:
        advice = template_advice(kwargs.get("chat_template") or tokenizer.chat_template)
        return error(_RANDOM_EPISODES, f"none can be played: {shorten(str(e), 300)}", advice)
    if template.render([_USER_TURN]) == other.render([_USER_TURN]):
        variants = [dict(kwargs)]
    attempts: Mapping[str, Callable[[], object]] = {
        "tools": lambda: template.prompt_ids([_USER_TURN], probe.TOOLS),
        "system messages": lambda: template.prompt_ids([{"role": "system", "content": "x"}, _USER_TURN]),
        "more user turns with tools": lambda: template.turn_ids([_USER_TURN], probe.TOOLS, last_id=None),
    }
    renderer, contexts, unread = make_renderer(tokenizer, kwargs), 0, ""
    results = [_run_check(name, renderer, attempt) for name, attempt in attempts.items()]
    refused = {finding.name: finding.found for finding in [*results, calls] if finding.status == "error"}
    for seed in seeds:
        episode = RandomEpisode(
            tokenizer,
            seed,
            variants[seed % len(variants)],
            parser or "hermes",
            refused=refused,
            max_calls=1 if ends.one_by_one else 3,
            is_silent=ends.silent,
        )
        finding = _run_check(_RANDOM_EPISODES, renderer, partial(asyncio.run, episode.play()))
        if finding.status == "error":
            return _add_history(finding, episode, seed)
        contexts, unread = contexts + len(episode.contexts), unread or episode.unread
    found = f"{len(seeds)} played (seed {seeds.start}): all {contexts:,} contexts equal the template's, token by token"
    limits = [f"; played without {name}: {shorten(reason, 160)}" for name, reason in refused.items()]
    limits += [f"; {shorten(unread, 300)}; shorter calls were played"] if unread else []
    facts = {"count": len(seeds), "seed": seeds.start, "contexts": contexts, "without": [*refused]}
    return good(_RANDOM_EPISODES, found + "".join(limits), random_episodes=facts)


def _add_history(finding: Finding, episode: RandomEpisode, seed: int) -> Finding:
    arguments = {key: value for key, value in episode.model.template_kwargs.items() if key != "chat_template"}
    lines = [f"\n  {json.dumps(message, ensure_ascii=False):.200}" for message in episode.chat]
    history = f"\n  seed {seed}, template arguments {arguments}, after these messages:{''.join(lines)}"
    remedy = f"to reproduce this with the full messages, add: --episodes 1 --seed {seed} --json; {template_advice()}"
    facts = {**finding.facts, "failed_episode": {"seed": seed, "messages": episode.chat}}
    return replace(finding, found=finding.found + history, remedy=remedy, facts=facts)
