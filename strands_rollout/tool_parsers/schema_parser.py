"""What the formats share whose values are bare text: the tools' schemas say what a value is.

Knows schemas and tags; no format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from strands_rollout.tool_parsers.base import MalformedError, NewId, random_id
from strands_rollout.tool_parsers.tagged_parser import TaggedParser
from strands_rollout.tool_parsers.typed_values import Schemas, typed_value, types_of


class SchemaParser(TaggedParser):
    """A parser of such a format; see `ToolParser` and `UntypedParser`.

    Args:
        new_id: Makes the ids of calls.
        schemas: Of the tools' arguments.

    Attributes:
        words: Texts that stand for values beside JSON.
        untyped_is_json: Whether a text of no known type is JSON where it can be; a string otherwise.
    """

    words: ClassVar[Mapping[str, Any]] = {}
    untyped_is_json: ClassVar[bool]

    def __init__(self, new_id: NewId = random_id, schemas: Schemas | None = None) -> None:
        super().__init__(new_id)
        self._schemas = schemas or {}

    def for_tools(self, schemas: Schemas) -> Self:
        """See `UntypedParser`."""
        return type(self)(self._new_id, schemas)

    def _value(self, tool: str, key: str, text: str, what: str) -> Any:  # noqa: ANN401 - any JSON value
        """The value of a tool's argument; `what` is the argument in words for the model."""
        types = types_of(self._schemas, tool, key)
        try:
            return typed_value(text, types, what, words=self.words, untyped_is_json=self.untyped_is_json)
        except MalformedError as e:
            raise MalformedError(str(e), tool) from e
