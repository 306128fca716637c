"""`check-template`: check that a tokenizer's chat template suits token-exact conversations.

Each rule is checked on a short conversation. Then random episodes are rendered: the tokens that would be sent must
equal those of the tokenizer's own `apply_chat_template` of the whole history.
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
_NO_TOOLS: Final = "use a model that was trained to call tools, set tools: [], or "
_PARSER: Final = "set tool_parser (--tool-parser) to auto, or to the name of the model's own format"
_WINDOW: Final = 8
_REASONING: Final = "probed-reasoning"
_USER_TURN: Final[ChatMessage] = {"role": "user", "content": "question"}
_TOOL_RESULT: Final[ChatMessage] = {"role": "tool", "name": "probe", "tool_call_id": "call00001", "content": "1"}
_CALL: Final = {"type": "function", "id": "call00001", "function": {"name": "probe", "arguments": {"x": "1"}}}


def load_tokenizer_folder(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder.

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
    try:
        return load_tokenizer(str(folder))
    except RolloutError:
        raise
    except Exception as e:  # tokenizers raises plain Exceptions, and transformers any exception of its parts
        raise ConfigError(f"the tokenizer of {folder} can't be loaded: {type(e).__name__}: {e}") from e


def read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or of a hub id; raise ConfigError if that fails."""
    return load_tokenizer_folder(Path(name)) if Path(name).exists() else load_tokenizer(name)


