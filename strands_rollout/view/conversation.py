"""Read a sample's conversation from its tokens: thoughts, text and calls of each turn, and the tool results after it.

Offsets are in UTF-16 units from the start of a turn or context, as in the page's JavaScript.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from strands_rollout.errors import ConfigError
from strands_rollout.model.answers import call_id
from strands_rollout.samples import EpisodeFacts
from strands_rollout.tool_parsers import ParseFailure, Reasoning, Text, ToolCall, ToolParser, get_parser, parser_names
from strands_rollout.tool_parsers.base import TaggedParser
from strands_rollout.view.tokens import TokenLists, is_control

Part = list[Any]
"""["text" | "think", start, end], ["call", id, name, arguments], ["malformed", start, end, id, name, reason], or
["result", start, end, id of its call or None]."""

_DEFAULT_PARSER: Final = "hermes"
_CALL_SYNTAX: Final = re.compile(
    r"tool_call|tool▁call|DSML|TOOL_CALLS|python_|<\|channel\|>|^\s*\{|<\|open\|>call|functools\[|tools_prefix|<atem:|\[[\w.-]+\("
)
_END_OF_TURN: Final = re.compile(
    rb"<(?:\||\xef\xbd\x9c)(?!tool).+(?:\||\xef\xbd\x9c)>|</s>|<eos>|<end_of_turn>|<turn\|>|<\|tool_response>|<seed:eos>|\[e~\["
)
_THOUGHT_TAGS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
# this table blanks the first characters of tags in text other than control tokens, so that forged tags don't match
_BLANK_TAG_STARTS: Final = bytes.maketrans(b"<[", b"\0\0")
# the result of a call, as the chat templates of the supported model families write it
_RESULT_PATTERNS: Final = [
    re.compile(pattern.encode(), re.DOTALL)
    for pattern in (
        r"<tool_response>\n?(.*?)\n?</tool_response>",
        r"<tool_response:opensource>\n?(.*?)\n?</tool_response:opensource>",
        r"<tool_result>\n?(.*?)\n?</tool_result>",
        r"<response>\n?(.*?)\n?</response>",
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


def read_conversation(
    lists: TokenLists, texts: Mapping[int, bytes], facts: EpisodeFacts
) -> list[tuple[int, list[Part]]]:
    """Return the parts of each turn and of each context after a turn, with the index of the first token.

    Args:
        lists: The sample's tokens.
        texts: Bytes of token ids; a missing id is shown as ⟨id⟩. If it is empty, the result is empty.
        facts: The episode's facts, which may be empty.
    """
    if not texts:
        return []
    turns = [_turn_text(lists.ids[start:end], texts) for start, end in lists.turns]
    parser = _choose_parser(facts.tool_parser, turns)
    contexts = dict(lists.contexts)
    found = []
    for number, ((start, end), text) in enumerate(zip(lists.turns, turns, strict=True), start=1):
        parts = list(_turn_parts(text, parser, number, facts.final_in_reasoning))
        found.append((start, parts))
        if end in contexts:
            calls = [part[1] if part[0] == "call" else part[3] for part in parts if part[0] in ("call", "malformed")]
            found.append((end, _result_parts(lists.ids[end : contexts[end]], texts, calls)))
    return found


def _turn_text(ids: Sequence[int], texts: Mapping[int, bytes]) -> str:
    parts = [_bytes_of(token, texts) for token in ids]
    if parts and _END_OF_TURN.fullmatch(parts[-1]):
        parts.pop()
    return b"".join(parts).decode("utf-8", "replace")


def _bytes_of(token: int, texts: Mapping[int, bytes]) -> bytes:
    return texts[token] if token in texts else f"⟨{token}⟩".encode()


def _choose_parser(name: object, turns: Sequence[str]) -> ToolParser:
    """Return the episode's parser, else the first parser that reads all calls, else the default parser."""
    try:
        if isinstance(name, str):
            return get_parser(name)
    except ConfigError:
        pass  # the parser was registered in another process
    texts = [text for text in turns if _CALL_SYNTAX.search(text)]
    for candidate in sorted(parser_names(), key=lambda name: name != _DEFAULT_PARSER) if texts else ():
        parsed = [part for text in texts for part in get_parser(candidate).parse(text)]
        if parsed and all(isinstance(part, ToolCall) for part in parsed):
            return get_parser(candidate)
    return get_parser(_DEFAULT_PARSER)


def _turn_parts(text: str, parser: ToolParser, number: int, in_reasoning: object) -> Iterator[Part]:
    """Yield the parts of turn `number`, counted from 1."""
    at = 0
    is_in_thought = in_reasoning if isinstance(in_reasoning, bool) else _begins_in_thought(text, parser)
    for index, segment in enumerate(parser.segments(text, in_reasoning=is_in_thought)):
        call = call_id(f"call_{number}_", index, segment)
        if isinstance(segment, ToolCall):
            yield ["call", call, segment.name, segment.arguments]
            continue
        content = segment.raw if isinstance(segment, ParseFailure) else segment.text
        start = text.find(content, at)
        if start < 0:  # a user's parser may return text that is not in the turn
            continue
        at = start + len(content)
        place = [_utf16(text[:start]), _utf16(text[:at])]
        if isinstance(segment, ParseFailure):
            yield ["malformed", *place, call, segment.name, segment.reason]
        elif isinstance(segment, Reasoning | Text):
            yield ["think" if isinstance(segment, Reasoning) else "text", *place]


def _begins_in_thought(text: str, parser: ToolParser) -> bool:
    """Return whether the turn begins inside a thought, that is, closes a thought that it did not open."""
    parser_tags: list[tuple[str, str]] = []
    # in other formats, the token that closes a thought also closes messages of other kinds
    if isinstance(parser, TaggedParser) and parser.tags.search(parser.close_reasoning):
        parser_tags.append((parser.open_reasoning, parser.close_reasoning))
    for opening, closing in (*parser_tags, *_THOUGHT_TAGS):
        before, found, _ = text.partition(closing)
        if found:
            return opening not in before
    return False


def _result_parts(ids: Sequence[int], texts: Mapping[int, bytes], calls: Sequence[str]) -> list[Part]:
    """Return the results in a context as parts, assigned to the calls in their order."""
    tokens = [_bytes_of(token, texts) for token in ids]
    whole = b"".join(tokens)
    # if the template writes tags as control tokens, a tag in the text of a tool is just text
    tagged = b"".join(text if is_control(text) else text.translate(_BLANK_TAG_STARTS) for text in tokens)
    for source in (tagged, whole):
        for pattern in _RESULT_PATTERNS:
            found = [match.span(1) for match in pattern.finditer(source)]
            if found:
                call_ids = [*calls, *[None] * len(found)]
                return [
                    [
                        "result",
                        _utf16(whole[:start].decode("utf-8", "replace")),
                        _utf16(whole[:end].decode("utf-8", "replace")),
                        call,
                    ]
                    for (start, end), call in zip(found, call_ids, strict=False)
                ]
    return []


def _utf16(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2
