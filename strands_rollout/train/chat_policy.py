"""Strands' own OpenAI model as the policy of an episode: its requests, its connection, what `run_episode` asks of it.

Knows Strands' model and OpenAI's client; nothing of samples.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import openai
from strands.models.openai import OpenAIModel

from strands_rollout.errors import EngineError
from strands_rollout.loop_cache import LoopCache
from strands_rollout.rollout_job import ROUTING_HEADER
from strands_rollout.sglang_connection import create_client
from strands_rollout.shared_client import shared_client
from strands_rollout.train.chat_recorder import RecordedChat

logger = logging.getLogger(__name__)

_OPENAI_PARAMS: Final = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "stop")
_SGLANG_PARAMS: Final = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos")
_MODEL_ID: Final = "policy"
_RETRIES: Final = 5
_STRANDS_LOGGER: Final = "strands.models.openai"
_DROPPED_REASONING: Final = "reasoningContent is not supported"
_CONNECTIONS: Final[LoopCache[Any]] = LoopCache()


class ChatPolicy(OpenAIModel):
    """Strands' model, with what an episode asks a policy beside its turns.

    Args:
        chat: Takes its requests.
        params: Of each request; see `request_params`.

    Attributes:
        conversation: How far the episode came.
        is_generating: Never: an engine that is told to abort would answer with text that can't be gone on with, so that
            it is not waited for.
    """

    is_generating: Final = False

    def __init__(self, chat: RecordedChat, params: dict[str, Any]) -> None:
        _log_dropped_reasoning_once()
        super().__init__(client=cast("Any", chat), model_id=_MODEL_ID, params=params, stream=False)
        self.conversation = _ChatHistory(chat)
        self._chat = chat

    @property
    def cut_by(self) -> str | None:
        """The limit that cut the last turn."""
        return self._chat.cut_by


class _ChatHistory:
    """What an episode asks of a conversation, of one that keeps no tokens."""

    covered_messages: Final = 0

    def __init__(self, chat: RecordedChat) -> None:
        self.history: Sequence[Mapping[str, Any]] | None = None
        self._chat = chat

    @property
    def turn_count(self) -> int:
        """Turns that were answered."""
        return len(self._chat.turns)

    def drop_empty_segment(self) -> None:
        """There are no segments."""

    def know_tools(self, tool_specs: object) -> None:
        """The endpoint reads calls."""


def request_params(
    sampling_params: Mapping[str, Any], template_kwargs: Mapping[str, Any], session_id: str | None
) -> dict[str, Any]:
    """The parameters of each request, in the endpoint's words; sampled tokens are asked for to measure what is lost."""
    given = {name: value for name, value in sampling_params.items() if value is not None}
    extra: dict[str, Any] = {name: given[name] for name in _SGLANG_PARAMS if name in given}
    if template_kwargs:
        extra["chat_template_kwargs"] = dict(template_kwargs)
    params: dict[str, Any] = {name: given[name] for name in _OPENAI_PARAMS if name in given}
    headers = {} if session_id is None else {"extra_headers": {ROUTING_HEADER: session_id}}
    return {**params, "logprobs": True, "extra_body": extra, **headers}


def chat_client(url: str) -> openai.AsyncOpenAI:
    """A client on the running loop's connection to the engine, which it closes with the loop."""
    http = _CONNECTIONS.get(url, lambda: create_client(url))
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=_RETRIES)


async def engine_context(url: str) -> int | None:
    """The engine's context length in tokens; None where it does not say."""
    try:
        return (await shared_client(url).server_info()).context_length
    except EngineError as e:  # a dead engine is reported by the turn itself
        logger.debug("context length unknown error=%s", e)
        return None


class _SaidOnce(logging.Filter):
    """Drops what Strands says of reasoning before every request but the first."""

    is_said = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log it."""
        if not str(record.msg).startswith(_DROPPED_REASONING):
            return True
        was_said, self.is_said = self.is_said, True
        return not was_said


@functools.cache
def _log_dropped_reasoning_once() -> None:
    logging.getLogger(_STRANDS_LOGGER).addFilter(_SaidOnce())
