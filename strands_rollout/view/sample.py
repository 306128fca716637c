"""One sample as the page shows it: a row of the list, what looks wrong in it, and details to be read when it is opened.

Among them the conversation: each turn as thoughts, text and tool calls, and the results that were read after it, at
places that are counted in UTF-16 units from the stretch's first, as the page's script counts them. Problems add to
slime's contract what only the facts show.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from strands_rollout.code_tool.sandbox.code_runner import shorten
from strands_rollout.dump import DumpRecord, TokenTexts
from strands_rollout.dump.record import steps_of, sums_of, text_or_bytes, without_secrets
from strands_rollout.errors import ConfigError, DumpError
from strands_rollout.files.json_codec import Json
from strands_rollout.model.answers import call_id
from strands_rollout.samples import (
    METADATA_KEY,
    UNGRADED_METHODS,
    EpisodeFacts,
    finite,
    recorded_facts,
    run_metric,
)
from strands_rollout.settings import REWARD_KEY
from strands_rollout.slime_plugin.sample_contract import contract_violations, export_violations
from strands_rollout.template.tokens import token_bytes
from strands_rollout.tool_parsers import ParseFailure, Reasoning, Text, ToolCall, ToolParser, get_parser, parser_names
from strands_rollout.tool_parsers.base import TaggedParser
from strands_rollout.view.tokens import DriftMark, TokenLists, TurnHabits, drift_marks, is_control, runs, token_kinds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Part = list[Any]
"""["text" | "think", start, end], ["call", id, name, arguments], ["malformed", start, end, id, name, reason], or
["result", start, end, id of its call, or None]."""

_USUAL: Final = "hermes"
_INTEGER_BITS: Final = 63
_WRITES_CALLS: Final = re.compile(
    r"tool_call|tool▁call|DSML|TOOL_CALLS|python_|<\|channel\|>|^\s*\{|<\|open\|>call|functools\[|tools_prefix|<atem:|\[[\w.-]+\("
)
_END: Final = re.compile(
    rb"<(?:\||\xef\xbd\x9c)(?!tool).+(?:\||\xef\xbd\x9c)>|</s>|<eos>|<end_of_turn>|<turn\|>|<\|tool_response>|<seed:eos>|\[e~\["
)
_THOUGHTS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
# what a forged tag begins with; blanked where no control token wrote it
_BLANKED: Final = bytes.maketrans(b"<[", b"\0\0")
# as the chat templates of the parsers' families write the result of a call
_RESULTS: Final = [
    re.compile(pattern.encode(), re.DOTALL)
    for pattern in (
        *map(
            r"<{0}>\n?(.*?)\n?</{0}>".format, ("tool_response", "tool_response:opensource", "tool_result", "response")
        ),
        r"<\|tool_response_start\|>(.*?)<\|tool_response_end\|>",
        r"response:[^{\0]*\{value:<\|\"\|>(.*?)<\|\"\|>\}<tool_response\|>",
        r"<\|open\|>message role=\"tool\"[^<\0]*<\|sep\|>(.*?)<\|close\|>message<\|sep\|>",
        r"<\|start_of_role\|>tool(?:_response)?<\|end_of_role\|>(.*?)<\|end_of_text\|>",
        r"<seed:bos>tool\n(.*?)<seed:eos>",
        r"<\|start\|>tool [^<\0]*<\|message\|>[<\0]tool_output name=\"[^\"]*\">\n(.*?)\n[<\0]/tool_output><\|eot\|>",
        r"<｜tool▁output▁begin｜>(.*?)<｜tool▁output▁end｜>",  # noqa: RUF001 - DeepSeek's own characters
        r"<\|im_system\|>[^<\0]*<\|im_middle\|>(?:## Return of [^\n]*\n)?(.*?)<\|im_end\|>",
        r"<\|(?:start_header_id|header_start)\|>ipython<\|(?:end_header_id|header_end)\|>\n\n(.*?)<\|eo[tm](?:_id)?\|>",
        r"\[TOOL_RESULTS\](.*?)\[/TOOL_RESULTS\]",
        r"<\|start\|>functions\.\S+ to=assistant<\|channel\|>commentary<\|message\|>(.*?)<\|end\|>",
    )
]

_DROPPED: Final = frozenset({"failed", "removed", "stale", "masked"})
_PREVIEW_CHARS: Final = 160
_MOST_TEXT_CHARS: Final = 20_000
_MOST_PARTS: Final = 12
_PART_CHARS: Final = 40
_MOST_CONTRACT: Final = 20
_POSITION: Final = re.compile(r"\[(\d+)\] is")
_FEW_TOKENS: Final = 4
# what a sentence of the contract's holds -> what the list calls it
_CONTRACT_KINDS: Final = {
    "expected response_length=": "lengths disagree",
    " tokens with response_length": "lengths disagree",
    "where loss_mask is 0": "context logprob",
    "a FAILED sample would be trained": "trained failure",
    "ends with context": "trailing context",
    "the episode was aborted": "unfinished",
    "trains no token": "nothing trained",
    "reward is": "reward",
    "status is": "status",
}


def conversation(lists: TokenLists, texts: Mapping[int, bytes], facts: EpisodeFacts) -> list[tuple[int, list[Part]]]:
    """The parts of each turn and of the context after it, each with its first token.

    An id whose bytes `texts` lacks is shown as it is elsewhere; the facts may be empty.
    """
    if not texts:
        return []
    turns = [_turn_text(lists.ids[start:end], texts) for start, end in lists.turns]
    parser = _parser(facts.tool_parser, turns)
    contexts = dict(lists.contexts)
    found = []
    for number, ((start, end), text) in enumerate(zip(lists.turns, turns, strict=True), start=1):
        parts = list(_turn_parts(text, parser, number, facts.final_in_reasoning))
        found.append((start, parts))
        if end in contexts:
            calls = [part[1] if part[0] == "call" else part[3] for part in parts if part[0] in ("call", "malformed")]
            found.append((end, _results(lists.ids[end : contexts[end]], texts, calls)))
    return found


def _turn_text(ids: Sequence[int], texts: Mapping[int, bytes]) -> str:
    """Without the token that ended the turn."""
    parts = [_bytes_of(token, texts) for token in ids]
    if parts and _END.fullmatch(parts[-1]):
        parts.pop()
    return b"".join(parts).decode("utf-8", "replace")


def _bytes_of(token: int, texts: Mapping[int, bytes]) -> bytes:
    return texts[token] if token in texts else f"⟨{token}⟩".encode()


def _parser(name: object, turns: Sequence[str]) -> ToolParser:
    """The episode's own, or the first that reads all calls; else the usual one."""
    try:
        if isinstance(name, str):
            return get_parser(name)
    except ConfigError:
        pass  # one that was registered elsewhere
    texts = [text for text in turns if _WRITES_CALLS.search(text)]
    for known in sorted(parser_names(), key=lambda known: known != _USUAL) if texts else ():
        read = [part for text in texts for part in get_parser(known).parse(text)]
        if read and all(isinstance(part, ToolCall) for part in read):
            return get_parser(known)
    return get_parser(_USUAL)


