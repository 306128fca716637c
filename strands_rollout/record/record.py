"""The record of an episode: every token that the policy read and wrote, as a tree of turns.

    Record          everything that one policy read and wrote in an episode
    Conversation    all requests of one agent
    Branch          one history of that agent, with its exact tokens in a `Trajectory`
    Node            one turn on a branch

`Record.place_of` compares a request with the branches: the request repeats a turn, extends a branch, or begins a new
branch. Unless it repeats a turn, `Record.enter` then prepares the branch for the next turn, which the model appends.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from strands_rollout.control import current_call
from strands_rollout.errors import EngineAbortedError
from strands_rollout.files.json_codec import Json
from strands_rollout.record.tokens import Trajectory
from strands_rollout.tool_parsers import ParseFailure, ToolParser

if TYPE_CHECKING:
    from strands_rollout.model.images import PlacedImage

UNPARSED: Final = "_unparsed"
"""Suffix of the tool-use id of a call that could not be parsed. The policy can write any tool name, but not this id."""

ConversationKind = Literal["main", "agent", "aside"]
Block = dict[str, Any]
Message = tuple[str, list[Block]]
"""Role and content of a Strands message: the two parts that the policy reads."""
StrandsMessages = Sequence[Mapping[str, Any]]

role_and_content: Final = itemgetter("role", "content")


class Record:
    """Everything that one policy read and wrote in an episode.

    A record has a conversation for each agent that asks the policy, a conversation has branches, and a branch has a
    node for each turn. The last branch of the main conversation is the episode's sample; with `fan_out`, each other
    branch with a turn becomes a sibling of that sample.

    Attributes:
        main: The main agent's conversation: the first conversation, until another is promoted.
        others: The other conversations, in the order in which they began.
        is_closed: True once no further turn may be sampled.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._touches = itertools.count(1)
        self.main = Conversation()
        self.others: list[Conversation] = []
        # conversations by `id()` of agents and cancel signals; an id may be reused after a garbage collection, so
        # `conversation_of` also checks `belongs_to`
        self._by_owner: dict[int, Conversation] = {}
        self.is_closed = False

    def __iter__(self) -> Iterator[Conversation]:
        return iter((self.main, *self.others))

    def place_of(self, request: Request) -> Place:
        """Find the turn that a request repeats, the branch that it extends, or where to begin a branch for it.

        The record is not changed; `enter` changes it.
        """
        matches = request.matches(self)
        for match in matches:
            if match.repeated is not None:
                return RepeatTurn(match.conversation, match.branch, match.repeated)
        for match in matches:
            if match.extends:
                return ExtendBranch(match.conversation, match.branch, match.answer, match.new_messages, match)
        return request.new_branch_place(self, matches)

    @contextmanager
    def entered(self, place: ExtendBranch | BeginBranch, head: Head) -> Iterator[Conversation]:
        """Call `enter`; at the end of the block, reset the conversation's `is_busy`."""
        conversation = self.enter(place, head)
        try:
            yield conversation
        finally:
            conversation.is_busy = False

    def enter(self, place: ExtendBranch | BeginBranch, head: Head) -> Conversation:
        """Begin or return to the branch of a place, so that a turn can be sampled there.

        The conversation is busy until the caller resets `is_busy`. Use `entered` if a `with` block can do this.

        Raises:
            EngineAbortedError: The place needs a new conversation, and the episode is over.
        """
        conversation = place.conversation
        if isinstance(conversation, str):
            conversation = self.begin_conversation(conversation)
        if isinstance(place, ExtendBranch):
            conversation.return_to(place.branch)
        else:
            if not conversation.branch.is_new:
                conversation.begin_branch(place.reason)
            branch = conversation.branch
            branch.head = head
            branch.messages = [*map(role_and_content, place.new_messages[: place.shared])]
            branch.client = ClientView()  # a failed first request may have left a client view
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
        """Bind a conversation to an agent and the agent's cancel signal, unless it is bound to either already.

        An argument that is None changes nothing. An agent with two concurrent requests has two conversations, which
        are both bound to it.
        """
        if conversation.belongs_to(agent, signal):
            return
        conversation.bind(agent, signal)
        self._by_owner.update((id(owner), conversation) for owner in (agent, signal) if owner is not None)

    def last_conversation_of(self, agent: object) -> Conversation | None:
        """Return the newest conversation that is bound to an agent and has a turn; None if there is none."""
        newest_first = (*reversed(self.others), self.main)
        return next((found for found in newest_first if found.agent is agent and found.turn_count), None)

    def begin_conversation(self, kind: ConversationKind) -> Conversation:
        """Begin another conversation, and return it.

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
        """Make a conversation the main conversation; keep the previous main conversation only if that has begun."""
        before = self.main
        if conversation is before:
            return
        self.others.remove(conversation)
        self.main, conversation.kind = conversation, "main"
        if self.has_begun(before):
            before.kind = "agent"
            self.others.insert(0, before)
            self._by_owner[id(before.agent)] = before
        else:  # `before` is dropped: its agent's first request begins another conversation
            self._by_owner = {key: found for key, found in self._by_owner.items() if found is not before}

    def restart_main(self) -> None:
        """Replace the main conversation with an empty conversation."""
        self.main = Conversation()

    def close(self) -> None:
        """Refuse all further turns."""
        self.is_closed = True


def _no_owner() -> None:
    """Stand in for the weak reference of a conversation that is not bound."""


class Conversation:
    """All requests of one agent: the growing branch, and the branches that the agent left by rewriting its history.

    Args:
        kind: "main" for the main agent's conversation, "agent" for another agent's, "aside" for requests outside of any
            agent's conversation, such as those of a conversation manager.
        number: Number of the conversation, from 0; makes its tool-use ids and seeds differ from other conversations'.
        shown_ids: `CallNames.shown_ids` of the other conversations, since the history may begin with their messages.

    Attributes:
        branches: The branches, in the order in which they were last entered; the last branch grows.
        call: Id of the outermost tool call in which the conversation began; "" outside of a call.
        is_busy: True while a turn is being sampled.
        has_unread_turn: True if an earlier attempt sampled the last turn, but ended before the agent got the answer.
        parser: Parser of tool calls, bound to the schemas of the tools; None until the schemas are known.
    """

    def __init__(
        self,
        kind: ConversationKind = "main",
        number: int = 0,
        shown_ids: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.number = number
        call = current_call()
        self.call = "" if call is None else call.outer_id
        self.branches = [Branch(shown_ids)]
        self.is_busy = False
        self.has_unread_turn = False
        self.parser: ToolParser | None = None
        # weak references: an agent refers to its model, and so to this conversation
        self._agent: Callable[[], Any] = _no_owner
        self._signal: Callable[[], Any] = _no_owner

    def __iter__(self) -> Iterator[Branch]:
        return iter(self.branches)

    @property
    def branch(self) -> Branch:
        """The branch that grows."""
        return self.branches[-1]

    @property
    def agent(self) -> Any:  # noqa: ANN401 - a Strands agent
        """The agent that the conversation is bound to; None if it was never bound, or the agent is gone."""
        return self._agent()

    @property
    def is_bound(self) -> bool:
        """True if the conversation was ever bound, even if its agent was garbage-collected."""
        return self._agent is not _no_owner or self._signal is not _no_owner

    @property
    def turn_count(self) -> int:
        """Number of turns on all branches."""
        return sum(len(branch.trajectory.turns) for branch in self.branches)

    @property
    def earlier_response_length(self) -> int:
        """Number of response tokens on the branches before the last."""
        return sum(branch.trajectory.response_length for branch in self.branches[:-1])

    @property
    def last_request_at_s(self) -> float:
        """Time of the last turn's request, in seconds since the episode began; 0.0 if unknown. A turn must exist."""
        turns = next(branch.trajectory.turns for branch in reversed(self.branches) if not branch.is_new)
        return turns[-1].parts[-1].at_s or 0.0

    def bind(self, agent: object, signal: object = None) -> None:
        """Bind the conversation to an agent and the agent's cancel signal; an argument that is None changes nothing."""
        self._agent = self._agent if agent is None else weakref.ref(agent)
        self._signal = self._signal if signal is None else weakref.ref(signal)

    def is_sampling(self, branch: Branch) -> bool:
        """Return whether a turn of this branch is being sampled."""
        return self.is_busy and branch is self.branch

    def belongs_to(self, agent: object, signal: object) -> bool:
        """Return whether the conversation is bound to this agent or this cancel signal."""
        return (agent is not None and self._agent() is agent) or (signal is not None and self._signal() is signal)

    def begin_branch(self, reason: str) -> Branch:
        """Begin another branch, and note the reason on the branch that ends."""
        last = self.branch
        last.ended_by = reason
        self.branches.append(Branch(last.calls.shown_ids))
        # the old branch's last text stays the final text until the new branch has an answer
        self.branch.final_text, self.branch.stop_reason = last.final_text, last.stop_reason
        return self.branch

    def return_to(self, branch: Branch) -> None:
        """Make an earlier branch grow again, since the agent has come back to its history."""
        if branch is self.branch:
            return
        self.branch.ended_by, branch.ended_by = "the agent came back to an earlier history", ""
        self.branches.remove(branch)
        self.branches.append(branch)

    def drop_new_branch(self) -> bool:
        """If the last of several branches has no turns, drop it, and let the branch before it grow again.

        Return True if the branch was dropped.
        """
        if not self.branch.is_new or len(self.branches) == 1:
            return False
        self.branches.pop()
        self.branch.ended_by = ""
        return True


