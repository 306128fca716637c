"""What this package reads in the cases of strands-sglang 0.4.3: each row of `peer_cases.txt`, and typed values.

Features of strands-sglang without a row: custom tags and reading drafts as calls (here, a custom format is a class with
`register_parser`); ids that sort as text (here, a rollout names calls by turn and position); the id that Kimi writes as
the call's id (a model may write an id twice); failures as JSON text (`payload`; here, a failure has a reason).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strands_rollout.tool_parsers import ParseFailure, ToolCall, bind_tool_specs, get_parser


def rows() -> Iterator[tuple[str, str, Any, str]]:
    """Yield parser, title, expected calls (names and arguments) and failures (names), and text for each row."""
    for line in Path(__file__).with_name("peer_cases.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            parser, what, outcome, text = line.split(" ¦ ", maxsplit=3)
            yield parser, what, json.loads(outcome.replace("⏎", "\\n")), text.replace("⏎", "\n")


@pytest.mark.parametrize(("parser", "what", "outcome", "text"), list(rows()), ids=lambda value: str(value)[:40])
def test_parse_peer_cases(parser, what, outcome, text) -> None:
    parts = get_parser(parser).parse(text)
    assert [part.name if isinstance(part, ParseFailure) else [part.name, part.arguments] for part in parts] == outcome


def test_parse_python_literals_in_typed_values() -> None:
    values = {"a": ["x", True, None], "b": {"c": 1.5}, "d": False, "e": "['as', 'text']"}
    kinds = dict(zip(values, ("array", "object", "boolean", "string"), strict=True))
    schema = {"properties": {key: {"type": kind} for key, kind in kinds.items()}}
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=f>\n{pairs}</function>\n</tool_call>"
    specs = [{"name": "f", "inputSchema": {"json": schema}}]
    [call] = bind_tool_specs(get_parser("qwen3_coder"), specs).parse(text)
    assert isinstance(call, ToolCall)
    assert call.arguments == values
