"""Trajectory and stop reason -> slime's Sample; the only place that knows Sample's fields.

Works on slime's own Sample and on our stand-in. Whatever happened, the sample that is left is one that slime's trainer
can take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from strands_rollout.agent import Episode, StopReason
from strands_rollout.sglang_model import SGLangModel
from strands_rollout.tools import CodeCalls
from strands_rollout.trajectory import Trajectory

METADATA_KEY: Final = "strands_rollout"
METADATA_VERSION: Final = 1

_TRAINED_AS_TRUNCATED: Final = frozenset(
    {
        StopReason.TURN_LENGTH,
        StopReason.RESPONSE_LENGTH,
        StopReason.CONTEXT_LENGTH,
        StopReason.PROMPT_TOO_LONG,
        StopReason.MAX_TOOL_ITERATIONS,
        StopReason.MAX_TOOL_CALLS,
        StopReason.EPISODE_TIMEOUT,
    }
)
# response-side fields of slime 0.3's Sample and what a new sample has there; those that a Sample lacks are skipped
_FRESH: Final[dict[str, Any]] = {
    "tokens": list,
    "response": str,
    "response_length": int,
    "loss_mask": lambda: None,
    "rollout_log_probs": lambda: None,
    "reward": lambda: None,
    "weight_versions": list,
    "rollout_top_p_token_ids": lambda: None,
    "rollout_top_p_token_offsets": lambda: None,
    "rollout_routed_experts": lambda: None,
    "teacher_log_probs": lambda: None,
    "remove_sample": bool,
    "non_generation_time": float,
}


def reset_sample(sample: Any) -> None:  # noqa: ANN401 - slime's Sample or ours
    """Forget an earlier attempt: a sample that comes back FAILED or ABORTED starts from nothing."""
    for name, fresh in _FRESH.items():
        if hasattr(sample, name):
            setattr(sample, name, fresh())
    for name in ("spec_info", "prefix_cache_info"):
        if hasattr(sample, name):
            setattr(sample, name, type(getattr(sample, name))())
    sample.status = type(sample).Status.PENDING
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    sample.metadata = {key: value for key, value in metadata.items() if key != METADATA_KEY}


def write_episode(
    args: Any,  # noqa: ANN401
    sample: Any,  # noqa: ANN401
    model: SGLangModel,
    episode: Episode,
    *,
    may_abort: bool,
    code_calls: CodeCalls | None = None,
) -> None:
    """Fill a (reset) sample from a finished episode.

    Args:
        args: slime's args, which its Sample needs to decode replay data.
        sample: slime's Sample or ours.
        model: The policy; its trajectory becomes tokens, mask and logprobs.
        episode: What became of it.
        may_abort: Whether an ABORTED sample can be returned now; if not, an abort counts as a failure of the
            infrastructure.
        code_calls: What its code tool did.
    """
    trajectory = model.trajectory
    status = _status(sample, episode.stop_reason, may_abort=may_abort)
    if trajectory.sampled_length:
        _append_turns(args, sample, trajectory)
        sample.response = model.template.encoder.decode(sample.tokens[len(sample.tokens) - sample.response_length :])
        if status is type(sample).Status.FAILED:
            exclude_from_training(sample)
    else:
        write_untrained(sample, trajectory.token_ids or model.prompt_ids, model.template.end_of_turn_id)
    sample.status = status
    sample.non_generation_time = episode.tools.seconds
    sample.metadata[METADATA_KEY] = _facts(model, episode, code_calls or CodeCalls())


def write_failure(sample: Any, error: BaseException, stop_reason: StopReason) -> None:  # noqa: ANN401
    """Make a (reset) sample valid when no episode could be run."""
    write_untrained(sample, [], 0)
    sample.status = type(sample).Status.FAILED
    sample.metadata[METADATA_KEY] = {
        "version": METADATA_VERSION,
        "stop_reason": str(stop_reason),
        "error": _error_text(error),
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


def _append_turns(args: Any, sample: Any, trajectory: Trajectory) -> None:  # noqa: ANN401
    """Turn by turn; context after the last sampled token trains nothing and is left out."""
    sample.tokens = trajectory.token_ids[: trajectory.prompt_length]
    written = trajectory.prompt_length
    last = max(turn.end for turn in trajectory.turns if turn.end > turn.start)
    for turn in trajectory.turns:
        if turn.end > last:
            break
        if turn.start > written:
            sample.append_response_tokens(args, tokens=trajectory.token_ids[written : turn.start], trainable=False)
        sample.append_response_tokens(
            args,
            tokens=trajectory.token_ids[turn.start : turn.end],
            log_probs=trajectory.logprobs[turn.start : turn.end],
            trainable=True,
            meta_info=dict(turn.meta_info),
        )
        written = turn.end


def _status(sample: Any, reason: StopReason, *, may_abort: bool) -> Any:  # noqa: ANN401 - the sample's own Status
    status = type(sample).Status
    if reason is StopReason.COMPLETED:
        return status.COMPLETED
    if reason in _TRAINED_AS_TRUNCATED:
        return status.TRUNCATED
    return status.ABORTED if reason is StopReason.ABORTED and may_abort else status.FAILED


def _facts(model: SGLangModel, episode: Episode, code_calls: CodeCalls) -> dict[str, Any]:
    """JSON-like facts of the episode, for reward, metrics and viewers."""
    trajectory = model.trajectory
    return {
        "version": METADATA_VERSION,
        "stop_reason": str(episode.stop_reason),
        "error": None if episode.error is None else _error_text(episode.error),
        "final_text": model.final_text,
        "final_in_reasoning": model.template.opens_reasoning,
        "turns": len(trajectory.turns),
        "tool_iterations": episode.tool_iterations,
        "tool_calls": episode.tool_calls,
        "tool_errors": episode.tools.errors,
        "tool_timeouts": episode.tools.timeouts,
        "tool_s": episode.tools.seconds,
        "code": asdict(code_calls),
        "parse_failures": len(model.parse_failures),
        "generate_s": sum(turn.latency_s for turn in trajectory.turns),
        "duration_s": episode.duration_s,
        "sampled_tokens": trajectory.sampled_length,
    }


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]