def _turn_parts(text: str, parser: ToolParser, number: int, in_reasoning: object) -> Iterator[Part]:
    at = 0
    begins_in_thought = in_reasoning if isinstance(in_reasoning, bool) else _begins_in_thought(text, parser)
    for index, segment in enumerate(parser.segments(text, in_reasoning=begins_in_thought)):
        call = call_id(f"call_{number}_", index, segment)
        if isinstance(segment, ToolCall):
            yield ["call", call, segment.name, segment.arguments]
            continue
        inside = segment.raw if isinstance(segment, ParseFailure) else segment.text
        start = text.find(inside, at)
        if start < 0:  # a parser of the user's may show other text than it read
            continue
        at = start + len(inside)
        place = [_utf16(text[:start]), _utf16(text[:at])]
        if isinstance(segment, ParseFailure):
            yield ["malformed", *place, call, segment.name, segment.reason]
        elif isinstance(segment, Reasoning | Text):
            yield ["think" if isinstance(segment, Reasoning) else "text", *place]


def _begins_in_thought(text: str, parser: ToolParser) -> bool:
    """Whether a thought ends in a turn that did not begin there."""
    own: list[tuple[str, str]] = []
    # the closing token of others ends messages of all kinds
    if isinstance(parser, TaggedParser) and parser.tags.search(parser.close_reasoning):
        own.append((parser.open_reasoning, parser.close_reasoning))
    for opening, closing in (*own, *_THOUGHTS):
        before, found, _ = text.partition(closing)
        if found:
            return opening not in before
    return False


