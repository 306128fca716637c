"""An agent's request, and the branch that it continues.

Strands usually passes the calling agent, so the agent's conversation is known. The agent may have changed its history.
So the request's history is compared, message by message, with what the policy has read in that conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from strands_rollout.record.record import (
    BeginBranch,
    Block,
    Branch,
    Conversation,
    Head,
    Match,
    Message,
    StrandsMessages,
    copy_content,
    role_and_content,
)
from strands_rollout.template.messages import clean_message, system_text, to_chat_tools

if TYPE_CHECKING:
    from strands_rollout.record.record import Record

TRANSIENT: Final = "a text was shown in one request and not in the next"


@dataclass(slots=True)
class AgentRequest:
    """A call of the model by Strands.

    Attributes:
        messages: The history that the agent sends, including transient texts. The agent may change this list while its
            request is answered.
        tool_specs: The tools that the policy may call.
        system_prompt: The agent's system prompt as text.
        system_blocks: The system prompt as content blocks, which take precedence over the text.
        agent: The calling agent; None if it is not known.
        signal: The agent's cancel signal, which no other agent has; None if it is not known.
        is_sole: True if all requests count as one agent's (`conversations="one"`).
        only_grew: True if messages were only appended since the agent's last answer. The comparison with what the
            policy has read is skipped then; for a long history it is the most expensive step of a turn.
        head: The system prompt and the tools.
    """

    messages: StrandsMessages
    tool_specs: StrandsMessages | None = None
    system_prompt: str | None = None
    system_blocks: StrandsMessages | None = None
    agent: Any = None
    signal: Any = None
    is_sole: bool = False
    only_grew: bool = False
    head: Head = field(init=False)

    def __post_init__(self) -> None:
        self.head = Head(system_text(self.system_prompt, self.system_blocks) or None, [*(self.tool_specs or ())])

    @property
    def history(self) -> StrandsMessages:
        """The agent's own messages, without transient texts.

        If the agent is unknown, or its number of messages differs from the request's, these are the request's messages.
        """
        own = getattr(self.agent, "messages", None)
        return own if isinstance(own, list) and len(own) == len(self.messages) else self.messages

    def matches(self, record: Record) -> list[Match]:
        """Compare the request with the growing branch of the agent's conversation; [] without a conversation."""
        conversation = record.main if self.is_sole else self._conversation(record)
        return [] if conversation is None else [self._match(conversation)]

    def new_branch_place(self, record: Record, matches: Sequence[Match]) -> BeginBranch:  # noqa: ARG002 - `ClientRequest` uses it
        """Return where to begin a branch: in the agent's conversation or, if there is none, in a new conversation."""
        if not matches:
            is_known = self.agent is not None or self.signal is not None
            return BeginBranch("agent" if is_known else "aside", [*self.messages])
        [match] = matches
        return BeginBranch(match.conversation, [*self.messages], match.difference, match.head_changes)

    def _conversation(self, record: Record) -> Conversation | None:
        known = record.conversation_of(self.agent, self.signal)
        return known if known is not None else next(filter(self._may_belong_to, record), None)

    def _may_belong_to(self, conversation: Conversation) -> bool:
        """Return whether this request may belong to a conversation that is not bound to the request's agent."""
        if conversation.is_busy:
            return False
        if (agent := conversation.agent) is not None:
            is_unknown = self.agent is None and self.signal is None
            return is_unknown and is_same_history(agent.messages, self.messages)
        if conversation.is_bound:
            return False  # its agent was garbage-collected
        branch = conversation.branch
        if branch.is_new:
            return conversation.kind == "main"
        is_unfinished = branch.is_open or conversation.has_unread_turn
        return self._continues_answer(branch) or (is_unfinished and has_read_exactly(branch, self.messages))

    def _continues_answer(self, branch: Branch) -> bool:
        """Return whether the request begins with what the policy has read, followed by exactly the policy's answer."""
        # Take the answer from the node: the branch's messages lack it until an agent has received it
        answer = branch.nodes[-1].answer if branch.nodes else None
        if answer is None or not is_extended_by(branch, self.messages):
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
        # Compare with and without transient texts
        is_repeated = has_read_exactly(branch, messages) or has_read_exactly(branch, self.history)
        if is_repeated and conversation.has_unread_turn:
            return Match(conversation, branch, repeated=branch.nodes[-1])
        if not changes and is_repeated and branch.is_open:
            return Match(conversation, branch, extends=True)
        if not changes and not is_repeated and is_extended_by(branch, messages):
            return Match(
                conversation, branch, extends=True, answer=messages[covered], new_messages=messages[covered + 1 :]
            )
        return Match(
            conversation, branch, difference=describe_difference(branch, messages, changes), head_changes=changes
        )

    def without_transient(self, start: int, new_messages: StrandsMessages) -> dict[int, Message]:
        """Return the agent's own versions of those new messages that have a transient text.

        Args:
            start: Index of the first new message in the branch.
            new_messages: The messages as the policy reads them.

        Returns:
            Index of the message in the branch -> role and content of the agent's own version.
        """
        history = self.history
        if self.messages is getattr(self.agent, "messages", None):
            return {}
        pairs = zip(map(role_and_content, new_messages), map(role_and_content, history[start:]), strict=False)
        return {
            index: (own[0], copy_content(own[1]))
            for index, (read, own) in enumerate(pairs, start)
            if own != read and clean_message(own) != clean_message(read)
        }


