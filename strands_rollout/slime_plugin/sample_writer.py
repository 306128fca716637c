"""A finished episode -> slime's samples: one, or with `fan_out` one for each trajectory of its agents.

The only place that fills slime's Sample: tokens, mask, logprobs, status and metadata.
"""

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

import numpy as np

from strands_rollout.agent.episode import Episode
from strands_rollout.agent.limits import StopReason
from strands_rollout.code_tool.tool import CodeCalls
from strands_rollout.errors import EngineResponseError, ResumeError
from strands_rollout.log_once import log_once
from strands_rollout.model.images import train_inputs_of
from strands_rollout.model.replay_data import joined_experts, located_experts
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.record.agent_request import TRANSIENT
from strands_rollout.record.branch import Branch
from strands_rollout.record.saved import SavedEpisode, save_episode
from strands_rollout.record.tokens import Part, Trajectory
from strands_rollout.record.weight_versions import distinct_numberings, distinct_versions, stale_spans
from strands_rollout.samples import (
    FAN_OUT_KEY,
    METADATA_KEY,
    METADATA_VERSION,
    NUMBERINGS_KEY,
    RESUME_KEY,
    Sample,
    SampleLike,
    SlimeArgs,
    rollout_id_field,
    rollout_id_of,
    statuses_of,
)
from strands_rollout.slime_plugin.resume import Beginning, reset_sample
from strands_rollout.slime_plugin.slime_adapter import is_fully_async

logger = logging.getLogger(__name__)

TRUNCATED_REASONS: Final = frozenset(
    reason
    for reason in StopReason
    if reason not in {StopReason.COMPLETED, StopReason.ABORTED} and not reason.endswith("_error")
)
TRAINED_REASONS: Final = TRUNCATED_REASONS | {StopReason.COMPLETED}


def write_episode(
    args: SlimeArgs,
    sample: SampleLike,
    model: SGLangModel,
    episode: Episode,
    *,
    may_abort: bool,
    code_calls: CodeCalls | None = None,
    beginning: Beginning | None = None,
    keep_progress: bool = True,
    max_staleness: int | None = None,
    conditions: Callable[[], Mapping[str, str]] | None = None,
) -> None:
    """Fill a sample that `begin_sample` has made ready from a finished episode; of a resumed one, append what is new.

    Where slime can't take an ABORTED sample, an abort is the infrastructure's failure. Tokens of weights that are older
    than the last by more versions than `max_staleness` are not trained. `conditions` gives those under which an aborted
    episode may be resumed.

    Raises:
        EngineResponseError: The engine's replay data does not fit its tokens.
    """
    code_calls, beginning = code_calls or CodeCalls(), beginning or Beginning()
    status = _status(sample, episode.stop_reason, may_abort=may_abort)
    engine_aborts = model.engine_aborts + (beginning.resume.engine_aborts if beginning.resume else 0)
    attempts = {"aborts": beginning.aborts, "resumes": beginning.resumes, "engine_aborts": engine_aborts}
    facts = episode_record(model, episode, code_calls) | attempts
    if model.trajectory.sampled_length:
        if beginning.resume and len(model.conversation.branches) > 1:  # the sample holds what is another segment by now
            reset_sample(sample)
        facts["stale_tokens"] = write_trajectory(args, sample, model, model.trajectory, max_staleness)
        if status is statuses_of(sample).FAILED:
            exclude_from_training(sample)
        if status is statuses_of(sample).ABORTED and keep_progress:
            played_under = {} if conditions is None else conditions()
            facts |= _saved_progress(model, episode, code_calls, engine_aborts, played_under)
    else:
        # image tokens without their images stop a trainer
        prompt_ids = [] if model.conversation.branch.new_images else model.prompt_ids
        write_untrained(sample, prompt_ids, model.template.end_of_turn_id)
    sample.status = status
    sample.non_generation_time = episode.tools.waited_s
    sample.metadata[METADATA_KEY] = facts


