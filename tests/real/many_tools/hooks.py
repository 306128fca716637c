"""A Strands hook that notes what it sees, cancels calls, and rewrites calls and results."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from strands.hooks import (
    AfterModelCallEvent,
    AfterToolCallEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    HookProvider,
    HookRegistry,
)

NOT_ALLOWED: Final = "Not allowed: nothing is thrown away."
COUNTED: Final = "1000, at least"


class Storekeeper(HookProvider):
    """Lets nothing be thrown away, takes pins for nuts, and counts screws generously.

    Attributes:
        latest: The one of the last episode.
        seen: Names of the events, in order; of a tool's with its name.
    """

    latest: ClassVar[Storekeeper]

    def __init__(self) -> None:
        self.seen: list[str] = []
        Storekeeper.latest = self

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(BeforeModelCallEvent, lambda event: self.seen.append("before model"))
        registry.add_callback(AfterModelCallEvent, lambda event: self.seen.append("after model"))
        registry.add_callback(BeforeToolCallEvent, self._before_tool)
        registry.add_callback(AfterToolCallEvent, self._after_tool)

    def _before_tool(self, event: BeforeToolCallEvent) -> None:
        self.seen.append(f"before {event.tool_use['name']}")
        if event.tool_use["name"] == "throw_away":
            event.cancel_tool = NOT_ALLOWED
        elif event.tool_use["input"].get("item") == "pins":
            event.tool_use = {**event.tool_use, "input": {"item": "nuts"}}

    def _after_tool(self, event: AfterToolCallEvent) -> None:
        self.seen.append(f"after {event.tool_use['name']}")
        if event.tool_use["input"].get("item") == "screws":
            event.result = {**event.result, "content": [{"text": COUNTED}]}
