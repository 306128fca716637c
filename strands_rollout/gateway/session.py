"""One episode behind the endpoint: each request is answered at its place in the record, which `record` finds.

An attempt that was started again is answered from the record of the one before, as long as it repeats it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol

from strands_rollout.errors import (
    ConfigError,
    EngineAbortedError,
    EngineOverlongError,
    EngineRejectedError,
    PromptError,
    RolloutError,
    TemplateError,
)
from strands_rollout.files.json_codec import encode_json
from strands_rollout.gateway import protocols
from strands_rollout.gateway.protocols import ItemCache, TurnRequest
from strands_rollout.model.context import first_prompt
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.record.branch import Branch, Conversation, Head, Node, Reply, StrandsMessages
from strands_rollout.record.client_request import ClientMatch, ClientRequest, reply_of
from strands_rollout.record.place import Place
from strands_rollout.record.tokens import Trajectory, Turn

logger = logging.getLogger(__name__)

MAX_AT_ONCE: Final = 256
MAX_CONVERSATIONS: Final = 1024
_SHOWN_DIFFERENCES: Final = 8
_SHOWN_CHARS: Final = 80
_SHOWN_FIELDS: Final = 64
_BAD_REQUEST: Final = (400, 422)
_OTHER_HEAD: Final = "the system prompt or the tools are others"


class SessionEndedError(RolloutError):
    """The episode of a session is over, or has reached a limit of its own: nothing more is sampled in it."""


class BusySessionError(RolloutError):
    """A session has as many requests at once, or conversations, as it may have."""


@dataclass(slots=True)
class Facts:
    """Counts of what a session was asked.

    Attributes:
        requests: All that could be read.
        repeats: Those that were answered from the record.
        forks: Those that go on from a history, or with a system prompt or tools, that no conversation had.
        changed_calls: Calls that the client sends back as others under their own ids, such as with defaults filled in,
            or leaves out beside some. They stay as the policy wrote them.
        differences: Of the first of all these, where the history left what was recorded.
        refused: By kind of error, requests that were refused.
        overridden: By name, what a client gave and the session fixes, or that has no effect here, as first given.
        diverged: Where a program that was started again left the record of its first attempt; "" where it did not.
        dropped_tokens: Those that the first attempt had sampled, then.
    """

    requests: int = 0
    repeats: int = 0
    forks: int = 0
    changed_calls: int = 0
    differences: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    overridden: dict[str, Any] = field(default_factory=dict)
    diverged: str = ""
    dropped_tokens: int = 0

    def record(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**asdict(self), "refused": dict(self.refused)}


@dataclass(slots=True)
class _Pending:
    """A request that is being answered."""

    request: TurnRequest
    branch: Branch
    task: asyncio.Task[Reply]
    is_gone: Callable[[], bool]


class Watch(Protocol):
    """Is told of a session's requests and turns; it may raise `SessionEndedError`, which ends the session."""

    def asked(self, conversation: Conversation, messages: StrandsMessages, waited_s: float | None) -> None:
        """A request brings these messages, so many seconds after the answer before them; None before the first."""

    def answered(self, conversation: Conversation, reply: Reply) -> None:
        """A turn was sampled."""

    def aborted(self) -> None:
        """The engine has aborted a turn."""

    def left_record(self, conversation: Conversation, messages: StrandsMessages, kept: Sequence[Reply]) -> None:
        """The record of an earlier attempt is left: of it these messages are kept, with the turns among them."""


