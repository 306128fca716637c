"""Trajectory and stop reason -> slime's Sample; the only place that knows Sample's fields.

Works on slime's own Sample and on our stand-in. Whatever happened, the sample that is left is one that slime's trainer
can take.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from strands_rollout.agent import Episode
from strands_rollout.episode_record import METADATA_KEY, METADATA_VERSION, RESUME_KEY, episode_record, error_text
from strands_rollout.errors import EngineResponseError, ResumeError
from strands_rollout.images import train_inputs_of
from strands_rollout.replay_data import located_experts
from strands_rollout.resume_state import ResumeState, save_resume_state
from strands_rollout.sample_beginning import Beginning, reset_sample
from strands_rollout.sglang_model import SGLangModel
from strands_rollout.staleness import stale_spans
from strands_rollout.stop_reason import StopReason
from strands_rollout.tools import CodeCalls
from strands_rollout.trajectory import Part, Trajectory

logger = logging.getLogger(__name__)


TRUNCATED_REASONS: Final = frozenset(
    {
        StopReason.TURN_LENGTH,
        StopReason.RESPONSE_LENGTH,
        StopReason.CONTEXT_LENGTH,
        StopReason.PROMPT_TOO_LONG,
        StopReason.MAX_TOOL_ITERATIONS,
        StopReason.MAX_TOOL_CALLS,
        StopReason.MAX_USER_TURNS,
        StopReason.TEAM_LIMIT,
        StopReason.EPISODE_TIMEOUT,
    }
)
TRAINED_REASONS: Final = TRUNCATED_REASONS | {StopReason.COMPLETED}


def write_episode(
    args: Any,  # noqa: ANN401
    sample: Any,  # noqa: ANN401
    model: SGLangModel,
    episode: Episode,
    *,
    may_abort: bool,
    code_calls: CodeCalls | None = None,
    beginning: Beginning | None = None,
    keep_progress: bool = True,
    max_staleness: int | None = None,
) -> None:
    """Fill a sample that `begin_sample` has made ready from a finished episode.

    Args:
        args: slime's args, which its Sample needs to decode replay data.
        sample: slime's Sample or ours.
        model: The policy; its trajectory becomes tokens, mask and logprobs. Of a resumed one, what is new is appended.
        episode: What became of it.
        may_abort: Whether an ABORTED sample can be returned now; if not, an abort counts as a failure of the
            infrastructure.
        code_calls: What its code tool did.
        beginning: What `begin_sample` said; None of a new sample.
        keep_progress: Whether an ABORTED sample keeps what is needed to go on with it.
        max_staleness: Tokens that older weights sampled than so many versions before the last are not trained; None
            trains them all.

    Raises:
        EngineResponseError: The engine's replay data does not fit its tokens.
    """
    trajectory = model.trajectory
    code_calls, beginning = code_calls or CodeCalls(), beginning or Beginning()
    status = _status(sample, episode.stop_reason, may_abort=may_abort)
    engine_aborts = model.engine_aborts + (beginning.resume.engine_aborts if beginning.resume else 0)
    facts = episode_record(
        model,
        episode,
        code_calls,
        aborts=beginning.aborts,
        resumes=beginning.resumes,
        engine_aborts=engine_aborts,
    )
    if trajectory.sampled_length:
        facts["stale_tokens"] = write_trajectory(args, sample, model, trajectory, max_staleness)
        if status is type(sample).Status.FAILED:
            exclude_from_training(sample)
        if status is type(sample).Status.ABORTED and keep_progress:
            facts |= _saved_progress(model, episode, code_calls, engine_aborts)
    else:
        # image tokens without their images stop a trainer
        prompt_ids = [] if model.conversation.new_images else model.prompt_ids
        write_untrained(sample, prompt_ids, model.template.end_of_turn_id)
    sample.status = status
    sample.non_generation_time = episode.tools.waited_s
    sample.metadata[METADATA_KEY] = facts


def write_trajectory(
    args: Any,  # noqa: ANN401
    sample: Any,  # noqa: ANN401
    model: SGLangModel,
    trajectory: Trajectory,
    max_staleness: int | None,
) -> int:
    """Append what of a trajectory of the model's the sample lacks; how many tokens were masked as too old.

    Raises:
        EngineResponseError: The engine's replay data does not fit its tokens.
        ConfigError: What the processor made of the images can't be joined.
    """
    _append_parts(args, sample, trajectory)
    if trajectory.images:
        sample.multimodal_train_inputs = train_inputs_of(trajectory.images)
    sample.response = model.template.encoder.decode(sample.tokens[len(sample.tokens) - sample.response_length :])
    return _mask_stale(sample, trajectory, max_staleness)


def _saved_progress(model: SGLangModel, episode: Episode, code_calls: CodeCalls, engine_aborts: int) -> dict[str, Any]:
    state = ResumeState(model.trajectory, episode.progress, engine_aborts, asdict(code_calls))
    try:
        return {RESUME_KEY: save_resume_state(state)}
    except ResumeError as e:
        logger.warning("an aborted episode can't be saved and will start afresh: %s", e)
        return {}


def write_failure(
    sample: Any,  # noqa: ANN401
    error: BaseException,
    stop_reason: StopReason,
    *,
    may_abort: bool = False,
) -> None:
    """Make a sample valid when no episode could be run or written."""
    write_untrained(sample, [], 0)
    sample.status = _status(sample, stop_reason, may_abort=may_abort)
    sample.metadata[METADATA_KEY] = {
        "version": METADATA_VERSION,
        "stop_reason": str(stop_reason),
        "error": error_text(error),
        "final_text": "",
    }


def write_untrained(sample: Any, prompt_ids: Sequence[int], filler_id: int) -> None:  # noqa: ANN401
    """Valid lengths without one sampled token: the prompt, one filler token as response, nothing trained.

    slime's trainer needs at least one prompt and one response token.
    """
    reset_sample(sample)
    sample.tokens = [*(prompt_ids or [filler_id]), filler_id]
    sample.response_length = 1
    sample.loss_mask = [0]
    sample.rollout_log_probs = [0.0]
    sample.remove_sample = True


def fill_replay_gaps(args: Any, sample: Any, sampling_params: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Give a sample without replay data empty data of the right shape, where slime replays.

    slime's conversion takes all samples of a batch to have it: one that failed before its first token would break the
    batch.
    """
    custom = sampling_params.get("custom_params")
    if (
        isinstance(custom, Mapping)
        and custom.get("return_top_p_token_ids")
        and _lacks(sample, "rollout_top_p_token_ids")
    ):
        sample.rollout_top_p_token_ids = np.zeros(0, dtype=np.int32)
        sample.rollout_top_p_token_offsets = np.zeros(sample.response_length + 1, dtype=np.int32)
    layers, top_k = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
    if (
        getattr(args, "use_rollout_routing_replay", False)
        and layers
        and top_k
        and _lacks(sample, "rollout_routed_experts")
    ):
        # slime refuses a capture that is all zeros
        experts = np.arange(1, top_k + 1, dtype=np.int32)
        sample.rollout_routed_experts = np.broadcast_to(experts, (len(sample.tokens) - 1, layers, top_k)).copy()


