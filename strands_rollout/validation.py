"""Messages for pydantic's validation errors: the place in the user's input, the given value, and what was expected."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, get_args

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

_EXPECTED: Final = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "extra_forbidden": "no such key",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_type": "an integer",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list, in [ ]",
    "mapping_type": "a mapping",
    "missing": "a value",
    "model_type": "a mapping",
    "none_required": "nothing",
    "path_type": "a path",
    "string_pattern_mismatch": "a string matching {pattern!r}",
    "string_too_short": "at least {min_length} characters",
    "string_type": "a string",
    "too_short": "at least {min_length} items",
    "tuple_type": "a list, in [ ]",
}


def explain_errors(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Return a message for all errors, on one line; if `model` is given, names are suggested for unknown keys."""
    return "; ".join(explain_fault(fault, model) for fault in error.errors(include_url=False))


def explain_fault(
    fault: ErrorDetails, model: type[BaseModel] | None = None, *, root: str = "", noun: str = "key"
) -> str:
    """Return a message for one error, such as `got reward.wrong='x'; expected: a number`.

    Args:
        fault: An element of `ValidationError.errors()`.
        model: The validated model, to suggest names of its keys; None for no suggestions.
        root: Dotted path of the whole input, which prefixes the path in the message.
        noun: The word for a key of the input, such as "setting".
    """
    path = [str(part) for part in fault["loc"]]
    place = ".".join([root, *path] if root else path)
    if fault["type"] == "extra_forbidden" and model is not None:
        known = sorted(_model_at(model, path[:-1]).model_fields)
        near = get_close_matches(path[-1], known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
        return f"got the unknown {noun} {place}; {hint}"
    expected = expectation(fault)
    if not path and fault["type"] == "model_type" and model is not None:
        expected = f"a mapping with the keys {', '.join(model.model_fields)}"
    if fault["type"] == "missing":
        return f"{place} is missing; expected: {expected}"
    return f"got {place}{'=' * bool(place)}{fault['input']!r:.500}; expected: {expected}"


def expectation(fault: ErrorDetails) -> str:
    """Return what was expected, such as "at least 1"; pydantic's message if `_EXPECTED` lacks the error's type."""
    known = _EXPECTED.get(fault["type"])
    if known is not None:
        return known.format(**fault.get("ctx", {}))
    return re.sub(r"^(Value error, |Input should be (a valid )?)", "", fault["msg"])


def _model_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel]:
    for name in path:  # keys of mappings and indices of lists are not fields
        if name in model.model_fields:
            model = next(_models_in(model.model_fields[name].annotation), model)
    return model


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
