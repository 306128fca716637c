"""The conversations that a chat template is probed with: messages whose texts can be found again in what it renders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from strands_rollout.chat_messages import ChatMessage
from strands_rollout.errors import TemplateError

TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": "probe",
            "description": "probed-tool-description",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string", "description": "An x."}},
                "required": ["x"],
            },
        },
    }
]


def user(text: str) -> ChatMessage:
    """A user's turn."""
    return {"role": "user", "content": text}


def tool(call_id: str, text: str) -> ChatMessage:
    """The result of a call."""
    return {"role": "tool", "name": tool_name(call_id), "tool_call_id": call_id, "content": text}


def tool_name(call_id: str) -> str:
    """The tool that a call is of; another one for each digit that ids end with."""
    return f"probe_{call_id[-1]}"


def assistant(index: int, *call_ids: str) -> ChatMessage:
    """An assistant's turn: words, and calls, with marks in both.

    Args:
        index: Of the turn among the assistant's.
        *call_ids: Of its calls; of 9 letters and digits, which some templates want.
    """
    message: ChatMessage = {"role": "assistant", "content": mark(index)}
    calls = [
        {
            "type": "function",
            "id": call_id,
            "function": {"name": tool_name(call_id), "arguments": {"x": mark(index, call_id)}},
        }
        for call_id in call_ids
    ]
    return message | {"tool_calls": calls} if calls else message


def mark(index: int, call_id: str | None = None) -> str:
    """What stands in a turn's words, or in the arguments of one of its calls."""
    return f"probed-answer-{index}-end" if call_id is None else f"probed-argument-{index}-{call_id}-end"


def calls_before(turn: Sequence[ChatMessage]) -> list[str]:
    """Ids of the calls that a turn's messages answer."""
    return [message["tool_call_id"] for message in turn if message["role"] == "tool"]


def span_of_answer(rendered: str, index: int, call_ids: Sequence[str] = ()) -> tuple[int, int]:
    """Where a turn's first mark begins, and its last one ends.

    Args:
        rendered: By the template.
        index: Of the turn among the assistant's.
        call_ids: Of its calls; of a turn with calls, a template may leave words or calls out.

    Raises:
        TemplateError: Words or calls of it are shown several times, or nothing of it is.
    """
    marks = [mark(index), *(mark(index, call_id) for call_id in call_ids)]
    counts = {part: rendered.count(part) for part in marks}
    shown = [part for part, count in counts.items() if count]
    if not shown or any(counts[part] > 1 for part in shown):
        what = "a call's arguments" if counts[marks[0]] == 1 else "an assistant message's content"
        raise TemplateError(
            f"the chat template renders {what} {max(counts.values())} times; expected exactly once, since earlier "
            "turns stay as they were sampled."
        )
    places = [(rendered.index(part), part) for part in shown]
    return min(places)[0], max(begin + len(part) for begin, part in places)


def shared_length(one: str, other: str) -> int:
    """How many characters two texts begin alike with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


USER_TURNS: Final = ([user("first")], [user("second")], [user("third\n")])
TOOL_TURNS: Final = ([user("first")], [tool("call00001", "one")], [tool("call00002", "2")])
PARALLEL_TURNS: Final = (
    [user("first")],
    [tool("call00001", "one")],
    [tool("call00002", "2"), tool("call00003", "")],
    [tool("call00004", "4")],
)
MIXED_TURNS: Final = (
    [user("first")],
    [tool("call00001", "one")],
    [user("second")],
    [tool("call00002", "2")],
    [tool("call00003", "3")],
    [user("third")],
)
"""Messages before each answer of the assistant."""
