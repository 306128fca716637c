"""The record of an episode: every token that the policy read and wrote, as a tree of turns.

`Record.place_of` is the one function that decides which turn a request continues.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

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

if TYPE_CHECKING:
    from strands_rollout.model.sampling import TurnSampler


class Request(Protocol):
    """A request to the policy: an `AgentRequest` of a Strands agent, or a `ClientRequest` of a gateway client."""

    @property
    def head(self) -> Head:
        """The system prompt and the tools."""

    def matches(self, record: Record) -> Sequence[Match]:
        """Compare the request with the branches that it may continue; the best match comes first."""

    def begin_branch(self, record: Record, matches: Sequence[Any]) -> BeginBranch:
        """Choose where a request begins a branch that neither repeats a turn nor extends a branch."""


class Record:
    """All that one policy read and wrote in an episode.

    A record has a conversation for each agent that asks the policy, a conversation has branches, and a branch has a
    node for each turn. Each branch becomes a sample: the last branch of the main conversation is the episode's sample,
    the others are its siblings.

    Args:
        new_sampler: Returns the sampler of a new conversation, which asks the engine for its turns.

    Attributes:
        main: The main agent's conversation: the first one, until another is promoted.
        others: The other conversations, in the order of their beginnings.
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

    def enter(self, place: ExtendBranch | BeginBranch, head: Head) -> Conversation:
        """Make a place the end of its conversation, so that a turn can be sampled there.

        The conversation is busy from here on. The caller sets `is_busy` back, as `SGLangModel.answer_at` does.

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
            branch.client = ClientView()  # not that of a first request which failed
            branch.origin = place.origin
            self.touch(branch)
        conversation.is_busy, conversation.has_unread_turn = True, False
        return conversation

    def touch(self, branch: Branch) -> None:
        """Note that a branch was begun or answered now; of equal matches, the branch touched last wins."""
        branch.touched = next(self._times)

    def is_begun(self, conversation: Conversation) -> bool:
        """Return whether a turn of a conversation was sampled or is being sampled."""
        return conversation.is_busy or conversation.turn_count > 0

    def conversation_of(self, agent: object, signal: object) -> Conversation | None:
        """Return the conversation that is bound to an agent or its cancel signal; None if that is busy or unknown."""
        bound = [self._known.get(id(owner)) for owner in (agent, signal) if owner is not None]
        for found in (self.main, next((one for one in bound if one is not None), None)):
            if found is not None and not found.is_busy and found.belongs_to(agent, signal):
                return found
        return None

    def bind(self, conversation: Conversation, agent: object, signal: object = None) -> None:
        """Bind a conversation to an agent and its cancel signal, unless it is bound to them; None changes nothing.

        An agent that asks twice at once has two conversations: it continues the first, and the second stays bound.
        """
        if conversation.belongs_to(agent, signal):
            return
        conversation.bind(agent, signal)
        self._known.update((id(owner), conversation) for owner in (agent, signal) if owner is not None)

    def last_of(self, agent: object) -> Conversation | None:
        """Return the newest conversation that is bound to an agent and has a turn."""
        return next((one for one in (*reversed(self.others), self.main) if one.agent is agent and one.turn_count), None)

    def begin(self, kind: ConversationKind) -> Conversation:
        """Begin a conversation beside the others.

        Raises:
            EngineAbortedError: The episode is over.
        """
        if self._is_closed:
            raise EngineAbortedError("the episode has ended before an agent's first request")
        shown_ids = {use_id: shown for one in self for use_id, shown in one.branch.calls.shown_ids.items()}
        self.others.append(Conversation(self._new_sampler(), kind, next(self._numbers), shown_ids))
        return self.others[-1]

    def promote(self, conversation: Conversation) -> None:
        """Make a conversation the main one; the main one before is kept among the others if it has begun."""
        before = self.main
        if conversation is before:
            return
        self.others.remove(conversation)
        self.main, conversation.kind = conversation, "main"
        if self.is_begun(before):
            before.kind = "agent"
            self.others.insert(0, before)
            self._known[id(before.agent)] = before
        else:  # its agent gets another conversation, of this record
            self._known = {key: one for key, one in self._known.items() if one is not before}

    def restart_main(self) -> None:
        """Replace the main conversation with an empty one."""
        self.main = Conversation(self._new_sampler())

    def close(self) -> None:
        """Refuse all further requests."""
        self._is_closed = True
        for one in self:
            one.sampler.is_closed = True
