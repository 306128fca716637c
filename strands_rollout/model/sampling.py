"""Asks the engine for one turn, within what budgets and the engine's own context leave, across the engine's aborts.

Knows budgets, the client and the trajectory that it fills; nothing of templates, messages or parsing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final

from strands.types.exceptions import ContextWindowOverflowException

from strands_rollout.episode_clock import began_at_s
from strands_rollout.errors import (
    EngineAbortedError,
    EngineError,
    EngineOverlongError,
    EngineResponseError,
    TrajectoryError,
)
from strands_rollout.image_request import check_image_answer, collapsed_ids, image_fields
from strands_rollout.images import PlacedImage
from strands_rollout.model_config import SGLangModelConfig
from strands_rollout.replay_data import missing_replay_data, request_fields
from strands_rollout.sglang_client import FinishReason, Flight, Generation, SGLangClient
from strands_rollout.sglang_request import EncodedIds, EncodedPrompt
from strands_rollout.token_limits import Room, room_left, turn_allowance
from strands_rollout.trajectory import Trajectory
from strands_rollout.turn_params import part_params, turn_params

logger = logging.getLogger(__name__)

RequestSpan = Callable[[int | None], AbstractContextManager[Callable[[Mapping[str, Any]], object]]]
"""Entered around each request with its max_new_tokens; what it gives is called with the answer's `meta_info`."""

# aborts of one turn in a row that brought no token, and the waits between them: about 40 s in all
_MAX_FRUITLESS_ABORTS: Final = 10
# a stop string ends within so many tokens, or it is not looked for
_STOP_TAIL_TOKENS: Final = 64
_BACKOFF_BASE_S: Final = 0.25
_BACKOFF_CAP_S: Final = 8.0


def no_span(_max_new_tokens: int | None) -> AbstractContextManager[Callable[[Mapping[str, Any]], object]]:
    """A `RequestSpan` that records nothing."""
    return nullcontext(no_note)


def no_note(_meta_info: Mapping[str, Any]) -> None:
    """What a span that records nothing is told."""