def write_trajectory(
    args: SlimeArgs, sample: SampleLike, model: SGLangModel, trajectory: Trajectory, max_staleness: int | None
) -> int:
    """Append what the sample lacks of a trajectory; returns how many tokens were masked as too old.

    Raises:
        EngineResponseError: The engine's replay data does not fit its tokens.
        ConfigError: What the processor made of the images can't be joined.
    """
    if not sample.tokens:
        sample.tokens = trajectory.token_ids[: trajectory.prompt_length]
    for part in trajectory.parts:  # a trajectory ends with a sampled token, so that nothing trails
        _append_part(args, sample, trajectory, part)
    if trajectory.images:
        sample.multimodal_train_inputs = train_inputs_of(trajectory.images)
    sample.response = model.template.encoder.decode(sample.tokens[len(sample.tokens) - sample.response_length :])
    if sum(trajectory.loss_mask) < trajectory.sampled_length:  # slime has masked some of a resumed one
        _mask(sample, [at for at, mask in enumerate(trajectory.loss_mask[trajectory.prompt_length :]) if not mask])
    return _mask_stale(sample, trajectory, max_staleness)


def _saved_progress(
    model: SGLangModel, episode: Episode, code_calls: CodeCalls, engine_aborts: int, conditions: Mapping[str, str]
) -> dict[str, Any]:
    state = SavedEpisode(model.trajectory, episode.progress, engine_aborts, asdict(code_calls))
    try:
        return {RESUME_KEY: save_episode(state, conditions)}
    except ResumeError as e:
        logger.warning("an aborted episode can't be saved and will start afresh: %s", e)
        return {}