class Branch:
    """One history that the policy reads and answers: its messages, its turns and their exact tokens.

    The tokens of a branch only grow, and become at most one sample. If an agent trims or rewrites its history, the
    policy has not read the new history. So the next request begins another branch, with the whole new history in its
    first prompt.

    Args:
        shown_ids: `CallNames.shown_ids` of earlier branches, since this branch's history may contain their calls.

    Attributes:
        messages: The messages that the policy has read, then its last answer. The answer is missing while the turn is
            open or unread (`Conversation.has_unread_turn`).
        covered: Number of messages that the policy has read; `messages[covered]` is the last answer.
        origin: The last turn that this branch shares with another branch; None if it shares none.
        nodes: The turns. After a resume, only the turns whose position among the messages is known.
        trajectory: Tokens, loss mask, logprobs and turns.
        head: System prompt and tools of the first prompt; None before the first request and after a resume.
        prompt_ids: Tokens of the first prompt, even if sampling the first turn failed.
        parse_failures: Tool calls that could not be parsed.
        final_text: The last turn as text, with its control tokens but without the end of turn. Before this branch's
            first answer, the text of the previous branch.
        stop_reason: Strands' stop reason of the turn in `final_text`; "" if there is none.
        calls: What the template needs to render the results of tool calls.
        chat_tools: The tools as the template reads them.
        new_images: Images in the context of the turn in progress; kept if the sampling fails.
        ended_by: Text that says why a request left this branch; "" while this branch may grow.
        with_transient: Index -> message as the policy read it, for each message with a transient text that stays in the
            tokens (`transient_context="keep"`). `messages` has these messages without that text.
        transient_texts: Number of messages that the policy read with a transient text, whether or not the text stays in
            the tokens.
        client: The branch as the gateway's client knows it; empty outside of the gateway.
        touched: Number from `Record.touch`; the branch that has begun or been answered last has the largest.
    """

    def __init__(self, shown_ids: Mapping[str, str] | None = None) -> None:
        self.messages: list[Message] = []
        self.covered = 0
        self.origin: Node | None = None
        self.nodes: list[Node] = []
        self.trajectory = Trajectory()
        self.head: Head | None = None
        self.prompt_ids: list[int] = []
        self.parse_failures: list[ParseFailure] = []
        self.final_text = ""
        self.stop_reason = ""
        self.calls = CallNames(shown_ids=dict(shown_ids or {}))
        self.chat_tools: list[dict[str, Any]] = []
        self.new_images: Sequence[PlacedImage] = ()
        self.ended_by = ""
        self.with_transient: dict[int, Message] = {}
        self.transient_texts = 0
        self.client = ClientView()
        self.touched = 0

    @property
    def is_new(self) -> bool:
        """True if the branch has no turn."""
        return not self.trajectory.turns

    @property
    def is_open(self) -> bool:
        """True if the last turn was aborted and can be continued from its own tokens."""
        return self.trajectory.is_open

    @property
    def last_answer(self) -> Message | None:
        """The answer at the end of the messages; None if it is missing, for example while a turn is open."""
        return self.messages[self.covered] if len(self.messages) > self.covered else None

    @property
    def tip(self) -> Node | None:
        """The last turn; on a branch without turns, the turn after which the branch begins."""
        return self.nodes[-1] if self.nodes else self.origin

    def path(self) -> Iterator[Node]:
        """Yield the turns from last to first, on this branch and then on the branches that it came from."""
        node = self.tip
        while node is not None:
            yield node
            node = node.parent

    def node_at(self, position: int) -> Node | None:
        """Return the turn whose answer is `messages[position]`; None if there is no such turn."""
        index = bisect_left(self.nodes, position, key=attrgetter("position"))
        if index < len(self.nodes) and self.nodes[index].position == position:
            return self.nodes[index]
        node = self.origin
        while node is not None and node.position > position:
            node = node.parent
        return node if node is not None and node.position == position else None

    def history(self) -> list[dict[str, Any]]:
        """Return the messages as Strands messages; the policy's answers have their usage in the metadata."""
        answers = ((node.position, node.answer or node.reply) for node in self.path())
        usages = {position: answer.usage for position, answer in answers if answer is not None}
        return [
            {"role": role, "content": content, **({"metadata": {"usage": usages[index]}} if index in usages else {})}
            for index, (role, content) in enumerate(self.messages)
        ]

    def snapshot(self) -> Branch:
        """Return a copy with a snapshot of the trajectory, since another thread may append to the trajectory."""
        frozen = copy.copy(self)
        frozen.trajectory = self.trajectory.snapshot()
        return frozen

    def append_read(self, messages: StrandsMessages, without_transient: Mapping[int, Message] | None = None) -> None:
        """Append the node of a turn with sampled tokens; store copies of the messages that the policy read in the turn.

        The copies replace all messages after the first `covered`. Usually, they replace only the last answer, which the
        agent may have reworded. In the first turn of a branch (`covered` is 0), they replace the shared messages that
        `Record.enter` stored.

        Args:
            messages: The last answer, if any, as the agent's history has it; then the new messages.
            without_transient: Index in the branch -> the agent's own version of a message that has a transient text in
                `messages`.
        """
        self.messages[self.covered :] = [
            (role, copy_content(content)) for role, content in map(role_and_content, messages)
        ]
        for index, message in (without_transient or {}).items():
            self.with_transient[index], self.messages[index] = self.messages[index], message
        self.covered = len(self.messages)
        self.nodes.append(Node(self.tip, self.covered, len(self.trajectory.turns) - 1))
        self.new_images = ()

    def append_answer(self, answer: Answer) -> None:
        """Store the answer of the last, ended turn; append its message unless the branch has it already."""
        self.nodes[-1].answer = answer
        if self.last_answer is None:
            self.messages.append(("assistant", answer.message["content"]))

    def restore(self, trajectory: Trajectory, messages: StrandsMessages, covered: int) -> None:
        """Take over the tokens and messages that an earlier attempt saved.

        Args:
            trajectory: The saved tokens and turns, which this branch owns from here on. An open last turn is continued.
            messages: The agent's messages.
            covered: Number of messages that the policy had read. The trajectory covers these messages and the turn
                after them.
        """
        self.trajectory = trajectory
        self.prompt_ids = trajectory.token_ids[: trajectory.prompt_length]
        recorded = messages[: covered if trajectory.is_open else covered + 1]
        self.messages = [(role, copy_content(content)) for role, content in map(role_and_content, recorded)]
        self.covered = covered
        earlier = [index for index, (role, _) in enumerate(self.messages[:covered]) if role == "assistant"]
        # the last assistant messages are the policy's; earlier assistant messages came with the prompt
        pairs = zip(reversed([*earlier, covered]), reversed(range(len(trajectory.turns))), strict=False)
        for position, turn in reversed([*pairs]):
            self.nodes.append(Node(self.tip, position, turn))

    def forget_history(self) -> None:
        """Forget all messages, since the agent's history no longer matches them."""
        self.messages, self.covered = [], 0


