"""An agent's request, and the branch that it goes on with: agents hand back what they were given, or change it.

Who asks is known, where Strands says so. A history is then compared with what the policy has read, message by message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from strands_rollout.record.branch import (
    Block,
    Branch,
    Conversation,
    Head,
    Message,
    StrandsMessages,
    copied,
    what_is_read,
)
from strands_rollout.record.place import Match, Place
from strands_rollout.template.messages import cleaned, system_text, to_chat_tools

if TYPE_CHECKING:
    from strands_rollout.record.record import Record

TRANSIENT: Final = "a text was shown in one request and not in the next"


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A call of the model by Strands.

    Attributes:
        messages: The agent's history; not changed. The agent may change it while its request is answered.
        tool_specs: The tools that the policy may call.
        system_prompt: The agent's system prompt as text.
        system_blocks: The same as content blocks, which count where both are given.
        agent: Who asks, where that is known.
        signal: The agent's cancel signal, which is its alone, where it is known.
        is_sole: Whether all requests are one agent's.
        only_grew: Whether nothing was done to the messages since the agent's last answer but to append some, so that
            they need not be compared with what the policy has read. To compare a long history costs more than all else.
    """

    messages: StrandsMessages
    tool_specs: StrandsMessages | None = None
    system_prompt: str | None = None
    system_blocks: StrandsMessages | None = None
    agent: Any = None
    signal: Any = None
    is_sole: bool = False
    only_grew: bool = False

    @property
    def head(self) -> Head:
        """The system prompt and the tools."""
        return Head(system_text(self.system_prompt, self.system_blocks) or None, [*(self.tool_specs or ())])

    @property
    def history(self) -> StrandsMessages:
        """The agent's own messages, without what was added for this request alone; the request's where not known."""
        own = getattr(self.agent, "messages", None)
        return own if isinstance(own, list) and len(own) == len(self.messages) else self.messages

    def matches(self, record: Record) -> list[Match]:
        """How far it follows the branch that grows in its agent's conversation; nothing for an agent without one."""
        conversation = record.main if self.is_sole else self._conversation(record)
        return [] if conversation is None else [self._match(conversation)]

    def place_beside(self, record: Record, matches: Sequence[Match]) -> Place:  # noqa: ARG002 - a client's looks at it
        """Where it goes on if it extends no branch: on a new one of its agent's conversation, or in a new one."""
        if not matches:
            is_known = self.agent is not None or self.signal is not None
            return Place("agent" if is_known else "aside", None, new=[*self.messages])
        match = matches[0]
        return Place(match.conversation, None, match.why, new=[*self.messages], changes_in_head=match.changes_in_head)

    def _conversation(self, record: Record) -> Conversation | None:
        """Its agent's; where nobody says who asks, that whose history it extends. An agent that asks twice has two."""
        known = record.conversation_of(self.agent, self.signal)
        if known is not None and not known.is_busy:
            return known
        return next((one for one in record if self._may_belong_to(one)), None)

    def _may_belong_to(self, conversation: Conversation) -> bool:
        """Return whether its history may be a conversation's, where it or the conversation has no known agent."""
        if conversation.is_busy:
            return False
        if (agent := conversation.agent) is not None:
            is_unknown = self.agent is None and self.signal is None
            return is_unknown and is_same_history(agent.messages, self.messages)
        if conversation.is_bound:
            return False  # of an agent that is gone
        branch = conversation.branch
        if branch.is_new:
            return conversation.kind == "main"
        is_unfinished = branch.is_open or conversation.has_unread_turn
        return self._continues_answer(branch) or (is_unfinished and is_covered(branch, self.messages))

    def _continues_answer(self, branch: Branch) -> bool:
        """Return whether it begins with what the policy has read and exactly its answer, and maybe has more."""
        answer = branch.nodes[-1].answer if branch.nodes else None  # which may be unread, and not among the messages
        if answer is None or not is_extended(branch, self.messages):
            return False
        return cleaned(what_is_read(self.messages[branch.covered])) == cleaned(what_is_read(answer.message))

    def _match(self, conversation: Conversation) -> Match:
        branch, messages, covered = conversation.branch, self.messages, conversation.branch.covered
        if branch.is_new:
            return Match(conversation, branch, extends=True, new=[*messages])
        changes = changes_in_head(branch.head, self.head)
        if self.only_grew and not changes:
            return Match(conversation, branch, extends=True, answered=messages[covered], new=messages[covered + 1 :])
        # whether the policy has read exactly these messages, or those without what is added for this request alone
        is_repeated = is_covered(branch, messages) or is_covered(branch, self.history)
        if is_repeated and conversation.has_unread_turn:
            return Match(conversation, branch, node=branch.nodes[-1])
        if not changes and is_repeated and branch.is_open:
            return Match(conversation, branch, extends=True)
        if not changes and not is_repeated and is_extended(branch, messages):
            answered, new = messages[covered], messages[covered + 1 :]
            return Match(conversation, branch, extends=True, answered=answered, new=new)
        why = why_not_extended(branch, messages, changes)
        return Match(conversation, branch, why=why, changes_in_head=changes)

    def as_kept(self, start: int, new: StrandsMessages) -> dict[int, Message]:
        """By their index, those new messages that were shown with a transient text, as the agent has them without it.

        The first of the new messages is at `start` of the branch.
        """
        history = self.history
        if self.messages is getattr(self.agent, "messages", None):
            return {}
        both = zip(map(what_is_read, new), map(what_is_read, history[start:]), strict=False)
        return {
            index: (kept[0], copied(kept[1]))
            for index, (read, kept) in enumerate(both, start)
            if kept != read and cleaned(kept) != cleaned(read)
        }