def _results(ids: Sequence[int], texts: Mapping[int, bytes], calls: Sequence[str]) -> list[Part]:
    """The results in a context, which come in the order of the calls."""
    tokens = [_bytes_of(token, texts) for token in ids]
    whole = b"".join(tokens)
    # what a tool's text says in the words of a tag is no tag, where the template writes tags as control tokens
    tagged = b"".join(text if is_control(text) else text.translate(_BLANKED) for text in tokens)
    for source in (tagged, whole):
        for pattern in _RESULTS:
            found = [match.span(1) for match in pattern.finditer(source)]
            if found:
                named = [*calls, *[None] * len(found)]
                return [
                    [
                        "result",
                        _utf16(whole[:start].decode("utf-8", "replace")),
                        _utf16(whole[:end].decode("utf-8", "replace")),
                        call,
                    ]
                    for (start, end), call in zip(found, named, strict=False)
                ]
    return []


def _utf16(text: str) -> int:
    """The length of a text as the page's script counts it."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


class Retokeniser:
    """Encodes turns again with the policy's tokenizer; knows the bytes of its ids, and which of them were added."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.texts = TokenTexts(tokenizer)
        self.controls = frozenset(tokenizer.get_added_vocab().values())
        self._tokenizer = tokenizer
        self._bytes_of = token_bytes(tokenizer)

    def marks(self, lists: TokenLists) -> list[DriftMark] | None:
        """Of all turns, in order, at places from the sample's first token; None where ids are not the tokenizer's."""

        def marks() -> list[DriftMark]:
            return [
                DriftMark(start + mark.start, start + mark.end, mark.instead)
                for start, end in lists.turns
                for mark in drift_marks(
                    lists.ids[start:end], self._tokenizer, self._bytes_of, lists.ids[start - 1] if start else None
                )
            ]

        return run_metric("drift", marks, of_sample=True)


