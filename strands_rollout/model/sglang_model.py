"""A Strands model provider on SGLang's native `/generate`: token-in/token-out.

Each request is first compared with the record of earlier requests. If it repeats a turn, it gets the recorded answer.
Otherwise, it extends a branch of the record or begins a new one: its new messages are rendered as context tokens, the
engine samples a turn, and the turn is recorded and parsed. Within a branch, sampled text is never tokenized again: the
branch's tokens only grow.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast
from weakref import WeakKeyDictionary

import httpx
from pydantic import BaseModel
from strands.event_loop.streaming import process_stream
from strands.models import Model
from strands.tools import convert_pydantic_to_tool_spec
from strands.types.exceptions import ContextWindowOverflowException

from strands_rollout.aio import admit_to_loop
from strands_rollout.client.client import SGLangClient, shared_client
from strands_rollout.client.retry import DEFAULT_PATIENCE_S, Fault
from strands_rollout.control import ABORT_POLL_S, Control, never
from strands_rollout.errors import BudgetExhaustedError, ConfigError, ReplayError, TrajectoryError
from strands_rollout.model import sampling
from strands_rollout.model.answers import AnswerReader, StreamEvent, answer_events, validated_output
from strands_rollout.model.context import first_prompt, token_count, turn_context
from strands_rollout.record.agent_request import AgentRequest, calling_agent, is_same_message
from strands_rollout.record.record import (
    Answer,
    BeginBranch,
    Conversation,
    ExtendBranch,
    Head,
    Record,
    RepeatTurn,
    StrandsMessages,
    copy_content,
)
from strands_rollout.record.tokens import Trajectory
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.tool_parsers import AUTO, ParseFailure, ToolParser, bind_tool_specs, detect_format, get_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

T = TypeVar("T", bound=BaseModel)


class SGLangModel(Model):
    """The policy as a Strands model: samples one conversation, or many at once, and records their exact tokens.

    Use it with any Strands agent: `Agent(model=SGLangModel(tokenizer=tokenizer, base_url=url), tools=[...])`, then read
    `model.trajectory`. With `conversations` "one", call `reset()` before another conversation.

    Args:
        tokenizer: A Hugging Face fast tokenizer with a chat template.
        base_url: URL of the server or router. On an event loop, models with the same URL, `vocab_size` and
            `engine_patience_s` share a connection pool.
        client: An `SGLangClient`, or an `httpx.AsyncClient` as made by `create_client`, instead of `base_url`.
        tool_parser: Name of a registered parser; "auto" for the parser of the template's tool-call format; or a parser
            object.
        sampling_params: SGLang's sampling parameters. `max_new_tokens` limits one turn.
        enable_thinking: Argument of the chat template, if given; takes precedence over `chat_template_kwargs`.
        chat_template_kwargs: Further arguments of the chat template.
        limits: Token budgets of each conversation; see `TokenLimits`.
        return_logprobs: Request the logprobs of sampled tokens; if False, `trajectory.logprobs` is all 0.0.
        model_id: Name for traces and logs.
        context_window_limit: Maximum context in tokens; None for the server's context length. A smaller context length
            of the server takes precedence.
        vocab_size: Vocabulary size of the served model. If None, new context is checked against the tokenizer's size,
            and sampled ids are not checked. An `SGLangClient` also checks all ids against its own `vocab_size`, if set.
        headers: Headers of each generation request and of its abort, such as a routing key.
        extra: Further top-level fields of each request, such as `{"return_routed_experts": True}`.
        continue_aborted: If the engine aborts a turn, for example for a weight update, continue the turn from its own
            tokens; otherwise raise `EngineAbortedError`.
        should_abort: Function that returns true once the rollout is aborted; then no request is sent, and no aborted
            turn is continued.
        control: The episode's control, which has its own `should_abort`; pass `control` or `should_abort`, not both.
        request_span: Returns a context manager around each request; see `RequestSpan`.
        on_rewritten_history: What happens if a request in mid-conversation rewrites the history: "error" refuses the
            request; "segment" begins a new trajectory. A request rewrites the history if its messages do not extend
            what the policy has read. A changed system prompt, or a new or changed tool, counts as a rewrite, too.
            Conversation managers that drop or summarize messages need "segment".
        conversations: "one" treats all requests as requests of one agent, and refuses a second concurrent turn. "many"
            records a conversation for each agent. Strands usually passes the calling agent; if it does not, agents are
            distinguished by their histories. Agents other than the main agent may rewrite their histories.
        transient_context: What happens after a request with a transient text. Such a text, for example a plugin's
            reminder, is not in the agent's history. "segment" treats the next request as a rewrite of the history (see
            `on_rewritten_history`). "keep" leaves the text in the tokens, and continues after it.
        processor: The model's Hugging Face processor, which turns images into tokens; or its folder or hub id. A folder
            or hub id is loaded when the first image comes.
        engine_patience_s: How long to retry requests to an unreachable, busy or failing engine, in seconds. An
            `SGLangClient` given as `client` has its own patience.

    Attributes:
        record: Everything that the policy read and wrote, by conversation; the main agent's conversation is the first.
        tool_parser: Name of the parser; None for a parser given as an object.

    Raises:
        ConfigError: Arguments are missing or contradict each other, an argument or a tool parser is unknown, or
            "auto" finds no single tool parser.
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
        engine_patience_s: float = DEFAULT_PATIENCE_S,
        **model_config: Unpack[sampling.SGLangModelConfig],
    ) -> None:
        if (base_url is None) == (client is None):
            got = "neither base_url nor client" if client is None else "both base_url and client"
            raise ConfigError(f"got {got}; expected exactly one of them")
        if control is not None and should_abort is not never:
            raise ConfigError(
                "got both control and should_abort; expected only one of them. To use both, pass "
                "control=Control(should_abort)"
            )
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

    @property
    def base_url(self) -> str | None:
        """URL of the server or router; None for a model with a `client`."""
        return self._base_url

    def client(self) -> SGLangClient:
        """Return the client that the model was given, or else the running event loop's client for the model's URL."""
        base_url = cast("str", self._base_url)
        return self._client or shared_client(base_url, vocab_size=self._vocab_size, patience_s=self._patience_s)

    # ---------------------------------------------------------------------------
    # The record
    # ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Start a new record, and end any replay; references to the old trajectory stay valid."""
        self.record = Record()
        # weak keys: a sampler is dropped with its conversation
        self._samplers: WeakKeyDictionary[Conversation, sampling.TurnSampler] = WeakKeyDictionary()
        self._replayed: StrandsMessages = ()

    @property
    def is_replaying(self) -> bool:
        """True from `replay` until the first request without a recorded answer."""
        return bool(self._replayed)

    def replay(self, messages: StrandsMessages) -> None:
        """Answer the main agent's next requests from `messages`, as long as the agent repeats an aborted attempt.

        Call it after `resume`, with the messages of the aborted attempt, if the agent begins again with its first
        message and no history.
        """
        self._replayed = messages

    @property
    def conversation(self) -> Conversation:
        """The main agent's conversation."""
        return self.record.main

    @property
    def trajectory(self) -> Trajectory:
        """Tokens, loss mask, logprobs and turns of the main conversation's last branch."""
        return self.conversation.branch.trajectory

    @property
    def prompt_ids(self) -> list[int]:
        """First prompt of the main conversation's last branch, as tokens; set even if sampling failed."""
        return self.conversation.branch.prompt_ids

    @property
    def final_text(self) -> str:
        """The main conversation's last turn as text, with its control tokens but without the token that ended it."""
        return self.conversation.branch.final_text

    @property
    def parse_failures(self) -> list[ParseFailure]:
        """Tool calls of the main conversation that could not be parsed."""
        return [failure for branch in self.conversation for failure in branch.parse_failures]

    def resume(self, trajectory: Trajectory, messages: Sequence[Mapping[str, Any]], covered: int) -> None:
        """Start a new record with a conversation that another model began, possibly in another process.

        See `Branch.restore`.
        """
        self.reset()
        self.restore_main(trajectory, messages, covered)

    def restore_main(self, trajectory: Trajectory, messages: StrandsMessages, covered: int) -> None:
        """Restore an earlier attempt's record in the main conversation, which must be new; see `Branch.restore`."""
        conversation = self.conversation
        conversation.branch.restore(trajectory, messages, covered)
        self._reader(conversation).read_all(conversation.branch)
        # true if the earlier agent was stopped after its last turn was sampled and before it got the answer
        conversation.has_unread_turn = len(messages) == covered and not trajectory.is_open

    # ---------------------------------------------------------------------------
    # A turn: find its place in the record, sample it there, parse it
    # ---------------------------------------------------------------------------

    async def answer(
        self,
        messages: StrandsMessages,
        tool_specs: Sequence[Mapping[str, Any]] | None = None,
        system_prompt: str | None = None,
        system_prompt_content: Sequence[Mapping[str, Any]] | None = None,
        agent: object = None,
        signal: object = None,
        *,
        only_grew: bool = False,
    ) -> Answer:
        """Sample one turn for an agent, record it, and return the answer.

        A turn sampled by an earlier attempt is returned without sampling. For the arguments, see `AgentRequest`.

        Raises:
            TrajectoryError: The main agent's request rewrites the history (with `on_rewritten_history` "error").
                Another turn is running (with `conversations` "one"). There is no new message. A token of the new
                context is outside the vocabulary. The request or the answer has a media token that stands for no image.
            PromptError, TemplateError: The messages can't be rendered.
            ConfigError: Pillow or the processor is missing for a user's image, or the image's conversion fails; a
                parameter has a token outside the vocabulary; or the request can't be sent.
            BudgetExhaustedError: A budget leaves no token for this turn.
            ContextWindowOverflowException: The engine refuses the request as too long; or the context is full, and the
                history may be rewritten.
            EngineAbortedError: The rollout is aborted, the episode has ended, or the engine aborted the turn and
                `continue_aborted` is False. The trajectory has the turn's sampled tokens, to continue the turn later.
            EngineError: The engine failed. The failed request does not change the trajectory.
            ReplayError: After `replay`, the request differs from the requests of the aborted attempt.
        """
        is_sole = self.config["conversations"] == "one"
        arguments = messages, tool_specs, system_prompt, system_prompt_content, agent, signal
        request = AgentRequest(*arguments, is_sole=is_sole, only_grew=only_grew)
        if self._replayed and agent is self.conversation.agent and (known := self._recorded_answer(messages)):
            return known
        await admit_to_loop()  # finding the new messages in the history blocks the loop longer than any other step
        if is_sole and self.conversation.is_busy:
            raise TrajectoryError(
                'got a second turn while one is running; expected one at a time, or conversations="many"'
            )
        place, head = self.record.place_of(request), request.head
        # bind even if the request is refused below: the agent's next request must be refused, too
        if isinstance(place.conversation, Conversation) and not is_sole:
            self.record.bind(place.conversation, agent, signal)
        if isinstance(place, RepeatTurn):  # an earlier attempt sampled the turn, but its agent did not get the answer
            answer = cast("Answer", place.node.answer)
            place.branch.append_answer(answer)
            place.conversation.has_unread_turn = False
            return answer
        if isinstance(place, BeginBranch) and place.rewrites and not self._may_rewrite(place.rewrites):
            raise TrajectoryError(_refusal_message(place, len(messages), self.conversation.branch.covered))
        with self.record.entered(place, head) as conversation:
            if isinstance(place.conversation, str) and not is_sole:  # the conversation has just begun
                self.record.bind(conversation, agent, signal)
            return await self.answer_at(conversation, place, head, request=request)

    def _recorded_answer(self, messages: StrandsMessages) -> Answer | None:
        """Return the recorded answer to a repeated request; if there is none, end the replay and return None."""
        recorded, count = self._replayed, len(messages)
        pairs = zip(recorded, messages, strict=False)
        at = next((n for n, (old, new) in enumerate(pairs) if not is_same_message(old, new)), None)
        if at is not None:
            raise ReplayError(f"message {at} of the request differs from the message of the aborted attempt")
        if count >= len(recorded):
            self._replayed = ()
            return None
        if recorded[count]["role"] != "assistant":
            raise ReplayError(
                f"the request ends with message {count - 1}, but the aborted attempt sent another message after it"
            )
        message = {"role": "assistant", "content": copy_content(recorded[count]["content"])}
        is_call = any("toolUse" in block for block in message["content"])
        usage, metrics = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}, {"latencyMs": 0}
        return Answer(message, "tool_use" if is_call else "end_turn", usage, metrics | {"timeToFirstByteMs": 0})

    async def answer_at(
        self,
        conversation: Conversation,
        place: ExtendBranch | BeginBranch,
        head: Head,
        params: Mapping[str, Any] | None = None,
        request: AgentRequest | None = None,
    ) -> Answer:
        """Sample and parse a turn, or the rest of the open turn, on the branch of `place`; for errors, see `answer`.

        Args:
            conversation: The result of `Record.enter` for `place`.
            place: The branch to extend or to begin.
            head: The system prompt and the tools.
            params: Sampling parameters of this turn, which override the model's.
            request: The agent's request, whose messages may have transient texts; None if no agent sent the request.
        """
        self.bind_tools(conversation, head.tools)
        branch, sampler, trajectory = conversation.branch, self._sampler(conversation), conversation.branch.trajectory
        config = sampling.config_with_left_budget(self.config, conversation.earlier_response_length)
        if params:
            config = {**config, "sampling_params": {**config["sampling_params"], **params}}
        may_rewrite = self._may_rewrite(conversation)
        client = self.client()
        await sampler.fetch_context_length(client)
        cut_to = sampler.remaining_budget(config, trajectory)
        if may_rewrite and cut_to.budget == "context":
            cut_to = sampling.RemainingBudget(None, "context")  # the conversation manager decides what to drop
        branch.new_images = ()
        read = place.new_messages  # what the policy reads in this turn
        continues_turn = branch.is_open and not read
        if isinstance(place, BeginBranch):
            context_ids = await first_prompt(self.template, branch, head, read)
        elif continues_turn:
            context_ids = []
        else:
            context_ids = await turn_context(self.template, place, head, cut_to, config["limits"].min_turn_tokens)
            if place.answer is not None:
                read = (place.answer, *read)
        sampling_request = sampling.SamplingRequest(
            client, config, trajectory, context_ids, branch.new_images, self._control, self._request_span, self.record
        )
        tokens_before = len(trajectory.token_ids)
        number = conversation.turn_count - 1 if continues_turn else conversation.turn_count  # from 0
        # call this before sampling: the agent's history may grow while the turn is sampled
        without_transient = {} if request is None else request.without_transient(branch.covered, read)
        try:
            turn = f"{conversation.number}/{number}" if conversation.number else number
            await sampler.sample(sampling_request, turn=turn)
        except BudgetExhaustedError as e:
            if may_rewrite and e.budget == "context":
                raise ContextWindowOverflowException(str(e)) from e
            raise
        finally:
            has_sampled = len(trajectory.token_ids) > tokens_before  # also true if the turn was then aborted
            if has_sampled and not continues_turn:
                branch.transient_texts += len(without_transient)
                branch.append_read(read, without_transient if config["transient_context"] == "keep" else {})
        answer = self._reader(conversation).read(branch, -1, number + 1)
        branch.append_answer(answer)
        return answer

    def _sampler(self, conversation: Conversation) -> sampling.TurnSampler:
        # `setdefault`: a thread that reads the engine's state may make the sampler at the same time
        return self._samplers.get(conversation) or self._samplers.setdefault(conversation, self._new_sampler())

    def _may_rewrite(self, conversation: Conversation) -> bool:
        return conversation is not self.conversation or self.config["on_rewritten_history"] == "segment"

    def bind_tools(self, conversation: Conversation, tool_specs: StrandsMessages | None) -> None:
        """Bind the conversation's parser to the schemas in `tool_specs`, if the tool-call format needs schemas.

        Resumed turns, which were parsed without schemas, are then parsed again. Do nothing if the conversation already
        has a parser or there are no tools.
        """
        if conversation.parser is not None or not tool_specs:
            return
        conversation.parser = bind_tool_specs(self._parser, tool_specs)
        if conversation.parser is not self._parser and len(conversation.branches) == 1:
            self._reader(conversation).read_all(conversation.branch)

    def _reader(self, conversation: Conversation) -> AnswerReader:
        return AnswerReader(self.template, conversation.parser or self._parser, conversation.number)

    # ---------------------------------------------------------------------------
    # Strands' interface
    # ---------------------------------------------------------------------------

    async def stream(  # type: ignore[override] # Strands' own providers narrow the signature, too
        self,
        messages: StrandsMessages,
        tool_specs: Sequence[Mapping[str, Any]] | None = None,
        system_prompt: str | None = None,
        *,
        system_prompt_content: Sequence[Mapping[str, Any]] | None = None,
        invocation_state: Mapping[str, Any] | None = None,
        cancel_signal: object = None,
        **kwargs: object,  # noqa: ARG002 - such as tool choice, which `/generate` does not support
    ) -> AsyncGenerator[StreamEvent, None]:
        """Sample one turn and yield it as Strands events; see `answer`.

        The server's answer is not streamed: all events come when the turn is complete.
        """
        agent = calling_agent(invocation_state, cancel_signal, messages)
        request = messages, tool_specs, system_prompt, system_prompt_content
        for event in answer_events(await self.answer(*request, agent, cancel_signal)):
            yield event

    async def structured_output(
        self,
        output_model: type[T],
        prompt: StrandsMessages,
        system_prompt: str | None = None,
        **kwargs: object,  # noqa: ARG002 - Strands' signature
    ) -> AsyncGenerator[dict[str, T | Any], None]:
        """Ask the policy for an instance of `output_model`, outside of the main trajectory.

        With `conversations="many"`, the turn is recorded in a conversation of its own; with "one", it is not recorded.

        Yields:
            The turn's events, then `{"output": instance}`.

        Raises:
            StructuredOutputException: The policy's answer is not a valid instance; the message gives the reason.
            RolloutError, ContextWindowOverflowException: As in `answer`.
        """
        record = Record() if self.config["conversations"] == "one" else self.record
        spec = convert_pydantic_to_tool_spec(output_model)
        head, place = AgentRequest(prompt, [spec], system_prompt).head, BeginBranch("aside", prompt)

        async def events() -> AsyncGenerator[StreamEvent, None]:
            with record.entered(place, head) as side_conversation:
                answer = await self.answer_at(side_conversation, place, head)
            for event in answer_events(answer):
                yield event

        message: dict[str, Any] = {"content": []}
        async for event in process_stream(cast("Any", events())):
            if "stop" in event:
                message = event["stop"][1]
            yield dict(event)
        yield {"output": validated_output(output_model, message, spec["name"])}

    async def count_tokens(
        self,
        messages: StrandsMessages,
        tool_specs: Sequence[Mapping[str, Any]] | None = None,
        system_prompt: str | None = None,
        system_prompt_content: Sequence[Mapping[str, Any]] | None = None,
    ) -> int:
        """Return the exact number of tokens of messages; see `context.token_count`."""
        if self.config["conversations"] == "many":  # callers compare the number with `context_window_limit`,
            # which depends on the engine's context length
            await self._sampler(self.conversation).fetch_context_length(self.client())
        request = AgentRequest(messages, tool_specs, system_prompt, system_prompt_content)
        return await token_count(self.template, request)

    @property
    def context_window_limit(self) -> int | None:
        """Context length in tokens: the smallest of the configured limits and the engine's; None if none is known."""
        limits = [self.config["context_window_limit"], self.config["limits"].max_context_tokens]
        configured = min((limit for limit in limits if limit is not None), default=None)
        return self._sampler(self.conversation).context_limit(configured)

    def estimate_utilization(self, input_tokens: int) -> float:
        """Return `input_tokens` as a share of the context length; 0.0 if the context length is not known."""
        limit = self.context_window_limit
        return input_tokens / limit if limit else 0.0

    def update_config(self, **model_config: Any) -> None:  # noqa: ANN401 - Strands' signature
        """Change settings by name, from the next turn on.

        Raises:
            ConfigError: A name is unknown.
        """
        self.config = sampling.updated_config(self.config, model_config)

    def get_config(self) -> sampling.SGLangModelConfig:
        """Return the current settings."""
        return self.config

    # ---------------------------------------------------------------------------
    # State of the engine, and the end of the episode
    # ---------------------------------------------------------------------------

    @property
    def cut_by(self) -> str | None:
        """The limit that cut the main agent's last turn: "turn", "response" or "context"; None if it was not cut."""
        return self._sampler(self.conversation).cut_by

    @property
    def engine_aborts(self) -> int:
        """Number of times that the engine aborted a request and the turn was then continued or repeated."""
        return sum(self._sampler(conversation).engine_aborts for conversation in self.record)

    @property
    def engine_fault(self) -> Fault | None:
        """The engine's last failure; None unless a request is being retried or its retries were cancelled."""
        faults = (self._sampler(conversation).engine_fault for conversation in self.record)
        return next(filter(None, faults), None)

    @property
    def sent_at(self) -> float | None:
        """Send time of the newest in-flight request, by `time.monotonic`; None if none is in flight."""
        flights = [self._sampler(conversation).flight for conversation in self.record]
        return max((flight.sent_at for flight in flights if flight.rid is not None), default=None)

    async def stop_generating(self) -> bool:
        """Ask the engine to abort the in-flight requests; return True if it confirmed an abort. Routers can't abort."""
        rids = [rid for each in self.record if (rid := self._sampler(each).flight.rid) is not None]
        client, headers = self.client(), self.config["headers"] or None
        return any([await client.stop(rid, headers=headers) for rid in rids])

    async def finish(self, grace_s: float) -> None:
        """Refuse new requests; abort in-flight requests, which nobody awaits; wait up to `grace_s` s for their end."""
        self.record.close()
        if any(conversation.is_busy for conversation in self.record):
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.stop_generating()
                    while any(each.is_busy for each in self.record):  # noqa: ASYNC110 - they may run in threads
                        await asyncio.sleep(ABORT_POLL_S / 5)


def _refusal_message(place: BeginBranch, got: int, read: int) -> str:
    if place.head_changes:
        return (
            f"got a request that changes {', '.join(place.head_changes)} in mid-conversation; expected the system "
            "prompt and tools of the first prompt, which the policy has already read. Set the system prompt and all "
            "tools before the first turn; or let a change begin a new segment: build the agent in an agent_factory "
            "(with fan_out, each segment becomes a sample), or pass on_rewritten_history='segment' to SGLangModel"
        )
    return (
        f"got a history of {got} messages that does not extend the {read} messages that the policy has read and "
        "its answer to them; expected only new messages at the end. Call model.reset() before a new conversation, and "
        "use a conversation manager that neither drops nor rewrites messages (NullConversationManager), or pass "
        "on_rewritten_history='segment' to SGLangModel"
    )


def _format_name(name: str, template: ChatTemplate) -> str:
    return detect_format(*template.example_call) if name == AUTO else name
