"""Sampled text -> tool calls or typed failures: one file per family of formats; `base.py` says how to add one."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from strands_rollout.errors import ConfigError
from strands_rollout.tool_parsers.bare_values import (
    GLM4Parser,
    Hunyuan3Parser,
    MiniMaxM2Parser,
    MuseGlimmerParser,
    Qwen3CoderParser,
    SeedOSSParser,
)
from strands_rollout.tool_parsers.base import (
    CutTurnParser,
    NewId,
    ParseFailure,
    Reasoning,
    Segment,
    Text,
    ToolCall,
    ToolParser,
    UntypedParser,
    random_id,
)
from strands_rollout.tool_parsers.json_arguments import (
    DeepSeekV3Parser,
    DeepSeekV4Parser,
    GptOssParser,
    KimiK2Parser,
    KimiK3Parser,
)
from strands_rollout.tool_parsers.json_object import (
    ApertusParser,
    GraniteParser,
    HermesParser,
    HunyuanA13BParser,
    Llama3JSONParser,
    MistralParser,
    Phi4MiniParser,
)
from strands_rollout.tool_parsers.literals import Gemma4Parser, LFM2Parser, PythonicParser

__all__ = [
    "AUTO",
    "CutTurnParser",
    "NewId",
    "ParseFailure",
    "Reasoning",
    "Segment",
    "Text",
    "ToolCall",
    "ToolParser",
    "UntypedParser",
    "for_tool_specs",
    "format_of_call",
    "get_parser",
    "parser_names",
    "register_parser",
]

AUTO: Final = "auto"
"""The name that stands for the format in which the chat template writes calls."""

ParserFactory = Callable[[NewId], ToolParser]
_factories: Final[dict[str, ParserFactory]] = {
    "apertus": ApertusParser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v4": DeepSeekV4Parser,
    "gemma4": Gemma4Parser,
    "glm4": GLM4Parser,
    "gpt_oss": GptOssParser,
    "granite": GraniteParser,
    "hermes": HermesParser,
    "hunyuan3": Hunyuan3Parser,
    "hunyuan_a13b": HunyuanA13BParser,
    "kimi_k2": KimiK2Parser,
    "kimi_k3": KimiK3Parser,
    "lfm2": LFM2Parser,
    "llama3_json": Llama3JSONParser,
    "minimax_m2": MiniMaxM2Parser,
    "mistral": MistralParser,
    "muse_glimmer": MuseGlimmerParser,
    "phi4_mini": Phi4MiniParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
    "seed_oss": SeedOSSParser,
}
# what only these formats begin a call with
_SIGNS: Final = {"granite": "<|tool_call|>", "hermes": '<tool_call>\n{"name"', "lfm2": "<|tool_call_start|>"}


def get_parser(name: str, *, new_id: NewId = random_id) -> ToolParser:
    """Make the parser of a format.

    Args:
        name: As registered; see `parser_names`.
        new_id: Makes the id of each call, which must be unique over an episode; random by default, a counter for
            transcripts that must not change from run to run.

    Raises:
        ConfigError: No parser has that name.
    """
    factory = _factories.get(name)
    if factory is None:
        near = difflib.get_close_matches(str(name), _factories, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown tool parser {name!r}; did you mean {near!r}? Known: {', '.join(parser_names())}")
    return factory(new_id)


def register_parser(name: str, factory: ParserFactory) -> None:
    """Make a format known by name; `factory` is called with the id source by each `get_parser(name)`.

    Raises:
        ConfigError: The name is empty or taken by another factory.
    """
    if not name or name == AUTO or _factories.get(name, factory) is not factory:
        raise ConfigError(f"a tool parser named {name!r} can't be registered: the name is empty or taken")
    _factories[name] = factory


def parser_names() -> list[str]:
    """Names of all known parsers, sorted."""
    return sorted(_factories)


def format_of_call(turn: str, name: str, arguments: Mapping[str, Any], shown: str = "") -> str:
    """The name of the one format in which a turn holds a call, or whose tag is shown where there is none.

    Args:
        turn: An assistant's turn with one call, as a chat template writes it; "" where it writes none.
        name: The called tool.
        arguments: The call's arguments, strings all.
        shown: What else may tell the format of a template that writes no calls; see `CallTurn`.

    Raises:
        ConfigError: No known format has that call in the turn, or several have; the message names the choices.
    """
    fitting = [
        known
        for known in parser_names()
        for call in get_parser(known).parse(turn)
        if isinstance(call, ToolCall) and (call.name, call.arguments) == (name, dict(arguments))
    ] or [known for known, sign in _SIGNS.items() if not turn and sign in shown]
    if len(fitting) == 1:
        return fitting[0]
    found = f"fits {' and '.join(fitting)}" if fitting else f"fits none of {', '.join(parser_names())}"
    written = f"writes a call as {turn[:300]!r}, which {found}" if turn else "writes no calls of an assistant"
    raise ConfigError(
        f'got tool_parser="auto", but the chat template {written}; expected exactly one known format. Name the format '
        f"in which the model was trained to call tools: {', '.join(fitting or parser_names())}"
    )


def for_tool_specs(parser: ToolParser, specs: Sequence[Mapping[str, Any]]) -> ToolParser:
    """The parser for tools of these specifications, where its format needs to know them; else the same."""
    if not isinstance(parser, UntypedParser):
        return parser
    return parser.for_tools({spec["name"]: spec["inputSchema"].get("json", spec["inputSchema"]) for spec in specs})
