"""One episode behind the endpoint: which conversation each request continues, and what it is answered.

A request's history is matched against what the policy read and wrote, by what the client was sent: ids of calls, text,
reasoning. What was sampled is never tokenised again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import asdict, dataclass, field
from operator import itemgetter
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
from strands_rollout.gateway.protocols import (
    Block,
    ItemCache,
    Message,
    Reply,
    TurnRequest,
    reply_of,
    sent_block,
    shared_length,
)
from strands_rollout.model.history import HistorySegment, ModelCall, lines_around
from strands_rollout.model.sampling import Room
from strands_rollout.model.sglang_model import Conversation, SGLangModel
from strands_rollout.model.trajectory import Trajectory, Turn

logger = logging.getLogger(__name__)

MAX_AT_ONCE: Final = 256
MAX_CONVERSATIONS: Final = 1024
_SHOWN_DIFFERENCES: Final = 8
_SHOWN_CHARS: Final = 80
_SHOWN_FIELDS: Final = 64
_BAD_REQUEST: Final = (400, 422)
_OTHER_HEAD: Final = "the system prompt or the tools are others"

Call = Mapping[str, Any]
"""A block of Strands' `toolUse`."""


class SessionEndedError(RolloutError):
    """The episode of a session is over, or has reached a limit of its own: nothing more is sampled in it."""


class BusySessionError(RolloutError):
    """A session has as many requests at once, or conversations, as it may have."""


@dataclass(slots=True)
class Facts:
    """What a session was asked.

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


@dataclass(slots=True, eq=False)
class _Thread:
    """One history: a segment of a conversation, and what clients were sent of it.

    Attributes:
        messages: Those that the policy has read and written; it ends with its answer, where the last turn is finished.
        seen: Those of the last request, as the client spelled them.
        ids: By the ids under which the client knows calls, those that they were sent with, where they differ; several
            where calls of one turn have one id.
        replies: By how many messages a request had, what it was answered.
        grammars: Likewise, the grammar that bounded the answer; none of an earlier attempt's.
        pending: A request that is being answered, where one is.
        is_head_known: Whether `system` and `tools` are, which the record of an earlier attempt does not have.
    """

    conversation: Conversation
    segment: HistorySegment
    system: str | None
    tools: list[dict[str, Any]]
    messages: list[Message] = field(default_factory=list)
    seen: list[Message] = field(default_factory=list)
    ids: dict[str, list[str]] = field(default_factory=dict)
    replies: dict[int, Reply] = field(default_factory=dict)
    grammars: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    pending: _Pending | None = None
    answered_at: float = 0.0
    is_head_known: bool = True

    @property
    def waited_s(self) -> float | None:
        """Seconds since its last answer; None before the first."""
        return time.monotonic() - self.answered_at if self.answered_at else None

    def sent(self, at: int) -> Reply:
        """What a client was sent of the policy's message at this place, or what it had told itself."""
        return self.replies.get(at) or reply_of(self.messages[at])

    def has_head_of(self, request: TurnRequest) -> bool:
        """Whether the system prompt and the tools are the same."""
        return self.is_head_known and self.system == request.system and self.tools == request.tools


@dataclass(slots=True)
class _Pending:
    request: TurnRequest
    task: asyncio.Task[Reply]
    is_gone: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Match:
    """How far a request's history is that of a thread.

    Attributes:
        given: The request's messages, the calls of a turn in one message.
        length: Messages that are the same.
        ids: The thread's, and those that the request tells.
        why: What differs in the next one.
        changed: Calls among those that were compared that differ, each as text.
    """

    thread: _Thread
    given: list[Message]
    length: int
    ids: dict[str, list[str]]
    why: str
    changed: Sequence[str] = ()


