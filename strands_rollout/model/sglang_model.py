"""A Strands model provider on SGLang's native `/generate`: token-in/token-out.

Each agent that it serves has a conversation, whose trajectory grows as long as the agent extends its history. One that
was rewritten begins a new segment, with all of it as prompt.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, Unpack, cast

import httpx
from pydantic import BaseModel
from strands.event_loop.streaming import process_stream
from strands.models import Model
from strands.tools import convert_pydantic_to_tool_spec
from strands.types.exceptions import ContextWindowOverflowException

from strands_rollout.aio import own_pass
from strands_rollout.client.client import SGLangClient, shared_client
from strands_rollout.client.transport import PATIENCE_S, Fault
from strands_rollout.control import ABORT_POLL_S, Control, current_call, never
from strands_rollout.errors import BudgetExhaustedError, ConfigError, EngineAbortedError, TrajectoryError
from strands_rollout.model import sampling
from strands_rollout.model.history import (
    Answer,
    HistorySegment,
    Messages,
    ModelCall,
    StreamEvent,
    answer_events,
    is_same_history,
    token_count,
    validated_output,
    who_asks,
)
from strands_rollout.model.trajectory import Trajectory
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.tool_parsers import AUTO, ParseFailure, ToolParser, for_tool_specs, format_of_call, get_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

T = TypeVar("T", bound=BaseModel)
_AT_ONCE: Final = 'got a second turn while one is running; expected one at a time, or conversations="many"'
Kind = Literal["main", "agent", "aside"]


class Conversation:
    """All segments of one agent's conversation; a new one is made for each.

    Args:
        template, parser, sampler: The policy's.
        kind: Whose it is: the main agent's, another agent's, or nobody's, as what a context manager asks.
        number: Tells its tool-use ids and seeds from those of the model's other conversations; 0 of the main one.
        shown_ids: Those of the others, whose history it may begin with.

    Attributes:
        last: The segment that the next turn extends.
        segments: Those before it, each up to where the history was rewritten.
        call: Id of the tool call in which it began; "" outside of one.
        is_busy: Whether a turn is under way.
        agent: Gives the agent whose it is; None where that is not known, or the agent is gone.
    """

    def __init__(
        self,
        template: ChatTemplate,
        parser: ToolParser,
        sampler: sampling.TurnSampler,
        kind: Kind = "main",
        number: int = 0,
        shown_ids: Mapping[str, str] | None = None,
    ) -> None:
        self._template = template
        self._parser = parser
        self.sampler = sampler
        self.kind = kind
        self.number = number
        call = current_call()
        self.call = "" if call is None else call.outer_id
        self.last = HistorySegment(template, shown_ids)
        self.segments: list[HistorySegment] = []
        self.is_busy = False
        # weak: an agent refers to its model
        self.agent: Callable[[], Any] = _nobody
        self._signal: Callable[[], Any] = _nobody
        self._is_unread = False
        self._knows_tools = False

    def __iter__(self) -> Iterator[HistorySegment]:
        return iter((*self.segments, self.last))

    @property
    def turn_count(self) -> int:
        """Turns in all segments."""
        return sum(len(segment.trajectory.turns) for segment in (*self.segments, self.last))

    @property
    def earlier_response_length(self) -> int:
        """Response tokens of the segments before the last."""
        return sum(segment.trajectory.response_length for segment in self.segments)

    @property
    def last_request_at_s(self) -> float:
        """When the last turn was asked for, in seconds since the episode began; there is one."""
        segment = self.last if self.last.trajectory.turns else self.segments[-1]
        return segment.trajectory.turns[-1].parts[-1].at_s or 0.0

    def bind(self, agent: object, signal: object = None) -> None:
        """Make it this agent's; what is None changes nothing."""
        self.agent = self.agent if agent is None else weakref.ref(agent)
        self._signal = self._signal if signal is None else weakref.ref(signal)

    def is_of(self, call: ModelCall) -> bool:
        """Whether the agent that asks is known to be its own, and has no turn under way."""
        by_agent = call.agent is not None and self.agent() is call.agent
        return not self.is_busy and (by_agent or (call.signal is not None and self._signal() is call.signal))

    def may_be_of(self, call: ModelCall) -> bool:
        """Whether a call of an agent that has none, or that is not known, may belong here, by its history."""
        if self.is_busy:
            return False
        if (agent := self.agent()) is not None:
            is_unknown = call.agent is None and call.signal is None
            return is_unknown and is_same_history(agent.messages, call.messages)
        if self.agent is not _nobody or self._signal is not _nobody:
            return False  # of an agent that is gone
        last = self.last
        if not last.trajectory.turns:
            return self.kind == "main"
        is_open = last.trajectory.is_open or self._is_unread
        return last.is_continued_by(call.messages) or (is_open and last.is_covered(call.messages))

    def know_tools(self, tool_specs: Messages | None) -> None:
        """Read calls by the tools' schemas, where the format needs them; the first tools count.

        What was resumed was read without them, and is read again.
        """
        if self._knows_tools or not tool_specs:
            return
        self._knows_tools = True
        before, self._parser = self._parser, for_tool_specs(self._parser, tool_specs)
        if self._parser is not before and not self.segments:
            self._read_all()

    def resume(self, trajectory: Trajectory, messages: Messages, covered: int) -> None:
        """Continue a conversation that was begun elsewhere.

        Args:
            trajectory: Its tokens and turns; owned by this conversation from here on. If it is open, its last turn is
                continued.
            messages: Its Strands messages.
            covered: How many of them the policy has read, so that the trajectory covers them and the turn after them.
        """
        self.last.trajectory = trajectory
        self.last.prompt_ids = trajectory.token_ids[: trajectory.prompt_length]
        self._read_all()
        self.last.accept(messages[:covered])
        # the turn was sampled, and the agent was stopped before it had the message
        self._is_unread = len(messages) == covered and not trajectory.is_open

    def takes_unread_turn(self, call: ModelCall) -> bool:
        """Whether a call was answered already, by a turn that the agent has not seen; true once."""
        is_unread, self._is_unread = self._is_unread, False
        return is_unread and self.last.covers(call)

    def begin_segment_for(self, call: ModelCall) -> None:
        """Begin a segment where a history does not extend what the policy has read, or its prompt or tools changed."""
        last = self.last
        if not last.trajectory.turns:
            return
        is_covered = last.covers(call)
        is_asked_again = is_covered and not (last.trajectory.is_open or self._is_unread)
        is_extended = is_covered or last.is_extended_by(call.messages)
        if is_extended and not is_asked_again and not last.changes_in_head(call):
            return
        self.begin_segment(last.why_not_extended_by(call))

    def begin_segment(self, why: str) -> None:
        """Begin a segment, for this reason."""
        (last := self.last).ended_by = why
        self.segments.append(last)
        self.last = HistorySegment(self._template, last.shown_ids)
        self.last.final_text, self.last.stop_reason = last.final_text, last.stop_reason  # until there is another answer

    def return_to(self, segment: HistorySegment) -> None:
        """Extend an earlier segment next, to whose history the agent has come back."""
        self.last.ended_by, segment.ended_by = "the agent came back to an earlier history", ""
        self.segments = [one for one in (*self.segments, self.last) if one is not segment]
        self.last = segment

    def drop_empty_segment(self) -> None:
        """Forget a segment whose first generation failed; the one before covers none of the rewritten history."""
        if self.segments and not self.last.trajectory.turns:
            self.last = self.segments.pop()
            self.last.ended_by = ""
            self.last.forget_history()

    def last_answer(self) -> Answer:
        """The last turn as Strands takes it."""
        return self.last.read_turn(-1, self.turn_count, self._parser, self.number)

    def _read_all(self) -> None:
        """Read the turns of the last segment, but an open one."""
        self.last.parse_failures.clear()
        for index, turn in enumerate(self.last.trajectory.turns):
            if turn.finish_reason != "abort":
                self.last.read_turn(index, index + 1, self._parser, self.number)


