"""A call as one JSON object, `{"name": "x", "arguments": {}}`: what is wrong with one, and which tool was meant.

Knows the object; nothing of the tags around it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

_LEADING_NAME: Final = re.compile(r'\{\s{0,20}"name"\s{0,20}:\s{0,20}"([^"\\\x00-\x1f]{1,200})"')


def call_faults(value: Mapping[str, Any], *, arguments: str = "arguments", also: str | None = None) -> list[str]:
    """What is wrong with a call's object; nothing where it is one.

    Args:
        value: The object.
        arguments: The key of its arguments.
        also: A key that may be there beside the two, with a string.
    """
    reasons = []
    if "name" not in value:
        reasons.append("the name is missing")
    elif not isinstance(value["name"], str) or not value["name"].strip():
        reasons.append(f"the name is {kind_of(value['name'])}, not a string with characters in it")
    if arguments not in value:
        reasons.append(f"the {arguments} are missing")
    elif not isinstance(value[arguments], dict):
        reasons.append(f"the {arguments} are {kind_of(value[arguments])}, not an object")
    if also is not None and not isinstance(value.get(also, ""), str):
        reasons.append(f"the {also} is {kind_of(value[also])}, not a string")
    others = [key for key in value if key not in ("name", arguments, also)]
    if others:
        reasons.append(f"there are other keys than name and {arguments}: {', '.join(map(repr, others[:5]))}")
    return [*reasons, f'expected {{"name": "<tool>", "{arguments}": {{...}}}} and nothing else'] if reasons else []


def name_of(value: Mapping[str, Any]) -> str | None:
    """The tool that a call's object names, where it does."""
    name = value.get("name")
    return name if isinstance(name, str) and name else None


def leading_name(text: str, start: int) -> str | None:
    """The same of an object that can't be decoded, where it begins with the name."""
    name = _LEADING_NAME.match(text, start)
    return name[1] if name else None


def kind_of(value: object) -> str:
    """A JSON value in words for the model."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return "a string" if value else "an empty string"
    return "an array" if isinstance(value, list) else "an object" if isinstance(value, dict) else "a number"