def is_covered(branch: Branch, messages: StrandsMessages) -> bool:
    """Return whether a branch's policy has read exactly these messages."""
    return len(messages) == branch.covered and _begin_as_read(branch, messages)


def is_extended(branch: Branch, messages: StrandsMessages) -> bool:
    """Return whether these are the messages that the policy has read, an answer to them, and maybe more."""
    covered = branch.covered
    return len(messages) > covered and messages[covered]["role"] == "assistant" and _begin_as_read(branch, messages)


def _begin_as_read(branch: Branch, messages: StrandsMessages) -> bool:
    """Return whether the messages begin with those that were read; if they do, by one comparison in C.

    Strands cleans what it sends on one of its ways to a model and not on another.
    """
    given, read = [*map(what_is_read, messages[: branch.covered])], branch.messages[: branch.covered]
    if given == read:
        return True
    for index, shown in branch.with_transient.items():  # what was shown once may be shown again
        if index < len(given) and given[index] == shown:
            given[index] = read[index]
    return given == read or [*map(cleaned, given)] == [*map(cleaned, read)]


def changes_in_head(read: Head | None, asked: Head) -> list[str]:
    """Name what of a request's system prompt and tools the policy has not read; nothing is known after a resume.

    Fewer tools are no change: of those that it has read, Strands shows only the one that it insists on.
    """
    if read is None:
        return []
    named: list[str] = []
    if asked.tools != read.tools:  # most often all are the same
        known = to_chat_tools(read.tools)
        changed = to_chat_tools([spec for spec in asked.tools if spec not in read.tools])
        unread = [tool for tool in changed if tool not in known and repr(tool) not in map(repr, known)]
        named = [f"the tool {tool['function']['name']!r}" for tool in unread]  # a NaN is no NaN but reads like one
    return named if asked.system == read.system else ["the system prompt", *named]


def why_not_extended(branch: Branch, messages: StrandsMessages, changes: Sequence[str]) -> str:
    """Why a request begins another branch, as text: its head or a message changed, or it repeats a request."""
    if changes:
        return f"the request changed {', '.join(changes)}"
    read = branch.messages[: branch.covered]
    for number, (kept, given) in enumerate(zip(read, map(what_is_read, messages), strict=False)):
        shown = branch.with_transient.get(number, kept)
        if cleaned(shown) != cleaned(given):
            before, now = _text_of(shown[1]), _text_of(given[1])
            is_text_alone = _without_text(shown[1]) == _without_text(given[1])
            if is_text_alone and (lines := lines_around(before, now)):
                return f"{TRANSIENT}: message {number} had {lines!r:.300}"
            return f"message {number} of the history was rewritten"
    is_shorter = len(messages) < branch.covered
    return "messages were taken from the history" if is_shorter else "the policy was asked for another answer"


def lines_around(before: str, now: str) -> str:
    """The lines that a text had around those of another, as a reminder stands around a message; "" where it had not."""
    had, has = ([" ".join(line.split()) for line in text.splitlines() if line.strip()] for text in (before, now))
    starts = range(len(had) - len(has) + 1)
    start = next((at for at in starts if had[at : at + len(has)] == has), None)
    return "" if start is None else "\n".join([*had[:start], *had[start + len(has) :]])


def _text_of(content: Sequence[Block]) -> str:
    return "\n".join(block["text"] for block in content if "text" in block)


def _without_text(content: Sequence[Block]) -> list[Block]:
    return [block for block in content if "text" not in block]


def is_same_history(history: StrandsMessages, messages: StrandsMessages) -> bool:
    """Return whether a request is about the agent's own messages, of which the last one tells.

    Strands cleans what it sends, and plugins add text to it.
    """
    if not history or len(history) != len(messages) or history[-1]["role"] != messages[-1]["role"]:
        return False
    return all(block in messages[-1]["content"] for block in history[-1]["content"])


def calling_agent(state: Mapping[str, Any] | None, signal: object, messages: StrandsMessages) -> object:
    """The agent that an invocation's state names; None where it may be another.

    The agents of a graph that work at once share one state. Newer Strands hand their own signals to the model too.
    """
    agent = (state or {}).get("agent")
    if signal is not None:
        return agent if getattr(agent, "_cancel_signal", None) is signal else None
    return agent if is_same_history(getattr(agent, "messages", ()), messages) else None
