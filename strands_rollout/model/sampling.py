"""Sample one turn within the token budgets and the engine's context length, even if the engine aborts requests.

The model's settings (`SGLangModelConfig`), its token budgets (`TokenLimits`) and the seeds of turns are here, too.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Final, Literal, TypedDict, cast

from strands.types.exceptions import ContextWindowOverflowException

from strands_rollout import errors
from strands_rollout.client.client import Flight, SGLangClient
from strands_rollout.client.generate_api import EncodedIds, EncodedPrompt, FinishReason, Generation
from strands_rollout.client.retry import Fault, FaultKind, Outage
from strands_rollout.control import Control
from strands_rollout.log_once import log_once
from strands_rollout.model.images import PlacedImage, check_image_answer, collapsed_ids, image_fields
from strands_rollout.model.replay_data import missing_replay_data, request_fields
from strands_rollout.record.record import Record
from strands_rollout.record.tokens import Trajectory
from strands_rollout.record.weight_versions import KNOWN_VERSIONS

logger = logging.getLogger(__name__)

RequestSpan = Callable[[int | None], AbstractContextManager[Callable[[Mapping[str, Any]], object] | None]]
"""Returns a context manager around a request, given the request's `max_new_tokens` (None if it has no limit). If the
manager yields a function, the function is called with the answer's `meta_info`."""

# sampling parameters that constrain a turn by a grammar; SGLang begins the grammar anew in each request
GRAMMARS: Final = ("json_schema", "regex", "ebnf", "structural_tag")

# how many tokens at the end of an aborted turn to search for a stop string
_STOP_TAIL_TOKENS: Final = 64


class SGLangModelConfig(TypedDict, total=False):
    """Settings that `SGLangModel.update_config` can change; see `SGLangModel`."""

    model_id: str | None
    sampling_params: dict[str, Any]
    limits: TokenLimits
    return_logprobs: bool
    context_window_limit: int | None
    headers: dict[str, str]
    extra: dict[str, Any]
    continue_aborted: bool
    on_rewritten_history: Literal["error", "segment"]
    conversations: Literal["one", "many"]
    transient_context: Literal["segment", "keep"]


def config_with_left_budget(config: SGLangModelConfig, spent: int) -> SGLangModelConfig:
    """Return `config` with the response budget reduced by `spent`, the response tokens of earlier branches.

    Raises:
        BudgetExhaustedError: No token is left.
    """
    limits = config["limits"]
    if limits.max_response_tokens is None or not spent:
        return config
    left = limits.max_response_tokens - spent
    if left < 1:
        raise errors.BudgetExhaustedError(
            f"no token of the response budget is left: {spent} of {limits.max_response_tokens} were used before the "
            "history was rewritten. Raise the budget (slime's --rollout-max-response-len)",
            budget="response",
        )
    return {**config, "limits": replace(limits, max_response_tokens=left)}


def updated_config(config: SGLangModelConfig, changes: Mapping[str, Any]) -> SGLangModelConfig:
    """Return a copy of `config` with `changes`.

    Raises:
        ConfigError: A name is unknown; the message suggests a similar known name, if there is one.
    """
    for name in changes:
        if name not in config:
            raise errors.ConfigError(unknown_name_message("setting", name, config))
    merged = {**config, **changes}
    return cast(
        "SGLangModelConfig",
        {name: dict(value) if isinstance(value, Mapping) else value for name, value in merged.items()},
    )