def view_sample(
    record: DumpRecord, habits: TurnHabits, retokeniser: Retokeniser | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A sample's row and details, as values of JSON; the habits are its dump's.

    Without a retokeniser there are no marks of drift, and no texts but the record's.
    """
    lists = TokenLists.of(record)
    marks = retokeniser.marks(lists) if retokeniser is not None and record.has_tokens else None
    texts = record.token_texts
    if retokeniser is not None:
        ids = {*lists.ids, *(token for mark in marks or () for token in mark.instead)}
        texts = {token: retokeniser.texts[token] for token in sorted(ids) if token in retokeniser.texts}
    judged = _Judged(record, lists, token_kinds(record, lists), marks, find_problems(record, lists, habits), texts)
    return _row(judged), _detail(judged)


class _Judged(NamedTuple):
    record: DumpRecord
    lists: TokenLists
    kinds: list[str]
    marks: list[DriftMark] | None
    problems: list[Problem]
    texts: Mapping[int, bytes]


def _row(judged: _Judged) -> dict[str, Any]:
    record, lists, kinds, marks, problems, _ = judged
    values, facts = record.values, record.facts
    grade = _grade(record)
    # what failed, or was not graded, by a fault of the infrastructure is neither right nor wrong
    is_missing = values.get("status") in ("failed", "aborted") or grade.get("method") in UNGRADED_METHODS
    return {
        "index": values.get("index"),
        "group": _group(values),
        "set": _text(_evaluated(values).get("data_set")),
        "question": _question_id(values),
        "part": _part(facts),
        "status": _text(values.get("status")),
        "stop": _text(facts.stop_reason),
        "reward": None if is_missing else _reward(record),
        "right": None if is_missing else _number(grade.get("acc")),
        "parts": _parts(grade),
        "answer": shorten(_text(grade["pred"]), _PREVIEW_CHARS) if "pred" in grade else None,
        "turns": len(lists.turns) if facts.turns is None else facts.turns,
        "calls": facts.tool_calls,
        "errors": facts.tool_errors,
        "tools": _tools(facts),
        "length": finite(values.get("response_length")),
        "trained": kinds.count("trained"),
        "dropped": sum(kind in _DROPPED for kind in kinds),
        "drift": None if marks is None else sum(mark.end - mark.start for mark in marks),
        "problems": list(dict.fromkeys(problem.kind for problem in problems)),
        "times": sums_of(facts),
        "versions": sorted({span.version for span in lists.spans if span.version is not None}),
        "asked": shorten(_question(values.get("prompt")), _PREVIEW_CHARS),
        "final": shorten(_text(facts.final_text or values.get("response")), _PREVIEW_CHARS),
        "label": shorten(_text(values.get("label")), _PREVIEW_CHARS),
        "where": record.where,
        "source": record.source,
    }


def _detail(judged: _Judged) -> dict[str, Any]:
    record, lists, kinds, marks, problems, texts = judged
    values = record.values
    given = values.get("metadata")
    metadata = without_secrets(given) if isinstance(given, Mapping) else {}
    facts = recorded_facts(metadata)
    if facts:
        del metadata[METADATA_KEY]
    facts = {name: value for name, value in facts.items() if name not in ("spans", "resume", "final_text", "requests")}
    return {
        "ids": lists.ids,
        "prompt": lists.prompt_length,
        "kinds": [list(run) for run in runs(kinds)],
        "mask": [[int(bool(kind)), start, end] for kind, start, end in runs(lists.loss_mask)],
        "logprobs": [round(value, 3) if math.isfinite(value) else None for value in lists.logprobs],
        "spans": [list(span) for span in lists.spans],
        "drift": None if marks is None else [list(mark) for mark in marks],
        "problems": [list(problem) for problem in problems],
        "talk": [[start, plain(parts)] for start, parts in conversation(lists, texts, record.facts)],
        "steps": [[step.kind, step.at_s, step.s, step.turn, step.call] for step in steps_of(record.facts)],
        "texts": {str(token): text_or_bytes(text) for token, text in texts.items()},
        "messages": plain(values.get("prompt")),
        "response": _text(values.get("response")) if not texts or not lists.ids else "",
        "reward": plain(values.get("reward")),
        "label": plain(values.get("label")),
        "facts": plain(facts),
        "metadata": plain(metadata),
    }


def _reward(record: DumpRecord) -> float | None:
    reward, key = record.values.get("reward"), reward_key(record)
    return _number(reward.get(key) if key is not None and isinstance(reward, Mapping) else reward)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, bool) else finite(value)


def _grade(record: DumpRecord) -> Mapping[str, Any]:
    """The result of the reward function: in the reward, or, where slime reads a number alone, in the facts."""
    reward = record.values.get("reward")
    return reward if isinstance(reward, Mapping) else record.facts.reward or {}


def _parts(grade: Mapping[str, Any]) -> dict[str, float]:
    """The further numbers of a reward, by name."""
    numbers = {name: _number(value) for name, value in grade.items() if name not in ("score", "acc")}
    named = {str(plain(name)).removeprefix("parts/")[:_PART_CHARS]: number for name, number in numbers.items()}
    return {name: number for name, number in list(named.items())[:_MOST_PARTS] if number is not None}


def _tools(facts: EpisodeFacts) -> dict[str, list[int]]:
    """By tool: its calls, and how many of them were no success or exited with an error."""
    found, calls = Counter[str](), Counter[str]()
    for call in facts.calls or ():
        if isinstance(call, Mapping):
            box, name = call.get("sandbox"), _text(call.get("tool"))
            calls[name] += 1
            found[name] += call.get("status") != "success" or bool(isinstance(box, Mapping) and box.get("exit_code"))
    return {name: [count, found[name]] for name, count in calls.items()}


def _evaluated(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Which problem of which data set an evaluation asked; empty in training."""
    metadata = values.get("metadata")
    asked = metadata.get("eval") if isinstance(metadata, Mapping) else None
    return asked if isinstance(asked, Mapping) else {}


def _group(values: Mapping[str, Any]) -> Json:
    """The group in slime; of an evaluation, which has none, the problem: its samples are to be seen side by side."""
    asked = _evaluated(values)
    if values.get("group_index") is None and asked:
        return f"{asked['data_set']}/{asked['problem']}"
    return values.get("group_index")


def _question_id(values: Mapping[str, Any]) -> str:
    """Equal for samples of one question, in other runs too; "" where it is not known."""
    asked, prompt = _evaluated(values), values.get("prompt")
    if asked:
        return f"{asked['data_set']}/{asked['problem']}"
    text = json.dumps(plain(prompt), ensure_ascii=False) if prompt else ""
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest() if text else ""


def _part(facts: EpisodeFacts) -> str:
    """Which of a fan-out's samples it is; "" of a sample that is a rollout of its own."""
    part = facts.fan_out
    return f"{part['kind']}, {part['part'] + 1} of {part['of']}" if part and part["of"] > 1 else ""


def _question(prompt: Json) -> str:
    """The last thing that a user said, or the text."""
    if not isinstance(prompt, list):
        return _text(prompt)
    of_user = [message for message in prompt if message.get("role") == "user"]
    said = of_user[-1].get("content") if of_user else ""
    parts = said if isinstance(said, list) else [{"text": said}]
    return " ".join(_text(part["text"]) if "text" in part else f"[{part.get('type')}]" for part in parts)


def _text(value: object) -> str:
    if value is None:
        return ""
    return str(plain(value)) if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)


