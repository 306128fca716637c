"""New messages -> the text between the policy's turn and the next generation prompt.

They are rendered after a short conversation whose last turn stands for the policy's: it has as many calls, with the
same names and ids, and nothing else of it. What the template makes of an assistant's words is therefore never seen:
the policy's turns stay as they were sampled. Knows how a template ends turns; not how that is found out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from strands_rollout.chat_messages import ChatMessage
from strands_rollout.errors import TemplateError
from strands_rollout.template_rendering import TemplateRenderer

_MARK: Final = "strands-rollout-answer"
_QUESTION: Final[ChatMessage] = {"role": "user", "content": "question"}


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """How a template ends the assistant's turns; texts of control tokens.

    Attributes:
        answer: Ends a turn without calls, before a user's.
        calls: Ends a turn with calls, before their results. Where a template has no token that closes a turn, this and
            `answer` open what follows.
        one_by_one: Whether a turn with several calls is not written with all of them, so that each result has to be
            rendered after a turn with its own call alone.
    """

    answer: str
    calls: str
    one_by_one: bool = False


class TurnRenderer:
    """Renders new messages by a template whose ends are known."""

    def __init__(self, template: TemplateRenderer, ends: TurnEnds) -> None:
        self._template = template
        self.ends = ends

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        after: Sequence[ChatMessage] = (),
    ) -> str:
        """The (escaped) text from the end of the assistant's turn, that token included, to the next generation prompt.

        Args:
            messages: The new messages: tool results in the order of their calls, user turns; not empty.
            tools: The tools of the first prompt.
            after: Messages before the turn; default: a question.

        Raises:
            TemplateError: The template refuses the messages, or does not end the turn.
        """
        before = after or [_QUESTION]
        results = sum(1 for _ in takewhile(_is_result, messages)) if self.ends.one_by_one else 0
        alone = max(results - 1, 0)  # the last result has what follows it
        parts = [self._after_turn([message], tools, before, generation_prompt=False) for message in messages[:alone]]
        parts.append(self._after_turn(messages[alone:], tools, before))
        return parts[0] + "".join(part.removeprefix(self.ends.calls) for part in parts[1:])

    def _after_turn(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        before: Sequence[ChatMessage],
        *,
        generation_prompt: bool = True,
    ) -> str:
        mark = _MARK
        while mark in str(tools) or any(mark in str(message["content"]) for message in messages):
            mark += "-"  # untrusted text may hold it
        turn = _stand_in(messages, mark)
        rendered = self._template.render([*before, turn, *messages], tools, generation_prompt=generation_prompt)
        end = self.ends.calls if "tool_calls" in turn else self.ends.answer
        at = rendered.find(end, rendered.rfind(mark) + len(mark)) if mark in rendered else -1
        if at < 0:
            raise TemplateError(f"the chat template does not end an assistant's turn with {end}, as it did when probed")
        return rendered[at:]


def _is_result(message: ChatMessage) -> bool:
    return bool(message["role"] == "tool")


def _stand_in(messages: Sequence[ChatMessage], mark: str) -> ChatMessage:
    """The turn before new messages, which made the calls that they answer; the last mark in it is close to its end."""
    calls = [
        {
            "type": "function",
            "id": message.get("tool_call_id", "call"),
            "function": {"name": message.get("name", "tool"), "arguments": {"x": mark}},
        }
        for message in takewhile(_is_result, messages)
    ]
    turn: ChatMessage = {"role": "assistant", "content": mark}
    return turn | {"tool_calls": calls} if calls else turn