def unknown_name_message(what: str, got: str, known: Mapping[str, Any]) -> str:
    """Return the error message for a name that is not in `known`; suggest a similar known name, if any."""
    near = get_close_matches(got, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"got the unknown {what} {got!r}; expected one of {', '.join(sorted(known))}.{hint}"


@dataclass(slots=True)
class SamplingRequest:
    """One turn to be sampled.

    Attributes:
        client: The client of the running event loop.
        config: The model's settings, with the sampling parameters and the response budget of this turn.
        trajectory: Receives the context and every accepted answer.
        context_ids: New context tokens; empty if the trajectory's last turn is open.
        images: Images in the context.
        control: The episode's control. Once the rollout is aborted, no request is sent, and no aborted turn is
            continued. Otherwise, a turn aborted by the engine is continued only with `config["continue_aborted"]`.
        span: Returns a context manager around each request; see `RequestSpan`. None for no context manager.
        record: The episode's record. Once it is closed, no request is sent.
    """

    client: SGLangClient
    config: SGLangModelConfig
    trajectory: Trajectory
    context_ids: Sequence[int]
    images: Sequence[PlacedImage] = ()
    control: Control = field(default_factory=Control)
    span: RequestSpan | None = None
    record: Record = field(default_factory=Record)


class TurnSampler:
    """Sampler of one conversation's turns, which remembers the engine's context length.

    Args:
        vocab_size: Token ids in contexts and parameters must be below this number.
        end_ids: Tokens that end a turn, in addition to the `stop_token_ids` of the sampling parameters.
        decode: Returns the text of ids. The text is searched for stop strings after an abort and, if a request has
            images, for the texts of media tokens.

    Attributes:
        cut_by: The limit that cut the last turn: "turn", "response" or "context"; None if the turn was not cut.
        engine_aborts: How often the engine aborted a request and the turn was then continued or repeated.
        flight: The state of the in-flight request.
    """

    def __init__(
        self, vocab_size: int, end_ids: Iterable[int] = (), decode: Callable[[Sequence[int]], str] = lambda _ids: ""
    ) -> None:
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._decode = decode
        self._engine_context: int | None = None
        self._connection_epoch: int | None = None
        self._info_client: SGLangClient | None = None  # the client that is fetching the context length
        self._unreachable_error: errors.EngineUnavailableError | None = None
        self.cut_by: str | None = None
        self.engine_aborts = 0
        self.flight = Flight()
        self._prompt = EncodedPrompt([], vocab_size=None)
        self._noted_version: str | None = None

    @property
    def engine_fault(self) -> Fault | None:
        """The engine's last failure; None unless a request is being retried or its retries were cancelled."""
        return self.flight.fault if self._info_client is None else self._info_client.info_fault

    def context_limit(self, configured: int | None) -> int | None:
        """Return the smaller of the configured and the engine's context length, in tokens; None if neither is known."""
        if configured is None or self._engine_context is None:
            return self._engine_context if configured is None else configured
        return min(configured, self._engine_context)

    async def fetch_context_length(self, client: SGLangClient) -> None:
        """Fetch the engine's context length, unless it was fetched in this `connection_epoch` of the client.

        If the engine can't be reached within the client's patience, the next `sample` raises the
        `EngineUnavailableError`.
        """
        if self._connection_epoch == client.connection_epoch:
            return
        self._info_client = client
        try:
            # a router may report no length; then keep the known length, perhaps from an engine's refusal
            self._engine_context = (await client.server_info()).context_length or self._engine_context
            self._connection_epoch = client.connection_epoch
        except errors.EngineUnavailableError as e:
            self._unreachable_error = e
        except errors.EngineError as e:
            logger.debug("the engine's context length is unknown: %s", e)
        self._info_client = None  # a cancellation skips this line: `engine_fault` then still reports the outage

    def remaining_budget(self, config: SGLangModelConfig, trajectory: Trajectory) -> RemainingBudget:
        """Return the tokens left for new context and the next turn together."""
        return remaining_budget(config["limits"], trajectory, self.context_limit(config["context_window_limit"]))

    async def sample(self, request: SamplingRequest, *, turn: int | str) -> Generation:
        """Sample a turn, or the rest of an open turn, into the trajectory; return the engine's last answer.

        If the engine aborts a turn, for example for a weight update, the trajectory keeps the turn's tokens, and the
        turn is continued from them. If the rollout is aborted or `continue_aborted` is False, the turn is not
        continued. Two kinds of tokens are not kept: tokens of an unfinished turn with a grammar, and tokens without the
        requested replay data. If the turn is continued, these tokens are sampled again. A request that is aborted
        before its first token does not change the trajectory.

        Args:
            request: The turn to sample.
            turn: The turn's number in the conversation, from 0; see `turn_seed`.

        Raises:
            TrajectoryError: A context id is outside the vocabulary; or the request or the answer has a media token that
                stands for no image.
            ConfigError: An id in a parameter is outside the vocabulary, or the request can't be sent.
            BudgetExhaustedError: No token is left for a turn.
            ContextWindowOverflowException: The engine refuses the request as too long for its context.
            EngineAbortedError: The rollout is aborted, the episode has ended, or the engine aborted the turn and
                `continue_aborted` is False.
            EngineError: The engine failed, aborted the turn because of an error, or aborts it again and again without a
                usable token.
        """
        self._check_vocabulary(request.context_ids)
        params = turn_params(request.config["sampling_params"], turn)
        self._check_params(params)
        if self._unreachable_error is not None:
            error, self._unreachable_error = self._unreachable_error, None
            raise error
        client, control = request.client, request.control
        empty_aborts: Outage | None = None  # consecutive aborts without a usable token
        while True:
            if request.record.is_closed:
                raise errors.EngineAbortedError("the episode ended before a request")
            control.check("before a request")
            generation = await self._generate(request, params)
            if generation.finish_reason.type == "abort":
                generation = self._after_abort(generation, request.config["extra"], params)
            if generation.output_ids:
                _append_turn(request, generation)
            if generation.finish_reason.type != "abort":
                return generation
            if generation.output_ids:
                # the trajectory now contains the context
                request, empty_aborts = replace(request, context_ids=(), images=()), None
            else:
                empty_aborts = empty_aborts or Outage(client.retry_policy)
                message = f"the engine aborts requests without a usable token: {_abort_reason(generation)}"
                empty_aborts.add(Fault(FaultKind.BUSY, message), generation.latency_s)
            _check_continuation(request, generation, empty_aborts)
            self.engine_aborts += 1
            if empty_aborts is not None and len(empty_aborts.faults) > 1:  # no wait after the first abort
                log_once(logger, logging.WARNING, "event=engine_aborts url=%s %s", client.url, message)
                self.flight.fault = empty_aborts.faults[-1]  # the cause to report if a timeout ends the wait
                await client.wait_to_retry(empty_aborts, control)

    def _after_abort(self, generation: Generation, extra: Mapping[str, Any], params: Mapping[str, Any]) -> Generation:
        ids = generation.output_ids
        if not ids:
            return generation
        if missing_replay_data(extra, params, generation.meta_info):
            # the trainer could not replay these tokens; they are sampled again
            return replace(generation, output_ids=[], logprobs=[])
        end = self._final_stop(ids, params)
        if end is not None:  # the engine aborted the request just as the turn ended
            return replace(generation, finish_reason=FinishReason("stop", matched=end))
        if any(params.get(name) for name in GRAMMARS):
            # a continuation would start the grammar anew, so the whole turn is sampled again
            return replace(generation, output_ids=[], logprobs=[])
        return generation

    def _final_stop(self, ids: Sequence[int], params: Mapping[str, Any]) -> int | str | None:
        """Return the stop token or stop string that an output ends with; None if it ends with neither."""
        if not params.get("ignore_eos") and ids[-1] in self._end_ids.union(params.get("stop_token_ids") or ()):
            return ids[-1]
        stops = params.get("stop") or ()
        stops = [stops] if isinstance(stops, str) else stops
        tail = self._decode(ids[-_STOP_TAIL_TOKENS:]) if stops else ""
        return next((stop for stop in stops if tail.endswith(stop)), None)

    async def _generate(
        self, request: SamplingRequest, params: Mapping[str, Any], *, is_retry: bool = False
    ) -> Generation:
        client, config, trajectory = request.client, request.config, request.trajectory
        images = [*trajectory.images, *request.images]
        allowance, limit = self._allowance(request, params.get("max_new_tokens"))
        params_now = request_params(params, trajectory, allowance)
        extra = request_fields(config["extra"], known_tokens=len(trajectory.token_ids)) if config["extra"] else {}
        try:
            with request.span(allowance) if request.span else nullcontext() as report:
                generation = await client.generate(
                    self._encode_input(trajectory, request.context_ids, client.vocab_size, images),
                    params_now,
                    return_logprob=config["return_logprobs"],
                    headers=config["headers"] or None,
                    extra={**extra, **image_fields(images)} if images else extra or None,
                    flight=self.flight,
                    control=request.control,
                )
                if report is not None:
                    report(generation.meta_info)
        except errors.EngineOverlongError as e:
            if is_retry:
                raise
            known = self.context_limit(config["context_window_limit"])
            if e.context_length is None or (known is not None and e.context_length >= known):
                raise ContextWindowOverflowException(str(e)) from e
            self._engine_context = e.context_length
            # the smaller context leaves fewer tokens to sample
            return await self._generate(request, params, is_retry=True)
        if generation.weight_version != self._noted_version:
            self._noted_version = generation.weight_version
            KNOWN_VERSIONS.note(self._noted_version)
        if images:
            check_image_answer(generation, images, len(trajectory.token_ids) + len(request.context_ids))
        if generation.finish_reason.type != "abort":
            _check_complete(generation, config["extra"], params_now, client.url)
        self.cut_by = limit if generation.finish_reason.type == "length" else None
        return generation

    def _encode_input(
        self,
        trajectory: Trajectory,
        context_ids: Sequence[int],
        vocab_size: int | None,
        images: Sequence[PlacedImage],
    ) -> EncodedIds:
        ids = trajectory.token_ids
        if images:
            return EncodedIds(collapsed_ids([*ids, *context_ids], images, self._decode), vocab_size=vocab_size)
        if not self._prompt.encodes(ids, vocab_size=vocab_size):
            self._prompt = EncodedPrompt(ids, vocab_size=vocab_size)
        return self._prompt.with_context(context_ids)

    def _allowance(self, request: SamplingRequest, turn_cap: int | None) -> tuple[int | None, str]:
        trajectory = request.trajectory
        turn_so_far = trajectory.turns[-1].end - trajectory.turns[-1].start if trajectory.is_open else 0
        return turn_allowance(
            request.config["limits"],
            self.remaining_budget(request.config, trajectory),
            len(request.context_ids),
            is_first=not trajectory.turns,
            turn_so_far=turn_so_far,
            turn_cap=turn_cap,
        )

    def _check_vocabulary(self, ids: Sequence[int]) -> None:
        largest = max(ids, default=0)
        if largest >= self._vocab_size:
            raise errors.TrajectoryError(
                f"got the token id {largest} at position {ids.index(largest)} of the new context; expected ids below "
                f"the vocabulary size {self._vocab_size}: other ids would kill the server. Check that the tokenizer "
                "belongs to the served model"
            )

    def _check_params(self, params: Mapping[str, Any]) -> None:
        """Check that token ids in parameters are in the vocabulary: the server indexes its logits with these ids."""
        for name in ("stop_token_ids", "logit_bias"):
            for token_id in map(str, params.get(name) or ()):
                if token_id.isdecimal() and int(token_id) >= self._vocab_size:
                    raise errors.ConfigError(
                        f"got the token id {token_id} in {name}; expected ids below the vocabulary size "
                        f"{self._vocab_size}"
                    )


def _check_continuation(request: SamplingRequest, generation: Generation, empty_aborts: Outage | None) -> None:
    """Raise an error if an aborted turn must not be continued.

    `empty_aborts` has the consecutive aborts without a usable token; None if this answer has a usable token.
    """
    status, reason = generation.finish_reason.status_code, _abort_reason(generation)
    aborted = f"the engine aborted the request after {len(generation.output_ids)} tokens"
    if request.control.should_abort() or not request.config["continue_aborted"]:
        raise errors.EngineAbortedError(f"{aborted}: {reason}")
    if status is not None:
        message = f"{aborted} with the error {status}: {reason}"
        if 400 <= status < 500:
            raise errors.EngineRejectedError(message, status_code=status)
        raise errors.EngineUnavailableError(message)
    if empty_aborts is not None and len(empty_aborts.faults) > 1 and empty_aborts.is_exhausted():
        raise errors.EngineUnavailableError(
            f"the engine aborted {len(empty_aborts.faults)} consecutive requests without a usable token, although "
            f"the rollout was not aborted: {reason}. The client waited {empty_aborts.waited_s:.0f} s "
            "(the limit is engine_patience_s)"
        )


def _abort_reason(generation: Generation) -> str:
    return generation.finish_reason.message or "no reason given"


def _append_turn(request: SamplingRequest, generation: Generation) -> None:
    request.trajectory.append_turn(
        request.context_ids,
        generation.output_ids,
        generation.logprobs,
        weight_versions=generation.weight_versions,
        numbering=KNOWN_VERSIONS.numbering,
        images=request.images,
        finish_reason=generation.finish_reason.type,
        matched=generation.finish_reason.matched,
        rid=generation.rid,
        latency_s=generation.latency_s,
        at_s=request.control.step_start_s(generation.latency_s),
        prompt_tokens=generation.prompt_tokens,
        cached_tokens=generation.cached_tokens,
        meta_info={key: value for key, value in generation.meta_info.items() if not key.endswith("_logprobs")},
    )


def _check_complete(generation: Generation, extra: Mapping[str, Any], params: Mapping[str, Any], url: str) -> None:
    if not generation.output_ids:
        raise errors.EngineResponseError(
            f"{url} returned no tokens, with the finish reason {generation.finish_reason.type!r}; expected at least "
            "one, unless the engine aborts the request"
        )
    missing = missing_replay_data(extra, params, generation.meta_info) if extra or "custom_params" in params else None
    if missing is not None:
        raise errors.EngineResponseError(f"the answer of {url} {missing}")


def turn_seed(seed: int, turn: int | str) -> int:
    """Return the sampling seed of a turn, derived from the sample's seed.

    SGLang draws each token from (seed, position). All requests of a turn have the same seed. So an abort does not
    change the turn's tokens, as long as the weights stay the same. Seeds are hashed because samples have consecutive
    seeds: `seed + turn` would be the seed of another sample.

    Args:
        seed: The sample's seed, which is also the seed of its first turn.
        turn: Number of the turn, from 0; "conversation/turn" in conversations other than the first; or the name of a
            sub-agent, for the seed of that sub-agent.
    """
    if turn == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 33


def turn_params(params: Mapping[str, Any], turn: int | str) -> dict[str, Any]:
    """Return a turn's sampling parameters: `params`, but with the turn's own seed if they have a seed."""
    seed = params.get("sampling_seed")
    return dict(params) if seed is None else {**params, "sampling_seed": turn_seed(seed, turn)}


def request_params(params: Mapping[str, Any], trajectory: Trajectory, allowance: int | None) -> dict[str, Any]:
    """Return the next request's parameters: at most `allowance` tokens, at least the rest of `min_new_tokens`.

    SGLang refuses a minimum above the maximum, so the allowance limits both.
    """
    limited = {**params, "max_new_tokens": allowance}
    minimum = params.get("min_new_tokens")
    if not minimum:
        return limited
    sampled = trajectory.turns[-1].end - trajectory.turns[-1].start if trajectory.is_open else 0
    left = max(0, minimum - sampled)
    return {**limited, "min_new_tokens": left if allowance is None else min(left, allowance)}


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Limits in tokens; a maximum of None means no limit other than the engine's context length.

    Attributes:
        max_response_tokens: Maximum tokens after the first prompt, tool results included; slime's `max_new_tokens`.
        max_context_tokens: Maximum tokens of prompt plus response.
        max_turn_tokens: Maximum tokens sampled in one turn.
        min_turn_tokens: Tokens to leave for the next turn: if tool results leave fewer, results without an image are
            cut. Fewer are left only if even empty results are too long. If the history may be rewritten, results are
            cut only if the response budget has fewer tokens left than the context budget.

    Raises:
        ConfigError: A limit is not an integer of at least 1.
    """

    max_response_tokens: int | None = None
    max_context_tokens: int | None = None
    max_turn_tokens: int | None = None
    min_turn_tokens: int = 16

    def __post_init__(self) -> None:
        for name in ("max_response_tokens", "max_context_tokens", "max_turn_tokens", "min_turn_tokens"):
            value, may_be_none = getattr(self, name), name != "min_turn_tokens"
            if value is None and may_be_none:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                none = ", or None for no limit" if may_be_none else ""
                raise errors.ConfigError(f"got {name}={value!r}; expected an integer of at least 1{none}")


DEFAULT_CONFIG: Final[SGLangModelConfig] = {
    "model_id": None,
    "sampling_params": {},
    "limits": TokenLimits(),
    "return_logprobs": True,
    "context_window_limit": None,
    "headers": {},
    "extra": {},
    "continue_aborted": True,
    "on_rewritten_history": "error",
    "conversations": "one",
    "transient_context": "segment",
}


@dataclass(slots=True)
class RemainingBudget:
    """Tokens left for new context and the next turn together.

    Attributes:
        tokens: Number of tokens; None if there is no limit.
        budget: The budget with the fewest tokens left, "response" or "context"; "context" if there is no limit.
    """

    tokens: int | None
    budget: str


def remaining_budget(limits: TokenLimits, trajectory: Trajectory, engine_context: int | None) -> RemainingBudget:
    """Return the tokens that the budgets leave after `trajectory`.

    Args:
        limits: The budgets.
        trajectory: The tokens so far. Before the first turn only the context budget applies, since a prompt is
            not part of the response.
        engine_context: The smaller of the configured and the engine's context length, in tokens; None if neither is
            known. One token stays free: SGLang 0.5.x refuses a request that would fill its context.
    """
    length = len(trajectory.token_ids)
    candidates: list[tuple[int, str]] = []
    if limits.max_response_tokens is not None and trajectory.turns:
        candidates.append((limits.max_response_tokens - (length - trajectory.prompt_length), "response"))
    if limits.max_context_tokens is not None:
        candidates.append((limits.max_context_tokens - length, "context"))
    if engine_context is not None:
        candidates.append((engine_context - 1 - length, "context"))
    if not candidates:
        return RemainingBudget(None, "context")
    tokens, budget = min(candidates)  # if both have the same number left, "context"
    return RemainingBudget(tokens, budget)


def turn_allowance(
    limits: TokenLimits,
    remaining: RemainingBudget,
    context_length: int,
    *,
    is_first: bool,
    turn_so_far: int = 0,
    turn_cap: int | None = None,
) -> tuple[int | None, str]:
    """Return how many tokens the next request may sample, and the deciding limit: "turn", "response" or "context".

    If there is no limit, the result is (None, "turn").

    Args:
        limits: The budgets.
        remaining: The tokens left before the new context.
        context_length: Number of new context tokens of this request; in the first turn, of the whole prompt.
        is_first: True for the first turn, whose prompt does not count as response.
        turn_so_far: Number of tokens of this turn that were sampled before an abort; 0 for a new turn.
        turn_cap: `max_new_tokens` of the sampling parameters, which also limits one turn; None for no such limit.

    Raises:
        BudgetExhaustedError: No token is left.
    """
    candidates: list[tuple[int, str]] = []
    if remaining.tokens is not None:
        candidates.append((remaining.tokens - context_length, remaining.budget))
    if is_first and limits.max_response_tokens is not None:
        candidates.append((limits.max_response_tokens, "response"))
    caps = [cap for cap in (limits.max_turn_tokens, turn_cap) if cap is not None]
    candidates += [(cap - turn_so_far, "turn") for cap in caps]
    if candidates and min(candidates)[0] < 1:
        left, budget = min(candidates)
        raise errors.BudgetExhaustedError(
            f"no token of the {budget} budget is left to sample: the {context_length} new context tokens leave {left}, "
            "and a turn needs at least 1. Raise the budget, shorten the prompt, or let tools return less",
            budget=budget,
        )
    return min(candidates) if candidates else (None, "turn")  # if limits are equal, the alphabetically first
