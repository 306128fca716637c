"""One sample as the page shows it: a row of the list, and the details that are read when it is opened.

Among them the conversation: each turn as thoughts, text and tool calls, and the results that were read after it, at
places that are counted in UTF-16 units from the stretch's first, as the page's script counts them.
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
from strands_rollout.dump.record import METADATA_KEY, steps_of, sums_of, text_or_bytes, without_secrets
from strands_rollout.errors import ConfigError
from strands_rollout.files import Json
from strands_rollout.model.conversation import call_id
from strands_rollout.samples import finite, kept
from strands_rollout.template.tokens import token_bytes
from strands_rollout.tool_parsers import ParseFailure, Reasoning, Text, ToolCall, ToolParser, get_parser, parser_names
from strands_rollout.view.problems import Problem, find_problems, reward_key
from strands_rollout.view.tokens import DriftMark, TokenLists, TurnHabits, drift_marks, is_control, runs, token_kinds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Part = list[Any]
"""["text" | "think", start, end], ["call", id, name, arguments], ["malformed", start, end, id, name, reason], or
["result", start, end, id of its call, or None]."""

_USUAL: Final = "hermes"
_INTEGER_BITS: Final = 63
_WRITES_CALLS: Final = re.compile(r"tool_call|tool▁call|DSML|TOOL_CALLS|python_tag|<\|channel\|>|^\s*\{")
_END: Final = re.compile(rb"<(?:\||\xef\xbd\x9c)(?!tool).+(?:\||\xef\xbd\x9c)>|</s>|<eos>|<end_of_turn>")
_THOUGHT_ENDS: Final = ("</think>", "[/THINK]")
# what a forged tag begins with; blanked where no control token wrote it
_BLANKED: Final = bytes.maketrans(b"<[", b"\0\0")
# as the chat templates of the parsers' families write the result of a call
_RESULTS: Final = [
    re.compile(pattern.encode(), re.DOTALL)
    for pattern in (
        r"<tool_response>\n?(.*?)\n?</tool_response>",
        r"<｜tool▁output▁begin｜>(.*?)<｜tool▁output▁end｜>",  # noqa: RUF001 - DeepSeek's own characters
        r"<\|im_system\|>[^<\0]*<\|im_middle\|>(?:## Return of [^\n]*\n)?(.*?)<\|im_end\|>",
        r"<\|start_header_id\|>ipython<\|end_header_id\|>\n\n(.*?)<\|eot_id\|>",
        r"\[TOOL_RESULTS\](.*?)\[/TOOL_RESULTS\]",
        r"<\|start\|>functions\.\S+ to=assistant<\|channel\|>commentary<\|message\|>(.*?)<\|end\|>",
    )
]

_DROPPED: Final = frozenset({"failed", "removed", "stale", "masked"})
_PREVIEW_CHARS: Final = 160
_MOST_TEXT_CHARS: Final = 20_000
_MOST_PARTS: Final = 12
_PART_CHARS: Final = 40


def conversation(
    lists: TokenLists, texts: Mapping[int, bytes], facts: Mapping[str, Any]
) -> list[tuple[int, list[Part]]]:
    """The parts of each turn and of the context after it, each with its first token.

    An id whose bytes `texts` lacks is shown as it is elsewhere; the facts may be empty.
    """
    if not texts:
        return []
    turns = [_turn_text(lists.ids[start:end], texts) for start, end in lists.turns]
    parser = _parser(facts.get("tool_parser"), turns)
    contexts = dict(lists.contexts)
    found = []
    for number, ((start, end), text) in enumerate(zip(lists.turns, turns, strict=True), start=1):
        parts = list(_turn_parts(text, parser, number, facts.get("final_in_reasoning")))
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
    for index, segment in enumerate(parser.segments(text, in_reasoning=_begins_in_thought(text, in_reasoning))):
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


def _begins_in_thought(text: str, recorded: object) -> bool:
    """As the episode says; of a foreign sample, where a thought ends that did not begin."""
    if isinstance(recorded, bool):
        return recorded
    for end in _THOUGHT_ENDS:
        before, found, _ = text.partition(end)
        if found:
            return end.replace("/", "") not in before
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
                for mark in drift_marks(lists.ids[start:end], self._tokenizer, self._bytes_of)
            ]

        return kept("drift", marks, of_sample=True)


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
    return {
        "index": values.get("index"),
        "group": _group(values),
        "set": _text(_evaluated(values).get("data_set")),
        "question": _question_id(values),
        "part": _part(facts),
        "status": _text(values.get("status")),
        "stop": _text(facts.get("stop_reason")),
        "reward": _reward(record),
        "right": _number(grade.get("acc")),
        "parts": _parts(grade),
        "answer": shorten(_text(grade["pred"]), _PREVIEW_CHARS) if "pred" in grade else None,
        "turns": finite(facts.get("turns")) if "turns" in facts else len(lists.turns),
        "calls": finite(facts.get("tool_calls")),
        "errors": finite(facts.get("tool_errors")),
        "tools": _tools(facts),
        "length": finite(values.get("response_length")),
        "trained": kinds.count("trained"),
        "dropped": sum(kind in _DROPPED for kind in kinds),
        "drift": None if marks is None else sum(mark.end - mark.start for mark in marks),
        "problems": list(dict.fromkeys(problem.kind for problem in problems)),
        "times": sums_of(facts),
        "versions": sorted({span.version for span in lists.spans if span.version is not None}),
        "asked": shorten(_question(values.get("prompt")), _PREVIEW_CHARS),
        "final": shorten(_text(facts.get("final_text") or values.get("response")), _PREVIEW_CHARS),
        "label": shorten(_text(values.get("label")), _PREVIEW_CHARS),
        "where": record.where,
        "source": record.source,
    }


def _detail(judged: _Judged) -> dict[str, Any]:
    record, lists, kinds, marks, problems, texts = judged
    values = record.values
    given = values.get("metadata")
    metadata = without_secrets(given) if isinstance(given, Mapping) else {}
    facts = metadata.pop(METADATA_KEY, None) if record.facts else {}
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
    """What the reward function said: in the reward, or, where slime reads a number alone, in the facts."""
    found = (given for given in (record.values.get("reward"), record.facts.get("reward")) if isinstance(given, Mapping))
    return next(found, {})


def _parts(grade: Mapping[str, Any]) -> dict[str, float]:
    """The further numbers of a reward, by name."""
    numbers = {name: _number(value) for name, value in grade.items() if name not in ("score", "acc")}
    named = {str(plain(name)).removeprefix("parts/")[:_PART_CHARS]: number for name, number in numbers.items()}
    return {name: number for name, number in list(named.items())[:_MOST_PARTS] if number is not None}


def _tools(facts: Mapping[str, Any]) -> dict[str, list[int]]:
    """By tool: its calls, and how many of them were no success or exited with an error."""
    found, calls = Counter[str](), Counter[str]()
    given = facts.get("calls")
    for call in given if isinstance(given, list) else ():
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


def _part(facts: Mapping[str, Any]) -> str:
    """Which of a fan-out's samples it is; "" of a sample that is a rollout of its own."""
    part = facts.get("fan_out")
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