def write_failure(
    sample: SampleLike, error: BaseException, stop_reason: StopReason, *, may_abort: bool = False
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


def write_untrained(sample: SampleLike, prompt_ids: Sequence[int], filler_id: int) -> None:
    """Valid lengths without one sampled token: the prompt, one filler token as response, nothing trained.

    slime's trainer needs at least one prompt and one response token.
    """
    reset_sample(sample)
    sample.tokens = [*(prompt_ids or [filler_id]), filler_id]
    sample.response_length = 1
    sample.loss_mask = [0]
    sample.rollout_log_probs = [0.0]
    sample.remove_sample = True


def fill_batch_fields(args: SlimeArgs, sample: SampleLike, sampling_params: Mapping[str, Any]) -> None:
    """Fill what slime expects of each sample of a batch where its arguments ask for it.

    That is the number of turns for `--log-multi-turn`, and replay data: a sample that failed before its first token
    gets empty data of the right shape, or it would break the batch.
    """
    if getattr(args, "log_multi_turn", False):
        sample.metadata["round_number"] = sample.metadata[METADATA_KEY].get("turns", 0)
    custom = sampling_params.get("custom_params")
    asks_top_p = isinstance(custom, Mapping) and custom.get("return_top_p_token_ids")
    if asks_top_p and _lacks(sample, "rollout_top_p_token_ids"):
        sample.rollout_top_p_token_ids = np.zeros(0, dtype=np.int32)
        sample.rollout_top_p_token_offsets = np.zeros(sample.response_length + 1, dtype=np.int32)
    layers, top_k = _experts(args)
    asks_experts = getattr(args, "use_rollout_routing_replay", False) and layers and top_k
    if asks_experts and _lacks(sample, "rollout_routed_experts"):
        # slime refuses a capture that is all zeros
        experts = np.arange(1, top_k + 1, dtype=np.int32)
        sample.rollout_routed_experts = np.broadcast_to(experts, (len(sample.tokens) - 1, layers, top_k)).copy()


def _lacks(sample: SampleLike, name: str) -> bool:
    return hasattr(sample, name) and getattr(sample, name) is None


def is_unfinished(sample: SampleLike) -> bool:
    """Whether its episode will go on later, or was left in the middle."""
    return sample.status in (statuses_of(sample).ABORTED, statuses_of(sample).PENDING)


def exclude_from_training(sample: SampleLike) -> None:
    """Keep the tokens, train none: slime trains FAILED samples like completed ones unless told not to."""
    sample.loss_mask = [0] * sample.response_length
    sample.rollout_log_probs = [0.0] * sample.response_length
    sample.remove_sample = True


def _append_part(args: SlimeArgs, sample: SampleLike, trajectory: Trajectory, part: Part) -> None:
    """Append one answer of the engine and the context before it, unless the sample has it."""
    written = len(sample.tokens)
    if part.end <= written:
        return
    if part.start > written:
        _append(args, sample, tokens=trajectory.token_ids[written : part.start], trainable=False)
    meta_info, (layers, top_k) = dict(part.meta_info), _experts(args)
    if layers and top_k:
        start = 0 if part.start == trajectory.prompt_length else written - 1
        meta_info = located_experts(meta_info, start=start, total=part.end, layers=layers, top_k=top_k)
    tokens, logprobs = trajectory.token_ids[part.start : part.end], trajectory.logprobs[part.start : part.end]
    try:
        _append(args, sample, tokens=tokens, log_probs=logprobs, trainable=True, meta_info=meta_info)
    except ValueError as e:
        raise EngineResponseError(f"the engine's replay data does not fit what it sampled: {e}") from e


def _append(args: SlimeArgs, sample: SampleLike, **appended: object) -> None:
    """Sample.append_response_tokens, also for slime before 0.3.1, whose Sample has no such method."""
    if hasattr(sample, "append_response_tokens"):
        sample.append_response_tokens(args, **appended)
        return
    Sample.append_response_tokens(cast("Any", sample), args, **cast("Any", appended))
    layers, top_k = _experts(args)
    if layers and top_k:
        meta_info, known = cast("Any", appended.get("meta_info") or {}), sample.rollout_routed_experts
        sample.rollout_routed_experts = joined_experts(meta_info, known, layers=layers, top_k=top_k)


def _experts(args: SlimeArgs) -> tuple[int, int]:
    """Layers, and how many experts each token has in one; 0 where slime's args don't say."""
    return getattr(args, "num_layers", None) or 0, getattr(args, "moe_router_topk", None) or 0


def _mask_stale(sample: SampleLike, trajectory: Trajectory, max_staleness: int | None) -> int:
    """Mask what too old weights sampled; how many tokens that are."""
    spans = [] if max_staleness is None else stale_spans(trajectory.weight_spans, max_staleness)
    for span in spans:
        _mask(sample, range(span.start - trajectory.prompt_length, span.end - trajectory.prompt_length))
    return sum(span.end - span.start for span in spans)


def _mask(sample: SampleLike, positions: Iterable[int]) -> None:
    """Train none of these tokens of the response."""
    for at in positions:
        sample.loss_mask[at], sample.rollout_log_probs[at] = 0, 0.0


def _status(sample: SampleLike, reason: StopReason, *, may_abort: bool) -> Any:  # noqa: ANN401 - the sample's own Status
    status = statuses_of(sample)
    if reason is StopReason.COMPLETED:
        return status.COMPLETED
    if reason in TRUNCATED_REASONS:
        return status.TRUNCATED
    return status.ABORTED if reason is StopReason.ABORTED and may_abort else status.FAILED


_GROUP_NORMALISED: Final = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")


def may_fan_out(args: SlimeArgs, sample: object, *, evaluation: bool) -> bool:
    """Whether slime can take a list of samples here; where it can't, a warning says why, once.

    slime 0.3 takes each element of a group for one sample where it collects partial rollouts, in its fully-async
    rollout and with --group-rm. Before 0.3.0 a Sample can't say which others belong to its rollout.
    """
    if evaluation:
        return False
    obstacle = _obstacle(args, sample)
    if obstacle is not None:
        words = "fan_out is on and %s: only the main agent's sample is returned"
        log_once(logger, logging.WARNING, words, obstacle)
        return False
    estimator = getattr(args, "advantage_estimator", None)
    if estimator in _GROUP_NORMALISED and not getattr(args, "custom_reward_post_process_path", None):
        log_once(
            logger,
            logging.WARNING,
            "fan_out is on and slime's own reward normalisation takes all samples of a step as one group; set "
            "--custom-reward-post-process-path strands_rollout.normalize_rewards",
        )
    return True


def _obstacle(args: SlimeArgs, sample: object) -> str | None:
    if rollout_id_field(sample) is None:
        return "this slime takes each sample for a rollout of its own (its Sample has no rollout_id)"
    if getattr(args, "partial_rollout", False):
        return "slime can't collect partial rollouts of several samples (--partial-rollout)"
    if is_fully_async(args):
        return "slime's fully-async rollout takes one sample per episode"
    if getattr(args, "group_rm", False):
        return "slime's --group-rm takes one sample per episode"
    return None


@dataclass(frozen=True, slots=True)
class SiblingSegment:
    """A conversation of an episode beside that of its main sample.

    The kind is "segment" for what an agent had read before its history was rewritten, "aside" for a side conversation,
    and "agent" for a sub-agent.
    """

    kind: str
    model: SGLangModel
    segment: Branch  # with at least one sampled token
    is_cut: bool = False  # whether it ended with a tool call that did not end well


def sibling_segments(
    main: SGLangModel, others: Sequence[SGLangModel], succeeded: Collection[str]
) -> list[SiblingSegment]:
    """All segments of an episode but the main agent's last; `succeeded` are ids of tool calls that ended well."""
    found = [SiblingSegment("segment", main, one) for one in main.conversation.branches[:-1]]
    beside = [(model, one) for model in (main, *others) for one in model.record if one is not main.conversation]
    for model, conversation in beside:
        kind = "aside" if conversation.kind == "aside" else "agent"
        # a tool in a thread may still be running one
        copies = [segment.snapshot() for segment in conversation]
        # an agent may end with a call, as of a structured output; one whose own tool call was cut or failed did not
        is_open = kind == "agent" and conversation.call not in succeeded
        found += [
            SiblingSegment(kind, model, copy, is_cut=is_open and copy.stop_reason == "tool_use")
            for copy in copies
            if copy.trajectory.turns
        ]
    return found


def warn_of_dropped(sample: SampleLike, segments: Sequence[SiblingSegment]) -> None:
    """Say, once for each reason, that what the policy has sampled in these segments is in no sample."""
    for one in segments:
        key = one.kind, one.segment.ended_by.startswith(TRANSIENT)
        reason = one.segment.ended_by or _BESIDE[one.kind]
        keep = ", or transient_context: keep" if key[1] else ""
        words = "event=sampled_tokens_dropped index=%s tokens=%d: %s; set fan_out: true%s (see docs/multi-agent.md)"
        count = one.segment.trajectory.sampled_length
        log_once(logger, logging.WARNING, words, sample.index, count, reason, keep, key=key)


_BESIDE: Final = {
    "agent": "the policy played further agents",
    "aside": "the policy was asked beside the agent's history, as by a context manager",
    "segment": "the history was rewritten",
}


def siblings(
    args: SlimeArgs, sample: SampleLike, segments: Sequence[SiblingSegment], *, max_staleness: int | None = None
) -> list[tuple[str, SampleLike]]:
    """A sample for each of these, with its kind; none where the episode failed or was aborted.

    `sample` is the main agent's, written; `max_staleness` is as for `write_episode`.

    Raises:
        EngineResponseError: The engine's replay data does not fit its tokens.
    """
    status = statuses_of(sample)
    if sample.status not in (status.COMPLETED, status.TRUNCATED):
        return []
    return [(one.kind, _sibling(args, sample, one, max_staleness)) for one in segments]


def as_fan_out(main: SampleLike, others: Sequence[tuple[str, SampleLike]]) -> list[SampleLike]:
    """The samples of one episode, the main agent's first, marked as one rollout: they share group and reward."""
    marked = [("main", main), *others]
    field = rollout_id_field(main) or "rollout_id"
    rollout_id = rollout_id_of(main)
    for part, (kind, sample) in enumerate(marked):
        setattr(sample, field, main.index if rollout_id is None else rollout_id)
        sample.metadata[METADATA_KEY][FAN_OUT_KEY] = {"part": part, "of": len(marked), "kind": kind}
    return [sample for _, sample in marked]


def _sibling(args: SlimeArgs, sample: SampleLike, given: SiblingSegment, max_staleness: int | None) -> SampleLike:
    sibling = copy.copy(sample)
    vars(sibling).pop("trace", None)  # slime's; the requests are counted with the main agent
    reset_sample(sibling)
    segment = given.segment
    stale_tokens = write_trajectory(args, sibling, given.model, segment.trajectory, max_staleness)
    ended = segment.trajectory.turns[-1].finish_reason == "stop" and not given.is_cut
    sibling.status = statuses_of(sample).COMPLETED if ended else statuses_of(sample).TRUNCATED
    reason = StopReason.COMPLETED if ended else StopReason.TURN_LENGTH
    record = {**agent_record(given.model, segment, reason), "stale_tokens": stale_tokens, "ended_by": segment.ended_by}
    if given.kind != "agent":
        del record["generate_s"]  # counted with the main agent
    sibling.metadata[METADATA_KEY] = record
    return sibling


def episode_record(model: SGLangModel, episode: Episode, code_calls: CodeCalls) -> dict[str, Any]:
    """The facts of an episode, those before it was resumed included."""
    own = [one for one in model.record if one.kind != "agent"]
    segments = [segment for one in own for segment in one]
    return {
        **agent_record(model, model.conversation.branch, episode.stop_reason),
        "generate_s": sum(turn.latency_s for segment in segments for turn in segment.trajectory.turns),
        "error": None if episode.error is None else error_text(episode.error),
        "tool_iterations": episode.tool_iterations,
        "tool_calls": episode.tool_calls,
        "user_turns": episode.user_turns,
        "tool_errors": episode.tools.errors,
        "tool_timeouts": episode.tools.timeouts,
        "unknown_tools": sum(call["status"] == "unknown" for call in episode.tools.calls),
        "tool_s": episode.tools.seconds,
        "calls": episode.tools.calls,
        "code": asdict(code_calls),
        "duration_s": episode.duration_s,
        "segments": len(model.conversation.branches),
        "stale_tokens": 0,
        "dropped_sampled_tokens": 0,
        "budgets": _budgets_used(model, episode),
    }


def agent_record(model: SGLangModel, segment: Branch, stop_reason: StopReason) -> dict[str, Any]:
    """The facts of one segment of an agent's conversation: its turns and tokens.

    `requests` has one entry for each accepted answer of the engine: the turn, from 0, when it was asked for, in seconds
    since the episode began, and its seconds.
    """
    trajectory = segment.trajectory
    return {
        "version": METADATA_VERSION,
        "stop_reason": str(stop_reason),
        "error": None,
        "final_text": segment.final_text,
        "final_in_reasoning": model.template.opens_reasoning,
        "final_is_cut": segment.stop_reason == "max_tokens" or trajectory.is_open,
        "template_kwargs": model.template_kwargs,
        "turns": len(trajectory.turns),
        "parse_failures": len(segment.parse_failures),
        "transient_texts": segment.transient_texts,
        "generate_s": sum(turn.latency_s for turn in trajectory.turns),
        "turn_s": [turn.latency_s for turn in trajectory.turns],
        "requests": [
            [number, part.at_s, round(part.latency_s, 4)]
            for number, turn in enumerate(trajectory.turns)
            for part in turn.parts
        ],
        "tool_parser": model.tool_parser,
        "sampled_tokens": trajectory.sampled_length,
        "spans": [
            [number, span.start, span.end, span.version]
            for number, turn in enumerate(trajectory.turns)
            for span in turn.weight_spans
        ],
        "weight_versions": distinct_versions(trajectory.weight_spans),
        NUMBERINGS_KEY: distinct_numberings(trajectory.weight_spans),
    }


def _budgets_used(model: SGLangModel, episode: Episode) -> dict[str, float | None]:
    """Used shares of the limits, from 0.0 to 1.0; None where there is none."""
    trajectory, limits, tokens = model.trajectory, episode.limits, model.config["limits"]
    contexts = [limit for limit in (tokens.max_context_tokens, model.context_window_limit) if limit is not None]
    response = model.conversation.earlier_response_length + trajectory.response_length
    amounts = {
        "response": (response, tokens.max_response_tokens),
        "context": (len(trajectory.token_ids), min(contexts, default=None)),
        "tool_iterations": (episode.tool_iterations, limits.max_tool_iterations),
        "tool_calls": (episode.tool_calls, limits.max_tool_calls),
    }
    return {name: used / limit if limit else None for name, (used, limit) in amounts.items()}


def error_text(error: BaseException) -> str:
    """The error in at most 2,000 characters."""
    return f"{type(error).__name__}: {error}"[:2000]