def _nobody() -> None:
    """In the place of a reference."""


class Conversations:
    """The conversations that one model has at once, that of the main agent first."""

    def __init__(
        self, template: ChatTemplate, parser: ToolParser, new_sampler: Callable[[], sampling.TurnSampler]
    ) -> None:
        self._shared = template, parser
        self._new_sampler = new_sampler
        self._numbers = itertools.count(1)
        self.main = Conversation(*self._shared, new_sampler())
        self.others: list[Conversation] = []
        self._known: dict[int, Conversation] = {}  # by the ids of agents and signals, which may have died
        self._is_closed = False

    def __iter__(self) -> Iterator[Conversation]:
        return iter((self.main, *self.others))

    def close(self) -> None:
        """Let no request follow."""
        self._is_closed = True
        for one in self:
            one.sampler.is_closed = True

    def of(self, call: ModelCall) -> Conversation:
        """Its agent's; where nobody says who asks, that whose history it extends; else a new one.

        An agent that asks twice at once has two.
        """
        if self.main.is_of(call):
            return self.main
        who = [one for one in (call.agent, call.signal) if one is not None]
        known = [self._known[id(one)] for one in who if id(one) in self._known]
        if known and known[0].is_of(call):
            return known[0]
        found = next((one for one in self if one.may_be_of(call)), None) or self.begin("agent" if who else "aside")
        found.bind(call.agent, call.signal)
        self._known.update((id(one), found) for one in who)
        return found

    def restart_main(self) -> None:
        """Begin the main one anew."""
        self.main = Conversation(*self._shared, self._new_sampler())

    def of_agent(self, agent: object) -> Conversation | None:
        """The newest one in which this agent has spoken."""
        return next(
            (one for one in (*reversed(self.others), self.main) if one.agent() is agent and one.turn_count), None
        )

    def promote(self, conversation: Conversation) -> None:
        """Make it the main one; the one before stays beside it, unless it has no turn."""
        before = self.main
        if conversation is before:
            return
        self.others.remove(conversation)
        self.main, conversation.kind = conversation, "main"
        if before.turn_count:
            before.kind = "agent"
            self.others.insert(0, before)
            self._known[id(before.agent())] = before

    def begin(self, kind: Kind) -> Conversation:
        """A new one beside the others."""
        if self._is_closed:
            raise EngineAbortedError("the episode has ended before an agent's first request")
        shown_ids = {use_id: shown for one in self for use_id, shown in one.last.shown_ids.items()}
        self.others.append(Conversation(*self._shared, self._new_sampler(), kind, next(self._numbers), shown_ids))
        return self.others[-1]


