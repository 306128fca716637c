"""An agent's request, and the branch that it continues.

Strands usually says which agent asks. Its history is then compared with what the policy has read, message by message:
agents hand back what they were given, or change it.
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
    role_and_content,
)
from strands_rollout.record.place import BeginBranch, Match
from strands_rollout.template.messages import clean_message, system_text, to_chat_tools

if TYPE_CHECKING:
    from strands_rollout.record.record import Record

TRANSIENT: Final = "a text was shown in one request and not in the next"


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A call of the model by Strands.

    Attributes:
        messages: The agent's history. The agent may change it while its request is answered.
        tool_specs: The tools that the policy may call.
        system_prompt: The agent's system prompt as text.
        system_blocks: The system prompt as content blocks, which win if both are given.
        agent: The agent that asks; None if that is not known.
        signal: The agent's cancel signal, which no other agent has; None if that is not known.
        is_sole: True if all requests come from one agent.
        only_grew: True if messages were only appended since the agent's last answer, so that the earlier ones need not
            be compared with what the policy has read. For a long history, that comparison costs more than all else.
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
        """The agent's own messages, without texts added for this request; the request's if those are not known."""
        own = getattr(self.agent, "messages", None)
        return own if isinstance(own, list) and len(own) == len(self.messages) else self.messages

    def matches(self, record: Record) -> list[Match]:
        """Compare it with the branch that grows in its agent's conversation; empty if the agent has none."""
        conversation = record.main if self.is_sole else self._conversation(record)
        return [] if conversation is None else [self._match(conversation)]

    def begin_branch(self, record: Record, matches: Sequence[Match]) -> BeginBranch:  # noqa: ARG002 - clients use it
        """Begin a branch in the agent's conversation, or a conversation if the agent has none."""
        if not matches:
            is_known = self.agent is not None or self.signal is not None
            return BeginBranch("agent" if is_known else "aside", [*self.messages])
        [match] = matches
        return BeginBranch(match.conversation, [*self.messages], match.difference, match.head_changes)

    def _conversation(self, record: Record) -> Conversation | None:
        """Return the agent's conversation; for an unknown agent, the conversation whose history the request extends."""
        known = record.conversation_of(self.agent, self.signal)
        return known if known is not None else next((one for one in record if self._may_belong_to(one)), None)

    def _may_belong_to(self, conversation: Conversation) -> bool:
        """Return whether it may be of a conversation although its agent, or the conversation's, is not known."""
        if conversation.is_busy:
            return False
        if (agent := conversation.agent) is not None:
            is_unknown = self.agent is None and self.signal is None
            return is_unknown and is_same_history(agent.messages, self.messages)
        if conversation.is_bound:
            return False  # its agent is gone
        branch = conversation.branch
        if branch.is_new:
            return conversation.kind == "main"
        is_unfinished = branch.is_open or conversation.has_unread_turn
        return self._continues_answer(branch) or (is_unfinished and is_covered(branch, self.messages))

    def _continues_answer(self, branch: Branch) -> bool:
        """Return whether it begins with what the policy has read and then exactly the policy's answer."""
        # an answer that the agent has not got yet is not among the branch's messages
        answer = branch.nodes[-1].answer if branch.nodes else None
        if answer is None or not is_extended(branch, self.messages):
            return False
        return clean_message(role_and_content(self.messages[branch.covered])) == clean_message(
            role_and_content(answer.message)
        )

    def _match(self, conversation: Conversation) -> Match:
        branch, messages, covered = conversation.branch, self.messages, conversation.branch.covered
        if branch.is_new:
            return Match(conversation, branch)
        changes = head_changes(branch.head, self.head)
        if self.only_grew and not changes:
            return Match(
                conversation, branch, extends=True, answer=messages[covered], new_messages=messages[covered + 1 :]
            )
        # also without the texts that were added for this request only
        is_repeated = is_covered(branch, messages) or is_covered(branch, self.history)
        if is_repeated and conversation.has_unread_turn:
            return Match(conversation, branch, repeated=branch.nodes[-1])
        if not changes and is_repeated and branch.is_open:
            return Match(conversation, branch, extends=True)
        if not changes and not is_repeated and is_extended(branch, messages):
            return Match(
                conversation, branch, extends=True, answer=messages[covered], new_messages=messages[covered + 1 :]
            )
        return Match(conversation, branch, difference=difference(branch, messages, changes), head_changes=changes)

    def without_transient(self, start: int, new_messages: StrandsMessages) -> dict[int, Message]:
        """Return those new messages that show a transient text, as the agent has them without it.

        Args:
            start: Index in the branch of the first new message, which is that of each key in the result.
            new_messages: The messages as the policy reads them.
        """
        history = self.history
        if self.messages is getattr(self.agent, "messages", None):
            return {}
        pairs = zip(map(role_and_content, new_messages), map(role_and_content, history[start:]), strict=False)
        return {
            index: (kept[0], copied(kept[1]))
            for index, (read, kept) in enumerate(pairs, start)
            if kept != read and clean_message(kept) != clean_message(read)
        }


