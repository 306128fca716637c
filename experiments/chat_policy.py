"""Strands' OpenAI model as the policy of an episode, and a client that records the requests and answers."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, TypeAlias, cast

import openai
from strands.models.openai import OpenAIModel
from strands.types.exceptions import ContextWindowOverflowException

from strands_rollout.aio import LoopCache
from strands_rollout.client.client import shared_client
from strands_rollout.client.transport import create_client
from strands_rollout.errors import (
    EngineAbortedError,
    EngineError,
    EngineRejectedError,
    EngineResponseError,
    EngineUnavailableError,
)
from strands_rollout.model.sampling import RemainingBudget, TokenLimits, turn_allowance, turn_seed
from strands_rollout.slime_plugin.episode import ROUTING_HEADER

ChatMessage: TypeAlias = dict[str, Any]

_TOO_LONG: Final = "context length"  # in SGLang's messages for a request that does not fit
_BUSY: Final = (408, 409, 429)  # the client has already retried these statuses, and 500 and above
_OPENAI_PARAMS: Final = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "stop")
_SGLANG_PARAMS: Final = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos")
_MODEL_ID: Final = "policy"
_RETRIES: Final = 5
_STRANDS_LOGGER: Final = "strands.models.openai"
_DROPPED_REASONING: Final = "reasoningContent is not supported"
_CONNECTIONS: Final[LoopCache[Any]] = LoopCache()


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One request and its answer.

    Attributes:
        messages: The conversation as it was sent.
        tools: The tools as they were sent.
        prompt_ids: Expected prompt tokens, by our own rendering of messages and tools.
        prompt_tokens: Prompt tokens by the engine's count.
        answer: The assistant's message as it came back.
        finish_reason: "stop", "tool_calls" or "length".
        completion_tokens: Sampled tokens by the engine's count.
        sampled: Each sampled token as text, if the endpoint gives logprobs.
        weight_version: Version of the weights at the end of the turn, if the engine reports it.
        latency_s: Seconds until the answer arrived.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[ChatMessage]
    prompt_ids: list[int]
    prompt_tokens: int
    answer: ChatMessage
    finish_reason: str
    completion_tokens: int
    sampled: list[str] | None
    weight_version: str | None
    latency_s: float


class RecordedChat:
    """An OpenAI client that records the turns of one episode: `OpenAIModel(client=RecordedChat(...), stream=False)`.

    Args:
        client: Client that sends and retries the requests.
        prompt_ids: Function of messages and tools that returns the tokens of a prompt.
        limits: The episode's budgets.
        engine_context: The engine's context length in tokens; None if unknown.
        seed: Seed of the first turn, from which the seeds of later turns are derived; None lets the engine choose.

    Attributes:
        turns: The answered turns so far.
        prompt_ids: The first prompt; empty before the first request.
        cut_by: The limit that cut the last turn off: "turn", "response" or "context"; None if it was not cut off.
    """

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        prompt_ids: Callable[[Sequence[ChatMessage], Sequence[ChatMessage]], list[int]],
        limits: TokenLimits,
        *,
        engine_context: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.chat = SimpleNamespace(completions=self)
        self.turns: list[ChatTurn] = []
        self.prompt_ids: list[int] = []
        self.cut_by: str | None = None
        self._client = client
        self._prompt_ids = prompt_ids
        self._limits = limits
        self._engine_context = engine_context
        self._seed = seed

    async def create(self, **request: Any) -> Any:
        """Request a turn; called by Strands' model.

        Raises:
            BudgetExhaustedError: A budget leaves no token for the turn.
            ContextWindowOverflowException: The engine refuses the prompt as too long.
            EngineAbortedError: The engine aborted the turn. Its sampled tokens are lost, because text can't be resumed.
            EngineError: The engine does not answer, refuses the request, or answers in an unexpected form.
        """
        messages, tools = request["messages"], request.get("tools") or ()
        prompt_ids = self._prompt_ids(messages, tools)
        self.prompt_ids = self.prompt_ids or prompt_ids
        allowance, limit = self._allowance(len(prompt_ids))
        if allowance is not None:
            request["max_tokens"] = allowance
        if self._seed is not None:
            request["seed"] = turn_seed(self._seed, len(self.turns))
        started = time.monotonic()
        completion = await self._call_endpoint(request)
        turn = _to_turn(completion, messages, tools, prompt_ids, time.monotonic() - started)
        self.cut_by = limit if turn.finish_reason == "length" else None
        self.turns.append(turn)
        return completion

    def _allowance(self, prompt_tokens: int) -> tuple[int | None, str]:
        """Return how many tokens the next turn may sample (None: any number), and the limit that would cut the turn."""
        limits, candidates = self._limits, []
        if limits.max_response_tokens is not None and self.turns:
            candidates.append((limits.max_response_tokens - (prompt_tokens - len(self.prompt_ids)), "response"))
        # SGLang refuses a request that would fill its context to the last token
        engine = None if self._engine_context is None else self._engine_context - 1
        contexts = [limit for limit in (limits.max_context_tokens, engine) if limit is not None]
        candidates += [(limit - prompt_tokens, "context") for limit in contexts]
        remaining = RemainingBudget(*min(candidates)) if candidates else RemainingBudget(None, "context")
        return turn_allowance(limits, remaining, 0, is_first=not self.turns)

    async def _call_endpoint(self, request: Mapping[str, Any]) -> Any:
        try:
            return await self._client.chat.completions.create(**request)
        except openai.APIConnectionError as e:
            raise EngineUnavailableError(f"no answer from {self._client.base_url}: {e}") from e
        except openai.APIStatusError as e:
            message = f"{self._client.base_url} answered {e.status_code}: {e.message:.500}"
            if e.status_code in _BUSY or e.status_code >= 500:
                raise EngineUnavailableError(message) from e
            if _TOO_LONG in e.message:
                raise ContextWindowOverflowException(message) from e
            raise EngineRejectedError(message, status_code=e.status_code) from e
        except openai.APIError as e:
            raise EngineResponseError(f"got an answer from {self._client.base_url} that can't be read: {e}") from e


def _to_turn(
    completion: Any,
    messages: Sequence[ChatMessage],
    tools: Sequence[ChatMessage],
    prompt_ids: list[int],
    latency_s: float,
) -> ChatTurn:
    if not completion.choices or completion.usage is None:
        raise EngineResponseError(f"got {completion!r:.300} from the engine; expected one choice and its usage")
    choice = completion.choices[0]
    if choice.finish_reason == "abort":
        raise EngineAbortedError(f"the engine aborted the turn after {completion.usage.completion_tokens} tokens")
    logprobs = choice.logprobs.content if choice.logprobs else None
    named = getattr(completion, "metadata", None)
    version = named.get("weight_version") if isinstance(named, Mapping) else None
    return ChatTurn(
        messages=messages,
        tools=tools,
        prompt_ids=prompt_ids,
        prompt_tokens=completion.usage.prompt_tokens,
        answer=choice.message.model_dump(exclude_none=True),
        finish_reason=choice.finish_reason,
        completion_tokens=completion.usage.completion_tokens,
        sampled=None if logprobs is None else [token.token for token in logprobs],
        weight_version=None if version is None else str(version),
        latency_s=latency_s,
    )


logger = logging.getLogger(__name__)


class ChatPolicy(OpenAIModel):
    """Strands' OpenAI model, with the other methods and attributes that an episode uses of a policy's model.

    Args:
        chat: Client that sends and records the requests.
        params: Parameters of each request; see `request_params`.

    Attributes:
        conversation: The episode's turns so far.
        sent_at: None: nothing waits for the answer to an aborted request, because its text can't be resumed.
        engine_fault: None: the OpenAI client's retries hide the engine's faults.
    """

    sent_at: Final = None
    engine_fault: Final = None

    def __init__(self, chat: RecordedChat, params: dict[str, Any]) -> None:
        _log_dropped_reasoning_once()
        super().__init__(client=cast("Any", chat), model_id=_MODEL_ID, params=params, stream=False)
        self.conversation = _ChatHistory(chat)
        self._chat = chat

    @property
    def cut_by(self) -> str | None:
        """The limit that cut the last turn off; None if it was not cut off."""
        return self._chat.cut_by

    def bind_tools(self, conversation: object, tool_specs: object) -> None:
        """Do nothing: the endpoint parses calls."""


class _ChatHistory:
    """Stand-in for the conversation of an `SGLangModel`, with the attributes that an episode uses; has no tokens."""

    covered: Final = 0

    def __init__(self, chat: RecordedChat) -> None:
        self._chat = chat

    @property
    def branch(self) -> _ChatHistory:
        """The only branch: this object."""
        return self

    @property
    def turn_count(self) -> int:
        """Number of answered turns."""
        return len(self._chat.turns)

    def drop_new_branch(self) -> bool:
        """Do nothing: there is only one branch."""
        return False

    def bind(self, agent: object, signal: object = None) -> None:
        """Do nothing: all requests come from the same agent."""


def request_params(
    sampling_params: Mapping[str, Any], template_kwargs: Mapping[str, Any], session_id: str | None
) -> dict[str, Any]:
    """Return the parameters of each request in the endpoint's form; logprobs are requested to measure lost tokens."""
    given = {name: value for name, value in sampling_params.items() if value is not None}
    extra: dict[str, Any] = {name: given[name] for name in _SGLANG_PARAMS if name in given}
    if template_kwargs:
        extra["chat_template_kwargs"] = dict(template_kwargs)
    params: dict[str, Any] = {name: given[name] for name in _OPENAI_PARAMS if name in given}
    headers = {} if session_id is None else {"extra_headers": {ROUTING_HEADER: session_id}}
    return {**params, "logprobs": True, "extra_body": extra, **headers}


def chat_client(url: str) -> openai.AsyncOpenAI:
    """Return a client that uses the running event loop's HTTP connections to the engine, which close with the loop."""
    http = _CONNECTIONS.get(url, lambda: create_client(url))
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=_RETRIES)


async def engine_context(url: str) -> int | None:
    """Return the engine's context length in tokens; None if the engine does not report it, or does not answer."""
    try:
        return (await shared_client(url).server_info()).context_length
    except EngineError as e:  # the next turn's request reports a dead engine
        logger.debug("context length unknown error=%s", e)
        return None


class _LogOnce(logging.Filter):
    """Log filter that drops Strands' repeated warning about reasoning after its first occurrence."""

    was_logged = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record."""
        if not str(record.msg).startswith(_DROPPED_REASONING):
            return True
        is_first, self.was_logged = not self.was_logged, True
        return is_first


@functools.cache
def _log_dropped_reasoning_once() -> None:
    logging.getLogger(_STRANDS_LOGGER).addFilter(_LogOnce())
