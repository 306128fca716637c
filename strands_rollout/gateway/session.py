"""The session of an episode, which finds where each request continues the record, and answers it there."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol, cast

from strands_rollout.errors import (
    ConfigError,
    EngineAbortedError,
    EngineOverlongError,
    EngineRejectedError,
    EngineUnavailableError,
    PromptError,
    RolloutError,
    TemplateError,
)
from strands_rollout.files.json_codec import encode_json
from strands_rollout.gateway.protocols import ApiProtocol, TurnRequest
from strands_rollout.gateway.replay import Replay, reply_of_turn
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.record.client_request import ClientMatch, ClientRequest
from strands_rollout.record.record import (
    BeginBranch,
    Branch,
    Conversation,
    ExtendBranch,
    Head,
    RepeatTurn,
    Reply,
    StrandsMessages,
)

MAX_CONCURRENT_REQUESTS: Final = 256
MAX_HISTORIES: Final = 1024
_MAX_SHOWN_DIFFERENCES: Final = 8
_MAX_SHOWN_CHARS: Final = 80
_MAX_SHOWN_FIELDS: Final = 64
_BAD_REQUEST: Final = (400, 422)


class SessionEndedError(RolloutError):
    """The session's episode is over or has reached a limit, so the session samples nothing more."""


class BusySessionError(RolloutError):
    """The session has reached its maximum number of concurrent requests."""


class HistoryLimitError(RolloutError):
    """The session has reached its maximum number of histories, so it begins no new history."""