def is_same_message(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two messages are equal after Strands' cleaning."""
    return clean_message(role_and_content(one)) == clean_message(role_and_content(other))


def has_read_exactly(branch: Branch, messages: StrandsMessages) -> bool:
    """Return whether the policy has read exactly these messages on a branch."""
    return len(messages) == branch.covered and _starts_as_read(branch, messages)


def is_extended_by(branch: Branch, messages: StrandsMessages) -> bool:
    """Return whether the messages begin with all that the policy has read on a branch, followed by an answer."""
    covered = branch.covered
    return len(messages) > covered and messages[covered]["role"] == "assistant" and _starts_as_read(branch, messages)


def _starts_as_read(branch: Branch, messages: StrandsMessages) -> bool:
    """Return whether the messages begin with all that the policy has read on a branch.

    Compare them as sent, then cleaned: Strands cleans messages before some calls of a model and not before others.
    """
    start, read = [*map(role_and_content, messages[: branch.covered])], branch.messages[: branch.covered]
    if start == read:
        return True
    for index, shown in branch.with_transient.items():  # a plugin may add its text again
        if index < len(start) and start[index] == shown:
            start[index] = read[index]
    return start == read or [*map(clean_message, start)] == [*map(clean_message, read)]


def head_changes(read: Head | None, requested: Head) -> list[str]:
    """Name the parts of a request's system prompt and tools that the policy has not read.

    A missing tool is not a change: to force a tool, Strands sends only that tool. After a resume, the head that the
    policy has read is unknown (None), and nothing counts as changed.
    """
    if read is None:
        return []
    named: list[str] = []
    if requested.tools != read.tools:  # a rare case
        known = to_chat_tools(read.tools)
        changed = to_chat_tools([spec for spec in requested.tools if spec not in read.tools])
        # Compare by repr too: a NaN in a schema is unequal to itself
        unread = [tool for tool in changed if tool not in known and repr(tool) not in map(repr, known)]
        named = [f"the tool {tool['function']['name']!r}" for tool in unread]
    return named if requested.system == read.system else ["the system prompt", *named]


def describe_difference(branch: Branch, messages: StrandsMessages, changes: Sequence[str]) -> str:
    """Describe how a request departs from a branch; `changes` names the changed parts of its system prompt and tools.

    If nothing has changed, the request asks for another answer than the recorded one.
    """
    if changes:
        return f"the request changed {', '.join(changes)}"
    read = branch.messages[: branch.covered]
    for number, (recorded, sent) in enumerate(zip(read, map(role_and_content, messages), strict=False)):
        shown = branch.with_transient.get(number, recorded)
        if clean_message(shown) != clean_message(sent):
            before, now = text_of(shown[1]), text_of(sent[1])
            only_text_differs = _without_text(shown[1]) == _without_text(sent[1])
            if only_text_differs and (lines := surrounding_lines(before, now)):
                return f"{TRANSIENT}: message {number} had {lines!r:.300}"
            return f"message {number} of the history was rewritten"
    is_shorter = len(messages) < branch.covered
    return "messages were removed from the history" if is_shorter else "the policy was asked for another answer"


def surrounding_lines(before: str, now: str) -> str:
    """Return the lines of `before` around the lines of `now`, such as a reminder.

    Return "" if `before` does not contain the lines of `now`, or has no other lines. Differences in white space and
    blank lines are ignored.
    """
    outer, inner = ([" ".join(line.split()) for line in text.splitlines() if line.strip()] for text in (before, now))
    starts = range(len(outer) - len(inner) + 1)
    start = next((at for at in starts if outer[at : at + len(inner)] == inner), None)
    return "" if start is None else "\n".join([*outer[:start], *outer[start + len(inner) :]])


def text_of(content: Sequence[Block]) -> str:
    """Return the text blocks of a message's content, joined by line breaks."""
    return "\n".join(block["text"] for block in content if "text" in block)


def _without_text(content: Sequence[Block]) -> list[Block]:
    return [block for block in content if "text" not in block]


def is_same_history(history: StrandsMessages, messages: StrandsMessages) -> bool:
    """Return whether a request sends an agent's own history, judging by its length and its last message.

    The other messages are not compared, since Strands cleans messages before it sends them, and plugins add text to
    them.
    """
    if not history or len(history) != len(messages) or history[-1]["role"] != messages[-1]["role"]:
        return False
    return all(block in messages[-1]["content"] for block in history[-1]["content"])


def calling_agent(state: Mapping[str, Any] | None, signal: object, messages: StrandsMessages) -> object:
    """Return the agent in an invocation's state; None without an agent, or if another agent may be the caller.

    Concurrent agents of a graph share one state, which may name any of them. The caller is recognized by its cancel
    `signal`. Older versions of Strands don't pass the signal; there, the caller is recognized by its messages.
    """
    agent = (state or {}).get("agent")
    if signal is not None:
        return agent if getattr(agent, "_cancel_signal", None) is signal else None
    return agent if is_same_history(getattr(agent, "messages", ()), messages) else None
