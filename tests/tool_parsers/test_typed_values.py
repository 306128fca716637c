"""Bare text becomes a value, by the JSON Schema of the tool's arguments."""

from typing import Any

import pytest

from strands_rollout.tool_parsers.bare_values import typed_value, types_of
from strands_rollout.tool_parsers.base import MalformedError


def types(schema: object, **definitions: Any) -> set[str] | None:
    found = types_of({"f": {"properties": {"a": schema}, **definitions}}, "f", "a")  # type: ignore[dict-item]
    return None if found is None else set(found)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"oneOf": [{"type": "array", "items": {}}, {"enum": ["x", 1]}]}, {"array", "string", "integer", "number"}),
        ({"allOf": [{"description": "x"}, {"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({"enum": ["a", "b"]}, {"string"}),
        ({"const": True}, {"boolean"}),
        ({"$ref": "#/$defs/Item"}, {"object"}),
        ({"anyOf": [{"$ref": "#/$defs/Item"}, {"type": "null"}]}, {"object", "null"}),
        ({}, None),
        ({"anyOf": [{"type": "integer"}, {}]}, None),
        ({"$ref": "#/$defs/Loop"}, None),
        ({"$ref": "#/nowhere"}, None),
        ({"type": "varchar"}, None),
        ({"type": 7}, None),
        ({"enum": []}, None),
        (True, None),
    ],
)
def test_types_of_schema(schema: object, expected: set[str] | None) -> None:
    definitions = {"Item": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}}
    assert types(schema, **{"$defs": definitions}) == expected


def value(text: str, *names: str, untyped_is_json: bool = False) -> Any:
    allowed = frozenset(names) or None
    return typed_value(text, allowed, "the parameter 'a'", may_be_python=True, untyped_is_json=untyped_is_json)


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("5", ("string",), "5"),
        (r"['\d+\a']", ("array",), ["\\d+\a"]),
        ("null", ("string",), "null"),
        ("", ("string",), ""),
        ("5", ("integer",), 5),
        ("5", ("number",), 5),
        ("True", ("boolean",), True),
        ("null", ("string", "null"), None),
        ("nil", ("string", "null"), "nil"),
        ("5", ("string", "integer"), 5),
        ("5.5", ("string", "integer"), "5.5"),
        ('{"a": [1]}', ("object",), {"a": [1]}),
        ("5", (), "5"),
        ("9" * 400, ("integer",), int("9" * 400)),
        ("['a', 'b']", ("array",), ["a", "b"]),
        ("['a', 'b']", ("string",), "['a', 'b']"),
        ("'a'", ("string", "array"), "'a'"),
        ("[True, None, -1.5, 1e+20]", ("array",), [True, None, -1.5, 1e20]),
        (
            repr(["it's", 'say "x"', "True, None", "a\n\t\\", "é\x00\x7f\u2028", "\U0001f600"]),
            ("array",),
            ["it's", 'say "x"', "True, None", "a\n\t\\", "é\x00\x7f\u2028", "\U0001f600"],
        ),
    ],
)
def test_typed_value_converts_text(text: str, names: tuple[str, ...], expected: object) -> None:
    read = value(text, *names)
    assert read == expected
    assert type(read) is type(expected)


@pytest.mark.parametrize(("text", "expected"), [("5", 5), ("five", "five"), ('"5"', "5"), ("True", True), ("[1", "[1")])
def test_typed_value_of_unknown_type_may_be_json(text: str, expected: object) -> None:
    assert value(text, untyped_is_json=True) == expected


MALFORMED = {
    "integer": ["five", "5.5", '"5"', "null", "", "-" * 100_000 + "1", "9" * 4301, "1" + "0" * 400 + ".5"],
    "number": ["1e999", "NaN"],
    "boolean": ["yes", "1"],
    "object": ["{'a': 1,}", "{1: 'a'}", "{'a': 1, 'a': 2}", '{"a": 1, "a": 2}'],
    "array": [
        "['a', true]",
        "['a' 'b']",
        "('a',)",
        "[b'a']",
        "['a",
        "[inf]",
        "[1] x",
        "{}",
        r"['\x4']",
        r"['\101']",
        r"['\ud800']",
        r"['\U00110000']",
        r"['\Uffffffff']",
        "[" * 101 + "'a'" + "]" * 101,
        "[" * 100_000,
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
def test_typed_value_rejects_text_of_other_type(name: str, text: str) -> None:
    with pytest.raises(MalformedError, match=f"the parameter 'a' is .*; expected {name}"):
        value(text, name)
