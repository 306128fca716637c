"""A branch of a record: one history that the policy reads and answers, turn by turn, with its exact tokens."""

from __future__ import annotations

import copy
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal

from strands_rollout.control import current_call
from strands_rollout.files.json_codec import Json
from strands_rollout.record.tokens import Trajectory
from strands_rollout.tool_parsers import ParseFailure, ToolParser

if TYPE_CHECKING:
    from strands_rollout.model.images import PlacedImage
    from strands_rollout.model.sampling import TurnSampler

UNPARSED: Final = "_unparsed"
"""The end of the tool-use id of a call that could not be parsed: the policy may write any name, but no id."""

Kind = Literal["main", "agent", "aside"]
Block = dict[str, Any]
Message = tuple[str, list[Block]]
"""Role and content of a Strands message: all of it that the policy reads."""
StrandsMessages = Sequence[Mapping[str, Any]]

what_is_read: Final = itemgetter("role", "content")


@dataclass(frozen=True, slots=True)
class Head:
    """The system prompt and the tools, which stand at the beginning of a first prompt."""

    system: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn as an agent's loop takes it.

    Attributes:
        message: The assistant's message.
        stop_reason: Strands' stop reason.
        usage: inputTokens, outputTokens, totalTokens, and cacheReadInputTokens where known.
        metrics: latencyMs, and timeToFirstByteMs: an answer comes whole.
    """

    message: dict[str, Any]
    stop_reason: str
    usage: dict[str, int]
    metrics: dict[str, int]


@dataclass(frozen=True, slots=True)
class Reply:
    """A turn as a client is sent it.

    Attributes:
        reasoning: The policy's reasoning.
        text: Its text, and calls that could not be parsed.
        calls: Blocks of Strands' `toolUse`.
        stop_reason: Strands' stop reason.
        usage: As that of Strands: inputTokens, outputTokens, cacheReadInputTokens.
        stop: The stop string that ended it, which is not part of the text.
    """

    reasoning: str
    text: str
    calls: Sequence[Mapping[str, Any]]
    stop_reason: str
    usage: Mapping[str, int] = field(default_factory=dict)
    stop: str | None = None

    @property
    def is_silent(self) -> bool:
        """True if it has neither text nor calls; some clients leave such a message out."""
        return not self.calls and not self.text.strip()


@dataclass(slots=True, eq=False)
class Node:
    """One turn on a branch: which messages it answers, and what was answered.

    Attributes:
        parent: The turn before it, which may be on the branch that its own began from; None of the first.
        position: How many messages of the branch it answers; its answer is the message at this index.
        turn: Index of its tokens in `Branch.trajectory.turns`.
        answer: The turn as an agent takes it; None while it is open.
        reply: The turn as a client was sent it, where it was.
        grammar: The sampling parameters that bounded its text; None where they are not known.
    """

    parent: Node | None
    position: int
    turn: int
    answer: Answer | None = None
    reply: Reply | None = None
    grammar: Mapping[str, Any] | None = None


class Branch:
    """One history that the policy reads and answers: its messages, turns and exact tokens. It becomes one sample.

    A branch only grows. A history that was trimmed or rewritten, also in place, is no longer what the policy read, and
    begins a branch of its own, whose first prompt holds all of it.

    Args:
        shown_ids: Those of the branch that its history left.

    Attributes:
        messages: What the policy has read, and then its last answer. That is missing while the turn is open, and while
            an agent has not had it (`Conversation.has_unread_turn`).
        covered: How many of them it has read, so that `messages[covered]` is the last answer.
        origin: The turn of another branch after which its own messages begin; None where it shares none.
        nodes: Its turns; of an episode that was resumed, those whose place among the messages is known.
        trajectory: Tokens, mask, logprobs and turns.
        head: Of its first prompt; None of one that was resumed.
        prompt_ids: The first prompt, also where its generation failed.
        parse_failures: Tool calls that could not be parsed.
        final_text: The last turn as text, control tokens included but its end of turn.
        stop_reason: Of the last turn, in Strands' words; "" before the first.
        failure_texts: By tool-use id, what the policy reads about a call that could not be parsed.
        tool_names: By tool-use id, the tool that was called.
        shown_ids: By tool-use id, the id under which the template shows a call's result: the one that the policy wrote,
            in formats that have one, else one of 9 letters and digits, as some templates want it. A history that was
            read before keeps its own.
        chat_tools: The tools as the template takes them.
        new_images: Those among the context of the turn that is being sampled; kept where that fails.
        ended_by: Why a request began another branch, as text; "" while it may grow.
        with_transient: By their index, messages as the policy has read them, with a text that was shown in one request
            alone and stays in the tokens (transient_context "keep"); `messages` has them as the agent has, without it.
        transient_texts: How many messages were shown with such a text, whether or not it stays.
        seen: The last request's messages, as its client spelled them. Of the gateway's branches, as `client_ids` is.
        client_ids: By the ids under which a client knows calls, those that they were sent with, where they differ;
            several where calls of one turn have one id.
        touched: Orders branches by their last answer, or their beginning.
        answered_at: When its last answer was given, of the monotonic clock; 0.0 before.
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
        self.failure_texts: dict[str, str] = {}
        self.tool_names: dict[str, str] = {}
        self.shown_ids = dict(shown_ids or {})
        self.chat_tools: list[dict[str, Any]] = []
        self.new_images: Sequence[PlacedImage] = ()
        self.ended_by = ""
        self.with_transient: dict[int, Message] = {}
        self.transient_texts = 0
        self.seen: StrandsMessages = ()
        self.client_ids: dict[str, list[str]] = {}
        self.touched = 0
        self.answered_at = 0.0

    @property
    def is_new(self) -> bool:
        """True if it has no turn."""
        return not self.trajectory.turns

    @property
    def is_open(self) -> bool:
        """True if its last turn was aborted, and can be continued from its own tokens."""
        return self.trajectory.is_open

    @property
    def answered(self) -> Message | None:
        """The answer that its messages end with; None before the first and while a turn is open."""
        return self.messages[self.covered] if len(self.messages) > self.covered else None

    @property
    def tip(self) -> Node | None:
        """Its last turn, or the one after which it begins."""
        return self.nodes[-1] if self.nodes else self.origin

    def path(self) -> Iterator[Node]:
        """The turns that lead to its end, the last first; those before its own are on the branches it began from."""
        node = self.tip
        while node is not None:
            yield node
            node = node.parent

    def node_at(self, position: int) -> Node | None:
        """The turn that answered so many messages; None where no turn has."""
        at = bisect_left(self.nodes, position, key=attrgetter("position"))
        if at < len(self.nodes) and self.nodes[at].position == position:
            return self.nodes[at]
        node = self.origin
        while node is not None and node.position > position:
            node = node.parent
        return node if node is not None and node.position == position else None

    def history(self) -> list[dict[str, Any]]:
        """Its messages as Strands messages, with the usage of the policy's answers."""
        told = ((node.position, node.answer or node.reply) for node in self.path())
        usages = {position: answer.usage for position, answer in told if answer is not None}
        return [
            {"role": role, "content": content, **({"metadata": {"usage": usages[at]}} if at in usages else {})}
            for at, (role, content) in enumerate(self.messages)
        ]

    def snapshot(self) -> Branch:
        """Copy it as it is now, also while another thread samples into it."""
        frozen = copy.copy(self)
        frozen.trajectory = self.trajectory.snapshot()
        return frozen

    def append_read(self, messages: StrandsMessages, kept: Mapping[int, Message] | None = None) -> None:
        """Append what the policy has read in a turn of which it has sampled the first token.

        Args:
            messages: The answer before them, as the agent has it by now, and all after it; copies are kept.
            kept: By their index in the branch, messages as the agent has them, where `messages` has a transient text.
        """
        self.messages[self.covered :] = [(role, copied(content)) for role, content in map(what_is_read, messages)]
        for index, message in (kept or {}).items():
            self.with_transient[index], self.messages[index] = self.messages[index], message
        self.covered = len(self.messages)
        self.nodes.append(Node(self.tip, self.covered, len(self.trajectory.turns) - 1))
        self.new_images = ()

    def append_answer(self, answer: Answer) -> None:
        """Append the last turn, which has ended."""
        self.nodes[-1].answer = answer
        if self.answered is None:
            self.messages.append(("assistant", answer.message["content"]))

    def restore(self, trajectory: Trajectory, messages: StrandsMessages, covered: int) -> None:
        """Take what an attempt before this one has sampled, of which only the tokens and messages were saved.

        Args:
            trajectory: Its tokens and turns; owned by this branch from here on. If it is open, its last turn is
                continued.
            messages: The agent's messages.
            covered: How many of them the policy has read, so that the trajectory covers them and the turn after them.
        """
        self.trajectory = trajectory
        self.prompt_ids = trajectory.token_ids[: trajectory.prompt_length]
        known = messages[: covered if trajectory.is_open else covered + 1]
        self.messages = [(role, copied(content)) for role, content in map(what_is_read, known)]
        self.covered = covered
        earlier = [at for at, (role, _) in enumerate(self.messages[:covered]) if role == "assistant"]
        # of the assistant's messages the last are the policy's; any before them came with the prompt
        both = zip(reversed([*earlier, covered]), reversed(range(len(trajectory.turns))), strict=False)
        for position, turn in reversed([*both]):
            self.nodes.append(Node(self.tip, position, turn))

    def forget_history(self) -> None:
        """Cover no message: the agent's history is another by now."""
        self.messages, self.covered = [], 0


