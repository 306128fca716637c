"""The record of an episode, a tree of the policy's turns, and the one function that decides where a request goes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from strands_rollout.errors import EngineAbortedError
from strands_rollout.record.branch import Branch, Conversation, Head, Kind, what_is_read
from strands_rollout.record.place import Match, Place

if TYPE_CHECKING:
    from strands_rollout.model.sampling import TurnSampler


class Request(Protocol):
    """A request to the policy: of an agent (`AgentRequest`), or of a client of the gateway (`ClientRequest`)."""

    @property
    def head(self) -> Head:
        """The system prompt and the tools."""

    def matches(self, record: Record) -> Sequence[Match]:
        """How far it follows the branches that it may go on with, the best first."""

    def place_beside(self, record: Record, matches: Sequence[Any]) -> Place:
        """Where it goes on if it neither repeats a turn nor extends a branch: a branch or a conversation of its own."""


class Record:
    """All that one policy has read and written in an episode: a conversation for each agent that asks it.

    Conversations hold branches, branches hold nodes, and a node is a turn. A branch becomes a sample: that of the main
    conversation which grows is the episode's, the others are its siblings.

    Args:
        new_sampler: Makes what asks the engine for the turns of one conversation.

    Attributes:
        main: The main agent's conversation: the first, until another is promoted.
        others: Those beside it.
    """

    def __init__(self, new_sampler: Callable[[], TurnSampler]) -> None:
        self._new_sampler = new_sampler
        self._numbers = itertools.count(1)
        self._times = itertools.count(1)
        self.main = Conversation(new_sampler())
        self.others: list[Conversation] = []
        self._known: dict[int, Conversation] = {}  # by the ids of agents and signals, which may have died
        self._is_closed = False

    def __iter__(self) -> Iterator[Conversation]:
        return iter((self.main, *self.others))

    def place_of(self, request: Request) -> Place:
        """Where a request goes on: the turn that it repeats, the branch that it extends, or a branch of its own.

        Nothing is changed; `enter` goes there.
        """
        matches = request.matches(self)
        for match in matches:
            if match.node is not None:
                return Place(match.conversation, match.branch, node=match.node, match=match)
        for match in matches:
            if match.extends:
                return Place(match.conversation, match.branch, answered=match.answered, new=match.new, match=match)
        return request.place_beside(self, matches)

    def enter(self, place: Place, head: Head) -> Conversation:
        """Go where a turn is to be sampled, and begin what is to be begun there.

        The conversation is busy until whoever entered it sets `is_busy` back, as `SGLangModel.answer_at` does.

        Raises:
            EngineAbortedError: A conversation is to be begun, and the episode is over.
        """
        conversation = self.begin(place.conversation) if isinstance(place.conversation, str) else place.conversation
        if place.branch is not None:
            conversation.return_to(place.branch)
        elif not isinstance(place.conversation, str):
            conversation.begin_branch(place.why)
        branch = conversation.branch
        if branch.is_new:
            branch.head = head
            branch.messages = [*map(what_is_read, place.new[: place.shared])]
            branch.seen, branch.client_ids = (), {}  # of a first request here that failed
            if place.origin is not None:
                branch.origin = place.origin
            self.touch(branch)
        conversation.is_busy, conversation.has_unread_turn = True, False
        return conversation

    def touch(self, branch: Branch) -> None:
        """Note that a branch was begun or answered now: of equal matches, the branch touched last counts."""
        branch.touched = next(self._times)

    def is_begun(self, conversation: Conversation) -> bool:
        """Return whether a turn was sampled in a conversation, or is being sampled."""
        return conversation.is_busy or conversation.turn_count > 0

    def conversation_of(self, agent: object, signal: object) -> Conversation | None:
        """The conversation that is known to be an agent's, unless a turn of it is in progress."""
        named = [self._known.get(id(one)) for one in (agent, signal) if one is not None]
        for found in (self.main, next((one for one in named if one is not None), None)):
            if found is not None and not found.is_busy and found.belongs_to(agent, signal):
                return found
        return None

    def bind(self, conversation: Conversation, agent: object, signal: object = None) -> None:
        """Remember whose conversation it is, unless that is known; what is None changes nothing.

        An agent that asked twice at once has two: what is known of the second is kept, while it goes on with the first.
        """
        if conversation.belongs_to(agent, signal):
            return
        conversation.bind(agent, signal)
        self._known.update((id(one), conversation) for one in (agent, signal) if one is not None)

    def last_of(self, agent: object) -> Conversation | None:
        """The newest conversation in which this agent has spoken."""
        return next((one for one in (*reversed(self.others), self.main) if one.agent is agent and one.turn_count), None)

    def begin(self, kind: Kind) -> Conversation:
        """A new conversation beside the others.

        Raises:
            EngineAbortedError: The episode is over.
        """
        if self._is_closed:
            raise EngineAbortedError("the episode has ended before an agent's first request")
        shown_ids: Mapping[str, str] = {use_id: shown for one in self for use_id, shown in one.branch.shown_ids.items()}
        self.others.append(Conversation(self._new_sampler(), kind, next(self._numbers), shown_ids))
        return self.others[-1]

    def promote(self, conversation: Conversation) -> None:
        """Make it the main one; the one before stays beside it, if a turn was sampled in it or is."""
        before = self.main
        if conversation is before:
            return
        self.others.remove(conversation)
        self.main, conversation.kind = conversation, "main"
        if self.is_begun(before):
            before.kind = "agent"
            self.others.insert(0, before)
            self._known[id(before.agent)] = before
        else:  # its agent is given another, which is in the record
            self._known = {key: one for key, one in self._known.items() if one is not before}

    def restart_main(self) -> None:
        """Begin the main one anew."""
        self.main = Conversation(self._new_sampler())

    def close(self) -> None:
        """Let no request follow."""
        self._is_closed = True
        for one in self:
            one.sampler.is_closed = True