def plain(value: object) -> Json:
    """The value as JSON has it, for people: what has no form there as Python writes it, long texts shortened."""
    if isinstance(value, str):
        return shorten(value, _MOST_TEXT_CHARS).encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool) or (isinstance(value, int) and value.bit_length() <= _INTEGER_BITS):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else repr(value)[:_PREVIEW_CHARS]


class Problem(NamedTuple):
    """One thing that is wrong: its kind in a word or two, and, where it is at tokens, the first and the end of them."""

    kind: str
    text: str
    start: int | None = None
    end: int | None = None


def find_problems(record: DumpRecord, lists: TokenLists, habits: TurnHabits) -> list[Problem]:
    """All that looks wrong, what slime's contract says first."""
    violations = [Problem("violation", text) for text in record.violations]
    if not record.has_tokens:
        return violations
    found = [*_contract(record, lists), *_masks(record, lists), *_logprobs(lists), *_response(record, lists)]
    return [*found, *_turns(lists, habits), *_forged(lists, habits), *_versions(lists), *violations]


def _contract(record: DumpRecord, lists: TokenLists) -> Iterator[Problem]:
    try:
        sample = record.to_sample()
    except DumpError as e:
        yield Problem("no sample", str(e))
        return
    key = reward_key(record)
    if record.has_facts:
        aborted = sample.status.value == "aborted"
        unrewarded = sample.reward is None and not sample.metadata.get("eval")
        found = contract_violations(sample, reward_key=key, may_abort=aborted)
        found = [text for text in found if not (unrewarded and text.startswith("reward is"))]
    else:
        found = export_violations(sample, reward_key=key)
    for text in found[:_MOST_CONTRACT]:
        place = _POSITION.search(text)
        start = None if place is None or "tokens" in text else lists.prompt_length + int(place[1])
        kind = next((kind for part, kind in _CONTRACT_KINDS.items() if part in text), "contract")
        yield Problem(kind, text, start, None if start is None else start + 1)
    if len(found) > _MOST_CONTRACT:
        yield Problem("contract", f"and {len(found) - _MOST_CONTRACT} more of slime's contract")


