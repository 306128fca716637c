"""Bare text -> a value, by the JSON Schema of the tool's arguments."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
        ({"description": "anything"}, None),
        ({"anyOf": [{"type": "integer"}, {}]}, None),
        ({"$ref": "#/$defs/Loop"}, None),
        ({"$ref": "other.json"}, None),
        ({"$ref": "#/nowhere"}, None),
        ({"type": "varchar"}, None),
        ({"type": 7}, None),
        ({"type": []}, None),
        ({"enum": []}, None),
        ({"enum": 3}, None),
        (True, None),
        (None, None),
    ],
)
def test_the_types_of_a_schema(schema: object, expected: set[str] | None) -> None:
    definitions = {"Item": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}}
    assert types(schema, **{"$defs": definitions}) == expected


def test_what_is_not_described_has_no_type() -> None:
    assert types_of({}, "f", "a") is None
    assert types_of({"f": {}}, "f", "a") is None
    assert types_of({"f": {"properties": []}}, "f", "a") is None
    assert types_of({"f": []}, "f", "a") is None  # type: ignore[dict-item]


def value(text: str, *names: str, untyped_is_json: bool = False) -> Any:
    allowed = frozenset(names) or None
    return typed_value(text, allowed, "the parameter 'a'", may_be_python=True, untyped_is_json=untyped_is_json)


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("5", ("string",), "5"),
        ("null", ("string",), "null"),
        ('"x"', ("string",), '"x"'),
        ("", ("string",), ""),
        ("5", ("integer",), 5),
        (" 5\n", ("integer",), 5),
        ("5.0", ("integer",), 5.0),
        ("5", ("number",), 5),
        ("-1.5e3", ("number",), -1500.0),
        ("true", ("boolean",), True),
        ("True", ("boolean",), True),
        ("None", ("null",), None),
        ("null", ("string", "null"), None),
        ("None", ("string", "null"), None),
        ("nil", ("string", "null"), "nil"),
        ("5", ("string", "integer"), 5),
        ("5.5", ("string", "integer"), "5.5"),
        ('{"a": [1]}', ("object",), {"a": [1]}),
        ("[1]", ("array", "null"), [1]),
        ("5", (), "5"),
        ("9" * 400, ("integer",), int("9" * 400)),
        ("9" * 400, ("string", "number"), int("9" * 400)),
        ("['a', 'b']", ("array",), ["a", "b"]),
        ("['a', 'b']", ("string",), "['a', 'b']"),
        ("['a']", ("string", "array"), ["a"]),
        ("'a'", ("string", "array"), "'a'"),
        ("[True, None, -1.5, 1e+20]", ("array",), [True, None, -1.5, 1e20]),
        ("{'a': {'b': [False, None]}}", ("object",), {"a": {"b": [False, None]}}),
        (
            repr(["it's", 'say "x"', "True, None", "a\n\t\\", "é\x00\x7f\u2028", "\U0001f600"]),
            ("array",),
            ["it's", 'say "x"', "True, None", "a\n\t\\", "é\x00\x7f\u2028", "\U0001f600"],
        ),
    ],
)
def test_a_text_is_read_as_its_type(text: str, names: tuple[str, ...], expected: object) -> None:
    read = value(text, *names)
    assert read == expected
    assert type(read) is type(expected)


@pytest.mark.parametrize(("text", "expected"), [("5", 5), ("five", "five"), ('"5"', "5"), ("True", True), ("[1", "[1")])
def test_a_text_of_no_known_type_may_be_json(text: str, expected: object) -> None:
    assert value(text, untyped_is_json=True) == expected


MALFORMED = {
    "integer": ["five", "5.5", '"5"', "null", "", "-" * 100_000 + "1", "9" * 4301, "1" + "0" * 400 + ".5"],
    "number": ["1e999", "NaN"],
    "boolean": ["yes", "1"],
    "object": ["{'a': 1,}", "{1: 'a'}", "{'a': 1, 'a': 2}", '{"a": 1, "a": 2}'],
    "array": [
        *("['a', true]", "['a' 'b']", "('a',)", "[b'a']", "['a", "[inf]", "[1] x", "{}"),
        *(r"['\q']", r"['\ud800']", r"['\U00110000']", r"['\Uffffffff']"),
        *("[" * 101 + "'a'" + "]" * 101, "[" * 100_000),
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
def test_a_text_that_is_no_value_of_its_type_is_malformed(name: str, text: str) -> None:
    with pytest.raises(MalformedError, match=f"the parameter 'a' is .*; expected {name}"):
        value(text, name)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
)


@given(
    schema=JSON_VALUES,
    keys=st.sampled_from(["type", "anyOf", "oneOf", "allOf", "enum", "const", "$ref"]),
    text=st.text(),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30)
def test_no_schema_and_no_text_raise_anything_else(schema: Any, keys: str, text: str) -> None:
    for odd in (schema, {keys: schema}, {"anyOf": [{keys: schema}]}, {keys: [schema]}, {"allOf": [{keys: [schema]}]}):
        found = types(odd)
        try:
            typed_value(text, frozenset(found) if found else None, "it", may_be_python=True, untyped_is_json=True)
        except MalformedError as e:
            assert "expected" in str(e)  # noqa: PT017 - an expected failure is one of two outcomes
