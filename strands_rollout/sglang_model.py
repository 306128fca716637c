"""A Strands model provider on SGLang's native `/generate`: token-in/token-out.

Glue of template, parser, client and trajectory; knows Strands' model interface and nothing of slime.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import httpx
from pydantic import BaseModel
from strands.models import Model
from strands.types.content import Messages

from strands_rollout.chat_messages import system_text, to_chat_messages, to_chat_tools
from strands_rollout.chat_template import ChatTemplate
from strands_rollout.context_builder import ContextBuilder
from strands_rollout.errors import ConfigError, EngineAbortedError, TrajectoryError
from strands_rollout.model_config import SGLangModelConfig, updated_config
from strands_rollout.sglang_client import Generation, SGLangClient, shared_client
from strands_rollout.strands_events import StreamEvent, turn_events
from strands_rollout.structured_output import structured_answer
from strands_rollout.token_limits import TokenLimits
from strands_rollout.tool_parsers import ParseFailure, ToolParser, get_parser
from strands_rollout.trajectory import Trajectory
from strands_rollout.turn_reader import read_turn
from strands_rollout.turn_sampler import TurnSampler

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
        tool_parser: A registered parser's name, or a parser.
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

    Attributes:
        trajectory: Tokens, mask, logprobs and turns of the conversation so far.
        parse_failures: Tool calls of the conversation that could not be parsed.
        prompt_ids: The first prompt, also where its generation failed.
        final_text: The last turn as text, control tokens included but its end of turn.

    Raises:
        ConfigError: Arguments contradict each other.
        TemplateError: The tokenizer or its template can't be used token-exactly.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - any Hugging Face fast tokenizer
        base_url: str | None = None,
        *,
        client: SGLangClient | httpx.AsyncClient | None = None,
        tool_parser: str | ToolParser = "hermes",
        sampling_params: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        limits: TokenLimits | None = None,
        return_logprobs: bool = True,
        model_id: str | None = None,
        context_window_limit: int | None = None,
        vocab_size: int | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if (base_url is None) == (client is None):
            raise ConfigError(f"got base_url={base_url!r} and client={client!r}; expected exactly one of them")
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, **{**(chat_template_kwargs or {}), **thinking})
        self.config: SGLangModelConfig = {
            "model_id": model_id,
            "sampling_params": dict(sampling_params or {}),
            "limits": limits or TokenLimits(),
            "return_logprobs": return_logprobs,
            "context_window_limit": context_window_limit,
            "headers": dict(headers or {}),
            "extra": dict(extra or {}),
        }
        self._base_url = base_url
        self._client = SGLangClient(client) if isinstance(client, httpx.AsyncClient) else client
        self._parser = get_parser(tool_parser) if isinstance(tool_parser, str) else tool_parser
        self._vocab_size = vocab_size
        self._sampler = TurnSampler(vocab_size or self.template.encoder.vocab_size)
        self._busy = False
        self.reset()

    def reset(self) -> None:
        """Start a new trajectory; the old one stays with whoever holds it."""
        self.trajectory = Trajectory()
        self.parse_failures: list[ParseFailure] = []
        self.final_text = ""
        self.prompt_ids: list[int] = []
        self._context = ContextBuilder(self.template)

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
        self.config = updated_config(self.config, model_config)

    def get_config(self) -> SGLangModelConfig:
        """The settings in force."""
        return self.config

    async def stream(  # type: ignore[override] # Strands' own providers narrow it the same way
        self,
        messages: Messages,
        tool_specs: Sequence[Mapping[str, Any]] | None = None,
        system_prompt: str | None = None,
        *,
        system_prompt_content: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,  # noqa: ARG002, ANN401 - tool choice and signals that SGLang has no equal for
    ) -> AsyncGenerator[StreamEvent, None]:
        """One turn: generate, record it, and describe it as Strands events.

        The request is not streamed from the server; all events come when the turn is complete.

        Raises:
            TrajectoryError: The history does not extend what the policy has read, or a turn is already running.
            BudgetExhaustedError: A budget leaves no token for this turn.
            ContextWindowOverflowException: The engine refuses the first prompt as too long.
            EngineAbortedError: The engine aborted the turn; what it had sampled is in the trajectory.
            EngineError: The engine did not deliver; the trajectory is as before.
        """
        if self._busy:
            raise TrajectoryError("got a second turn while one is running; expected one conversation per SGLangModel")
        self._busy = True
        try:
            specs, blocks = tool_specs, system_prompt_content
            generation = await self._turn(messages, specs, system_prompt, blocks)
        finally:
            self._busy = False
        for event in self._events(generation):
            yield event

    async def structured_output(
        self,
        output_model: type[T],
        prompt: Messages,
        system_prompt: str | None = None,
        **kwargs: Any,  # noqa: ARG002, ANN401 - Strands' signature
    ) -> AsyncGenerator[dict[str, T | Any], None]:
        """Ask for an instance of `output_model`, outside the trajectory.

        Yields:
            The turn's events, then `{"output": instance}`.

        Raises:
            StructuredOutputException: The policy's answer is not a valid instance; the message says why.
        """
        aside = self._aside()
        async for event in structured_answer(aside.stream, output_model, prompt, system_prompt):
            yield event

    async def count_tokens(
        self,
        messages: Messages,
        tool_specs: Sequence[Mapping[str, Any]] | None = None,
        system_prompt: str | None = None,
        system_prompt_content: Sequence[Mapping[str, Any]] | None = None,
    ) -> int:
        """Tokens of the messages in this template, exactly; tool results alone count as the turn that they open."""
        chat = to_chat_messages(messages)
        tools = to_chat_tools(tool_specs)
        if chat and chat[0]["role"] == "tool":
            return len(self.template.turn_ids(chat, tools, last_id=self.template.end_of_turn_id))
        system = system_text(system_prompt, system_prompt_content)
        head = [{"role": "system", "content": system}] if system else []
        return len(self.template.prompt_ids([*head, *chat], tools))

    def client(self) -> SGLangClient:
        """The client of the running event loop."""
        return self._client or shared_client(cast("str", self._base_url), vocab_size=self._vocab_size)

    async def _turn(
        self,
        messages: Messages,
        tool_specs: Sequence[Mapping[str, Any]] | None,
        system_prompt: str | None,
        blocks: Sequence[Mapping[str, Any]] | None,
    ) -> Generation:
        client = self.client()
        await self._sampler.learn_context(client)
        room = self._sampler.room(self.config, self.trajectory)
        context_ids = await self._context.build(
            messages, tool_specs, system_prompt, blocks, self.trajectory, room, self.config["limits"].min_turn_tokens
        )
        if not self.trajectory.turns:
            self.prompt_ids = context_ids
        generation = await self._sampler.sample(client, self.config, self.trajectory, context_ids)
        self.trajectory.append_turn(
            context_ids,
            generation.output_ids,
            generation.logprobs,
            finish_reason=generation.finish_reason.type,
            rid=generation.rid,
            latency_s=generation.latency_s,
            prompt_tokens=generation.prompt_tokens,
            cached_tokens=generation.cached_tokens,
            weight_version=generation.weight_version,
            meta_info={key: value for key, value in generation.meta_info.items() if not key.endswith("_logprobs")},
        )
        self._context.accept(messages)
        if generation.finish_reason.type == "abort":
            raise EngineAbortedError(f"the engine aborted the turn after {len(generation.output_ids)} tokens")
        return generation

    def _events(self, generation: Generation) -> Iterator[StreamEvent]:
        turn = read_turn(generation, self.template, self._parser)
        self.final_text = turn.text
        self.parse_failures += turn.failures
        prefix = f"call_{len(self.trajectory.turns)}_"
        self._context.note_calls(prefix, turn.segments)
        return turn_events(
            turn.segments,
            prefix,
            stop_reason=turn.stop_reason,
            usage=self._usage(generation),
            latency_s=generation.latency_s,
        )

    def _usage(self, generation: Generation) -> dict[str, int]:
        turn = self.trajectory.turns[-1]
        usage = {"inputTokens": turn.start, "outputTokens": turn.end - turn.start, "totalTokens": turn.end}
        if generation.cached_tokens is not None:
            usage["cacheReadInputTokens"] = generation.cached_tokens
        return usage

    def failure_text(self, call_id: str) -> str:
        """What the policy is told about a call of this conversation that could not be parsed."""
        return self._context.failure_texts[call_id]

    def _aside(self) -> SGLangModel:
        """A model with the same settings and a trajectory of its own."""
        aside = object.__new__(SGLangModel)
        aside.__dict__.update(self.__dict__)
        aside._busy = False
        aside.reset()
        return aside