def reward_key(record: DumpRecord) -> str | None:
    """Where the number is in its reward; None where the reward is one."""
    reward = record.values.get("reward")
    if not isinstance(reward, dict):
        return None
    if REWARD_KEY in reward:
        return REWARD_KEY
    numbers = (key for key, value in reward.items() if isinstance(value, int | float))
    return next(numbers, REWARD_KEY)


def _masks(record: DumpRecord, lists: TokenLists) -> Iterator[Problem]:
    """Where mask and spans say otherwise of who wrote a token."""
    if not lists.spans_recorded:
        return
    sampled = bytearray(len(lists.ids))
    for span in lists.spans:
        sampled[span.start : span.end] = b"\x01" * (span.end - span.start)
    offset, mask = lists.prompt_length, lists.loss_mask
    may_drop = bool(
        record.values.get("status") == "failed" or record.values.get("remove_sample") or record.facts.stale_tokens
    )
    disagree = [
        ("context is trained" if mask[place] else "a sampled token is not trained")
        if bool(mask[place]) != bool(sampled[offset + place]) and (mask[place] or not may_drop)
        else None
        for place in range(min(len(mask), len(sampled) - offset))
    ]
    for what, start, end in runs(disagree):
        if what:
            yield Problem("mask", f"{what}: the mask disagrees with the turn's span", offset + start, offset + end)
    count = record.facts.sampled_tokens
    if count is not None and count != sum(sampled):
        yield Problem("spans", f"spans cover {sum(sampled)} tokens; the episode says that {count} were sampled")


def _logprobs(lists: TokenLists) -> Iterator[Problem]:
    """Logprobs above 0, and turns that have none."""
    offset = lists.prompt_length
    values = lists.logprobs
    for positive, start, end in runs([value > 0 for value in values]):
        if positive:
            yield Problem("logprob", "a logprob above 0", offset + start, offset + end)
    for start, end in lists.turns:
        turn = values[start - offset : end - offset]
        trained = any(lists.loss_mask[start - offset : end - offset])
        if len(turn) >= _FEW_TOKENS and trained and not any(turn):
            yield Problem("logprob", "a turn whose logprobs are all 0.0", start, end)


def _response(record: DumpRecord, lists: TokenLists) -> Iterator[Problem]:
    """A response that is not what its tokens say; only where all their texts are known."""
    response, texts = record.values.get("response"), record.token_texts
    ids = lists.ids[lists.prompt_length :]
    if not isinstance(response, str) or not texts or not all(token in texts for token in ids):
        return
    text = b"".join(texts[token] for token in ids).decode("utf-8", "replace")
    if response != text and any(lists.loss_mask):
        place = next((p for p, (one, two) in enumerate(zip(response, text, strict=False)) if one != two), None)
        where = "is shorter or longer" if place is None else f"differs from character {place} on"
        yield Problem("text", f"the response's text is not that of its tokens: it {where}")


def _turns(lists: TokenLists, habits: TurnHabits) -> Iterator[Problem]:
    """Turns that were not closed before the next context began."""
    text = "a turn is not closed: context follows without an end of turn"
    for start, _ in lists.contexts if habits.ends_of_turn else ():
        if not habits.ends_of_turn.intersection(lists.ids[start - 1 : start + 1]):
            yield Problem("not closed", text, start - 1, start + 1)


def _forged(lists: TokenLists, habits: TurnHabits) -> Iterator[Problem]:
    for start, end in lists.contexts:
        for place in habits.forged(lists.ids[start:end]):
            text = "a control token inside context that no template writes there: text may have forged it"
            yield Problem("forged control", text, start + place, start + place + 1)


def _versions(lists: TokenLists) -> Iterator[Problem]:
    """Tokens of older weights than the sample's last ones."""
    last = lists.spans[-1].version if lists.spans else None
    for span in lists.spans:
        if last is not None and span.version not in (None, last):
            text = f"sampled by weights {span.version}; the sample ends with {last}"
            yield Problem("stale version", text, span.start, span.end)