@dataclass(slots=True)
class SessionFacts:
    """Facts about a session's requests.

    Attributes:
        requests: Number of well-formed requests for a turn. Requests refused by an ended session, or by a session with
            too many requests in flight, don't count.
        repeats: Number of repeated requests, which got the turn of the earlier request.
        forks: Number of requests that continue a conversation, but match no branch by history, system prompt and tools.
        changed_calls: Number of calls that the client omitted, or sent back with the same id but other values, for
            instance with defaults filled in. The record keeps these calls as the policy wrote them.
        differences: Descriptions of where the first forks and changed calls differ from the record; at most 8.
        refused: Error code -> number of requests that were answered with this error.
        overridden: Name of a request field -> the first value that a client sent. The field has no effect, or the
            session sets another value. At most 64 fields are listed; a long value is cut to the beginning of its JSON.
        diverged: Description of how a restarted program departed from the record of its earlier attempt; "" if it did
            not depart from the record.
        dropped_tokens: Number of sampled tokens of the earlier attempt that this departure dropped.
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

    def as_json(self) -> dict[str, Any]:
        """Return the facts as JSON values."""
        return {**asdict(self), "refused": dict(self.refused)}


@dataclass(slots=True)
class _Pending:
    request: TurnRequest
    branch: Branch
    task: asyncio.Task[Reply]
    is_gone: Callable[[], bool]


class SessionObserver(Protocol):
    """Protocol of an object that follows a session.

    `on_request` and `on_turn` may raise `SessionEndedError`, which ends the session.
    """

    def on_request(self, conversation: Conversation, messages: StrandsMessages, waited_s: float | None) -> None:
        """Handle a request, whose new messages are `messages`.

        `waited_s` is the number of seconds since this attempt last answered a request on the same branch; None if it
        has not answered any.
        """

    def on_turn(self, conversation: Conversation, reply: Reply) -> None:
        """Handle a sampled turn."""

    def on_abort(self) -> None:
        """Handle the abort of a turn by the engine."""

    def on_restart(self, conversation: Conversation, messages: StrandsMessages, kept: Sequence[Reply]) -> None:
        """Handle the restart of the main conversation.

        `conversation` replaces the main conversation of an earlier attempt. It keeps only the `messages` and the turns
        `kept` of that conversation.
        """


class Session:
    """State of one episode, or of one client, on the gateway, with methods that answer its requests.

    Args:
        model: A model with `conversations="many"`, for this session alone.
        observer: Follows the session; None for no observer.

    Attributes:
        facts: Facts about the requests.
        protocols: Class name of an API's protocol -> the protocol's instance for this session.
        error: The error of the turn that ended last; None if that turn succeeded. Cancelled turns are left out. So are
            turns that failed through the client's fault, with a `PromptError` or `TemplateError`.
        last_used_at: Time of the last request for a turn, by `time.monotonic`; before the first request, time of the
            session's start. Reading the session's samples over HTTP counts as a request, too.
        context: The episode's context variables; each turn is sampled in a copy of them.
    """

    def __init__(self, model: SGLangModel, observer: SessionObserver | None = None) -> None:
        self.model = model
        self.facts = SessionFacts()
        self.protocols: dict[str, ApiProtocol] = {}
        self.error: Exception | None = None
        self.last_used_at = time.monotonic()
        self.context = copy_context()
        self.observer = observer
        self._pending: list[_Pending] = []
        self._tasks: set[asyncio.Task[Reply]] = set()
        self._replay: Replay | None = None
        self._main_was_interrupted = False  # true once a main conversation's turn with tools was interrupted
        self._ended: Exception | None = None

    @property
    def is_busy(self) -> bool:
        """True if a request is being answered."""
        return bool(self._tasks)

    @property
    def main(self) -> Conversation:
        """The main conversation: the first one with tools; as long as none has tools, the first that has begun.

        If the first turn of a main conversation with tools is interrupted, the conversation remains the main one.
        """
        record = self.model.record
        if self._main_was_interrupted and not record.main.turn_count:
            return record.main
        return next(filter(record.has_begun, record), record.main)

    @property
    def main_messages(self) -> list[dict[str, Any]]:
        """The messages on the newest branch of the record's main conversation; [] if this branch has no turn."""
        branch = self.model.conversation.branch
        return [] if branch.is_new else branch.history()

    # ---------------------------------------------------------------------------
    # Start and end
    # ---------------------------------------------------------------------------

    def restore(self, messages: StrandsMessages) -> None:
        """Answer repeated requests from an earlier attempt's main conversation, which the model has resumed."""
        self._replay = Replay(self.model, messages)

    def end(self, error: Exception) -> None:
        """Refuse later requests and cancel those in flight; all get a `SessionEndedError` with the first `error`."""
        self._ended = self._ended or error
        for task in self._tasks:
            task.cancel()

    async def finish(self) -> None:
        """Wait until all requests in flight have ended, then settle the main conversation."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.settle_main()

    def release(self) -> None:
        """Drop references to the ended session and its observer, to free their memory without a garbage collection."""
        self.observer = None
        if self._ended is not None:
            self._ended.__traceback__ = None

    def settle_main(self) -> None:
        """Make the session's main conversation the main conversation of the model's record, too."""
        self.model.record.promote(self.main)

    def end_replay(self) -> None:
        """Drop the part of an earlier attempt that the program did not repeat before it ended."""
        replay = self._replay
        if replay is None or replay.is_over:
            return
        if replay.position is None:
            self._restart("the program repeated no request of the record")
            self.settle_main()  # the program may have sent other requests
        elif replay.is_complete:
            replay.is_over = True
        else:
            reason = f"the program ended after message {replay.position}, before the end of the record"
            self._restart(reason, replay.position + 1)

    def _restart(self, reason: str, kept_messages: int = 0) -> None:
        """Begin the main conversation again with the record's first `kept_messages`; count the tokens of the rest."""
        if self._replay is None:
            return
        before = self.model.conversation
        kept_nodes = self._replay.restart(self.model, kept_messages)
        main = self.model.conversation
        before_tokens, kept_tokens = (
            sum(branch.trajectory.sampled_length for branch in conversation) for conversation in (before, main)
        )
        self.facts.diverged, self.facts.dropped_tokens = reason, before_tokens - kept_tokens
        if self.observer is not None:
            replies = [node.reply for node in kept_nodes if node.reply is not None]
            self.observer.on_restart(main, self._replay.branch.history()[:kept_messages], replies)

    # ---------------------------------------------------------------------------
    # Answer a request
    # ---------------------------------------------------------------------------

    async def reply(self, request: TurnRequest, is_gone: Callable[[], bool] = lambda: False) -> Reply:
        """Return the turn that answers a request: a new turn or, for a repeated request, the earlier turn.

        Args:
            request: The client's request.
            is_gone: Returns true once the client has disconnected. If the client then repeats the request, the repeat
                gets the turn that is being sampled.

        Raises:
            SessionEndedError: The episode is over, or reaches a limit with this request or its turn.
            BusySessionError: There are too many concurrent requests.
            HistoryLimitError: There are too many histories.
            PromptError, TemplateError, ConfigError: The messages can't be rendered, or the session or the engine
                refuses a field of the request.
            UnsendableTextError: A message, or the policy's turn, has the placeholder of an image or another medium.
            BudgetExhaustedError, ContextWindowOverflowException: A budget is used up.
            EngineError: The engine failed, or aborted the turn.
        """
        self._check_open()
        self.facts.requests += 1
        self.last_used_at = time.monotonic()
        self._check_fields(request)
        keeps_transient = self.model.config["transient_context"] == "keep"
        client_request = ClientRequest(
            request.messages, Head(request.system, request.tools), request.grammar, keeps_transient
        )
        if self._replay is not None and not self._replay.is_over:
            difference = await self._replay.compare(client_request)
            self._check_open()  # the episode may have ended meanwhile
            if difference:
                self._restart(difference)
        for pending in self._pending:
            is_same = pending.branch.head == client_request.head and pending.request.is_repeated_by(request)
            if is_same and pending.is_gone():
                self.facts.repeats += 1
                pending.is_gone = is_gone
                return await self._result_of(pending.task)
        place = self.model.record.place_of(client_request)
        if isinstance(place, RepeatTurn):
            self.facts.repeats += 1
            client = place.branch.client
            client.answered_at = client.answered_at or time.monotonic()  # 0.0 before this attempt's first answer
            if self._replay is not None and place.branch is self._replay.branch and not self._replay.is_over:
                self._replay.note_repeat(place.node)
            return cast("Reply", place.node.reply)  # a client's request only matches turns with a reply
        return await self._result_of(self._begin_turn(request, client_request, place, is_gone))

    def _check_open(self) -> None:
        if self._ended is not None:
            raise SessionEndedError(f"the episode has ended: {self._ended}") from self._ended
        if len(self._tasks) >= MAX_CONCURRENT_REQUESTS:
            raise BusySessionError(
                f"got a request while {MAX_CONCURRENT_REQUESTS} others are in flight; expected at most "
                f"{MAX_CONCURRENT_REQUESTS} at once in one session. Send it again when one of these has been answered"
            )

    def _begin_turn(
        self,
        request: TurnRequest,
        client_request: ClientRequest,
        place: ExtendBranch | BeginBranch,
        is_gone: Callable[[], bool],
    ) -> asyncio.Task[Reply]:
        """Prepare a request's branch, count its fork or changed calls, and start the task that samples its turn."""
        record, match = self.model.record, place.match
        if isinstance(place, ExtendBranch) and isinstance(match, ClientMatch):
            self.facts.changed_calls += len(match.changed_calls)
            for description in match.changed_calls:
                self._note_difference(description)
        elif isinstance(place, BeginBranch):
            self._note_fork(request, place)
        is_first_with_tools = place.conversation == "agent" and not any(
            branch.head.tools for branch in record.main if branch.head is not None
        )
        conversation = record.enter(place, client_request.head)
        if is_first_with_tools:
            self._make_main(conversation)
        branch = conversation.branch
        client_messages: StrandsMessages = request.messages
        if isinstance(match, ClientMatch):
            branch.client.call_ids, client_messages = match.call_ids, match.given
            if isinstance(place, BeginBranch):
                branch.client.messages = match.branch.client.messages[: match.length]
        if self.observer is not None:
            answered_at = branch.client.answered_at
            waited_s = time.monotonic() - answered_at if answered_at else None
            new_messages = place.new_messages[place.shared :] if isinstance(place, BeginBranch) else place.new_messages
            try:
                self._observe(self.observer.on_request, conversation, new_messages, waited_s)
            except SessionEndedError:
                conversation.is_busy = False
                conversation.drop_new_branch()
                raise
        task = asyncio.create_task(self._sample(conversation, request, client_request, place, client_messages))
        pending = _Pending(request, branch, task, is_gone)
        self._pending.append(pending)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._on_turn_done, pending, conversation))
        return task

    async def _sample(
        self,
        conversation: Conversation,
        request: TurnRequest,
        client_request: ClientRequest,
        place: ExtendBranch | BeginBranch,
        client_messages: StrandsMessages,
    ) -> Reply:
        branch, params = conversation.branch, self._allowed_params(request.params)
        end = len(place.new_messages) + (0 if branch.is_new else len(branch.messages))
        try:
            answer = await self.model.answer_at(conversation, place, client_request.head, params)
        except (EngineAbortedError, EngineUnavailableError, asyncio.CancelledError):
            self._main_was_interrupted |= bool(request.tools) and conversation is self.model.conversation
            raise
        except (EngineRejectedError, ConfigError) as e:
            client_params = sorted(params.keys() - {"max_new_tokens", "stop"})
            is_other_fault = isinstance(e, EngineRejectedError) and e.status_code not in _BAD_REQUEST
            if not client_params or is_other_fault or isinstance(e, EngineOverlongError):
                raise
            raise PromptError(f"a request with the client's {', '.join(client_params)} was refused: {e}") from e
        finally:
            if not conversation.drop_new_branch() and branch.covered == end:
                branch.client.messages = client_messages
        node = branch.nodes[-1]
        node.reply = reply = reply_of_turn(answer.message["content"], branch.trajectory.turns[-1], answer.usage)
        node.grammar = client_request.grammar
        branch.client.answered_at = time.monotonic()
        self.model.record.touch(branch)
        if self.observer is not None:
            self._observe(self.observer.on_turn, conversation, reply)
        return reply

    async def _result_of(self, task: asyncio.Task[Reply]) -> Reply:
        """Wait for the reply of a turn; the turn continues if the waiting handler is cancelled."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._ended is not None:
                raise SessionEndedError(f"the episode has ended: {self._ended}") from self._ended
            raise

    def _on_turn_done(self, pending: _Pending, conversation: Conversation, task: asyncio.Task[Reply]) -> None:
        self._tasks.discard(task)
        self._pending.remove(pending)
        conversation.is_busy = False
        if task.cancelled():
            conversation.drop_new_branch()  # the turn may have been cancelled before it began
            return
        error = task.exception()
        if isinstance(error, Exception | None) and not isinstance(error, PromptError | TemplateError):
            self.error = error  # a PromptError or TemplateError is the client's fault
        if isinstance(error, EngineAbortedError) and self.observer is not None:
            self.observer.on_abort()

    def _observe(self, method: Callable[..., None], *args: object) -> None:
        try:
            method(*args)
        except SessionEndedError as e:
            self.end(e)
            raise

    def _make_main(self, conversation: Conversation) -> None:
        """Make an agent's conversation the main one instead of the first, which had no tools; this ends a replay."""
        before = self.model.conversation
        self.model.record.promote(conversation)
        before.kind = "aside"
        if self._replay is None:
            return
        self._replay.is_over = True
        if before is self._replay.conversation:  # `before` stays in the record, so no token is dropped
            self.facts.diverged, self.facts.dropped_tokens = "another conversation became the main one", 0
            if self.observer is not None:
                self.observer.on_restart(conversation, (), ())

    # ---------------------------------------------------------------------------
    # Fields and counts
    # ---------------------------------------------------------------------------

    def _allowed_params(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a client's sampling parameters that the session allows; note the overridden ones."""
        fixed, params = self.model.config["sampling_params"], dict[str, Any]()
        for name, value in given.items():
            if name == "stop":
                stops = fixed.get("stop") or []
                params["stop"] = list(dict.fromkeys([*([stops] if isinstance(stops, str) else stops), *value]))
            elif name == "max_new_tokens":
                params[name] = min(value, fixed.get(name) or value)
            elif fixed.get(name) is None:
                params[name] = value
            elif fixed[name] != value:
                self._note_overridden(name, value)
        return params

    def _check_fields(self, request: TurnRequest) -> None:
        """Raise PromptError if a template argument is not the policy's; note fields without effect."""
        used = self.model.template_kwargs
        for name, value in request.template_kwargs.items():
            if used.get(name) != value:
                raise PromptError(
                    f"got chat_template_kwargs with {name}={value!r:.100}; expected {used.get(name)!r:.100}, which the "
                    "policy uses. Leave it out, or change it in the policy's settings"
                )
        for name, value in request.ignored_fields.items():
            if used.get(name) != value:
                self._note_overridden(name, value)

    def _note_overridden(self, name: str, value: object) -> None:
        if len(self.facts.overridden) < _MAX_SHOWN_FIELDS:
            try:
                text = encode_json(value).decode()
            except ValueError as e:
                value = text = f"a value that can't be written as JSON: {e}"
            shown = value if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
            self.facts.overridden.setdefault(name[:_MAX_SHOWN_CHARS], shown)

    def _note_difference(self, description: str) -> None:
        if len(self.facts.differences) < _MAX_SHOWN_DIFFERENCES:
            self.facts.differences.append(f"request {self.facts.requests}: {description}")

    def _note_fork(self, request: TurnRequest, place: BeginBranch) -> None:
        """Check the number of histories, and count the request as a fork unless it begins a conversation."""
        histories = sum(
            not branch.is_new or conversation.is_sampling(branch)
            for conversation in self.model.record
            for branch in conversation
        )
        if histories >= MAX_HISTORIES:
            raise HistoryLimitError(
                f"got a new history in addition to {MAX_HISTORIES} others; expected at most {MAX_HISTORIES} in one "
                "session. Continue one of these"
            )
        if place.shared or any(message["role"] == "assistant" for message in request.messages):
            self.facts.forks += 1
            self._note_difference(place.reason)