@dataclass(slots=True, eq=False)
class Node:
    """One turn on a branch.

    Attributes:
        parent: The previous turn, possibly on the branch from which this branch began; None for a first turn.
        position: Number of messages before the turn's answer, so that `Branch.messages[position]` is the answer.
        turn: Index of the turn in `Branch.trajectory.turns`.
        answer: The answer as an agent gets it; None while the turn is open.
        reply: The answer as a client got it; None for an agent's turn.
        grammar: The sampling parameters that constrained the text of the turn; None if they are not known.
    """

    parent: Node | None
    position: int
    turn: int
    answer: Answer | None = None
    reply: Reply | None = None
    grammar: Mapping[str, Any] | None = None


# ---------------------------------------------------------------------------
# Prompts and answers on a branch
# ---------------------------------------------------------------------------


@dataclass(slots=True)
class Head:
    """The system prompt and the tools, which the chat template renders at the start of a first prompt."""

    system: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(slots=True)
class Answer:
    """A turn of the policy as an agent's loop gets it.

    Attributes:
        message: The assistant's message.
        stop_reason: Strands' stop reason.
        usage: inputTokens, outputTokens, totalTokens, and cacheReadInputTokens where known.
        metrics: latencyMs and timeToFirstByteMs, which are equal: an answer arrives whole.
    """

    message: dict[str, Any]
    stop_reason: str
    usage: dict[str, int]
    metrics: dict[str, int]