class Session:
    """The requests of one episode, or of one client.

    Args:
        model: With many conversations, of which each may begin segments. It is this session's alone.
        watch: Told of each request and turn.

    Attributes:
        facts: What it was asked.
        protocols: One of each kind, by its name, and what its requests were parsed to.
        error: The last error that the episode itself is to blame for; None where a later request succeeded.
        used: When it was asked last, of the monotonic clock.
        context: That of the episode, with its clock and spans; a server's handlers have another one.
    """

    def __init__(self, model: SGLangModel, watch: Watch | None = None) -> None:
        self.model = model
        self.facts = Facts()
        self.protocols: dict[str, tuple[protocols.Protocol, ItemCache]] = {}
        self.error: Exception | None = None
        self.used = time.monotonic()
        self.context = copy_context()
        self._watch = watch
        self._pending: list[_Pending] = []
        self._tasks: set[asyncio.Task[Reply]] = set()
        self._recorded: Branch | None = None  # of an earlier attempt, until its record is used up
        self._resumed: Conversation | None = None  # that the earlier attempt began
        self._repeated: int | None = None  # the last place in it that was answered from it
        self._is_interrupted = False  # the main conversation, before its first turn
        self._ended: Exception | None = None

    @property
    def is_busy(self) -> bool:
        """True if a request is being answered."""
        return bool(self._tasks)

    @property
    def main(self) -> Conversation:
        """The main conversation: the first with tools, or while there is none, the first."""
        record = self.model.record
        if self._is_interrupted and not record.main.turn_count:
            return record.main
        return next((one for one in record if record.is_begun(one)), record.main)

    @property
    def main_messages(self) -> list[dict[str, Any]]:
        """The history of the main conversation: what the policy read and wrote."""
        branch = self.model.conversation.branch
        return [] if branch.is_new else branch.history()

    def restore(self, messages: StrandsMessages) -> None:
        """Answer the first requests from an earlier attempt's main conversation, which the model has resumed."""
        self._resumed, self._recorded = self.model.conversation, (branch := self.model.conversation.branch)
        for node in branch.nodes:
            turn = branch.trajectory.turns[node.turn]
            if turn.finish_reason != "abort" and node.position < len(messages):
                message = messages[node.position]
                usage = message.get("metadata", {}).get("usage")
                node.reply = _reply_of_turn(message["content"], turn, usage)

    def end(self, error: Exception) -> None:
        """Answer nothing more; requests that wait get this error."""
        self._ended = self._ended or error
        for task in self._tasks:
            task.cancel()

    async def finish(self) -> None:
        """Wait for what was ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.settle_main()

    def leave_record(self) -> None:
        """Keep of an earlier attempt what this one has repeated, where it has ended before the record has."""
        if (record := self._recorded) is None:
            return
        if self._repeated is None:
            self._begin_afresh("it has asked for nothing of the record")
            self.settle_main()  # where it has only asked something else
            return
        end = self._repeated + 1
        if end == len(record.messages) and not record.is_open:
            self._recorded = None  # all of it
            return
        kept = [node for node in record.nodes if node.position < end]
        turns = len(record.trajectory.turns) - (len(record.nodes) - len(kept))
        why = f"it has ended after message {self._repeated}; the record goes on"
        self._begin_afresh(why, record.trajectory.snapshot(turns), record.history()[:end], kept)
        main = self.model.conversation
        main.branch.head = record.head
        self.model.know_tools(main, record.head.tools if record.head is not None else ())

    def settle_main(self) -> None:
        """Make the main conversation the model's."""
        self.model.record.promote(self.main)

    async def reply(self, request: TurnRequest, is_gone: Callable[[], bool] = lambda: False) -> Reply:
        """The next turn of the conversation that a request continues, or the recorded one that it had before.

        Args:
            request: A client's.
            is_gone: Whether the client has left; one that then asks the same again gets the same answer.

        Raises:
            SessionEndedError: The episode is over.
            BusySessionError: Too many requests at once, or conversations.
            PromptError, TemplateError: The messages can't be rendered.
            BudgetExhaustedError, ContextWindowOverflowException: Nothing is left of a budget.
            EngineError: The engine did not deliver, or was aborted.
        """
        self._check_open()
        self.facts.requests += 1
        self.used = time.monotonic()
        self._heed(request)
        if self._recorded is not None:
            why = await self._divergence(request, self._recorded)
            self._check_open()  # still
            if why:
                self._begin_afresh(why)
        asked = self._asked(request)
        for one in self._pending:
            if one.branch.head == asked.head and one.request.is_repeated_by(request) and one.is_gone():
                self.facts.repeats += 1
                one.is_gone = is_gone
                return await self._result_of(one.task)
        place = self.model.record.place_of(asked)
        if place.node is not None and place.node.reply is not None and place.branch is not None:
            self.facts.repeats += 1
            # of an earlier attempt, until now
            place.branch.answered_at = place.branch.answered_at or time.monotonic()
            if place.branch is self._recorded:
                self._repeated = max(place.node.position, self._repeated or 0)
            return place.node.reply
        return await self._result_of(self._begin(request, asked, place, is_gone))

    def _asked(self, request: TurnRequest) -> ClientRequest:
        keeps = self.model.config["transient_context"] == "keep"
        return ClientRequest(request.messages, Head(request.system, request.tools), request.grammar, keeps)

    def _check_open(self) -> None:
        if self._ended is not None:
            raise SessionEndedError(f"the episode has ended: {self._ended}") from self._ended
        if len(self._tasks) >= MAX_AT_ONCE:
            raise BusySessionError(f"got more than {MAX_AT_ONCE} requests at once; expected fewer in one session")

    def _begin(
        self, request: TurnRequest, asked: ClientRequest, place: Place, is_gone: Callable[[], bool]
    ) -> asyncio.Task[Reply]:
        """Enter the place of a request, and begin its turn."""
        record, match = self.model.record, place.match
        extends = place.branch is not None and not place.branch.is_new
        if extends and isinstance(match, ClientMatch):
            self.facts.changed_calls += len(match.changed)
            for words in match.changed:
                self._note_difference(words)
        else:
            self._note_fork(request, place)
        is_first_with_tools = place.conversation == "agent" and not any(
            branch.head.tools for branch in record.main if branch.head is not None
        )
        conversation = record.enter(place, asked.head)
        if is_first_with_tools:
            self._make_main(conversation)
        branch = conversation.branch
        given: StrandsMessages = request.messages
        if isinstance(match, ClientMatch):
            branch.client_ids, given = match.ids, match.given
            branch.seen = branch.seen if extends else match.branch.seen[: match.length]
        if self._watch is not None:
            waited_s = time.monotonic() - branch.answered_at if branch.answered_at else None
            try:
                self._watched(self._watch.asked, conversation, place.new[place.shared :], waited_s)
            except SessionEndedError:
                _leave(conversation)
                raise
        task = asyncio.create_task(self._turn(conversation, request, asked, place, given))
        pending = _Pending(request, branch, task, is_gone)
        self._pending.append(pending)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._settled, pending, conversation))
        return task

    def _note_fork(self, request: TurnRequest, place: Place) -> None:
        """Note that a request goes on from a history, or with a system prompt or tools, that no conversation had."""
        branches = sum(not branch.is_new or one.is_sampling(branch) for one in self.model.record for branch in one)
        if branches >= MAX_CONVERSATIONS:
            raise BusySessionError(f"got more than {MAX_CONVERSATIONS} histories; expected fewer in one session")
        if place.shared or any(message["role"] == "assistant" for message in request.messages):
            self.facts.forks += 1
            self._note_difference(place.why)

    def _settled(self, pending: _Pending, conversation: Conversation, task: asyncio.Task[Reply]) -> None:
        self._tasks.discard(task)
        self._pending.remove(pending)
        if task.cancelled():
            if conversation.is_busy:  # the turn was cancelled before it began
                _leave(conversation)
            return
        error = task.exception()
        if isinstance(error, Exception | None) and not isinstance(error, PromptError | TemplateError):
            self.error = error  # of these the client is to blame
        if isinstance(error, EngineAbortedError) and self._watch is not None:
            self._watch.aborted()

    def _make_main(self, agent: Conversation) -> None:
        """Make it the main one in place of the first of all: an earlier attempt had ended before the agent asked."""
        before = self.model.conversation
        self.model.record.promote(agent)
        before.kind, self._recorded = "aside", None
        if before is self._resumed:  # which stays beside it, and is counted there
            self.facts.diverged, self.facts.dropped_tokens = "its main conversation is another", 0
            if self._watch is not None:
                self._watch.left_record(agent, (), ())

    async def _turn(
        self,
        conversation: Conversation,
        request: TurnRequest,
        asked: ClientRequest,
        place: Place,
        given: StrandsMessages,
    ) -> Reply:
        branch, params = conversation.branch, self._params(request.params)
        end = len(place.new) + (0 if branch.is_new else len(branch.messages))
        try:
            answer = await self.model.answer_at(conversation, place, asked.head, params)
        except (EngineAbortedError, asyncio.CancelledError):
            self._is_interrupted |= bool(request.tools) and conversation is self.model.conversation
            raise
        except (EngineRejectedError, ConfigError) as e:
            blamed = sorted(params.keys() - {"max_new_tokens", "stop"})
            is_other = isinstance(e, EngineRejectedError) and e.status_code not in _BAD_REQUEST
            if not blamed or is_other or isinstance(e, EngineOverlongError):
                raise
            raise PromptError(f"a request with the client's own {', '.join(blamed)} was refused: {e}") from e
        finally:
            if not conversation.drop_new_branch() and branch.covered == end:
                branch.seen = given
        node = branch.nodes[-1]
        node.reply = reply = _reply_of_turn(answer.message["content"], branch.trajectory.turns[-1], answer.usage)
        node.grammar = asked.grammar
        branch.answered_at = time.monotonic()
        self.model.record.touch(branch)
        if self._watch is not None:
            self._watched(self._watch.answered, conversation, reply)
        return reply

    def _watched(self, tell: Callable[..., None], *what: object) -> None:
        try:
            tell(*what)
        except SessionEndedError as e:
            self.end(e)
            raise

    async def _result_of(self, task: asyncio.Task[Reply]) -> Reply:
        """The reply of a turn; the turn goes on if the waiting handler is cancelled."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._ended is not None:
                raise SessionEndedError(f"the episode has ended: {self._ended}") from self._ended
            raise

    def _params(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A client's sampling parameters: those that the session has not fixed; stop strings and limits add up."""
        fixed, params = self.model.config["sampling_params"], dict[str, Any]()
        for name, value in given.items():
            if name == "stop":
                own = fixed.get("stop") or []
                params["stop"] = list(dict.fromkeys([*([own] if isinstance(own, str) else own), *value]))
            elif name == "max_new_tokens":
                params[name] = min(value, fixed.get(name) or value)
            elif fixed.get(name) is None:
                params[name] = value
            elif fixed[name] != value:
                self._note_overridden(name, value)
        return params

    def _heed(self, request: TurnRequest) -> None:
        """See that a request's template is the policy's, and note what of it has no effect."""
        own = self.model.template_kwargs
        for name, value in request.template_kwargs.items():
            if own.get(name) != value:
                raise PromptError(
                    f"got chat_template_kwargs with {name}={value!r:.100}; expected {own.get(name)!r:.100}, which is "
                    "the policy's. Leave it out, or change it in the policy's settings"
                )
        for name, value in request.unheeded.items():
            if own.get(name) != value:
                self._note_overridden(name, value)

    def _note_overridden(self, name: str, value: object) -> None:
        if len(self.facts.overridden) < _SHOWN_FIELDS:
            text = encode_json(value).decode()
            is_short = len(text) <= _SHOWN_CHARS
            self.facts.overridden.setdefault(name[:_SHOWN_CHARS], value if is_short else f"{text[:_SHOWN_CHARS]}...")

    def _note_difference(self, words: str) -> None:
        if len(self.facts.differences) < _SHOWN_DIFFERENCES:
            self.facts.differences.append(f"request {self.facts.requests}: {words}")

    async def _divergence(self, request: TurnRequest, recorded: Branch) -> str:
        """Where a request of what would be the main conversation leaves the record; "" where it does not."""
        asked, conversation = self._asked(request), self.model.conversation
        if recorded.head is None:  # the first of its requests tells the system prompt and the tools
            first = min((node.position for node in recorded.nodes if node.reply), default=len(recorded.messages))
            beginning = recorded.history()[:first]
            prompt_ids = await first_prompt(self.model.template, Branch(), asked.head, beginning)
            if self._recorded is not recorded:  # by another request meanwhile
                return ""
            if prompt_ids != recorded.prompt_ids:
                has_calls = any("toolUse" in block for _, content in recorded.messages for block in content)
                is_beside = not request.tools and (has_calls or not asked.match(conversation, recorded).length)
                return "" if is_beside else _OTHER_HEAD
            recorded.head = asked.head
        match = asked.match(conversation, recorded)
        if not match.has_same_head:
            is_at_end = match.length == len(recorded.messages)
            # the agent's own next request, before the end; one without tools is beside an agent that has some
            goes_on = self._repeated is not None and match.length > self._repeated
            is_agents = goes_on and bool(request.tools or not recorded.head.tools)
            return _OTHER_HEAD if is_at_end or is_agents else ""
        if match.extends:
            self._recorded = None
        elif match.length < len(match.given):
            return f"message {match.length}: {match.why}"
        elif (node := recorded.node_at(match.length)) is None or node.reply is None:
            return f"got {match.length} messages, to which the record has no answer"
        return ""

    def _begin_afresh(
        self,
        why: str,
        trajectory: Trajectory | None = None,
        messages: StrandsMessages = (),
        kept: Sequence[Node] = (),
    ) -> None:
        """Forget the record of an earlier attempt, and what has branched off it, but for what is given of it."""
        before = self.model.conversation
        self._recorded = None
        self.model.record.restart_main()
        main = self.model.conversation
        if trajectory is not None:
            self.model.restore_main(trajectory, messages, len(messages) - 1)
            for node in kept:
                if (own := main.branch.node_at(node.position)) is not None:
                    own.reply = node.reply
            self.model.record.touch(main.branch)
        self.facts.diverged = why
        sampled = [sum(branch.trajectory.sampled_length for branch in one) for one in (before, main)]
        self.facts.dropped_tokens = sampled[0] - sampled[1]
        if self._watch is not None:
            self._watch.left_record(main, messages, [node.reply for node in kept if node.reply is not None])


def _leave(conversation: Conversation) -> None:
    """Leave a conversation that was entered for a turn that is not sampled."""
    conversation.is_busy = False
    conversation.drop_new_branch()


def _reply_of_turn(content: Sequence[dict[str, Any]], turn: Turn, usage: Mapping[str, int] | None) -> Reply:
    """A finished turn as its client is sent it."""
    matched = turn.parts[-1].matched
    stop = matched if isinstance(matched, str) else None
    has_calls = any("toolUse" in block for block in content)
    ended = "tool_use" if has_calls else "end_turn" if stop is None else "stop_sequence"
    return reply_of(content, "max_tokens" if turn.finish_reason == "length" else ended, usage, stop)
