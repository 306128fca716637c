"""Where a request goes on in a record: how far it follows a branch, and the place that is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strands_rollout.record.branch import Branch, Conversation, Kind, Node, StrandsMessages


@dataclass(frozen=True, slots=True)
class Match:
    """How far a request follows one branch.

    Attributes:
        conversation: The branch's.
        branch: The branch.
        node: The turn that is the answer to this request, which it has had, or should have.
        extends: Whether it goes on where the branch ends.
        why: Why it does not, as text.
        changes_in_head: What of its system prompt and tools is not the branch's, named.
        answered: The branch's last answer, as whoever asks has it; None before the first and inside an open turn.
        new: The messages after that.
        length: How many messages are the branch's.
    """

    conversation: Conversation
    branch: Branch
    node: Node | None = None
    extends: bool = False
    why: str = ""
    changes_in_head: Sequence[str] = ()
    answered: Mapping[str, Any] | None = None
    new: StrandsMessages = ()
    length: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes on.

    Attributes:
        conversation: The conversation; the kind of one that is to be begun.
        branch: The branch that it extends, or repeats; None where it begins one.
        why: Why it begins a branch in a conversation that has some, as text.
        node: The turn that it repeats, if it does.
        answered: The answer before the new messages, as whoever asks has it.
        new: The messages that the policy is to read; none inside an open turn.
        changes_in_head: What of the system prompt and tools is not those of the branch before, named.
        match: The match with the branch that it extends, or from which it forks.
        shared: How many of the new messages are those of the branch that the history has left.
        origin: The last of its turns among these.
    """

    conversation: Conversation | Kind
    branch: Branch | None
    why: str = ""
    node: Node | None = None
    answered: Mapping[str, Any] | None = None
    new: StrandsMessages = ()
    changes_in_head: Sequence[str] = ()
    match: Match | None = None
    shared: int = 0
    origin: Node | None = None