def _lacks(sample: Any, name: str) -> bool:  # noqa: ANN401
    return hasattr(sample, name) and getattr(sample, name) is None


def exclude_from_training(sample: Any) -> None:  # noqa: ANN401
    """Keep the tokens, train none: slime trains FAILED samples like completed ones unless told not to."""
    sample.loss_mask = [0] * sample.response_length
    sample.rollout_log_probs = [0.0] * sample.response_length
    sample.remove_sample = True


def _append_parts(args: Any, sample: Any, trajectory: Trajectory) -> None:  # noqa: ANN401
    """Answer by answer what the sample does not have yet; trajectories end with a sampled token, so nothing trails."""
    if not sample.tokens:
        sample.tokens = trajectory.token_ids[: trajectory.prompt_length]
    for part in trajectory.parts:
        written = len(sample.tokens)
        if part.end <= written:
            continue
        if part.start > written:
            sample.append_response_tokens(args, tokens=trajectory.token_ids[written : part.start], trainable=False)
        meta_info = _located(args, part, start=0 if part.start == trajectory.prompt_length else written - 1)
        try:
            sample.append_response_tokens(
                args,
                tokens=trajectory.token_ids[part.start : part.end],
                log_probs=trajectory.logprobs[part.start : part.end],
                trainable=True,
                meta_info=meta_info,
            )
        except ValueError as e:
            raise EngineResponseError(f"the engine's replay data does not fit what it sampled: {e}") from e


def _located(args: Any, part: Part, *, start: int) -> dict[str, Any]:  # noqa: ANN401
    layers, top_k = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
    if not layers or not top_k:
        return dict(part.meta_info)
    return located_experts(part.meta_info, start=start, total=part.end, layers=layers, top_k=top_k)


def _mask_stale(sample: Any, trajectory: Trajectory, max_staleness: int | None) -> int:  # noqa: ANN401
    """Mask what too old weights sampled; how many tokens that are."""
    if max_staleness is None:
        return 0
    masked = 0
    prompt_length = trajectory.prompt_length
    for span in stale_spans(trajectory.weight_spans, max_staleness):
        for position in range(span.start - prompt_length, span.end - prompt_length):
            masked += 1
            sample.loss_mask[position], sample.rollout_log_probs[position] = 0, 0.0
    return masked


def _status(sample: Any, reason: StopReason, *, may_abort: bool) -> Any:  # noqa: ANN401 - the sample's own Status
    status = type(sample).Status
    if reason is StopReason.COMPLETED:
        return status.COMPLETED
    if reason in TRUNCATED_REASONS:
        return status.TRUNCATED
    return status.ABORTED if reason is StopReason.ABORTED and may_abort else status.FAILED
