"""Sampled text -> tool calls or typed failures: one file per family of formats, found by name.

Knows the formats; nothing of tokens, tools or conversations.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Final

from strands_rollout.errors import ConfigError
from strands_rollout.tool_parsers.base import NewId, ParseFailure, Reasoning, Segment, Text, ToolCall, ToolParser
from strands_rollout.tool_parsers.hermes import HermesParser, random_id

__all__ = [
    "NewId",
    "ParseFailure",
    "Reasoning",
    "Segment",
    "Text",
    "ToolCall",
    "ToolParser",
    "get_parser",
    "parser_names",
    "register_parser",
]

ParserFactory = Callable[[NewId], ToolParser]
_factories: Final[dict[str, ParserFactory]] = {"hermes": HermesParser}


def get_parser(name: str, *, new_id: NewId = random_id) -> ToolParser:
    """Make the parser of a format.

    Args:
        name: As registered; "hermes" is built in.
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
    if not name or _factories.get(name, factory) is not factory:
        raise ConfigError(f"a tool parser named {name!r} can't be registered: the name is empty or taken")
    _factories[name] = factory


def parser_names() -> list[str]:
    """Names of all known parsers, sorted."""
    return sorted(_factories)
