"""A Strands model provider on SGLang's native `/generate`: token-in/token-out."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

import httpx
from pydantic import BaseModel, ValidationError
from strands.event_loop.streaming import process_stream
from strands.models import Model
from strands.tools import convert_pydantic_to_tool_spec
from strands.types.content import Messages
from strands.types.exceptions import ContextWindowOverflowException, StructuredOutputException

from strands_rollout.aio import own_pass
from strands_rollout.client.client import SGLangClient, shared_client
from strands_rollout.client.transport import PATIENCE_S, Fault
from strands_rollout.errors import BudgetExhaustedError, ConfigError, TrajectoryError
from strands_rollout.model import sampling
from strands_rollout.model.conversation import Answer, Conversation, ModelCall, StreamEvent, answer_events, token_count
from strands_rollout.model.trajectory import Trajectory
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.tool_parsers import AUTO, ParseFailure, ToolParser, format_of_call, get_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=BaseModel)


class SGLangModel(Model):
    """One policy for one conversation at a time; `trajectory` holds its exact tokens.

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
        request_span: Entered around each request; see `RequestSpan`.
        on_rewritten_history: "error" refuses a history that does not extend what the policy has read, and another
            system prompt or a further tool in mid-conversation; "segment" begins a new trajectory with it, as for a
            conversation manager that drops or sums up messages.
        processor: What makes tokens of images: the Hugging Face processor of the model, or the folder or hub id of one,
            which is loaded when the first image occurs.
        engine_patience_s: How long an engine that is away, busy or failing is asked again; a `client` that is an
            `SGLangClient` has its own.

    Attributes:
        conversation: The conversation so far.
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
        should_abort: Callable[[], bool] = lambda: False,
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
        self._sampler = sampling.TurnSampler(vocab_size or encoder.vocab_size, end_ids, encoder.decode)
        self._should_abort = should_abort
        self._request_span = request_span
        self._busy = False
        self.reset()

    def reset(self) -> None:
        """Start a new trajectory; references to the old one stay valid."""
        self.conversation = Conversation(self.template, self._parser)

    @property
    def trajectory(self) -> Trajectory:
        """Tokens, mask, logprobs and turns of the conversation so far."""
        return self.conversation.last.trajectory

    @property
    def parse_failures(self) -> list[ParseFailure]:
        """Tool calls of the conversation that could not be parsed."""
        earlier = [failure for segment in self.conversation.segments for failure in segment.parse_failures]
        return [*earlier, *self.conversation.last.parse_failures]

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
        return self._sampler.engine_aborts

    @property
    def engine_fault(self) -> Fault | None:
        """How the engine failed, while it is asked again; None while it is well."""
        return self._sampler.engine_fault

    @property
    def is_generating(self) -> bool:
        """Whether a request of this model is at the engine."""
        return self._sampler.flight.rid is not None

    async def stop_generating(self) -> bool:
        """Ask the engine to abort the request that it has; whether it said that it will. A router can't."""
        rid = self._sampler.flight.rid
        return rid is not None and await self.client().stop(rid, headers=self.config["headers"] or None)

    @property
    def context_window_limit(self) -> int | None:
        """Context length in tokens: the smaller of the configured and the engine's own, where known."""
        return self._sampler.context_limit(self.config["context_window_limit"])

    @property
    def cut_by(self) -> str | None:
        """The limit that cut the last turn: "turn", "response" or "context"; None if none did."""
        return self._sampler.cut_by

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
        **kwargs: object,  # noqa: ARG002 - tool choice and signals that SGLang has no equal for
    ) -> AsyncGenerator[StreamEvent, None]:
        """One turn as Strands events; see `answer`.

        The request is not streamed from the server; all events come when the turn is complete.
        """
        for event in answer_events(await self.answer(messages, tool_specs, system_prompt, system_prompt_content)):
            yield event

    async def answer(
        self,
        messages: Messages,
        tool_specs: Sequence[Mapping[str, Any]] | None = None,
        system_prompt: str | None = None,
        system_prompt_content: Sequence[Mapping[str, Any]] | None = None,
    ) -> Answer:
        """One turn: generate it, record it, and read it.

        Args:
            messages: The agent's history; not changed.
            tool_specs: The tools that the policy may call.
            system_prompt: The agent's system prompt as text.
            system_prompt_content: The same as content blocks, which count where both are given.

        Raises:
            TrajectoryError: The history does not extend what the policy has read, or it came with another system prompt
                or a further tool; or a turn is already running.
            BudgetExhaustedError: A budget leaves no token for this turn.
            ContextWindowOverflowException: The engine refuses the first prompt as too long; or the context is full, and
                the history may be rewritten.
            EngineAbortedError: The engine aborted the turn, and it is not continued; what it had sampled is in the
                trajectory.
            EngineError: The engine did not deliver; the trajectory is as before.
        """
        if self._busy:
            raise TrajectoryError("got a second turn while one is running; expected one conversation per SGLangModel")
        self._busy = True
        try:
            await own_pass()  # reading what is new in the history is the longest step of a turn
            call = ModelCall(messages, tool_specs, system_prompt, system_prompt_content)
            may_rewrite = self.config["on_rewritten_history"] == "segment"
            conversation = self.conversation.for_call(call) if may_rewrite else self.conversation
            await self._turn(conversation, call)
        finally:
            self._busy = False
        return conversation.last_answer()

    async def structured_output(
        self,
        output_model: type[T],
        prompt: Messages,
        system_prompt: str | None = None,
        **kwargs: object,  # noqa: ARG002 - Strands' signature
    ) -> AsyncGenerator[dict[str, T | Any], None]:
        """Ask for an instance of `output_model`, outside the trajectory.

        Yields:
            The turn's events, then `{"output": instance}`.

        Raises:
            StructuredOutputException: The policy's answer is not a valid instance; the message says why.
        """
        aside = Conversation(self.template, self._parser)
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
        yield {"output": _validated(output_model, message, spec["name"])}

    async def count_tokens(
        self,
        messages: Messages,
        tool_specs: Sequence[Mapping[str, Any]] | None = None,
        system_prompt: str | None = None,
        system_prompt_content: Sequence[Mapping[str, Any]] | None = None,
    ) -> int:
        """Tokens of the messages in this template, exactly; tool results alone count as the turn that they open."""
        return await token_count(self.template, ModelCall(messages, tool_specs, system_prompt, system_prompt_content))

    def client(self) -> SGLangClient:
        """The client of the running event loop."""
        base_url = cast("str", self._base_url)
        return self._client or shared_client(base_url, vocab_size=self._vocab_size, patience_s=self._patience_s)

    async def _turn(self, conversation: Conversation, call: ModelCall) -> None:
        """Sample the next turn into the conversation, or the rest of the open one."""
        conversation.know_tools(call.tool_specs)
        if conversation.takes_unread_turn(call.messages):
            return
        segment, trajectory = conversation.last, conversation.last.trajectory
        config = sampling.config_after(self.config, conversation.earlier_response_length)
        may_rewrite = config["on_rewritten_history"] == "segment"
        client = self.client()
        await self._sampler.learn_context(client)
        room = self._sampler.room(config, trajectory)
        if may_rewrite and room.budget == "context":
            room = sampling.Room(None, "context")  # what does not fit is the conversation manager's business
        context_ids = await segment.new_context(call, room, config["limits"].min_turn_tokens)
        asked = sampling.TurnRequest(
            client, config, trajectory, context_ids, segment.new_images, self._should_abort, self._request_span
        )
        tokens_before = len(trajectory.token_ids)
        try:
            await self._sampler.sample(asked, turn=conversation.turn_count - trajectory.is_open)
        except BudgetExhaustedError as e:
            if may_rewrite and e.budget == "context":
                raise ContextWindowOverflowException(str(e)) from e
            raise
        finally:
            if len(trajectory.token_ids) > tokens_before:
                segment.accept(call.messages)


def _format_name(name: str, template: ChatTemplate) -> str:
    call = template.written_call
    return format_of_call(call.turn, call.name, call.arguments) if name == AUTO else name


def _validated(output_model: type[T], message: dict[str, Any], tool_name: str) -> T:
    calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
    text = "".join(block.get("text", "") for block in message["content"]).strip()
    arguments = next((call["input"] for call in calls if call["name"] == tool_name), None)
    try:
        return output_model.model_validate(json.loads(text) if arguments is None else arguments)
    except (ValidationError, ValueError) as e:
        got = f"a call with {arguments!r}" if arguments is not None else f"the text {text[:200]!r}"
        raise StructuredOutputException(
            f"got {got}; expected a call of the tool {tool_name!r} with valid arguments, or their JSON alone: {e}"
        ) from e
