"""The record of an episode: every token that the policy read and wrote, as a tree of turns.

`Record.place_of` decides which turn a request continues.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from strands_rollout.errors import EngineAbortedError
from strands_rollout.record.branch import (
    Branch,
    ClientView,
    Conversation,
    ConversationKind,
    Head,
    role_and_content,
)
from strands_rollout.record.place import BeginBranch, ExtendBranch, Match, Place, RepeatTurn


class Request(Protocol):
    """A request to the policy: an `AgentRequest` of a Strands agent, or a `ClientRequest` of a gateway client."""

    @property
    def head(self) -> Head:
        """The system prompt and the tools."""

    def matches(self, record: Record) -> Sequence[Match]:
        """Compare the request with the branches that it may continue; return the matches, best match first."""

    def begin_branch(self, record: Record, matches: Sequence[Any]) -> BeginBranch:
        """Return the place of a new branch, for a request that neither repeats a turn nor extends a branch."""


class Record:
    """Everything that one policy read and wrote in an episode.

    A record has a conversation for each agent that asks the policy, a conversation has branches, and a branch has a
    node for each turn. The last branch of the main conversation is the episode's sample; with `fan_out`, each other
    branch becomes a sibling of that sample.

    Attributes:
        main: The main agent's conversation: the first conversation, until another is promoted.
        others: The other conversations, in the order of their beginnings.
        is_closed: True once no further turn may be sampled.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._touches = itertools.count(1)
        self.main = Conversation()
        self.others: list[Conversation] = []
        # by `id()` of agents and cancel signals, which may have been garbage-collected
        self._by_owner: dict[int, Conversation] = {}
        self.is_closed = False

    def __iter__(self) -> Iterator[Conversation]:
        return iter((self.main, *self.others))

    def place_of(self, request: Request) -> Place:
        """Return the place of a request: the turn that it repeats, the branch that it extends, or a new branch.

        The record is not changed; `enter` changes it.
        """
        matches = request.matches(self)
        for match in matches:
            if match.repeated is not None:
                return RepeatTurn(match.conversation, match.branch, match.repeated)
        for match in matches:
            if match.extends:
                return ExtendBranch(match.conversation, match.branch, match.answer, match.new_messages, match)
        return request.begin_branch(self, matches)

    @contextmanager
    def entered(self, place: ExtendBranch | BeginBranch, head: Head) -> Iterator[Conversation]:
        """Enter a place, and leave it at the end of the block; see `enter`."""
        conversation = self.enter(place, head)
        try:
            yield conversation
        finally:
            conversation.is_busy = False

    def enter(self, place: ExtendBranch | BeginBranch, head: Head) -> Conversation:
        """Make a place the end of its conversation, so that a turn can be sampled there.

        The conversation is busy until the caller resets `is_busy`. Use `entered` where a block can do this.

        Raises:
            EngineAbortedError: The place needs a new conversation, and the episode is over.
        """
        conversation = self.begin(place.conversation) if isinstance(place.conversation, str) else place.conversation
        if isinstance(place, ExtendBranch):
            conversation.return_to(place.branch)
        else:
            if not conversation.branch.is_new:
                conversation.begin_branch(place.reason)
            branch = conversation.branch
            branch.head = head
            branch.messages = [*map(role_and_content, place.new_messages[: place.shared])]
            branch.client = ClientView()  # a first request that failed may have left a client view
            branch.origin = place.origin
            self.touch(branch)
        conversation.is_busy, conversation.has_unread_turn = True, False
        return conversation

    def touch(self, branch: Branch) -> None:
        """Record that a branch has just begun or been answered; among equal matches, the branch touched last wins."""
        branch.touched = next(self._touches)

    def has_begun(self, conversation: Conversation) -> bool:
        """Return whether a turn of a conversation was sampled or is being sampled."""
        return conversation.is_busy or conversation.turn_count > 0

    def conversation_of(self, agent: object, signal: object) -> Conversation | None:
        """Return the conversation bound to an agent or its cancel signal; None if it is missing or busy."""
        if not self.main.is_busy and self.main.belongs_to(agent, signal):
            return self.main
        bound = [self._by_owner.get(id(owner)) for owner in (agent, signal) if owner is not None]
        found = next((conversation for conversation in bound if conversation is not None), None)
        return found if found is not None and not found.is_busy and found.belongs_to(agent, signal) else None

    def bind(self, conversation: Conversation, agent: object, signal: object = None) -> None:
        """Bind a conversation to an agent and its cancel signal; an argument that is None changes nothing.

        An agent with two concurrent requests has two conversations, which are both bound to it.
        """
        if conversation.belongs_to(agent, signal):
            return
        conversation.bind(agent, signal)
        self._by_owner.update((id(owner), conversation) for owner in (agent, signal) if owner is not None)

    def last_conversation_of(self, agent: object) -> Conversation | None:
        """Return the newest conversation that is bound to an agent and has a turn."""
        newest_first = (*reversed(self.others), self.main)
        return next((found for found in newest_first if found.agent is agent and found.turn_count), None)

    def begin(self, kind: ConversationKind) -> Conversation:
        """Begin another conversation.

        Raises:
            EngineAbortedError: The episode is over.
        """
        if self.is_closed:
            raise EngineAbortedError("the episode has ended before an agent's first request")
        # the history may begin with messages of another conversation, whose calls keep their ids
        shown_ids = {use_id: shown for each in self for use_id, shown in each.branch.calls.shown_ids.items()}
        self.others.append(Conversation(kind, next(self._numbers), shown_ids))
        return self.others[-1]

    def promote(self, conversation: Conversation) -> None:
        """Make a conversation the main conversation; keep the former main conversation only if it has begun."""
        before = self.main
        if conversation is before:
            return
        self.others.remove(conversation)
        self.main, conversation.kind = conversation, "main"
        if self.has_begun(before):
            before.kind = "agent"
            self.others.insert(0, before)
            self._by_owner[id(before.agent)] = before
        else:  # it is dropped: its agent's first request begins another conversation
            self._by_owner = {key: found for key, found in self._by_owner.items() if found is not before}

    def restart_main(self) -> None:
        """Replace the main conversation with an empty conversation."""
        self.main = Conversation()

    def close(self) -> None:
        """Refuse all further turns."""
        self.is_closed = True
