"""Values that a format writes as bare text, typed by the JSON Schema of the tool's arguments.

Knows schemas as far as the type of a whole value goes: no key of a nested object, no range, no pattern. That is for the
tool to check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from strands_rollout.tool_parsers.base import MalformedError
from strands_rollout.tool_parsers.strict_json import StrictJSONError, whole_value

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON Schema of each tool's arguments, by the tool's name."""

_TYPES: Final = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
_STRING: Final = frozenset({"string"})
_MAX_DEPTH: Final = 20


def types_of(schemas: Schemas, tool: str, key: str) -> frozenset[str] | None:
    """The JSON types that an argument may have; None where nothing is known of it."""
    root = schemas.get(tool)
    properties = root.get("properties") if isinstance(root, Mapping) else None
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(schema, root or {}, 0)


def typed_value(
    text: str, types: frozenset[str] | None, what: str, *, words: Mapping[str, Any], untyped_is_json: bool
) -> Any:  # noqa: ANN401 - any JSON value
    """The value that a bare text stands for.

    A string is the text itself. Any other value is strict JSON, or one of the format's words. Where an argument may be
    a string or something else, it is something else if the text reads so.

    Args:
        text: As the model wrote it.
        types: The JSON types that are allowed; None where they are not known.
        what: The argument, in words for the model.
        words: Texts that stand for values beside JSON.
        untyped_is_json: Whether a text of no known type is JSON where it can be; a string otherwise.

    Raises:
        MalformedError: The text is no value of these types.
    """
    if types == _STRING or (types is None and not untyped_is_json):
        return text
    try:
        value = words[text] if text in words else whole_value(text)
    except StrictJSONError as e:
        if types is None or "string" in types:
            return text
        raise MalformedError(f"{what} is {text[:40]!r}; expected {_listed(types)}: {e}") from e
    if types is None or _fits(value, types):
        return value
    if "string" in types:
        return text
    raise MalformedError(f"{what} is {text[:40]!r}; expected {_listed(types)}")


def _fits(value: object, types: frozenset[str]) -> bool:
    """Whether a decoded value is one of these types but a string, which stands without quotes."""
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean") in types
    if isinstance(value, int | float):
        return "number" in types or ("integer" in types and float(value).is_integer())
    return ("object" if isinstance(value, dict) else "array") in types if isinstance(value, dict | list) else False


def _listed(types: frozenset[str]) -> str:
    return " or ".join(sorted(types))


def _types(schema: object, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    named = schema.get("type")
    if named is not None:
        names = named if isinstance(named, list | tuple) else [named]
        known = all(isinstance(name, str) and name in _TYPES for name in names)
        return frozenset(names) if known and names else None
    if isinstance(schema.get("$ref"), str):
        return _types(_referred(schema["$ref"], root), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list | tuple):
            return _union([_types(option, root, depth + 1) for option in schema[key]])
    if isinstance(schema.get("allOf"), list | tuple):
        known_types = [types for part in schema["allOf"] if (types := _types(part, root, depth + 1)) is not None]
        return frozenset.intersection(*known_types) or None if known_types else None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return _union([_type_of(value) for value in values]) if isinstance(values, list | tuple) else None


def _union(options: list[frozenset[str] | None]) -> frozenset[str] | None:
    """All types of the options; None where there is none, or one may be anything."""
    known = [types for types in options if types is not None]
    return frozenset().union(*known) if known and len(known) == len(options) else None


def _type_of(value: object) -> frozenset[str]:
    return frozenset(name for name in sorted(_TYPES - {"string"}) if _fits(value, frozenset({name}))) or _STRING


def _referred(ref: str, root: Mapping[str, Any]) -> object:
    """What a reference into the same schema names."""
    found: object = root
    for part in ref.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found if ref.startswith("#/") else None
