"""The place of a request in the record: it repeats a turn, extends a branch, or begins a branch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from strands_rollout.record.branch import Branch, Conversation, ConversationKind, Node, StrandsMessages


@dataclass(slots=True)
class Match:
    """Extent to which a request follows a branch.

    Attributes:
        conversation: The branch's conversation.
        branch: The branch.
        repeated: The recorded turn that answers this very request; None if no turn does.
        extends: True if the request continues where the branch ends.
        difference: Description of where the request departs from the branch; meaningless if it extends the branch.
        head_changes: Names of the parts of the head that differ from the branch's system prompt and tools.
        answer: The branch's last answer, as an agent's request words it, or for a client's request as recorded; None
            before the first answer and in an open turn.
        new_messages: The messages after that answer.
        length: Number of messages that the request shares with the branch; only counted for clients of the gateway.
    """

    conversation: Conversation
    branch: Branch
    repeated: Node | None = None
    extends: bool = False
    difference: str = ""
    head_changes: Sequence[str] = ()
    answer: Mapping[str, Any] | None = None
    new_messages: StrandsMessages = ()
    length: int = 0


@dataclass(slots=True)
class RepeatTurn:
    """The policy has answered this very request: nothing is sampled.

    Attributes:
        conversation: The conversation of the turn.
        branch: The branch that the turn is on.
        node: The turn.
    """

    conversation: Conversation
    branch: Branch
    node: Node


@dataclass(slots=True)
class ExtendBranch:
    """The request continues where a branch ends.

    Attributes:
        conversation: The conversation of the branch.
        branch: The branch.
        answer: See `Match`.
        new_messages: The messages that the policy has to read; none if the branch's last turn is open.
        match: The comparison with the branch.
    """

    conversation: Conversation
    branch: Branch
    answer: Mapping[str, Any] | None
    new_messages: StrandsMessages
    match: Match


@dataclass(slots=True)
class BeginBranch:
    """The request has a history that no branch has, and begins a new branch.

    Attributes:
        conversation: The conversation that gets the branch, or the kind of the conversation to begin.
        new_messages: All messages of the request; messages shared with a branch are worded as recorded.
        reason: Text that says why the request extends no branch; "" for the first branch of a conversation.
        head_changes: Names of the parts of the head that differ from the conversation's last branch.
        match: The comparison with the branch that shares the first messages; None if no branch does.
        shared: Number of `new_messages` that are shared with the branch of `match`.
        origin: The last turn among the shared messages; None if they contain no turn.
    """

    conversation: Conversation | ConversationKind
    new_messages: StrandsMessages
    reason: str = ""
    head_changes: Sequence[str] = ()
    match: Match | None = None
    shared: int = 0
    origin: Node | None = None

    @property
    def rewrites(self) -> Conversation | None:
        """The conversation whose history the request rewrites; None if it has no history yet."""
        conversation = self.conversation
        return None if isinstance(conversation, str) or conversation.branch.is_new else conversation


Place: TypeAlias = RepeatTurn | ExtendBranch | BeginBranch
