"""Parsers of tool-call formats: sampled text -> tool calls and failures. `base.py` describes how to add a format."""

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
    "bind_tool_specs",
    "detect_format",
    "get_parser",
    "parser_names",
    "register_parser",
]

AUTO: Final = "auto"
"""Value of the setting `tool_parser` to detect the format from the chat template."""

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
# format -> text that occurs only in prompts for this format
_HINTS: Final = {"granite": "<|tool_call|>", "hermes": '<tool_call>\n{"name"', "lfm2": "<|tool_call_start|>"}


def get_parser(name: str, *, new_id: NewId = random_id) -> ToolParser:
    """Make the parser of a format.

    Args:
        name: Registered name; see `parser_names`.
        new_id: Returns the id of a new call, which must be unique in an episode. The default ids are random; use a
            counter if transcripts must be the same in every run.

    Raises:
        ConfigError: No parser has that name.
    """
    factory = _factories.get(name)
    if factory is None:
        near = difflib.get_close_matches(str(name), _factories, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown tool parser {name!r}; did you mean {near!r}? Known: {', '.join(parser_names())}")
    return factory(new_id)


def register_parser(name: str, factory: ParserFactory) -> None:
    """Register a format by name.

    Args:
        name: Name of the format for `get_parser` and the setting `tool_parser`.
        factory: Makes a parser, given a function that returns the id of a new call.

    Raises:
        ConfigError: The name is empty, is "auto", or is taken by another factory.
    """
    if not name or name == AUTO or _factories.get(name, factory) is not factory:
        raise ConfigError(
            f"can't register a tool parser named {name!r}: the name is empty, reserved or taken; choose another name"
        )
    _factories[name] = factory


def parser_names() -> list[str]:
    """Return the names of all registered parsers, sorted."""
    return sorted(_factories)


def detect_format(turn: str, name: str, arguments: Mapping[str, Any], shown: str = "") -> str:
    """Detect the format of a template's calls.

    Args:
        turn: An assistant's turn with one call, as the chat template writes it; "" if the template can't write calls.
        name: The called tool.
        arguments: The call's arguments; all are strings.
        shown: If the template can't write calls, text that may show the format: a prompt with a tool, and all control
            tokens.

    Returns:
        The name of the format.

    Raises:
        ConfigError: No known format fits the turn (or `shown`, if the turn is empty), or several formats fit; the
            message names the choices.
    """
    fitting = [
        known
        for known in parser_names()
        for call in get_parser(known).parse(turn)
        if isinstance(call, ToolCall) and (call.name, call.arguments) == (name, dict(arguments))
    ] or [known for known, hint in _HINTS.items() if not turn and hint in shown]
    if len(fitting) == 1:
        return fitting[0]
    found = f"fits {' and '.join(fitting)}" if fitting else f"fits none of {', '.join(parser_names())}"
    written = f"writes a call as {turn[:300]!r}, which {found}" if turn else "can't write an assistant's calls"
    raise ConfigError(
        f'got tool_parser="auto", but the chat template {written}; expected exactly one known format. Set tool_parser '
        f"to the format of calls that the model was trained with: {', '.join(fitting or parser_names())}"
    )


def bind_tool_specs(parser: ToolParser, specs: Sequence[Mapping[str, Any]]) -> ToolParser:
    """If the format needs schemas, return a parser with the schemas of `specs`; else return `parser` itself."""
    # check `hasattr` first: `isinstance` with a protocol is slow
    if not hasattr(parser, "for_tools") or not isinstance(parser, UntypedParser):
        return parser
    return parser.for_tools({spec["name"]: spec["inputSchema"].get("json", spec["inputSchema"]) for spec in specs})