def read_object(file: Path) -> dict[str, Json]:
    """Return the JSON object in a file; empty if there is none."""
    try:
        value = orjson.loads(read_regular(file, MAX_JSON_BYTES))
    except (OSError, orjson.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def template_text(given: Path) -> str:
    """Return the template in a file, or this package's template of that name; raise ConfigError if it is neither."""
    if str(given) in SHIPPED_TEMPLATES:
        return str(given)
    try:
        return given.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(
            f"got the template {given}: {e}; expected a file, or one of {', '.join(SHIPPED_TEMPLATES)}"
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
    """Check each rule on the tokenizer's template, or on `chat_template`, and render random episodes.

    `tool_parser` must read the template's calls; "auto" picks a parser that does. `episodes` random episodes are
    rendered, with seeds from `seed`. Must not be called from a running event loop.
    """
    kwargs = {} if chat_template is None else {"chat_template": chat_template}
    rule, own = "template", template_advice(chat_template or tokenizer.chat_template)
    try:
        (template := make_renderer(tokenizer, kwargs)).render([_USER_TURN])  # conversations begin with a user
        rule = "end of turn"
        end_of_turn = probe.find_end_of_turn(template)
    except TemplateError as e:
        return [error(rule, str(e), own)]
    tool_findings = [
        good(rule, "yes") if fault is None else error(rule, fault, _NO_TOOLS + own)
        for rule, fault in probe.tool_faults(template)
    ]
    ends = TurnEnds(end_of_turn, end_of_turn)
    if len(tool_findings) > 1:  # otherwise the template does not render tools
        try:
            ends = probe.find_ends(template, end_of_turn)
        except TemplateError as e:
            tool_findings.append(error("end of a turn with calls", str(e), own))
    calls, seeds = _calls(template, ends, tool_parser), range(seed, seed + episodes)
    return [
        _end_of_turn(Path(name), tokenizer, template, ends),
        *_rules(template, ends, tool_findings),
        calls,
        _reasoning(template, tokenizer),
        *([_random_episodes(tokenizer, kwargs, calls, ends, seeds)] if seeds else []),
    ]


def _rules(template: TemplateRenderer, ends: TurnEnds, tool_findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield findings on which messages the template appends; `tool_findings` are those about tools."""
    with_tools, turns = all(finding.status == "ok" for finding in tool_findings), TurnRenderer(template, ends)
    yield _tried("encoding", template, lambda: probe.check_encoding(template, with_tools=with_tools))
    yield _appends("user turns", template, turns, probe.USER_TURNS)
    yield from tool_findings
    yield from _tool_rules(template, turns, with_tools=with_tools)
    system_fault = probe.system_fault(template, turns, with_tools=with_tools)
    remedy = f"set system_prompt to an empty text, or {template_advice(template.source)}"
    yield _needed_by_some("system message", system_fault, remedy)


def _end_of_turn(
    folder: Path, tokenizer: PreTrainedTokenizerBase, template: TemplateRenderer, ends: TurnEnds
) -> Finding:
    """Check that generation stops at the token that ends a turn; engines read stop ids from three files."""
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
    """Yield findings on how tool results are appended and assistant turns are rewritten."""
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
    remedy = f"let conversations with tools have one user's turn, or {template_advice(template.source)}"
    yield _needed_by_some("user turns with tools", fault, remedy)


def _needed_by_some(rule: str, fault: str | None, remedy: str) -> Finding:
    """Return a finding for a rule that only some conversations need; without the rule they are refused."""
    if fault is None:
        return good(rule, "append-only")
    return warning(rule, f"{fault} Such conversations are refused.", remedy)


def _appends(
    rule: str, template: TemplateRenderer, turns: TurnRenderer, parts: Sequence[Sequence[ChatMessage]], **tools: Json
) -> Finding:
    return _tried(rule, template, lambda: probe.check_append_only(template, turns, rule, parts, **tools))


def _tried(rule: str, template: TemplateRenderer, check: Callable[[], object]) -> Finding:
    """Run a check and return its finding; if tokens differ, with both renderings around the first difference."""
    try:
        check()
    except TemplateDifferenceError as e:
        around = {}
        for side, ids in (("got", e.got), ("expected", e.expected)):
            part = ids[max(0, e.position - _WINDOW) : e.position + _WINDOW]
            around[side] = {"ids": part, "text": template.encoder.decode(part)}
        shown = "".join(f"\n  {side:<8} {part['ids']} {part['text']!r}" for side, part in around.items())
        facts = {f"{rule.replace(' ', '_')}_difference": {"position": e.position, **around}}
        return Finding(rule, "error", f"{e}{shown}", template_advice(template.source), facts)
    except TemplateError as e:
        return error(rule, str(e), template_advice(template.source))
    return good(rule, "append-only" if rule != "encoding" else "the tokenizer's own ids, piece by piece")


def _calls(template: TemplateRenderer, ends: TurnEnds, tool_parser: str) -> Finding:
    """Find the tool parser that reads the template's calls."""
    call = probe.find_example_call(template, ends)
    try:
        name = detect_format(*call) if tool_parser == AUTO else tool_parser
        read = [segment for segment in get_parser(name).parse(call.turn) if isinstance(segment, ToolCall)]
    except ConfigError as e:
        return error("calls", str(e), _PARSER)
    if [(segment.name, segment.arguments) for segment in read] != [(call.name, dict(call.arguments))]:
        return error("calls", f"{name!r} does not read the call in {call.turn!r}", _PARSER)
    return good("calls", f"written as {call.turn!r}; tool_parser {name!r} reads them", tool_parser=name)


def _reasoning(template: TemplateRenderer, tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Report whether the template keeps reasoning; rollouts keep sampled reasoning in any case."""
    opens, _ = probe.find_lead(template)
    with_thinking, without = (
        tokenizer.apply_chat_template(
            [_USER_TURN], tokenize=False, add_generation_prompt=True, enable_thinking=on, **template.kwargs
        )
        for on in (True, False)
    )
    if with_thinking == without:
        opening = f"enable_thinking changes nothing{', answers begin inside reasoning' if opens else ''}"
    elif opens:
        opening = "answers begin inside reasoning, unless enable_thinking is false"
    else:
        opening = "enable_thinking: false leaves thinking out"
    kept = {"after a tool result": _keeps(template, _TOOL_RESULT), "after a user turn": _keeps(template, _USER_TURN)}
    shown = ", ".join(f"{what} {when}" for when, what in kept.items())
    words = f"{opening}; an earlier turn's is {shown}"
    return good("reasoning", words, opens_reasoning=opens, earlier_reasoning=kept)


def _keeps(template: TemplateRenderer, following: ChatMessage) -> str:
    """Describe what happens to a turn's reasoning, as its own key or within the text, before a message."""
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


_RANDOM: Final = "random episodes"
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
    """A conversation that a seed determines, played through `SGLangModel` with a scripted engine.

    What is sent before each turn is compared with the tokenizer's own rendering of all messages, from the end of the
    turn before: the policy's turns stay as sampled. `tool_parser` must read the calls; message kinds in `refused` are
    left out. With `is_silent`, calls come without text: see `TurnEnds`.

    Attributes:
        chat: The messages so far, as templates read them.
        contexts: The new tokens that were sent before each turn.
        turns: The sampled tokens.
        unread: The first calls that the parser does not read as the template writes them; shorter calls are played
            instead.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        kwargs: Mapping[str, Json],
        tool_parser: str,
        *,
        refused: Collection[str] = (),
        most_calls: int = 3,
        is_silent: bool = False,
    ) -> None:
        self.chat: list[ChatMessage] = []
        self.contexts: list[list[int]] = []
        self.turns: list[list[int]] = []
        self.unread = ""
        self._history: list[Json] = []  # in Strands' form
        self._sent, self._answer = list[int](), dict[str, Json]()
        self._most_calls, self._is_silent, self._rng = most_calls, is_silent, np.random.default_rng(seed)
        engine = httpx.AsyncClient(transport=httpx.MockTransport(self._generate), base_url="http://scripted")
        self.model = SGLangModel(
            tokenizer, client=engine, tool_parser=tool_parser, chat_template_kwargs=kwargs, return_logprobs=False
        )
        self._renderer = make_renderer(tokenizer, kwargs)
        self._tags = sorted({"<think>", *_TAG.findall(str(self._renderer.source)), *tokenizer.get_added_vocab()})
        has_tools = "tools" not in refused and "calls" not in refused
        names = [str(name) for name in self._rng.permutation([*_TOOLS] if has_tools else [])]
        self._tools = [_function(name) for name in names[: self._rng.integers(len(_TOOLS) + 1)]]
        self._specs = [{**tool, "inputSchema": {"json": tool["parameters"]}} for tool in self._tools]
        self._parser = bind_tool_specs(get_parser(tool_parser), self._specs)
        self._system = self._text() if "system messages" not in refused and self._rng.integers(2) else ""
        self._most_users = 1 if self._tools and "more user turns with tools" in refused else 3

    async def play(self) -> None:
        """Play the episode.

        Raises:
            TemplateDifferenceError: The tokens that were sent differ from the template's.
            TemplateError: The template refuses messages, or the parser does not read the calls that the template
                writes.
        """
        self.chat += [{"role": "system", "content": self._system}] if self._system else []
        most_rounds = 3 if any(_TOOLS[tool["name"]] for tool in self._tools) else 1
        for _ in range(self._rng.integers(self._most_users) + 1):
            question = self._text()
            self.chat.append({"role": "user", "content": question})
            self._history.append({"role": "user", "content": [{"text": question}]})
            for count in self._rng.integers(self._most_calls, size=self._rng.integers(most_rounds)) + 1:
                await self._turn(count)
            await self._turn(0)

    async def _turn(self, call_count: int) -> None:
        """Play a turn and the results of its calls."""
        mark, template = _MARK.format(len(self.turns)), self.model.template
        calls = [self._call(mark, is_last=at + 1 == call_count) for at in range(call_count)]
        try:
            message, written, end_id = self._message(calls, mark)
        except TemplateError as e:  # a template may write some values in a way that no parser can read
            self.unread = self.unread or str(e)
            calls = [(name, {"note": mark} if "note" in given else {}) for name, given in calls]
            message, written, end_id = self._message(calls, mark)
        # another stop token of the model may end it, or a stop string
        stop = self._one_of([*[end_id] * 3, *sorted(template.end_ids), self.model.tokenizer.eos_token_id, written[-1]])
        ids = template.encoder.encode_trusted(written) + ([stop] if isinstance(stop, int) else [])
        self._answer = {"output_ids": ids, "meta_info": {"finish_reason": {"type": "stop", "matched": stop}}}
        answer = await self.model.answer(self._history, self._specs, self._system or None)
        self._compare()
        self.turns.append(ids)
        self.chat.append(message)
        uses = [block["toolUse"] for block in answer.message["content"] if "toolUse" in block]
        results = []
        for use, call in zip(uses, message.get("tool_calls", ()), strict=True):
            text, use_id = self._text(), use["toolUseId"]
            call["id"] = call["id"] or self.model.conversation.branch.calls.shown_ids[use_id]
            self.chat.append({"role": "tool", "name": use["name"], "tool_call_id": call["id"], "content": text})
            results.append({"toolResult": {"toolUseId": use_id, "status": "success", "content": [{"text": text}]}})
        self._history += [answer.message, *([{"role": "user", "content": results}] if results else [])]

    def _call(self, mark: str, *, is_last: bool) -> tuple[str, dict[str, Json]]:
        """Return a call of a tool with some of its arguments; those of the last call contain the mark."""
        name = self._one_of([tool["name"] for tool in self._tools if _TOOLS[tool["name"]] or not is_last])
        given = {key: self._one_of(_PARAMETERS[key][1]) for key in _TOOLS[name] if self._rng.integers(3)}
        return name, {**given, "note": mark + self._one_of(_TURN_TEXTS)} if _TOOLS[name] else {}

    def _message(self, calls: list[tuple[str, dict[str, Json]]], mark: str) -> tuple[ChatMessage, str, int]:
        """Return a turn as a message, its sampled tokens and its end token; without text if calls allow none."""
        opening, closing = getattr(self._parser, "open_reasoning", ""), getattr(self._parser, "close_reasoning", "")
        in_reasoning = self.model.template.opens_reasoning
        said, thought = self._one_of(_TURN_TEXTS) + mark, self._one_of(("", "hm\n例")) if closing else ""
        opened = f"{'' if in_reasoning else opening}\n{thought}\n{closing}\n\n" if thought else ""
        for words in (opened + said, ""):
            written, end_id = self.model.template.write_turn(words, calls)
            read = [part for part in self._parser.parse(written, in_reasoning) if isinstance(part, ToolCall)]
            if [(call.name, call.arguments) for call in read] == calls:
                shown = "" if calls and self._is_silent else words and said
                message: ChatMessage = {"role": "assistant", "content": shown}
                message |= {"reasoning_content": thought} if words and thought else {}
                functions = [(call.written_id, {"name": call.name, "arguments": call.arguments}) for call in read]
                made = [{"type": "function", "id": own, "function": function} for own, function in functions]
                return message | ({"tool_calls": made} if made else {}), written, end_id
        raise TemplateError(f"tool_parser {self.model.tool_parser!r} does not read the calls {calls} in {written!r}")

    def _compare(self) -> None:
        template, encoder, number = self.model.template, self.model.template.encoder, len(self.turns)
        tools = [{"type": "function", "function": tool} for tool in self._tools]
        rendered = self._renderer.render(_escaped(self.chat, encoder), _escaped(tools, encoder), escaped=False)
        known = [token for pair in zip(self.contexts, self.turns, strict=True) for ids in pair for token in ids]
        if known:
            end_id = template.end_of_calls_id if self.chat[-1]["role"] == "tool" else template.end_of_turn_id
            _, mark, after = rendered.rpartition(_MARK.format(number - 1))
            at = after.find(encoder.decode([end_id]))
            if not mark or at < 0:
                raise TemplateError(f"the chat template leaves out turn {number} of the policy, or its end")
            rendered = after[at:]
        # the tokenizer's own ids, except for texts that look like control tokens
        is_plain = encoder.unescape(rendered) == rendered
        ids = encoder.encode_trusted(rendered) if is_plain else encoder.encode_rendered(rendered)
        expected = [*known, *(ids[1:] if known[-1:] == ids[:1] else ids)]
        words = f"what is sent before turn {number + 1} is not what the chat template makes of the messages"
        probe.require_equal(encoder, self._sent, expected, words)
        self.contexts.append(self._sent[len(known) :])

    def _generate(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":  # the scripted engine has no server info
            return httpx.Response(404)
        self._sent = orjson.loads(request.content)["input_ids"]
        return httpx.Response(200, json=self._answer)

    def _text(self) -> str:
        """Return a random text of a user, tool or system message."""
        tag = self._one_of(self._tags)
        return "".join(self._one_of((tag, tag[1:], tag[:-1]) * 3 + _TEXTS) for _ in range(self._rng.integers(1, 4)))

    def _one_of(self, options: Sequence[T]) -> T:
        return options[int(self._rng.integers(len(options)))]


def _function(name: str) -> dict[str, Json]:
    properties = {key: _PARAMETERS[key][0] for key in _TOOLS[name]}
    return {"name": name, "description": f"{name}\n", "parameters": {"type": "object", "properties": properties}}


def _escaped(value: Json, encoder: TokenEncoder) -> Json:
    """Return a value whose texts, except roles, can't form control tokens."""
    if isinstance(value, Mapping):
        return {key: item if key == "role" else _escaped(item, encoder) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item, encoder) for item in value]
    return encoder.escape(value) if isinstance(value, str) else value


def _random_episodes(
    tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Json], calls: Finding, ends: TurnEnds, seeds: range
) -> Finding:
    """Render an episode for each seed; `calls` is the finding on the tool parser."""
    variants, parser = [{**kwargs, "enable_thinking": on} for on in (True, False)], calls.facts.get("tool_parser")
    try:
        template, other = (ChatTemplate(tokenizer, **variant) for variant in variants)
    except TemplateError as e:
        own = template_advice(kwargs.get("chat_template") or tokenizer.chat_template)
        return error(_RANDOM, f"none can be played: {shorten(str(e), 300)}", own)
    if template.render([_USER_TURN]) == other.render([_USER_TURN]):
        variants = [dict(kwargs)]
    attempts: Mapping[str, Callable[[], object]] = {
        "tools": lambda: template.prompt_ids([_USER_TURN], probe.TOOLS),
        "system messages": lambda: template.prompt_ids([{"role": "system", "content": "x"}, _USER_TURN]),
        "more user turns with tools": lambda: template.turn_ids([_USER_TURN], probe.TOOLS, last_id=None),
    }
    renderer, contexts, unread = make_renderer(tokenizer, kwargs), 0, ""
    tried = [_tried(name, renderer, attempt) for name, attempt in attempts.items()]
    refused = {one.name: one.found for one in [*tried, calls] if one.status == "error"}
    for seed in seeds:
        given = variants[seed % len(variants)], parser or "hermes"
        most = 1 if ends.one_by_one else 3
        episode = RandomEpisode(tokenizer, seed, *given, refused=refused, most_calls=most, is_silent=ends.silent)
        found = _tried(_RANDOM, renderer, partial(asyncio.run, episode.play()))
        if found.status == "error":
            return _with_history(found, episode, seed)
        contexts, unread = contexts + len(episode.contexts), unread or episode.unread
    words = f"{len(seeds)} played (seed {seeds.start}): {contexts:,} contexts equal the template's, token by token"
    left_out = [f"; played without {name}: {shorten(reason, 160)}" for name, reason in refused.items()]
    left_out += [f"; {shorten(unread, 300)}; shorter ones were played"] if unread else []
    facts = {"count": len(seeds), "seed": seeds.start, "contexts": contexts, "without": [*refused]}
    return good(_RANDOM, words + "".join(left_out), random_episodes=facts)


def _with_history(found: Finding, episode: RandomEpisode, seed: int) -> Finding:
    """Add the messages and the seed that led to a difference to a finding."""
    arguments = {key: value for key, value in episode.model.template_kwargs.items() if key != "chat_template"}
    lines = [f"\n  {json.dumps(message, ensure_ascii=False):.200}" for message in episode.chat]
    told = f"\n  seed {seed}, template arguments {arguments}, after these messages:{''.join(lines)}"
    remedy = f"see it again, with the whole messages: --episodes 1 --seed {seed} --json; {template_advice()}"
    facts = {**found.facts, "failed_episode": {"seed": seed, "messages": episode.chat}}
    return replace(found, found=found.found + told, remedy=remedy, facts=facts)