class SGLangModel(Model):
    """One policy, for one conversation or for many at once; `trajectory` holds the exact tokens of the first.

    Use it with any Strands agent: `Agent(model=SGLangModel(tokenizer=tokenizer, base_url=url), tools=[...])`, then read
    `model.trajectory`. Call `reset()` before another conversation.

    Args:
        tokenizer: A Hugging Face fast tokenizer with a chat template.
        base_url: The server's or router's URL; the connection pool is shared by all models on the same URL and event
            loop.
        client: Instead of `base_url`: an `SGLangClient`, or an `httpx.AsyncClient` as made by `create_client`.
        tool_parser: A registered parser's name; "auto" for the one that reads the calls which the template writes; or a
            parser.
        sampling_params: SGLang's sampling parameters. `max_new_tokens` among them caps one turn.
        enable_thinking: Handed to the chat template when given.
        chat_template_kwargs: Further arguments of the chat template.
        limits: Token budgets of the whole conversation.
        return_logprobs: Ask for the logprobs of sampled tokens; without them `trajectory.logprobs` is all 0.0.
        model_id: A name for traces and logs.
        context_window_limit: Context length in tokens; learned from the server where it is not given.
        vocab_size: Ids that the served model knows are below this; default: what the tokenizer makes.
        headers: Sent with each generation, e.g. a routing key.
        extra: Further top-level fields of each request, e.g. `{"return_routed_experts": True}`.
        continue_aborted: Continue a turn that the engine aborts, as it does for a weight update, from its own tokens;
            else `EngineAbortedError` is raised.
        should_abort: Once it holds, no aborted turn is continued.
        control: That of the episode, which asks its own `should_abort`.
        request_span: Entered around each request; see `RequestSpan`.
        on_rewritten_history: "error" refuses a history that does not extend what the policy has read, and another
            system prompt or a further tool in mid-conversation; "segment" begins a new trajectory with it, as for a
            conversation manager that drops or sums up messages.
        conversations: "one" refuses a second turn at once, and reads all requests as one agent's; "many" keeps one
            conversation for each agent, told apart by what Strands says of who asks, else by their histories. Those of
            agents beside the first may rewrite their histories.
        transient_context: "segment" begins a new trajectory after a request that had a text which the history has not,
            such as a plugin's reminder; "keep" leaves it where the policy has read it, and goes on after it.
        processor: What makes tokens of images: the Hugging Face processor of the model, or the folder or hub id of one,
            which is loaded when the first image occurs.
        engine_patience_s: How long an engine that is away, busy or failing is asked again; a `client` that is an
            `SGLangClient` has its own.

    Attributes:
        conversations: All conversations, the first agent's first.
        tool_parser: The parser's name; None of one that was handed over.

    Raises:
        ConfigError: Arguments contradict each other.
        TemplateError: The tokenizer or its template can't be used token-exactly.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        base_url: str | None = None,
        *,
        client: SGLangClient | httpx.AsyncClient | None = None,
        tool_parser: str | ToolParser = "hermes",
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
        should_abort: Callable[[], bool] = never,
        control: Control | None = None,
        request_span: sampling.RequestSpan | None = None,
        processor: ProcessorMixin | str | None = None,
        engine_patience_s: float = PATIENCE_S,
        **model_config: Unpack[sampling.SGLangModelConfig],
    ) -> None:
        if (base_url is None) == (client is None):
            raise ConfigError(f"got base_url={base_url!r} and client={client!r}; expected exactly one of them")
        given = {name: value for name, value in model_config.items() if value is not None}
        self.config = sampling.updated_config(sampling.DEFAULT_CONFIG, given)
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.tokenizer = tokenizer
        self.template_kwargs = {**(chat_template_kwargs or {}), **thinking}
        self.template = ChatTemplate(tokenizer, **self.template_kwargs)
        self.template.processor = processor
        self._base_url = base_url
        self._patience_s = engine_patience_s
        if isinstance(client, httpx.AsyncClient):
            client = SGLangClient(client, patience_s=engine_patience_s)
        self._client = client
        self.tool_parser = _format_name(tool_parser, self.template) if isinstance(tool_parser, str) else None
        self._parser = get_parser(self.tool_parser) if self.tool_parser is not None else cast("ToolParser", tool_parser)
        self._vocab_size = vocab_size
        ends = [*self.template.end_ids, getattr(tokenizer, "eos_token_id", None)]
        end_ids, encoder = [token for token in ends if isinstance(token, int)], self.template.encoder
        limit = vocab_size or encoder.vocab_size
        self._new_sampler = functools.partial(sampling.TurnSampler, limit, end_ids, encoder.decode)
        self._control = control or Control(should_abort)
        self._request_span = request_span
        self.reset()

    def reset(self) -> None:
        """Start a new trajectory; references to the old one stay valid."""
        self.conversations = Conversations(self.template, self._parser, self._new_sampler)

    @property
    def conversation(self) -> Conversation:
        """That of the main agent: the first, or the episode's."""
        return self.conversations.main

    @property
    def trajectory(self) -> Trajectory:
        """Tokens, mask, logprobs and turns of the conversation so far."""
        return self.conversation.last.trajectory

    @property
    def parse_failures(self) -> list[ParseFailure]:
        """Tool calls of the conversation that could not be parsed."""
        return [failure for segment in self.conversation for failure in segment.parse_failures]

    @property
    def prompt_ids(self) -> list[int]:
        """The first prompt, also where its generation failed."""
        return self.conversation.last.prompt_ids

    @property
    def final_text(self) -> str:
        """The last turn as text, control tokens included but its end of turn."""
        return self.conversation.last.final_text

    def resume(self, trajectory: Trajectory, messages: Sequence[Mapping[str, Any]], covered: int) -> None:
        """Continue a conversation that another model began, perhaps in another process; see `Conversation.resume`."""
        self.reset()
        self.conversation.resume(trajectory, messages, covered)

    @property
    def engine_aborts(self) -> int:
        """Requests that the engine aborted and that were continued in place."""
        return sum(one.sampler.engine_aborts for one in self.conversations)

    @property
    def engine_fault(self) -> Fault | None:
        """How the engine failed, while it is asked again; None while it is well."""
        return next((one.sampler.engine_fault for one in self.conversations if one.sampler.engine_fault), None)

    @property
    def sent_at(self) -> float | None:
        """When the last of this model's requests that are at the engine was sent; None without any."""
        flights = [one.sampler.flight for one in self.conversations]
        return max((flight.sent_at for flight in flights if flight.rid is not None), default=None)

    async def stop_generating(self) -> bool:
        """Ask the engine to abort the requests that it has; whether it said that it will. A router can't."""
        rids = [rid for one in self.conversations if (rid := one.sampler.flight.rid) is not None]
        client, headers = self.client(), self.config["headers"] or None
        return any([await client.stop(rid, headers=headers) for rid in rids])

    async def finish(self, grace_s: float) -> None:
        """Let no request follow; wait so many seconds at most for those of agents that nobody awaits."""
        self.conversations.close()
        if any(one.is_busy for one in self.conversations):
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.stop_generating()
                    while any(one.is_busy for one in self.conversations):  # noqa: ASYNC110 - perhaps in threads
                        await asyncio.sleep(ABORT_POLL_S / 5)

    @property
    def context_window_limit(self) -> int | None:
        """Context length in tokens: the smallest of those configured and the engine's own, where known."""
        limits = [self.config["context_window_limit"], self.config["limits"].max_context_tokens]
        return self.conversation.sampler.context_limit(min((one for one in limits if one is not None), default=None))

    def estimate_utilization(self, input_tokens: int) -> float:
        """The share of the context that so many tokens use; 0.0 where its length is not known."""
        limit = self.context_window_limit
        return input_tokens / limit if limit else 0.0

    @property
    def cut_by(self) -> str | None:
        """The limit that cut the main agent's last turn: "turn", "response" or "context"; None if none did."""
        return self.conversation.sampler.cut_by

    def update_config(self, **model_config: Any) -> None:  # noqa: ANN401 - Strands' signature
        """Change settings by name; the next turn uses them.

        Raises:
            ConfigError: There is no such setting.
        """
        self.config = sampling.updated_config(self.config, model_config)

    def get_config(self) -> sampling.SGLangModelConfig:
        """The settings in force."""
        return self.config

    async def stream(  # type: ignore[override] # Strands' own providers narrow it the same way
        self,
        messages: Messages,
        tool_specs: Sequence[Mapping[str, Any]] | None = None,
        system_prompt: str | None = None,
        *,
        system_prompt_content: Sequence[Mapping[str, Any]] | None = None,
        invocation_state: Mapping[str, Any] | None = None,
        cancel_signal: object = None,
        **kwargs: object,  # noqa: ARG002 - tool choice and others that SGLang has no equal for
    ) -> AsyncGenerator[StreamEvent, None]:
        """One turn as Strands events; see `answer`.

        The request is not streamed from the server; all events come when the turn is complete.
        """
        agent = who_asks(invocation_state, cancel_signal, messages)
        request = messages, tool_specs, system_prompt, system_prompt_content
        for event in answer_events(await self.answer(*request, agent, cancel_signal)):
            yield event

    async def answer(
        self,
        messages: Messages,
        tool_specs: Sequence[Mapping[str, Any]] | None = None,
        system_prompt: str | None = None,
        system_prompt_content: Sequence[Mapping[str, Any]] | None = None,
        agent: object = None,
        signal: object = None,
        params: Mapping[str, Any] | None = None,
        conversation: Conversation | None = None,
    ) -> Answer:
        """One turn: generate it, record it, and read it. A call with a `conversation` is known to be its next.

        Raises:
            TrajectoryError: The history does not extend what the policy has read, or it came with another system prompt
                or a further tool; or a turn is already running. Not where many conversations, and segments, may begin.
            BudgetExhaustedError: A budget leaves no token for this turn.
            ContextWindowOverflowException: The engine refuses the first prompt as too long; or the context is full, and
                the history may be rewritten.
            EngineAbortedError: The engine aborted the turn, and it is not continued; what it had sampled is in the
                trajectory.
            EngineError: The engine did not deliver; the trajectory is as before.
        """
        asked = messages, tool_specs, system_prompt, system_prompt_content, agent, signal, params
        call = ModelCall(*asked, conversation is not None)
        if conversation is None:
            conversation = self.conversation if self.config["conversations"] == "one" else self.conversations.of(call)
        if conversation.is_busy:
            raise TrajectoryError(_AT_ONCE)
        conversation.is_busy = True
        try:
            await own_pass()  # reading what is new in the history is the longest step of a turn
            may_rewrite = conversation.kind != "main" or self.config["on_rewritten_history"] == "segment"
            if may_rewrite and not call.is_matched:
                conversation.begin_segment_for(call)
                call = replace(call, is_matched=True)
            await self._turn(conversation, call)
        finally:
            conversation.is_busy = False
        return conversation.last_answer()

    async def structured_output(
        self,
        output_model: type[T],
        prompt: Messages,
        system_prompt: str | None = None,
        **kwargs: object,  # noqa: ARG002 - Strands' signature
    ) -> AsyncGenerator[dict[str, T | Any], None]:
        """Ask for an instance of `output_model`, outside the trajectory; with many conversations, in one of its own.

        Yields:
            The turn's events, then `{"output": instance}`.

        Raises:
            StructuredOutputException: The policy's answer is not a valid instance; the message says why.
        """
        is_one = self.config["conversations"] == "one"
        beside = Conversations(self.template, self._parser, self._new_sampler) if is_one else self.conversations
        aside = beside.begin("aside")
        spec = convert_pydantic_to_tool_spec(output_model)

        async def events() -> AsyncGenerator[StreamEvent, None]:
            await self._turn(aside, ModelCall(prompt, [spec], system_prompt))
            for event in answer_events(aside.last_answer()):
                yield event

        message: dict[str, Any] = {"content": []}
        async for event in process_stream(cast("Any", events())):
            if "stop" in event:
                message = event["stop"][1]
            yield dict(event)
        yield {"output": validated_output(output_model, message, spec["name"])}

    async def count_tokens(
        self,
        messages: Messages,
        tool_specs: Sequence[Mapping[str, Any]] | None = None,
        system_prompt: str | None = None,
        system_prompt_content: Sequence[Mapping[str, Any]] | None = None,
    ) -> int:
        """Tokens of the messages in this template, exactly; tool results alone count as the turn that they open."""
        if self.config["conversations"] == "many":  # who counts compares with the context's length
            await self.conversation.sampler.learn_context(self.client())
        return await token_count(self.template, ModelCall(messages, tool_specs, system_prompt, system_prompt_content))

    def client(self) -> SGLangClient:
        """The client of the running event loop."""
        base_url = cast("str", self._base_url)
        return self._client or shared_client(base_url, vocab_size=self._vocab_size, patience_s=self._patience_s)

    async def _turn(self, conversation: Conversation, call: ModelCall) -> None:
        """Sample the next turn into the conversation, or the rest of the open one."""
        conversation.know_tools(call.tool_specs)
        if conversation.takes_unread_turn(call):
            return
        segment, sampler, trajectory = conversation.last, conversation.sampler, conversation.last.trajectory
        config = sampling.config_after(self.config, conversation.earlier_response_length)
        if call.params:
            config = {**config, "sampling_params": {**config["sampling_params"], **call.params}}
        may_rewrite = conversation.kind != "main" or config["on_rewritten_history"] == "segment"
        client = self.client()
        await sampler.learn_context(client)
        room = sampler.room(config, trajectory)
        if may_rewrite and room.budget == "context":
            room = sampling.Room(None, "context")  # what does not fit is the conversation manager's business
        context_ids = await segment.new_context(call, room, config["limits"].min_turn_tokens)
        asked = sampling.TurnRequest(
            client, config, trajectory, context_ids, segment.new_images, self._control, self._request_span
        )
        tokens_before, number = len(trajectory.token_ids), conversation.turn_count - (not context_ids)
        # before the agent gets further messages
        kept = {} if call.messages is getattr(call.agent, "messages", None) else segment.without_transient(call)
        try:
            await sampler.sample(asked, turn=f"{conversation.number}/{number}" if conversation.number else number)
        except BudgetExhaustedError as e:
            if may_rewrite and e.budget == "context":
                raise ContextWindowOverflowException(str(e)) from e
            raise
        finally:
            if len(trajectory.token_ids) > tokens_before:
                segment.transient_texts += len(kept)
                segment.accept(call.messages, kept if config["transient_context"] == "keep" else {})


def _format_name(name: str, template: ChatTemplate) -> str:
    call = template.written_call
    return format_of_call(*call) if name == AUTO else name