@dataclass(frozen=True, slots=True)
class Reply:
    """A turn of the policy as a client of the gateway gets it.

    Attributes:
        reasoning: The policy's reasoning.
        text: The policy's text, including calls that could not be parsed.
        calls: Strands' `toolUse` values.
        stop_reason: Strands' stop reason.
        usage: inputTokens, outputTokens, cacheReadInputTokens, as Strands names them.
        stop: The stop string that ended the turn, which `text` does not contain; None if no stop string did.
    """

    reasoning: str
    text: str
    calls: Sequence[Mapping[str, Any]]
    stop_reason: str
    usage: Mapping[str, int] = field(default_factory=dict)
    stop: str | None = None

    @property
    def is_silent(self) -> bool:
        """True if the turn has neither text nor calls; some clients leave such a message out of their histories."""
        return not self.calls and not self.text.strip()


@dataclass(slots=True)
class CallNames:
    """Facts that the template needs to render the results of tool calls, by tool-use id.

    Attributes:
        tools: The name of the called tool.
        shown_ids: The id under which the template shows the call and its result. If the format has ids, this is the
            policy's id; otherwise, 9 letters and digits, as some templates require.
        failure_texts: For a malformed call, the text that the policy reads in place of a result.
    """

    tools: dict[str, str] = field(default_factory=dict)
    shown_ids: dict[str, str] = field(default_factory=dict)
    failure_texts: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class ClientView:
    """A branch as the gateway's client knows it.

    Attributes:
        messages: The messages of the client's last request, in the client's wording.
        call_ids: For calls with ids that the client changed: the client's id -> the gateway's tool-use ids. There are
            several if the client gave calls of one turn the same id.
        answered_at: Time of the last answer, by `time.monotonic`; 0.0 before the first.
    """

    messages: StrandsMessages = ()
    call_ids: dict[str, list[str]] = field(default_factory=dict)
    answered_at: float = 0.0