def is_covered(branch: Branch, messages: StrandsMessages) -> bool:
    """Return whether the policy has read exactly these messages on a branch."""
    return len(messages) == branch.covered and _begin_as_read(branch, messages)


def is_extended(branch: Branch, messages: StrandsMessages) -> bool:
    """Return whether the messages are those that the policy has read, then an answer, then any others."""
    covered = branch.covered
    return len(messages) > covered and messages[covered]["role"] == "assistant" and _begin_as_read(branch, messages)


def _begin_as_read(branch: Branch, messages: StrandsMessages) -> bool:
    """Return whether the messages begin with those that were read.

    Equal messages are compared in C. Strands cleans messages on some ways to a model only, so others are cleaned first.
    """
    given, read = [*map(role_and_content, messages[: branch.covered])], branch.messages[: branch.covered]
    if given == read:
        return True
    for index, shown in branch.with_transient.items():  # a text that was shown once may be shown again
        if index < len(given) and given[index] == shown:
            given[index] = read[index]
    return given == read or [*map(clean_message, given)] == [*map(clean_message, read)]


def head_changes(read: Head | None, asked: Head) -> list[str]:
    """Name the parts of a request's system prompt and tools that the policy has not read.

    Fewer tools are no change: Strands leaves out all but the tool that it forces. After a resume nothing is known to
    have changed.
    """
    if read is None:
        return []
    named: list[str] = []
    if asked.tools != read.tools:  # usually all are the same
        known = to_chat_tools(read.tools)
        changed = to_chat_tools([spec for spec in asked.tools if spec not in read.tools])
        # by repr too, since a NaN in a schema is unequal to itself
        unread = [tool for tool in changed if tool not in known and repr(tool) not in map(repr, known)]
        named = [f"the tool {tool['function']['name']!r}" for tool in unread]
    return named if asked.system == read.system else ["the system prompt", *named]


def difference(branch: Branch, messages: StrandsMessages, changes: Sequence[str]) -> str:
    """Describe how a request leaves a branch: by its head, by a message, or by repeating a request."""
    if changes:
        return f"the request changed {', '.join(changes)}"
    read = branch.messages[: branch.covered]
    for number, (kept, given) in enumerate(zip(read, map(role_and_content, messages), strict=False)):
        shown = branch.with_transient.get(number, kept)
        if clean_message(shown) != clean_message(given):
            before, now = _text_of(shown[1]), _text_of(given[1])
            only_text_differs = _without_text(shown[1]) == _without_text(given[1])
            if only_text_differs and (lines := lines_around(before, now)):
                return f"{TRANSIENT}: message {number} had {lines!r:.300}"
            return f"message {number} of the history was rewritten"
    is_shorter = len(messages) < branch.covered
    return "messages were taken from the history" if is_shorter else "the policy was asked for another answer"


def lines_around(before: str, now: str) -> str:
    """Return the lines of a text around those of another text, such as a reminder's; "" if it is not around them."""
    had, has = ([" ".join(line.split()) for line in text.splitlines() if line.strip()] for text in (before, now))
    starts = range(len(had) - len(has) + 1)
    start = next((at for at in starts if had[at : at + len(has)] == has), None)
    return "" if start is None else "\n".join([*had[:start], *had[start + len(has) :]])


def _text_of(content: Sequence[Block]) -> str:
    return "\n".join(block["text"] for block in content if "text" in block)


def _without_text(content: Sequence[Block]) -> list[Block]:
    return [block for block in content if "text" not in block]


def is_same_history(history: StrandsMessages, messages: StrandsMessages) -> bool:
    """Return whether a request sends an agent's own history, judged by its length and its last message.

    Strands cleans messages before it sends them, and plugins add text to them.
    """
    if not history or len(history) != len(messages) or history[-1]["role"] != messages[-1]["role"]:
        return False
    return all(block in messages[-1]["content"] for block in history[-1]["content"])


def calling_agent(state: Mapping[str, Any] | None, signal: object, messages: StrandsMessages) -> object:
    """Return the agent that an invocation's state names; None if another agent may be asking.

    Agents that work at once in a graph share one state. Newer versions of Strands pass the agent's signal as well.
    """
    agent = (state or {}).get("agent")
    if signal is not None:
        return agent if getattr(agent, "_cancel_signal", None) is signal else None
    return agent if is_same_history(getattr(agent, "messages", ()), messages) else None
