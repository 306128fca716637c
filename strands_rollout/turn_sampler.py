"""Asks the engine for one turn, within what budgets and the engine's own context leave.

Knows budgets and the client; nothing of templates, messages or parsing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from strands.types.exceptions import ContextWindowOverflowException

from strands_rollout.errors import EngineError, EngineOverlongError, EngineResponseError, TrajectoryError
from strands_rollout.model_config import SGLangModelConfig
from strands_rollout.sglang_client import Generation, SGLangClient
from strands_rollout.token_limits import Room, room_left, turn_allowance
from strands_rollout.trajectory import Trajectory

logger = logging.getLogger(__name__)


class TurnSampler:
    """Samples the turns of one conversation after another; remembers what it learned of the engine's context.

    Args:
        vocab_size: New context ids must be below it.

    Attributes:
        cut_by: The limit that cut the last turn: "turn", "response" or "context"; None if none did.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._engine_context: int | None = None
        self._asked = False
        self.cut_by: str | None = None

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
        self, client: SGLangClient, config: SGLangModelConfig, trajectory: Trajectory, context_ids: Sequence[int]
    ) -> Generation:
        """One accepted response; asked for again, for less, if the engine's context turns out smaller than known.

        Raises:
            TrajectoryError: A context id is outside the vocabulary.
            BudgetExhaustedError: No token is left for a turn.
            ContextWindowOverflowException: The engine refuses the request as too long for its context.
            EngineError: The engine did not deliver.
        """
        self._check_vocabulary(context_ids)
        try:
            return await self._request(client, config, trajectory, context_ids)
        except EngineOverlongError as e:
            known = self.context_limit(config["context_window_limit"])
            if e.context_length is None or (known is not None and e.context_length >= known):
                raise ContextWindowOverflowException(str(e)) from e
            self._engine_context = e.context_length
            return await self._request(client, config, trajectory, context_ids)

    async def _request(
        self, client: SGLangClient, config: SGLangModelConfig, trajectory: Trajectory, context_ids: Sequence[int]
    ) -> Generation:
        room = self.room(config, trajectory)
        is_first = not trajectory.turns
        allowance, limit = turn_allowance(config["limits"], room, len(context_ids), is_first=is_first)
        turn_cap = config["sampling_params"].get("max_new_tokens")
        if turn_cap is not None and (allowance is None or turn_cap < allowance):
            allowance, limit = turn_cap, "turn"
        generation = await client.generate(
            [*trajectory.token_ids, *context_ids],
            config["sampling_params"] | {"max_new_tokens": allowance},
            return_logprob=config["return_logprobs"],
            headers=config["headers"] or None,
            extra=config["extra"] or None,
        )
        if not generation.output_ids and generation.finish_reason.type != "abort":
            raise EngineResponseError(
                f"got no token with the finish reason {generation.finish_reason.type!r} from {client.url}; expected at "
                "least one of a turn that was not aborted"
            )
        self.cut_by = limit if generation.finish_reason.type == "length" else None
        return generation

    def _check_vocabulary(self, ids: Sequence[int]) -> None:
        largest = max(ids, default=0)
        if largest >= self._vocab_size:
            raise TrajectoryError(
                f"got the token id {largest} at position {ids.index(largest)} of the new context; expected ids below "
                f"the vocabulary size {self._vocab_size}: an id outside it would kill the server. Is this the served "
                "model's tokenizer?"
            )