class Watch(Protocol):
    """Is told of a session's requests and turns; it may raise `SessionEndedError`, which ends the session."""

    def asked(self, conversation: Conversation, messages: Sequence[Message], waited_s: float | None) -> None:
        """A request brings these messages, so many seconds after the answer before them; None before the first."""

    def answered(self, conversation: Conversation, reply: Reply) -> None:
        """A turn was sampled."""

    def aborted(self) -> None:
        """The engine has aborted a turn."""

    def left_record(self, conversation: Conversation, messages: Sequence[Message], kept: Sequence[Reply]) -> None:
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
        self._threads: list[_Thread] = []  # that of the newest answer last
        self._tasks: set[asyncio.Task[Reply]] = set()
        self._recorded: _Thread | None = None  # of an earlier attempt, until its record is used up
        self._resumed: Conversation | None = None  # that the earlier attempt began
        self._repeated: int | None = None  # the last place in it that was answered from it
        self._is_interrupted = False  # the main conversation, before its first turn
        self._ended: Exception | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return bool(self._tasks)

    @property
    def main(self) -> Conversation:
        """The main conversation: the first with tools, or while there is none, the first."""
        conversations = self.model.conversations
        if self._is_interrupted and not conversations.main.turn_count:
            return conversations.main
        played = [one for one in conversations if any(thread.conversation is one for thread in self._threads)]
        return played[0] if played else conversations.main

    @property
    def main_messages(self) -> list[Message]:
        """The history of the main conversation: what the policy read and wrote."""
        own = [one for one in self._threads if one.segment is self.model.conversation.last]
        return list(own[-1].messages) if own else []

    def restore(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Answer the first requests from an earlier attempt's main conversation, which the model has resumed."""
        conversation = self.model.conversation
        thread = _Thread(conversation, conversation.last, None, [], [dict(message) for message in messages])
        finished = [turn for turn in conversation.last.trajectory.turns if turn.finish_reason != "abort"]
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        # of the assistant's messages the last are the policy's; any before them came with the prompt
        for at, turn in zip(reversed(answers), reversed(finished), strict=False):
            thread.replies[at] = _reply_of_turn(messages[at], turn, messages[at].get("metadata", {}).get("usage"))
        thread.is_head_known = False
        self._threads, self._recorded, self._resumed = [thread], thread, conversation

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
        if end == len(record.messages) and not record.segment.trajectory.is_open:
            self._recorded = None  # all of it
            return
        kept = {at: reply for at, reply in record.replies.items() if at < end}
        turns = record.segment.trajectory.turns
        later = len(record.replies) - len(kept) + record.segment.trajectory.is_open
        trajectory, messages = record.segment.trajectory.snapshot(len(turns) - later), record.messages[:end]
        why = f"it has ended after message {self._repeated}; the record goes on"
        self._begin_afresh(why, trajectory, messages, [*kept.values()])
        main = self.model.conversation
        main.know_tools(record.tools)
        self._threads.append(_Thread(main, main.last, record.system, record.tools, messages, replies=kept))

    def settle_main(self) -> None:
        """Make the main conversation the model's."""
        self.model.conversations.promote(self.main)

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
        for one in (thread.pending for thread in self._threads if thread.has_head_of(request)):
            if one is not None and one.request.is_repeated_by(request) and one.is_gone():
                self.facts.repeats += 1
                one.is_gone = is_gone
                return await self._result_of(one.task)
        matches = [self._match(thread, request) for thread in reversed(self._threads)]
        matches.sort(key=lambda one: -one.length)
        for match in matches:
            thread, n = match.thread, match.length
            if n < len(match.given) or not thread.has_head_of(request):
                continue
            if n in thread.replies and thread.grammars.get(n, request.grammar) == request.grammar:
                self.facts.repeats += 1
                thread.answered_at = thread.answered_at or time.monotonic()  # of an earlier attempt, until now
                if thread is self._recorded:
                    self._repeated = max(n, self._repeated or 0)
                return thread.replies[n]
        return await self._result_of(self._begin(request, matches, is_gone))

    def _check_open(self) -> None:
        if self._ended is not None:
            raise SessionEndedError(f"the episode has ended: {self._ended}") from self._ended
        if len(self._tasks) >= MAX_AT_ONCE:
            raise BusySessionError(f"got more than {MAX_AT_ONCE} requests at once; expected fewer in one session")

    def _begin(
        self, request: TurnRequest, matches: Sequence[_Match], is_gone: Callable[[], bool]
    ) -> asyncio.Task[Reply]:
        """Choose the thread that a request continues, and begin its turn."""
        match = next((one for one in matches if self._extends(one, request)), None)
        if match is None:
            match = self._fork(request, matches)
        elif match.thread.segment is not match.thread.conversation.last:
            match.thread.conversation.return_to(match.thread.segment)
        thread, conversation = match.thread, match.thread.conversation
        thread.ids = match.ids
        self.facts.changed_calls += len(match.changed)
        for words in match.changed:
            self._note_difference(words)
        own = [_under_ids(match.given, at, match.ids, match.length) for at in range(match.length, len(match.given))]
        messages = [*thread.messages[: match.length], *own]
        if self._watch is not None:
            self._watched(self._watch.asked, conversation, own, thread.waited_s)
        task = asyncio.create_task(self._turn(thread, request, match.given, messages))
        thread.pending = _Pending(request, task, is_gone)
        self._tasks.add(task)
        task.add_done_callback(self._settled)
        return task

    def _settled(self, task: asyncio.Task[Reply]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Exception | None) and not isinstance(error, PromptError | TemplateError):
            self.error = error  # of these the client is to blame
        if isinstance(error, EngineAbortedError) and self._watch is not None:
            self._watch.aborted()

    def _fork(self, request: TurnRequest, matches: Sequence[_Match]) -> _Match:
        """A thread for a history that extends none: a segment of an agent's conversation, or a conversation."""
        continues = any(message["role"] == "assistant" for message in request.messages)
        same = [one for one in matches if one.thread.has_head_of(request)]
        # a head that changed in mid-conversation; else another agent's
        near = next((one for one in same if one.length or not continues), same[0] if same else None)
        near = near or next((one for one in matches if self._extends(one, request, any_head=True)), None)
        if len(self._threads) >= MAX_CONVERSATIONS:
            raise BusySessionError(f"got more than {MAX_CONVERSATIONS} histories; expected fewer in one session")
        if continues or (near is not None and near.length):
            self.facts.forks += 1
            self._note_difference(_words_of(near, request))
        if near is not None and not self._is_busy(near.thread.conversation):
            conversation = near.thread.conversation
            conversation.begin_segment(_words_of(near, request))
        else:
            conversation = self._new_conversation(request)
        thread = _Thread(conversation, conversation.last, request.system, request.tools)
        if near is not None:  # what was recorded of a shared beginning is read again as it was
            thread.messages = [*map(_as_sent, near.thread.messages[: near.length])]
            thread.seen = near.thread.seen[: near.length]
            thread.replies = {at: reply for at, reply in near.thread.replies.items() if at < near.length}
            thread.grammars = {at: grammar for at, grammar in near.thread.grammars.items() if at < near.length}
        self._threads.append(thread)
        given = near.given if near is not None else request.messages
        return _Match(thread, given, len(thread.messages), near.ids if near is not None else {}, "")

    def _new_conversation(self, request: TurnRequest) -> Conversation:
        """The main one for the first request with tools; the first of all becomes it later, where none has any."""
        if not request.tools:
            return self.model.conversations.begin("aside")
        main = self.model.conversation
        own = [one for one in self._threads if one.conversation is main]
        if not own:
            return main
        agent = self.model.conversations.begin("agent")
        if not any(one.tools for one in own):
            self._make_main(agent)
        return agent

    def _make_main(self, agent: Conversation) -> None:
        """Make it the main one in place of the first of all: an earlier attempt had ended before the agent asked."""
        before = self.model.conversation
        self.model.conversations.promote(agent)
        before.kind, self._recorded = "aside", None
        if before is self._resumed:  # which stays beside it, and is counted there
            self.facts.diverged, self.facts.dropped_tokens = "its main conversation is another", 0
            if self._watch is not None:
                self._watch.left_record(agent, (), ())

    async def _turn(
        self, thread: _Thread, request: TurnRequest, given: list[Message], messages: list[Message]
    ) -> Reply:
        conversation, segment = thread.conversation, thread.segment
        params = self._params(request.params)
        try:
            answer = await self.model.answer(
                messages, request.tools, request.system, params=params, conversation=conversation
            )
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
            thread.pending = None
            thread.segment = segment = conversation.last
            if not segment.trajectory.turns and conversation.segments:  # a new one that came to nothing
                conversation.last = conversation.segments.pop()
                conversation.last.ended_by = ""
                self._forget(thread)
            elif segment.covered_messages == len(messages):
                thread.messages, thread.seen = messages, given
            elif not segment.trajectory.turns:
                self._forget(thread)
        reply = _reply_of_turn(answer.message, segment.trajectory.turns[-1], answer.usage)
        thread.replies[len(messages)], thread.grammars[len(messages)] = reply, request.grammar
        answer.message["metadata"] = {"usage": answer.usage}
        thread.messages = [*messages, answer.message]
        thread.answered_at = time.monotonic()
        if thread in self._threads:  # the record of an earlier attempt may have been dropped meanwhile
            self._threads.remove(thread)
            self._threads.append(thread)
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

    async def _divergence(self, request: TurnRequest, thread: _Thread) -> str:
        """Where a request of what would be the main conversation leaves the record; "" where it does not."""
        if not thread.is_head_known:  # the first of its requests tells the system prompt and the tools
            fresh, first = HistorySegment(self.model.template), min(thread.replies, default=len(thread.messages))
            call = ModelCall(thread.messages[:first], request.tools, request.system)
            prompt_ids = await fresh.new_context(call, Room(None, "context"), 0)
            if self._recorded is not thread:  # by another request meanwhile
                return ""
            if prompt_ids != thread.segment.prompt_ids:
                has_calls = any("toolUse" in block for message in thread.messages for block in message["content"])
                is_beside = not request.tools and (has_calls or not self._match(thread, request).length)
                return "" if is_beside else _OTHER_HEAD
            thread.system, thread.tools, thread.is_head_known = request.system, request.tools, True
        elif not thread.has_head_of(request):
            length, repeated = self._match(thread, request).length, self._repeated
            is_at_end = length == len(thread.messages)
            # the agent's own next request, before the end; one without tools is beside an agent that has some
            goes_on = repeated is not None and length > repeated and bool(request.tools or not thread.tools)
            return _OTHER_HEAD if is_at_end or goes_on else ""
        match = self._match(thread, request)
        if self._extends(match, request):
            self._recorded = None
        elif match.length < len(match.given):
            return f"message {match.length}: {match.why}"
        elif match.length not in thread.replies:
            return f"got {match.length} messages, to which the record has no answer"
        return ""

    def _begin_afresh(
        self,
        why: str,
        trajectory: Trajectory | None = None,
        messages: Sequence[Message] = (),
        kept: Sequence[Reply] = (),
    ) -> None:
        """Forget the record of an earlier attempt, and what has branched off it, but for what is given of it."""
        before = self.model.conversation
        self._threads = [one for one in self._threads if one.conversation is not before]
        self._recorded = None
        self.model.conversations.restart_main()
        main = self.model.conversation
        if trajectory is not None:
            main.resume(trajectory, messages, len(messages) - 1)
        self.facts.diverged = why
        sampled = [sum(segment.trajectory.sampled_length for segment in one) for one in (before, main)]
        self.facts.dropped_tokens = sampled[0] - sampled[1]
        if self._watch is not None:
            self._watch.left_record(main, messages, kept)

    def _forget(self, thread: _Thread) -> None:
        self._threads = [one for one in self._threads if one is not thread]

    def _is_busy(self, conversation: Conversation) -> bool:
        return any(one.pending is not None for one in self._threads if one.conversation is conversation)

    def _extends(self, match: _Match, request: TurnRequest, *, any_head: bool = False) -> bool:
        """Whether a request goes on where a thread ends."""
        thread, n = match.thread, match.length
        if n < len(thread.messages) or not (any_head or thread.has_head_of(request)):
            return False
        # an open turn is continued by the request that it answers, which tells nothing new; grammars bound whole turns
        is_open = thread.segment.trajectory.is_open
        is_next = (len(match.given) == n and not request.grammar) if is_open else (len(match.given) > n)
        return is_next and not self._is_busy(thread.conversation)

    def _match(self, thread: _Thread, request: TurnRequest) -> _Match:
        given, ids = request.messages, dict(thread.ids)
        length = shared_length(thread.seen, given)  # what is spelled as before is compared in C
        asked = next((at for at in reversed(range(length)) if given[at]["role"] == "assistant"), None)
        if asked is not None:  # a client may use an id again: that of the last turn counts
            _note_ids(_pairs(thread.sent(asked).calls, reply_of(given[asked]).calls), ids)
        keeps = self.model.config["transient_context"] == "keep"
        changed: list[str] = []
        while length < min(len(given), len(thread.messages)):
            kept = thread.messages[length]
            if kept["role"] == "assistant" and given[length]["role"] == "user" and thread.sent(length).is_silent:
                given = [*given[:length], {"role": "assistant", "content": []}, *given[length:]]
            if kept["role"] == "user" == given[length]["role"]:
                why = _user_difference(kept["content"], _under_ids(given, length, ids, length)["content"], keeps)
            elif kept["role"] != given[length]["role"]:
                why = f"got one of the {given[length]['role']}, in the place of one of the {kept['role']}"
            else:
                sent = thread.sent(length)
                given = _with_whole_turn(given, length, sent)
                why = _difference(sent, reply_of(given[length]), ids, changed)
            if why:
                return _Match(thread, given, length, ids, why)
            length += 1
        if (more := len(given) - length) == 0:
            why = "messages were taken from its end"
        elif self._is_busy(thread.conversation):
            why = "another request that goes on there is being answered"
        else:
            why = f"got {more} more; the turn before it was interrupted"
        return _Match(thread, given, length, ids, why, changed)


def _reply_of_turn(message: Mapping[str, Any], turn: Turn, usage: Mapping[str, int] | None) -> Reply:
    """A finished turn as its client is sent it."""
    matched = turn.parts[-1].matched
    stop = matched if isinstance(matched, str) else None
    has_calls = any("toolUse" in block for block in message["content"])
    ended = "tool_use" if has_calls else "end_turn" if stop is None else "stop_sequence"
    return reply_of(message, "max_tokens" if turn.finish_reason == "length" else ended, usage, stop)


def _as_sent(message: Message) -> Message:
    """A message of the policy's with calls that could not be parsed as the text that they are."""
    return {**message, "content": [*map(sent_block, message["content"])]}


def _words_of(near: _Match | None, request: TurnRequest) -> str:
    """Why a request extends no history."""
    if near is None:
        return "its beginning is of no conversation so far"
    if near.thread.has_head_of(request):
        return f"message {near.length}: {near.why}"
    return "the system prompt changed" if near.thread.system != request.system else "the tools changed"


def _pairs(sent: Sequence[Call], got: Sequence[Call]) -> list[tuple[Call, Call]]:
    """The calls that a client tells, each after the one that it was sent: by its id if no other has it, or in order."""
    by_id, counts = {call["toolUseId"]: call for call in sent}, Counter(call["toolUseId"] for call in got)
    own = {use_id for use_id, count in counts.items() if count == 1 and use_id in by_id}
    others = (call for call in sent if call["toolUseId"] not in own)
    return [
        (one, call)
        for call in got
        if (one := by_id[call["toolUseId"]] if call["toolUseId"] in own else next(others, None)) is not None
    ]


def _note_ids(pairs: Sequence[tuple[Call, Call]], ids: dict[str, list[str]]) -> None:
    """Remember under which ids a client knows the calls of a turn, in the place of those of earlier turns."""
    told = dict[str, list[str]]()
    for one, other in pairs:
        told.setdefault(other["toolUseId"], []).append(one["toolUseId"])
    for use_id, sent in told.items():
        ids.pop(use_id, None)
        if sent != [use_id]:
            ids[use_id] = sent


def _with_whole_turn(given: list[Message], at: int, sent: Reply) -> list[Message]:
    """The messages with the calls of one turn in one of them, and their results in the next.

    Some clients tell a turn's calls one by one, each with its result, as if the policy had waited for it.
    """
    calls, results, end = [*given[at]["content"]], list[Block](), at + 1
    known = {call["toolUseId"] for call in sent.calls}
    while (count := sum("toolUse" in block for block in calls)) < len(sent.calls) and end + 1 < len(given):
        told, more = given[end]["content"], given[end + 1]["content"]
        follows = zip(sent.calls[count:], (block.get("toolUse") for block in more), strict=False)
        is_of_turn = all(
            call is not None and (call["toolUseId"] in known or _is_same(one, call)) for one, call in follows
        )
        are_results = bool(told) and all("toolResult" in block for block in told)
        if not (more and is_of_turn and len(more) <= len(sent.calls) - count and are_results):
            break
        calls, results, end = [*calls, *more], [*results, *told], end + 2
    if not results or end >= len(given):
        return given
    turn, answers = {**given[at], "content": calls}, {**given[end], "content": [*results, *given[end]["content"]]}
    return [*given[:at], turn, answers, *given[end + 1 :]]


def _is_same(one: Call, other: Call) -> bool:
    return (one["name"], one["input"]) == (other["name"], other["input"])


def _difference(sent: Reply, got: Reply, ids: dict[str, list[str]], changed: list[str]) -> str:
    """In what a client's message is another than the assistant's that it was sent; "" if in nothing.

    Whitespace does not count, nor a text that is left out beside calls, nor reasoning that is left out, or changed
    beside a text or calls. `ids` gets the ids under which the client knows calls, `changed` the calls that are others
    under their own id, or left out beside such: agents tell them as their tools took them, and some don't tell those
    that they have not run.
    """
    known = {call["toolUseId"] for call in sent.calls}
    is_known = bool(got.calls) and len({call["toolUseId"] for call in got.calls} & known) == len(got.calls)
    if not is_known and len(sent.calls) != len(got.calls):
        return f"got {len(got.calls)} calls; {len(sent.calls)} were sent"
    pairs = _pairs(sent.calls, got.calls)
    for one, other in pairs:
        if not _is_same(one, other):
            shown = [_short(call["name"], call["input"]) for call in (other, one)]
            words = "got the call {}; {} was sent".format(*shown)
            if one["toolUseId"] != other["toolUseId"]:
                return words
            changed.append(words)
    told = [one for one, _ in pairs]
    left_out = [call for call in sent.calls if call not in told]
    changed += [f"got no call {_short(call['name'], call['input'])}, which was sent" for call in left_out]
    is_left_out = not got.text and bool(got.calls)
    if sent.text.split() != got.text.split() and not is_left_out:
        return f"got the text {_short(got.text)}; {_short(sent.text)} was sent"
    if sent.is_silent and got.reasoning.strip() and sent.reasoning.split() != got.reasoning.split():
        return "got other reasoning than was sent"
    _note_ids(pairs, ids)
    return ""


def _user_difference(
    kept: list[Block],
    given: list[Block],
    keeps_transient: bool,  # noqa: FBT001 - handed on
) -> str:
    if kept == given:
        return ""
    before, now = _plain(kept), _plain(given)
    if before == now:
        return ""
    if before[0] != now[0]:
        return "the results or images are others"
    if keeps_transient and (now[0] or now[1]) and lines_around(_texts(kept), _texts(given)):
        return ""
    at = next((n for n, (a, b) in enumerate(zip(before[1], now[1], strict=False)) if a != b), 0)
    return f"got the text {_short(*now[1][at:])}; the policy has read {_short(*before[1][at:])}"


def _plain(content: Sequence[Block]) -> tuple[list[Any], list[str]]:
    """What a user's message says: its results, by the ids of their calls, and images; and the words of its texts."""
    results = [block["toolResult"] for block in content if "toolResult" in block]
    images = [block["image"]["source"]["bytes"] for block in content if "image" in block]
    by_id = sorted(((one["toolUseId"], _plain(one["content"])) for one in results), key=itemgetter(0))
    return [*by_id, *images], _texts(content).split()


def _texts(content: Sequence[Block]) -> str:
    return "\n".join(block["text"] for block in content if "text" in block)


def _short(*given: object) -> str:
    text = " ".join(map(str, given))
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")


def _under_ids(given: Sequence[Message], at: int, ids: Mapping[str, Sequence[str]], matched: int) -> Message:
    """A message with its results under the ids that their calls were sent with; those under one id stand in order.

    Results of a turn that is not among the `matched` messages stay under the client's ids, as do its calls.
    """
    message = given[at]
    if not ids or message["role"] == "assistant" or not any("toolResult" in block for block in message["content"]):
        return message
    counts = Counter[str]()
    begin = at
    while begin and given[begin - 1]["role"] == "user":  # the first results of the turn
        begin -= 1
        counts.update(block["toolResult"]["toolUseId"] for block in given[begin]["content"] if "toolResult" in block)
    if begin > matched:
        return message
    blocks = []
    for block in message["content"]:
        if (result := block.get("toolResult")) is not None:
            sent, number = ids.get(result["toolUseId"], ()), counts[result["toolUseId"]]
            counts[result["toolUseId"]] += 1
            block = {"toolResult": {**result, "toolUseId": sent[number] if number < len(sent) else result["toolUseId"]}}
        blocks.append(block)
    return {**message, "content": blocks}
