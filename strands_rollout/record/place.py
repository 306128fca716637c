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
        node: The turn that has answered this very request already; None where no turn has.
        extends: Whether it goes on where the branch ends.
        why: Why it does not, as text; not to be read where it does.
        changes_in_head: What of its system prompt and tools is not the branch's, named.
        answered: The branch's last answer, as whoever asks has it; None before the first and inside an open turn.
        new: The messages after that.
        length: How many of its messages are the branch's; only compared by requests of clients.
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
        conversation: The conversation, or the kind of a new one, which `Record.enter` begins.
        branch: The branch that it extends, or whose turn it repeats; None where it begins a branch.
        why: Why it begins a branch in a conversation that has some, as text.
        node: The turn that it repeats, if it does.
        answered: The answer before the new messages, as whoever asks has it.
        new: The messages that the policy is to read: of a new branch all of them, the shared beginning included; of
            others those after the last answer; none inside an open turn.
        changes_in_head: What of the system prompt and tools is not those of the branch before, named.
        match: The match with the branch that it extends, or from which it forks.
        shared: How many of `new` are those of the branch that the history has left; 0 where a branch is extended.
        origin: The last turn among these.
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
