# ruff: noqa: RUF001 - DeepSeek's own characters
"""Writers of turns (reasoning, text, calls) in the format of each model family, the counterparts of the parsers.

They follow the sources that the parsers name. A family with several forms has an entry for each form.
"""

import functools
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strands_rollout.tool_parsers import ToolParser, get_parser

Call = tuple[str, dict[str, Any]]


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: object) -> str:
    """Return a value as a format without types writes it."""
    return value if isinstance(value, str) else as_json(value)


def type_of(value: object) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def schemas_of(calls: Sequence[Call]) -> dict[str, Any]:
    """Return schemas of tools that accept the arguments of these calls."""
    return {
        name: {"type": "object", "properties": {key: {"type": type_of(value)} for key, value in arguments.items()}}
        for name, arguments in calls
    }


@dataclass(frozen=True)
class Family:
    """A format of reasoning, text and tool calls."""

    id: str  # family, with its form if there are several
    parser: str
    calls: Callable[[Sequence[Call]], str]
    tags: str  # pattern of the format's markup, which no parsed segment may contain
    reasoning: tuple[str, str] = ("<think>", "</think>")  # opening and closing tag of reasoning
    text: Callable[[str], str] = str  # writes text outside of calls
    is_xml: bool = False  # True if values are bare text, typed by the tool's schema
    mixes: bool = True  # True if a turn may have text and calls

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """Fragments for damaged turns: tags of a turn, the text between them, and a whole call."""
        turn = self.turn(reasoning="x", calls=[("f", {"a": "x", "b": 1}), ("g", {})])
        pieces = re.findall(r"<[^<>]*>|\[/?[A-Z_]+\]|[^<\[]+|.", turn)
        return (*dict.fromkeys(pieces), self.calls([("f", {})]))

    def turn(
        self, *, reasoning: str = "", text: str = "", calls: Sequence[Call] = (), in_reasoning: bool = False
    ) -> str:
        """Return the text of a turn; `in_reasoning` omits the opening tag, which is then in the prompt."""
        opening, closing = self.reasoning
        thought = f"{'' if in_reasoning else opening}{reasoning}{closing}" if reasoning else ""
        return thought + (self.text(text) if text else "") + (self.calls(calls) if calls else "")

    def make(self, calls: Sequence[Call] = ()) -> ToolParser:
        """Return the parser, with call ids c0, c1 ...

        If the format's values are bare text, the parser knows the schemas of these calls' tools.
        """
        numbers = itertools.count()
        parser = get_parser(self.parser, new_id=lambda: f"c{next(numbers)}")
        return parser.for_tools(schemas_of(calls)) if self.is_xml and calls else parser  # type: ignore[attr-defined]

    def stripped(self, text: str) -> str:
        """Return a text without the format's markup and whitespace."""
        return re.sub(r"\s", "", re.sub(self.tags, "", text))

    @property
    def has_bare_values(self) -> bool:
        """True if values are not plain JSON, or are enclosed in markup that a value's own text could close."""
        typed = ("deepseek_v3-2", "deepseek_v4", "gemma4", "kimi_k3", "lfm2", "pythonic")
        return self.is_xml or self.id in typed

    def __str__(self) -> str:
        return self.id


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": {as_json(name)}, "arguments": {as_json(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def qwen3_coder(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def glm(calls: Sequence[Call], line: str = "\n") -> str:
    return line.join(
        f"<tool_call>{name}{line}"
        + "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{bare(value)}</arg_value>{line}"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def kimi(calls: Sequence[Call]) -> str:
    inner = (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{as_json(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(inner)}<|tool_calls_section_end|>"


def deepseek_v3(calls: Sequence[Call]) -> str:
    inner = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(inner) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    inner = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{''.join(inner)}<｜tool▁calls▁end｜>"


def deepseek_v32(calls: Sequence[Call]) -> str:
    def parameter(key: str, value: object) -> str:
        is_string = "true" if isinstance(value, str) else "false"
        return f'<｜DSML｜parameter name="{key}" string="{is_string}">{bare(value)}</｜DSML｜parameter>\n'

    inner = (
        f'<｜DSML｜invoke name="{name}">\n'
        + "".join(parameter(key, value) for key, value in arguments.items())
        + "</｜DSML｜invoke>\n"
        for name, arguments in calls
    )
    return f"<｜DSML｜function_calls>\n{''.join(inner)}</｜DSML｜function_calls>"


def deepseek_v4(calls: Sequence[Call]) -> str:
    return deepseek_v32(calls).replace("function_calls", "tool_calls")


def kimi_k3(calls: Sequence[Call]) -> str:
    def argument(key: str, value: object) -> str:
        kind = "number" if type_of(value) == "integer" else type_of(value)
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{bare(value)}<|close|>argument<|sep|>'

    inner = (
        f'<|open|>call tool="{name}" index="{index}"<|sep|>'
        + "".join(itertools.starmap(argument, arguments.items()))
        + "<|close|>call<|sep|>"
        for index, (name, arguments) in enumerate(calls, start=1)
    )
    return f"<|open|>tools<|sep|>{''.join(inner)}<|close|>tools<|sep|>"


def minimax_m2(calls: Sequence[Call]) -> str:
    inner = (
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{bare(value)}</parameter>\n' for key, value in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{''.join(inner)}</minimax:tool_call>"


def muse_glimmer(calls: Sequence[Call]) -> str:
    """Return a message for each call; the closing token of the last message, which ends the turn, is left out."""
    return "<|eom|>".join(
        f'<|start|>assistant to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n'
        + "".join(f'<atem:parameter name="{key}">{bare(value)}</atem:parameter>\n' for key, value in given.items())
        + "</atem:invoke>\n</atem:function_calls>"
        for name, given in calls
    )


def seed_oss(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<seed:tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>{value!s}</parameter>\n" for key, value in arguments.items())
        + "</function>\n</seed:tool_call>"
        for name, arguments in calls
    )


def hunyuan3(calls: Sequence[Call]) -> str:
    inner = re.sub(r"<tool_call>([^<]*)\n", r"<tool_call>\1<tool_sep>\n", glm(calls))
    tags = re.compile(r"(</?(?:tool_calls?|tool_sep|arg_key|arg_value))>")
    return tags.sub(r"\1:opensource>", f"<tool_calls>\n{inner}\n</tool_calls>")


def pythonic(calls: Sequence[Call], write: Callable[[object], str] = repr) -> str:
    inner = (
        f"{name}({', '.join(f'{key}={write(value)}' for key, value in arguments.items())})" for name, arguments in calls
    )
    return f"[{', '.join(inner)}]"


def gemma4(calls: Sequence[Call]) -> str:
    def value_of(value: object) -> str:
        if isinstance(value, dict):
            keys = [key if re.fullmatch(r"[\w.-]+", key) else value_of(key) for key in value]
            return "{" + ",".join(f"{key}:{value_of(value[own])}" for key, own in zip(keys, value, strict=True)) + "}"
        if isinstance(value, list):
            return f"[{','.join(map(value_of, value))}]"
        return f'<|"|>{value}<|"|>' if isinstance(value, str) else as_json(value)

    return "".join(f"<|tool_call>call:{name}{value_of(arguments)}<tool_call|>" for name, arguments in calls)


def array(calls: Sequence[Call]) -> str:
    return as_json([{"name": name, "arguments": arguments} for name, arguments in calls])


def llama(calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": {as_json(name)}, "parameters": {as_json(arguments)}}}' for name, arguments in calls)


def mistral_array(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS] {array(calls)}"


def mistral_nemo(calls: Sequence[Call]) -> str:
    listed = enumerate(calls)
    return "[TOOL_CALLS]" + as_json(
        [{"name": name, "arguments": arguments, "id": f"Ab345678{at}"} for at, (name, arguments) in listed]
    )


def mistral_named(calls: Sequence[Call], call_id: str = "") -> str:
    return "".join(f"[TOOL_CALLS]{name}{call_id}[ARGS]{as_json(arguments)}" for name, arguments in calls)


def harmony(calls: Sequence[Call], header: str = "<|channel|>commentary to=functions.{} <|constrain|>json") -> str:
    """Return a message for each call; the closing token of the last message, which ends the turn, is left out."""
    messages = (f"<|start|>assistant{header.format(name)}<|message|>{as_json(given)}" for name, given in calls)
    return "<|call|>".join(messages)


_THINK = r"</?think>"
_HARMONY_TAGS = r"<\|start\|>assistant|<\|channel\|>[a-z]*|<\|(?:message|end|call|return|constrain)\|>"
_HARMONY_OF_TEMPLATE = " to=functions.{}<|channel|>commentary json"
_HARMONY: dict[str, Any] = {
    "parser": "gpt_oss",
    "tags": _HARMONY_TAGS,
    "reasoning": ("<|start|>assistant<|channel|>analysis<|message|>", "<|end|>"),
    "text": "<|start|>assistant<|channel|>commentary<|message|>{}<|end|>".format,
}
_MISTRAL: dict[str, Any] = {
    "parser": "mistral",
    # each malformed element of an array is a segment of its own, without the text between the elements
    "tags": r"\[/?THINK\]|[\],]",
    "reasoning": ("[THINK]", "[/THINK]"),
}
_KIMI_TAGS = _THINK + r"|<\|tool_calls_section_(?:begin|end)\|>"
_DEEPSEEK_TAGS = _THINK + r"|<｜tool▁calls▁(?:begin|end)｜>|</?｜DSML｜(?:function|tool)_calls>"
_K3: dict[str, Any] = {
    "tags": r"<\|(?:open|close)\|>(?:think|response|tools|message)<\|sep\|>",
    "reasoning": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "text": "<|open|>response<|sep|>{}<|close|>response<|sep|>".format,
}
_ARRAY = _THINK + r"|[\],]"

FAMILIES: tuple[Family, ...] = (
    Family("hermes", "hermes", hermes, _THINK),
    Family("qwen3_coder", "qwen3_coder", qwen3_coder, _THINK, is_xml=True),
    Family("glm4", "glm4", glm, _THINK, is_xml=True),
    Family("glm4-7", "glm4", lambda calls: glm(calls, ""), _THINK, is_xml=True),
    Family("kimi_k2", "kimi_k2", kimi, _KIMI_TAGS),
    Family("deepseek_v3", "deepseek_v3", deepseek_v3, _DEEPSEEK_TAGS),
    Family("deepseek_v3-1", "deepseek_v3", deepseek_v31, _DEEPSEEK_TAGS),
    Family("deepseek_v3-2", "deepseek_v3", deepseek_v32, _DEEPSEEK_TAGS),
    Family("deepseek_v4", "deepseek_v4", deepseek_v4, _DEEPSEEK_TAGS),
    Family("kimi_k3", "kimi_k3", kimi_k3, **_K3),
    Family("minimax_m2", "minimax_m2", minimax_m2, _THINK + r"|</?minimax:tool_call>", is_xml=True),
    Family(
        *("muse_glimmer", "muse_glimmer", muse_glimmer),
        r"<\|start\|>assistant|to=[^\s<]*(?=<\|message)|<\|(?:message|eom|eot)\|>|</?atem:function_calls>",
        ("<|start|>assistant to=self<|message|>", "<|eom|>"),
        "<|start|>assistant to=user<|message|>{}<|eom|>".format,
        is_xml=True,
    ),
    Family("seed_oss", "seed_oss", seed_oss, r"</?seed:think>", ("<seed:think>", "</seed:think>"), is_xml=True),
    Family(
        *("hunyuan3", "hunyuan3", hunyuan3, r"</?(?:think|tool_calls):opensource>"),
        ("<think:opensource>", "</think:opensource>"),
        is_xml=True,
    ),
    Family("pythonic", "pythonic", pythonic, _THINK + r"|<\|python_(?:start|end)\|>"),
    Family("lfm2", "lfm2", lambda calls: f"<|tool_call_start|>{pythonic(calls, as_json)}<|tool_call_end|>", _THINK),
    Family("lfm2-json", "lfm2", lambda calls: f"<|tool_call_start|>{array(calls)}<|tool_call_end|>", _ARRAY),
    Family("gemma4", "gemma4", gemma4, r"<\|channel>thought|<channel\|>", ("<|channel>thought", "<channel|>")),
    Family(
        *("apertus", "apertus", lambda calls: f"<|tools_prefix|>{as_json([{name: given} for name, given in calls])}"),
        r"<\|inner_(?:prefix|suffix)\|>|[\],]",
        ("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    Family("granite", "granite", lambda calls: f"<|tool_call|>{array(calls)}", _ARRAY),
    Family("phi4_mini", "phi4_mini", lambda calls: f"functools{array(calls)}", _ARRAY),
    Family("hunyuan_a13b", "hunyuan_a13b", lambda calls: f"<tool_calls>{array(calls)}</tool_calls>", _ARRAY),
    Family("llama3_json", "llama3_json", llama, _THINK, mixes=False),
    Family("llama3_json-tag", "llama3_json", lambda calls: "<|python_tag|>" + llama(calls), _THINK),
    Family("mistral-array", calls=mistral_array, **_MISTRAL),
    Family("mistral-nemo", calls=mistral_nemo, **_MISTRAL),
    Family("mistral-named", calls=mistral_named, **_MISTRAL),
    Family("mistral-id", calls=lambda calls: mistral_named(calls, "[CALL_ID]Ab3456789"), **_MISTRAL),
    Family("gpt_oss", calls=harmony, **_HARMONY),
    Family("gpt_oss-template", calls=lambda calls: harmony(calls, _HARMONY_OF_TEMPLATE), **_HARMONY),
)


def family(family_id: str) -> Family:
    return next(known for known in FAMILIES if known.id == family_id)