class TurnSampler:
    """Samples the turns of one conversation after another; remembers what it learned of the engine's context.

    Args:
        vocab_size: New context ids must be below it.
        end_ids: Tokens that end a turn, beside those of the sampling parameters.
        decode: Text of ids, to look for stop strings in an aborted turn.

    Attributes:
        cut_by: The limit that cut the last turn: "turn", "response" or "context"; None if none did.
        engine_aborts: Requests that the engine aborted and that were continued from their own tokens.
        flight: Where the request is.
    """

    def __init__(
        self, vocab_size: int, end_ids: Iterable[int] = (), decode: Callable[[Sequence[int]], str] = lambda _ids: ""
    ) -> None:
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._decode = decode
        self._engine_context: int | None = None
        self._asked = False
        self.cut_by: str | None = None
        self.engine_aborts = 0
        self.flight = Flight()
        self._prompt = EncodedPrompt([], vocab_size=None)

    def context_limit(self, configured: int | None) -> int | None:
        """The smaller of the configured context length and the engine's own, in tokens, where known."""
        return min((limit for limit in (configured, self._engine_context) if limit is not None), default=None)

    async def learn_context(self, client: SGLangClient) -> None:
        """Ask the engine once for its context length; its refusals teach it otherwise."""
        if self._asked:
            return
        self._asked = True
        try:
            self._engine_context = (await client.server_info()).context_length
        except EngineError as e:
            # a dead engine is reported by the generation itself
            logger.debug("context length unknown error=%s", e)

    def room(self, config: SGLangModelConfig, trajectory: Trajectory) -> Room:
        """Tokens left for new context and the next turn."""
        return room_left(config["limits"], trajectory, self.context_limit(config["context_window_limit"]))

    async def sample(
        self,
        client: SGLangClient,
        config: SGLangModelConfig,
        trajectory: Trajectory,
        context_ids: Sequence[int],
        *,
        turn: int,
        should_abort: Callable[[], bool],
        span: RequestSpan = no_span,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Sample one turn into the trajectory, or the rest of its open one; return the engine's last answer.

        A turn that the engine aborts, as it does for a weight update, is continued from its own tokens; what it had
        sampled is kept whatever follows. A request that was aborted before its first token leaves no trace.

        Args:
            client: Of the running event loop.
            config: The settings in force.
            trajectory: Grows by the context and every accepted answer.
            context_ids: New context tokens; none where the trajectory's last turn is open.
            turn: The number of this turn in the conversation, from 0.
            should_abort: Asked before each request: if it holds, none is sent, and an aborted turn stays open, as it
                does where `config["continue_aborted"]` does not hold.
            span: Entered around each request.
            images: Those among the context.

        Raises:
            TrajectoryError: A context id is outside the vocabulary; or an image token stands for no image.
            BudgetExhaustedError: No token is left for a turn.
            ContextWindowOverflowException: The engine refuses the request as too long for its context.
            EngineAbortedError: The rollout is aborted, or the turn was and is not continued.
            EngineError: The engine did not deliver.
        """
        self._check_vocabulary(context_ids)
        config = {**config, "sampling_params": turn_params(config["sampling_params"], turn)}
        fruitless = 0
        while True:
            if should_abort():
                raise EngineAbortedError("the rollout was aborted before a request")
            generation = self._settled(
                await self._ask(client, config, trajectory, context_ids, should_abort, span, images), config
            )
            if generation.output_ids:
                _record(trajectory, context_ids, generation, images)
                context_ids, images, fruitless = (), (), 0
            else:
                fruitless += 1
            if generation.finish_reason.type != "abort":
                return generation
            if should_abort() or not _can_continue(config, generation) or fruitless > _MAX_FRUITLESS_ABORTS:
                count = len(generation.output_ids)
                words = generation.finish_reason.message or "no reason given"
                raise EngineAbortedError(f"the engine aborted the turn after {count} tokens: {words}")
            self.engine_aborts += 1
            if fruitless > 1:  # a paused engine lets the next request wait; one that does not is not asked in a hurry
                await asyncio.sleep(min(_BACKOFF_BASE_S * 2 ** (fruitless - 2), _BACKOFF_CAP_S))

    def _settled(self, generation: Generation, config: SGLangModelConfig) -> Generation:
        """What counts of an aborted answer; any other is taken as it is."""
        params, ids = config["sampling_params"], generation.output_ids
        if generation.finish_reason.type != "abort" or not ids:
            return generation
        if missing_replay_data(config["extra"], params, generation.meta_info):
            # the trainer could not replay these tokens: they are sampled again
            return replace(generation, output_ids=[], logprobs=[])
        end = self._end_of(ids, params)
        # aborted as it sampled the end of its turn, after which nothing may follow
        return generation if end is None else replace(generation, finish_reason=FinishReason("stop", matched=end))

    def _end_of(self, ids: Sequence[int], params: Mapping[str, Any]) -> int | str | None:
        """The stop token or string that output ends with, if it does."""
        if not params.get("ignore_eos") and ids[-1] in self._end_ids.union(params.get("stop_token_ids") or ()):
            return ids[-1]
        stops = params.get("stop") or ()
        stops = [stops] if isinstance(stops, str) else stops
        tail = self._decode(ids[-_STOP_TAIL_TOKENS:]) if stops else ""
        return next((stop for stop in stops if tail.endswith(stop)), None)

    async def _ask(
        self,
        client: SGLangClient,
        config: SGLangModelConfig,
        trajectory: Trajectory,
        context_ids: Sequence[int],
        should_abort: Callable[[], bool],
        span: RequestSpan,
        images: Sequence[PlacedImage],
    ) -> Generation:
        """One accepted response; asked for again, for less, if the engine's context turns out smaller than known."""
        try:
            return await self._request(client, config, trajectory, context_ids, should_abort, span, images)
        except EngineOverlongError as e:
            known = self.context_limit(config["context_window_limit"])
            if e.context_length is None or (known is not None and e.context_length >= known):
                raise ContextWindowOverflowException(str(e)) from e
            self._engine_context = e.context_length
            return await self._request(client, config, trajectory, context_ids, should_abort, span, images)

    async def _request(
        self,
        client: SGLangClient,
        config: SGLangModelConfig,
        trajectory: Trajectory,
        context_ids: Sequence[int],
        should_abort: Callable[[], bool],
        span: RequestSpan,
        images: Sequence[PlacedImage],
    ) -> Generation:
        images = [*trajectory.images, *images]
        allowance, limit = self._allowance(config, trajectory, len(context_ids))
        params = part_params(config["sampling_params"], trajectory, allowance)
        with span(allowance) as note:
            generation = await client.generate(
                self._encoded(trajectory, context_ids, client.vocab_size, images),
                params,
                return_logprob=config["return_logprobs"],
                headers=config["headers"] or None,
                extra=request_fields(config["extra"], known_tokens=len(trajectory.token_ids)) | image_fields(images)
                or None,
                flight=self.flight,
                should_abort=should_abort,
            )
            note(generation.meta_info)
        if images:
            check_image_answer(generation, images, len(trajectory.token_ids) + len(context_ids))
        if generation.finish_reason.type != "abort":
            _check_complete(generation, config, params, client.url)
        self.cut_by = limit if generation.finish_reason.type == "length" else None
        return generation

    def _encoded(
        self,
        trajectory: Trajectory,
        context_ids: Sequence[int],
        vocab_size: int | None,
        images: Sequence[PlacedImage],
    ) -> EncodedIds:
        """The input of the next request, of which only what is new is encoded; all of it where there are images."""
        ids = trajectory.token_ids
        if images:
            return EncodedIds(collapsed_ids([*ids, *context_ids], images, self._decode), vocab_size=vocab_size)
        if not self._prompt.is_of(ids, vocab_size=vocab_size):
            self._prompt = EncodedPrompt(ids, vocab_size=vocab_size)
        return self._prompt.followed_by(context_ids)

    def _allowance(
        self, config: SGLangModelConfig, trajectory: Trajectory, context_length: int
    ) -> tuple[int | None, str]:
        """Tokens that may be sampled, and the limit that will cut them."""
        room = self.room(config, trajectory)
        turn_so_far = trajectory.turns[-1].end - trajectory.turns[-1].start if trajectory.is_open else 0
        return turn_allowance(
            config["limits"],
            room,
            context_length,
            is_first=not trajectory.turns,
            turn_so_far=turn_so_far,
            turn_cap=config["sampling_params"].get("max_new_tokens"),
        )

    def _check_vocabulary(self, ids: Sequence[int]) -> None:
        largest = max(ids, default=0)
        if largest >= self._vocab_size:
            raise TrajectoryError(
                f"got the token id {largest} at position {ids.index(largest)} of the new context; expected ids below "
                f"the vocabulary size {self._vocab_size}: an id outside it would kill the server. Is this the served "
                "model's tokenizer?"
            )


def _record(
    trajectory: Trajectory, context_ids: Sequence[int], generation: Generation, images: Sequence[PlacedImage]
) -> None:
    trajectory.append_turn(
        context_ids,
        generation.output_ids,
        generation.logprobs,
        weight_versions=generation.weight_versions,
        images=images,
        finish_reason=generation.finish_reason.type,
        matched=generation.finish_reason.matched,
        rid=generation.rid,
        latency_s=generation.latency_s,
        at_s=began_at_s(generation.latency_s),
        prompt_tokens=generation.prompt_tokens,
        cached_tokens=generation.cached_tokens,
        meta_info={key: value for key, value in generation.meta_info.items() if not key.endswith("_logprobs")},
    )


def _can_continue(config: SGLangModelConfig, generation: Generation) -> bool:
    """Whether an abort is one of those that a weight update makes, and not an error of this request."""
    return config["continue_aborted"] and generation.finish_reason.status_code is None


def _check_complete(generation: Generation, config: SGLangModelConfig, params: Mapping[str, Any], url: str) -> None:
    if not generation.output_ids:
        raise EngineResponseError(
            f"got no token with the finish reason {generation.finish_reason.type!r} from {url}; expected at "
            "least one of a turn that was not aborted"
        )
    missing = missing_replay_data(config["extra"], params, generation.meta_info)
    if missing is not None:
        raise EngineResponseError(f"{url}: {missing}")