# ---------------------------------------------------------------------------
# Requests, and where they continue
# ---------------------------------------------------------------------------


class Request(Protocol):
    """A request to the policy: an `AgentRequest` of a Strands agent, or a `ClientRequest` of a gateway client."""

    @property
    def head(self) -> Head:
        """The system prompt and the tools."""

    def matches(self, record: Record) -> Sequence[Match]:
        """Compare the request with the branches that it may continue; return the matches, best match first."""

    def new_branch_place(self, record: Record, matches: Sequence[Any]) -> BeginBranch:
        """Return where to begin a branch for a request that neither repeats a turn nor extends a branch."""


@dataclass(slots=True)
class Match:
    """Result of comparing a request with a branch.

    Attributes:
        conversation: The branch's conversation.
        branch: The branch.
        repeated: The recorded turn that answers this very request; None if no turn does.
        extends: True if the request continues where the branch ends.
        difference: Description of where the request departs from the branch; meaningless if `repeated` or `extends` is
            set.
        head_changes: Names of the changed parts of the system prompt and tools; empty for clients of the gateway.
        answer: The branch's last answer if the request continues after it, otherwise None. For an agent's request, the
            answer is worded as in the request; for a client's request, as recorded.
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
        new_messages: Messages for the policy to read; none if the branch's last turn is open.
        match: The comparison with the branch.
    """

    conversation: Conversation
    branch: Branch
    answer: Mapping[str, Any] | None
    new_messages: StrandsMessages
    match: Match


@dataclass(slots=True)
class BeginBranch:
    """The request neither repeats a turn nor extends a branch: it begins a new branch.

    Attributes:
        conversation: The conversation that gets the branch, or the kind of the conversation to begin.
        new_messages: All messages of the request; messages shared with a branch are worded as recorded.
        reason: Text that says why the request extends no branch; may be "" for the first branch of a conversation.
        head_changes: See `Match`.
        match: The best match of a client's request, whose length may be 0; None if there is no match, and for an
            agent's request.
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


def copy_content(content: object) -> Json:
    """Return a copy of the content's dicts and lists, with the same strings."""
    if isinstance(content, dict):
        return {key: value if isinstance(value, str) else copy_content(value) for key, value in content.items()}
    if isinstance(content, list):
        return [copy_content(value) for value in content]
    return content