def _nobody() -> None:
    """In the place of a reference."""


class Conversation:
    """All that one agent asks the policy: a branch, and those before it that its history has left.

    Args:
        sampler: Asks the engine for its turns.
        kind: Whose it is: the main agent's, another agent's, or nobody's, as what a context manager asks.
        number: Tells its tool-use ids and seeds from those of the model's other conversations; 0 of the main one.
        shown_ids: Those of the others, whose history it may begin with.

    Attributes:
        branches: In the order of their beginnings; the last one grows.
        call: Id of the tool call in which it began; "" outside of one.
        is_busy: Whether a turn is in progress.
        has_unread_turn: Whether its last turn was sampled in an earlier attempt, which ended before the agent had it.
        parser: Reads its calls by the schemas of its tools; None until these are known.
    """

    def __init__(
        self, sampler: TurnSampler, kind: Kind = "main", number: int = 0, shown_ids: Mapping[str, str] | None = None
    ) -> None:
        self.sampler = sampler
        self.kind = kind
        self.number = number
        call = current_call()
        self.call = "" if call is None else call.outer_id
        self.branches = [Branch(shown_ids)]
        self.is_busy = False
        self.has_unread_turn = False
        self.parser: ToolParser | None = None
        # weak: an agent refers to its model
        self._agent: Callable[[], Any] = _nobody
        self._signal: Callable[[], Any] = _nobody

    def __iter__(self) -> Iterator[Branch]:
        return iter(self.branches)

    @property
    def branch(self) -> Branch:
        """The branch that grows."""
        return self.branches[-1]

    @property
    def agent(self) -> Any:  # noqa: ANN401 - a Strands agent
        """The agent whose conversation it is; None where that is not known, or the agent is gone."""
        return self._agent()

    @property
    def is_bound(self) -> bool:
        """True if it is known to be of an agent, which may be gone."""
        return self._agent is not _nobody or self._signal is not _nobody

    @property
    def turn_count(self) -> int:
        """Turns on all branches."""
        return sum(len(branch.trajectory.turns) for branch in self.branches)

    @property
    def earlier_response_length(self) -> int:
        """Response tokens of the branches before the last."""
        return sum(branch.trajectory.response_length for branch in self.branches[:-1])

    @property
    def last_request_at_s(self) -> float:
        """When the last turn was asked for, in seconds since the episode began; there is one."""
        turns = next(branch.trajectory.turns for branch in reversed(self.branches) if not branch.is_new)
        return turns[-1].parts[-1].at_s or 0.0

    def bind(self, agent: object, signal: object = None) -> None:
        """Make it this agent's; what is None changes nothing."""
        self._agent = self._agent if agent is None else weakref.ref(agent)
        self._signal = self._signal if signal is None else weakref.ref(signal)

    def is_sampling(self, branch: Branch) -> bool:
        """Return whether a turn of this branch is in progress."""
        return self.is_busy and branch is self.branch

    def belongs_to(self, agent: object, signal: object) -> bool:
        """Return whether the agent that asks is known to be its own."""
        return (agent is not None and self._agent() is agent) or (signal is not None and self._signal() is signal)

    def begin_branch(self, why: str) -> Branch:
        """Begin a branch, for this reason."""
        last = self.branch
        last.ended_by = why
        self.branches.append(Branch(last.shown_ids))
        # until there is another answer
        self.branch.final_text, self.branch.stop_reason = last.final_text, last.stop_reason
        return self.branch

    def return_to(self, branch: Branch) -> None:
        """Extend an earlier branch next, to whose history the agent has come back."""
        if branch is self.branch:
            return
        self.branch.ended_by, branch.ended_by = "the agent came back to an earlier history", ""
        self.branches.remove(branch)
        self.branches.append(branch)

    def drop_new_branch(self) -> bool:
        """Forget a branch whose first generation failed, unless it is the only one; whether there was one."""
        if not self.branch.is_new or len(self.branches) == 1:
            return False
        self.branches.pop()
        self.branch.ended_by = ""
        return True


def copied(content: object) -> Json:
    """The dicts and lists of a content anew, its texts as they are."""
    if isinstance(content, dict):
        return {key: value if isinstance(value, str) else copied(value) for key, value in content.items()}
    if isinstance(content, list):
        return [copied(value) for value in content]
    return content
