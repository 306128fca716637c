"""Cache of the histories that the client of a session has sent, since each request repeats most of an earlier one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from strands_rollout.errors import PromptError
from strands_rollout.files.json_codec import decode_json
from strands_rollout.record.record import Block
from strands_rollout.template.tokens import shared_length

if TYPE_CHECKING:
    from strands_rollout.gateway.protocols import TurnRequest

Message = dict[str, Any]
Item = Mapping[str, Any]
Piece = tuple[str, list[Block]]
"""A converted item of a request, or a part of it: role ("system", "user", "assistant" or "tool") and Strands blocks."""


@dataclass(slots=True, eq=False)
class History:
    """The history of a request, and the request's body.

    A later request that only appends items changes this object: only the new items are parsed and converted.

    Attributes:
        items: The items of the history, as the client sent them.
        pieces: The pieces of each item.
        raw: The body; b"" if no request may extend it: it is too long, or the history has items that it lacks.
        body: The parsed body; {} without `raw`.
        settings: The request without its history; None without `raw`.
        end: Position in `raw` after the last item; 0 until a longer body has revealed it.
        system: Texts of the system pieces before the first piece of another role.
        messages: The history as Strands messages.
        last_role: Role of the piece that was added to `messages` last; "" if there is none.
    """

    items: list[dict[str, Any]]
    pieces: list[list[Piece]]
    raw: bytes = b""
    body: Mapping[str, Any] = field(default_factory=dict)
    settings: TurnRequest | None = None
    end: int = 0
    system: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    last_role: str = ""

    def append(self, pieces: Sequence[Sequence[Piece]]) -> None:
        """Append pieces to the system texts and the messages.

        Consecutive pieces of the assistant become one message, and so do consecutive tool results. System messages
        after the first message of another role become user messages, since many templates render a system message only
        at the beginning.
        """
        messages = self.messages
        for role, blocks in (piece for item in pieces for piece in item):
            if role == "system" and not messages:
                self.system.append("\n".join(system_texts(blocks)))
            elif role == self.last_role and role in ("assistant", "tool"):
                messages[-1] = {**messages[-1], "content": [*messages[-1]["content"], *blocks]}
            else:
                messages.append({"role": "assistant" if role == "assistant" else "user", "content": blocks})
                self.last_role = role

    def extend(self, raw: bytes, name: str, convert: Callable[[Item], list[Piece]]) -> bool:
        """Append the items that a body adds to the list `name`, and return True.

        Return False if the body adds nothing, or differs in anything else.

        Raises:
            PromptError: A new item can't be converted, or `check_end` refuses the history.
        """
        if not self.raw:
            return False
        end = self.end or _first_difference(self.raw, raw)
        tail = self.raw[end:]
        if raw[end : end + 1] != b"," or not raw.endswith(tail) or not raw.startswith(memoryview(self.raw)[:end]):
            return False
        try:
            items: list[Any] = decode_json(b"[%b]" % raw[end + 1 : len(raw) - len(tail)])
            # once parsing only the new items has given the right result, `end` is known to be the end of the list
            is_proven = self.end or {**self.body, name: [*self.items, *items]} == decode_json(raw)
        except ValueError:
            return False
        if not is_proven or {*map(type, items)} != {dict}:
            return False
        pieces = [convert(item) for item in items]
        self.raw, self.end = raw, len(raw) - len(tail)
        self.items += items
        self.pieces += pieces
        self.append(pieces)
        self.check_end()
        return True

    def check_end(self) -> None:
        """Raise PromptError if the history does not end with a user's message or a tool's result."""
        if not self.messages or self.last_role == "assistant":
            fault = "has no user message" if not self.messages else "ends with the assistant"
            raise PromptError(f"the history {fault}; expected one that ends with a user's message or a tool's result")


class HistoryCache:
    """The histories of a session's latest requests.

    Args:
        name: Name of the field with the history.
        convert: Returns the pieces of an item. It may raise PromptError.
    """

    _MAX_HISTORIES: Final = 4

    def __init__(self, name: str, convert: Callable[[Item], list[Piece]]) -> None:
        self._name = name
        self._convert = convert
        self._histories: list[History] = []  # the newest first

    def extended(self, raw: bytes) -> History | None:
        """If a body only appends items to a history, extend that history and return it; else return None.

        Raises:
            PromptError: A new item can't be converted, or `History.check_end` refuses the history.
        """
        history = next((known for known in self._histories if known.extend(raw, self._name, self._convert)), None)
        if history is not None:
            self._histories = [history, *(other for other in self._histories if other is not history)]
        return history

    def read(self, settings: TurnRequest, items: list[dict[str, Any]], body: Mapping[str, Any], raw: bytes) -> History:
        """Convert a history, and return it.

        If the items only extend the items of a recent request, the result has the message objects of that request. So
        comparisons are fast. For the arguments, see `History`.

        Raises:
            PromptError: An item can't be converted, or `History.check_end` refuses the history.
        """
        shared, known, others = 0, None, list[History]()
        for earlier in self._histories:
            length = shared_length(earlier.items, items)
            if length > shared:
                shared, known = length, earlier
            has_other_items = length < len(earlier.items)
            if has_other_items or earlier.settings not in (None, settings):  # otherwise the new history replaces it
                others.append(earlier)
        shared_pieces = known.pieces[:shared] if known is not None else []
        pieces = shared_pieces + [self._convert(item) for item in items[shared:]]
        history = History(items, pieces, raw, body, settings) if raw else History(items, pieces)
        if known is not None and shared == len(known.items):
            history.system, history.messages, history.last_role = [*known.system], [*known.messages], known.last_role
            history.append(history.pieces[shared:])
        else:
            history.append(history.pieces)
        history.check_end()  # a history without a message is not stored: `extend` would have to convert system texts
        self._histories = [history, *others[: self._MAX_HISTORIES - 1]]
        return history


def system_texts(blocks: Sequence[Block]) -> list[str]:
    """Return the texts of a system message.

    Raises:
        PromptError: The message has content other than text.
    """
    if not all("text" in block for block in blocks):
        raise PromptError("got a system message with content other than text; expected text only")
    return [block["text"] for block in blocks]


def _first_difference(one: bytes, other: bytes) -> int:
    at = 0
    for size in (4096, 64, 1):
        while at < len(one) and one[at : at + size] == other[at : at + size]:
            at += size
    return at
