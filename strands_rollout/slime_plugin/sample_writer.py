"""Write an ended episode into slime's samples: one sample, or with `fan_out` one for each branch that has a turn.

This module writes the tokens, mask, logprobs, status and facts of an episode that has ended. Before the episode,
`resume` prepares its sample; later, `reward` and `reward_groups` may exclude the sample from training. Start at
`write_episode`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np

from strands_rollout.agent.limits import StopReason
from strands_rollout.agent.run import Episode
from strands_rollout.code_tool.tool import CodeCallTotals
from strands_rollout.errors import EngineResponseError, ResumeError
from strands_rollout.log_once import log_once
from strands_rollout.model.images import train_inputs_of
from strands_rollout.model.replay_data import joined_experts, located_experts
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.record.agent_request import TRANSIENT
from strands_rollout.record.record import Branch
from strands_rollout.record.saved import SavedEpisode, save_episode
from strands_rollout.record.tokens import Part, Trajectory
from strands_rollout.record.weight_versions import distinct_numberings, distinct_versions, stale_spans
from strands_rollout.samples import (
    METADATA_KEY,
    METADATA_VERSION,
    EpisodeFacts,
    Sample,
    SampleLike,
    SlimeArgs,
    add_facts,
    facts_of,
    rollout_id_field,
    rollout_id_of,
    statuses_of,
)
from strands_rollout.slime_plugin.resume import EpisodeStart, reset_sample
from strands_rollout.slime_plugin.slime_adapter import is_fully_async

logger = logging.getLogger(__name__)

TRUNCATED_REASONS: Final = frozenset(
    reason
    for reason in StopReason
    if reason not in {StopReason.COMPLETED, StopReason.ABORTED} and not reason.endswith("_error")
)
TRAINED_REASONS: Final = TRUNCATED_REASONS | {StopReason.COMPLETED}


@dataclass(slots=True)
class EndedEpisode:
    """An episode that has ended, with its models and the results of its tools and its environment.

    Attributes:
        model: The main agent's model.
        episode: The result of the agent loop: stop reason, messages and tool statistics.
        start: The state that the episode started from.
        code_calls: The counts and seconds of the code tool.
        sub_agents: The sub-agents' models.
        score: The score from the environment or from the agent program; None if there is none.
        question: The environment's question, which replaced the row's prompt; None if there is none.
        evaluated: The values that an evaluator judges: the main agent's messages, tools and system prompt, and the
            environment's state; None if the settings name no evaluator, or the episode failed or was aborted.
        gateway: The facts of a session of `integrations.sessions`; None if there is no such session. The facts of a
            program's session are in `episode.program`.
    """

    model: SGLangModel
    episode: Episode
    start: EpisodeStart = field(default_factory=EpisodeStart)
    code_calls: CodeCallTotals = field(default_factory=CodeCallTotals)
    sub_agents: Sequence[SGLangModel] = ()
    score: Mapping[str, Any] | None = None
    question: str | None = None
    evaluated: Mapping[str, Any] | None = None
    gateway: Mapping[str, Any] | None = None


@dataclass(slots=True)
class WritingRules:
    """The rules for writing an episode's samples.

    Attributes:
        may_abort: True if slime can take an ABORTED sample now; otherwise an aborted episode becomes a FAILED sample.
        fans_out: True if `fan_out` is on and slime can take a list of samples. slime then gets a list, except for an
            ABORTED sample.
        max_staleness: Maximum number of weight versions that a trained token may be behind the last sampled token;
            None for no limit.
        resume_conditions: A function that returns the episode's conditions, to be saved with an aborted sample; None if
            the episode can't be resumed.
        evaluation: True for an evaluation; the facts record this for the reward function.
        sampling_params: slime's sampling parameters, recorded with the facts.
    """

    may_abort: bool = False
    fans_out: bool = False
    max_staleness: int | None = None
    resume_conditions: Callable[[], Mapping[str, str]] | None = None
    evaluation: bool = False
    sampling_params: Mapping[str, Any] | None = None


def write_episode(
    args: SlimeArgs,
    sample: SampleLike,
    ended: EndedEpisode,
    rules: WritingRules,
    segments: Sequence[SiblingSegment] = (),
) -> list[SampleLike]:
    """Fill a sample with an episode's tokens, status and facts; with `rules.fans_out`, build the siblings.

    The sample must have been prepared by `prepare_sample`. New tokens are appended to those of a resumed sample, unless
    the history was rewritten after the resume.

    Returns:
        The sample and, with `rules.fans_out`, a sibling for each segment, unless the episode failed or was aborted.

    Raises:
        EngineResponseError: The engine's replay data does not fit its tokens.
        ConfigError: The processor's outputs for several images can't be joined.
    """
    model, episode, statuses = ended.model, ended.episode, statuses_of(sample)
    status = _status(sample, episode.stop_reason, may_abort=rules.may_abort)
    stale_tokens, resume = 0, None
    if model.trajectory.sampled_length:
        if ended.start.resume and len(model.conversation.branches) > 1:
            # the history was rewritten after the resume, so the sample's tokens belong to another segment
            reset_sample(sample)
        stale_tokens = write_trajectory(args, sample, model, model.trajectory, rules.max_staleness)
        if status is statuses.FAILED:
            exclude_from_training(sample)
        if status is statuses.ABORTED and rules.resume_conditions is not None:
            resume = _resume_state(ended, rules.resume_conditions())
    else:
        # a trainer fails on image tokens without their images
        prompt_ids = [] if model.conversation.branch.new_images else model.prompt_ids
        write_untrained(sample, prompt_ids, model.template.end_of_turn_id)
    sample.status = status
    sample.non_generation_time = episode.tools.waited_s
    returned = segments if rules.fans_out and status in (statuses.COMPLETED, statuses.TRUNCATED) else ()
    samples = [sample, *(_build_sibling(args, sample, segment, rules) for segment in returned)]
    dropped = 0 if returned else sum(sibling.segment.trajectory.sampled_length for sibling in segments)
    dropped_tokens = ended.start.dropped_tokens + dropped
    write_facts(sample, _episode_facts(ended, rules, stale_tokens, dropped_tokens, resume))
    if dropped and not (rules.evaluation or rules.fans_out):
        warn_about_dropped_tokens(sample, segments)
    if is_fan_out(sample, rules):
        _mark_as_one_rollout(samples, ["main", *(segment.kind for segment in returned)])
    return samples


def write_failure(sample: SampleLike, error: BaseException, stop_reason: StopReason, rules: WritingRules) -> None:
    """Fill the sample of an episode that could not be played or written: without sampled tokens, but with the error."""
    write_untrained(sample, [], 0)
    sample.status = _status(sample, stop_reason, may_abort=rules.may_abort)
    facts = EpisodeFacts(
        version=METADATA_VERSION,
        stop_reason=str(stop_reason),
        error=error_text(error),
        final_text="",
        evaluation=rules.evaluation or None,
    )
    write_facts(sample, facts)
    if is_fan_out(sample, rules):
        _mark_as_one_rollout([sample], ["main"])


def write_facts(sample: SampleLike, facts: EpisodeFacts) -> None:
    """Replace all facts of a sample by `facts`."""
    sample.metadata[METADATA_KEY] = facts.to_metadata()


def write_trajectory(
    args: SlimeArgs, sample: SampleLike, model: SGLangModel, trajectory: Trajectory, max_staleness: int | None
) -> int:
    """Append the trajectory's new tokens to a sample, set its images and response text, and mask stale tokens.

    Returns:
        The number of stale tokens that were masked.

    Raises:
        EngineResponseError: The engine's replay data does not fit its tokens.
        ConfigError: The processor's outputs for several images can't be joined.
    """
    if not sample.tokens:
        sample.tokens = trajectory.token_ids[: trajectory.prompt_length]
    for part in trajectory.parts:  # a trajectory ends with a sampled token, so no context follows the last part
        _append_part(args, sample, trajectory, part)
    if trajectory.images:
        sample.multimodal_train_inputs = train_inputs_of(trajectory.images)
    sample.response = model.template.encoder.decode(sample.tokens[len(sample.tokens) - sample.response_length :])
    if trajectory.loss_mask.count(1) < trajectory.sampled_length:  # slime has masked tokens of a resumed sample
        _mask(sample, [at for at, mask in enumerate(trajectory.loss_mask[trajectory.prompt_length :]) if not mask])
    return _mask_stale(sample, trajectory, max_staleness)


def _resume_state(ended: EndedEpisode, conditions: Mapping[str, str]) -> dict[str, Any] | None:
    state = SavedEpisode(
        ended.model.trajectory, ended.episode.progress, _engine_aborts(ended), asdict(ended.code_calls)
    )
    try:
        return save_episode(state, conditions)
    except ResumeError as e:
        logger.warning("an aborted episode can't be saved and will start from scratch: %s", e)
        return None


def _engine_aborts(ended: EndedEpisode) -> int:
    """Return the number of engine aborts, in all attempts, after which the turn was continued or repeated."""
    resumed = ended.start.resume
    return ended.model.engine_aborts + (resumed.engine_aborts if resumed else 0)


def write_untrained(sample: SampleLike, prompt_ids: Sequence[int], filler_id: int) -> None:
    """Fill a sample without sampled tokens: with the prompt, and a masked filler token as response.

    slime's trainer needs at least one prompt token and one response token. If `prompt_ids` is empty, `filler_id` is the
    prompt, too.
    """
    reset_sample(sample)
    sample.tokens = [*(prompt_ids or [filler_id]), filler_id]
    sample.response_length = 1
    sample.loss_mask = [0]
    sample.rollout_log_probs = [0.0]
    sample.remove_sample = True


def fill_batch_fields(args: SlimeArgs, sample: SampleLike, sampling_params: Mapping[str, Any]) -> None:
    """Fill the fields that some of slime's arguments require of every sample in a batch.

    These are the number of turns (`--log-multi-turn`) and the replay data. A sample may lack replay data, for example
    after a failure before its first token. Such a sample gets placeholders of the right shape: no top-p ids, arbitrary
    experts. Otherwise, the batch could not be built.
    """
    if getattr(args, "log_multi_turn", False):
        sample.metadata["round_number"] = facts_of(sample).turns or 0
    custom = sampling_params.get("custom_params")
    wants_top_p = isinstance(custom, Mapping) and custom.get("return_top_p_token_ids")
    if wants_top_p and _has_empty_field(sample, "rollout_top_p_token_ids"):
        sample.rollout_top_p_token_ids = np.zeros(0, dtype=np.int32)
        sample.rollout_top_p_token_offsets = np.zeros(sample.response_length + 1, dtype=np.int32)
    layers, top_k = _expert_shape(args)
    wants_experts = getattr(args, "use_rollout_routing_replay", False) and layers and top_k
    if wants_experts and _has_empty_field(sample, "rollout_routed_experts"):
        # slime rejects replay data that is all zeros
        experts = np.arange(1, top_k + 1, dtype=np.int32)
        sample.rollout_routed_experts = np.broadcast_to(experts, (len(sample.tokens) - 1, layers, top_k)).copy()


def _has_empty_field(sample: SampleLike, name: str) -> bool:
    return hasattr(sample, name) and getattr(sample, name) is None


def is_unfinished(sample: SampleLike) -> bool:
    """Return whether the sample is ABORTED, or its episode was interrupted before the sample was filled."""
    return sample.status in (statuses_of(sample).ABORTED, statuses_of(sample).PENDING)


def exclude_from_training(sample: SampleLike) -> None:
    """Mask the response, zero its logprobs and set `remove_sample`; slime would train on a FAILED sample otherwise."""
    sample.loss_mask = [0] * sample.response_length
    sample.rollout_log_probs = [0.0] * sample.response_length
    sample.remove_sample = True


def _append_part(args: SlimeArgs, sample: SampleLike, trajectory: Trajectory, part: Part) -> None:
    """Append one answer of the engine and the context before it, unless the sample has the answer already."""
    written = len(sample.tokens)
    if part.end <= written:
        return
    if part.start > written:
        _append(args, sample, trajectory.token_ids[written : part.start])
    meta_info, (layers, top_k) = dict(part.meta_info), _expert_shape(args)
    if layers and top_k:
        start = 0 if part.start == trajectory.prompt_length else written - 1
        meta_info = located_experts(meta_info, start=start, total=part.end, layers=layers, top_k=top_k)
    tokens, logprobs = trajectory.token_ids[part.start : part.end], trajectory.logprobs[part.start : part.end]
    try:
        _append(args, sample, tokens, logprobs, meta_info)
    except ValueError as e:
        raise EngineResponseError(f"the engine's replay data does not fit the tokens that it sampled: {e}") from e


def _append(
    args: SlimeArgs,
    sample: SampleLike,
    tokens: list[int],
    log_probs: list[float] | None = None,
    meta_info: Mapping[str, Any] | None = None,
) -> None:
    """Append sampled tokens with their logprobs, or context without logprobs, to the Sample of any version of slime."""
    target: Any = sample
    is_sampled = log_probs is not None
    if hasattr(target, "append_response_tokens"):
        target.append_response_tokens(
            args, tokens=tokens, log_probs=log_probs, trainable=is_sampled, meta_info=meta_info
        )
        return
    # slime before 0.3.1, whose Sample has no such method
    Sample.append_response_tokens(
        target, args, tokens=tokens, log_probs=log_probs, trainable=is_sampled, meta_info=meta_info
    )
    layers, top_k = _expert_shape(args)
    if layers and top_k:
        known = sample.rollout_routed_experts
        sample.rollout_routed_experts = joined_experts(meta_info or {}, known, layers=layers, top_k=top_k)


def _expert_shape(args: SlimeArgs) -> tuple[int, int]:
    """Return the number of layers, and of experts for each token in a layer; 0 for a number that slime's args lack."""
    return getattr(args, "num_layers", None) or 0, getattr(args, "moe_router_topk", None) or 0


def _mask_stale(sample: SampleLike, trajectory: Trajectory, max_staleness: int | None) -> int:
    spans = [] if max_staleness is None else stale_spans(trajectory.weight_spans, max_staleness)
    for span in spans:
        _mask(sample, range(span.start - trajectory.prompt_length, span.end - trajectory.prompt_length))
    return sum(span.end - span.start for span in spans)


def _mask(sample: SampleLike, positions: Iterable[int]) -> None:
    for at in positions:
        sample.loss_mask[at], sample.rollout_log_probs[at] = 0, 0.0


def _status(sample: SampleLike, reason: StopReason, *, may_abort: bool) -> Any:  # noqa: ANN401 - the sample's own Status
    status = statuses_of(sample)
    if reason is StopReason.COMPLETED:
        return status.COMPLETED
    if reason in TRUNCATED_REASONS:
        return status.TRUNCATED
    return status.ABORTED if reason is StopReason.ABORTED and may_abort else status.FAILED


_GROUP_NORMALIZED_ESTIMATORS: Final = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")


def may_fan_out(args: SlimeArgs, sample: object, *, evaluation: bool) -> bool:
    """Return whether slime can take a list of samples from an episode; warn once about arguments that conflict with it.

    In an evaluation, slime can't take lists. In three cases, slime 0.3 expects each element of a group to be one
    sample, not a list: with --partial-rollout, with --group-rm, and in its fully-async rollout. Before 0.3.0, slime's
    Sample has no field for the rollout to which it belongs.
    """
    if evaluation:
        return False
    obstacle = _fan_out_obstacle(args, sample)
    if obstacle is not None:
        message = "fan_out is on, but %s, so only the main agent's sample is returned"
        log_once(logger, logging.WARNING, message, obstacle)
        return False
    estimator = getattr(args, "advantage_estimator", None)
    if estimator in _GROUP_NORMALIZED_ESTIMATORS and not getattr(args, "custom_reward_post_process_path", None):
        log_once(
            logger,
            logging.WARNING,
            "fan_out is on, but slime's own reward normalization takes all samples of a step as one group; set "
            "--custom-reward-post-process-path strands_rollout.normalize_rewards",
        )
    return True


def _fan_out_obstacle(args: SlimeArgs, sample: object) -> str | None:
    if rollout_id_field(sample) is None:
        return "this version of slime takes each sample for a rollout of its own (its Sample has no rollout_id)"
    if getattr(args, "partial_rollout", False):
        return "slime can't collect partial rollouts of several samples (--partial-rollout)"
    if is_fully_async(args):
        return "slime's fully-async rollout takes one sample per episode"
    if getattr(args, "group_rm", False):
        return "slime's --group-rm takes one sample per episode"
    return None


@dataclass(frozen=True, slots=True)
class SiblingSegment:
    """A branch of an episode's conversations that the main sample does not hold.

    Attributes:
        kind: "segment" for a history of the main agent from before a rewrite, "aside" for a side conversation,
            "agent" for a sub-agent.
        model: The model that sampled the branch.
        segment: The branch, with at least one sampled token.
        is_cut: True for a branch of a sub-agent that was interrupted in a tool call.
    """

    kind: str
    model: SGLangModel
    segment: Branch
    is_cut: bool = False


def sibling_segments(
    main: SGLangModel, others: Sequence[SGLangModel], succeeded: Collection[str]
) -> list[SiblingSegment]:
    """Return the branches of an episode, except the main agent's last branch and branches without a turn.

    Args:
        main: The main agent's model.
        others: The models of sub-agents.
        succeeded: The ids of the tool calls that succeeded.
    """
    siblings = [SiblingSegment("segment", main, branch) for branch in main.conversation.branches[:-1]]
    other_conversations = [
        (model, conversation)
        for model in (main, *others)
        for conversation in model.record
        if conversation is not main.conversation
    ]
    for model, conversation in other_conversations:
        kind = "aside" if conversation.kind == "aside" else "agent"
        # Take snapshots: a tool in a thread may still be running the agent and appending to its record
        branches = [branch.snapshot() for branch in conversation]
        # an agent may end with a turn that calls a tool, for example for structured output. But if the tool call that
        # ran the agent failed or was cut, the agent was interrupted in that turn
        was_interrupted = kind == "agent" and conversation.call not in succeeded
        siblings += [
            SiblingSegment(kind, model, branch, is_cut=was_interrupted and branch.stop_reason == "tool_use")
            for branch in branches
            if branch.trajectory.turns
        ]
    return siblings


def warn_about_dropped_tokens(sample: SampleLike, segments: Sequence[SiblingSegment]) -> None:
    """Warn, once for each kind of segment and each remedy, that no sample holds these segments' sampled tokens."""
    message = "event=sampled_tokens_dropped index=%s tokens=%d: %s; set fan_out: true%s (see docs/multi-agent.md)"
    for sibling in segments:
        is_transient = sibling.segment.ended_by.startswith(TRANSIENT)
        reason = sibling.segment.ended_by or _DROP_REASONS[sibling.kind]
        remedy = ", or transient_context: keep" if is_transient else ""
        count = sibling.segment.trajectory.sampled_length
        key = sibling.kind, is_transient
        log_once(logger, logging.WARNING, message, sample.index, count, reason, remedy, key=key)


_DROP_REASONS: Final = {
    "agent": "sub-agents sampled from the policy",
    "aside": "the policy answered a side conversation, such as a conversation manager's request for a summary",
    "segment": "the history was rewritten",
}


def is_fan_out(sample: SampleLike, rules: WritingRules) -> bool:
    """Return whether slime gets the samples of this episode as a list.

    slime takes an ABORTED sample back alone, never in a list. If one episode of a run returns a list, every other
    episode whose sample is not ABORTED must return a list, too.
    """
    return rules.fans_out and sample.status is not statuses_of(sample).ABORTED


def _mark_as_one_rollout(samples: Sequence[SampleLike], kinds: Sequence[str]) -> None:
    """Give the samples of an episode (the main agent's first) one rollout id, and number them in their facts."""
    main = samples[0]
    field_name = rollout_id_field(main) or "rollout_id"
    rollout_id = rollout_id_of(main)
    for part, (sample, kind) in enumerate(zip(samples, kinds, strict=True)):
        setattr(sample, field_name, main.index if rollout_id is None else rollout_id)
        add_facts(sample, EpisodeFacts(fan_out={"part": part, "of": len(samples), "kind": kind}))


def _build_sibling(args: SlimeArgs, sample: SampleLike, source: SiblingSegment, rules: WritingRules) -> SampleLike:
    sibling = copy.copy(sample)
    vars(sibling).pop("trace", None)  # slime's trace; its requests are counted with the main agent's sample
    reset_sample(sibling)
    segment = source.segment
    stale_tokens = write_trajectory(args, sibling, source.model, segment.trajectory, rules.max_staleness)
    has_ended = segment.trajectory.turns[-1].finish_reason == "stop" and not source.is_cut
    sibling.status = statuses_of(sample).COMPLETED if has_ended else statuses_of(sample).TRUNCATED
    reason = StopReason.COMPLETED if has_ended else StopReason.TURN_LENGTH
    facts = _agent_facts(source.model, segment, reason)
    if source.kind != "agent":
        facts["generate_s"] = None  # counted with the main agent
    write_facts(sibling, EpisodeFacts(**facts, stale_tokens=stale_tokens, ended_by=segment.ended_by))
    return sibling


def _episode_facts(
    ended: EndedEpisode, rules: WritingRules, stale_tokens: int, dropped_tokens: int, resume: dict[str, Any] | None
) -> EpisodeFacts:
    """Return the facts of an episode, over all of its attempts."""
    model, episode = ended.model, ended.episode
    main_and_side = [conversation for conversation in model.record if conversation.kind != "agent"]
    agent_facts = _agent_facts(model, model.conversation.branch, episode.stop_reason)
    agent_facts["generate_s"] = sum(
        turn.latency_s
        for conversation in main_and_side
        for segment in conversation
        for turn in segment.trajectory.turns
    )
    facts = EpisodeFacts(
        **agent_facts,
        error=None if episode.error is None else error_text(episode.error),
        tool_iterations=episode.tool_iterations,
        tool_calls=episode.tool_calls,
        user_turns=episode.user_turns,
        tool_errors=episode.tools.errors,
        tool_timeouts=episode.tools.timeouts,
        unknown_tools=sum(call["status"] == "unknown" for call in episode.tools.calls),
        tool_s=episode.tools.seconds,
        calls=episode.tools.calls,
        code={**vars(ended.code_calls)},
        duration_s=episode.duration_s,
        segments=len(model.conversation.branches),
        stale_tokens=stale_tokens,
        dropped_sampled_tokens=dropped_tokens,
        resume=resume,
        budgets=_budgets_used(model, episode),
        aborts=ended.start.aborts,
        resumes=ended.start.resumes,
        engine_aborts=_engine_aborts(ended),
        sampling_params=None if rules.sampling_params is None else dict(rules.sampling_params),
        environment_score=ended.score,
        gateway=ended.gateway,
        environment=None if episode.played is None else dict(episode.played.facts),
        question=ended.question,
        evaluated=ended.evaluated,
        evaluation=rules.evaluation or None,
    )
    program = episode.program
    if program is None:
        return facts
    facts = replace(facts, gateway=program.facts)
    if program.text is None:
        return facts
    # if the program took its answer from the end of a cut turn, the answer is cut, too
    is_cut = facts.final_is_cut and str(facts.final_text).rstrip().endswith(program.text.rstrip())
    return replace(facts, final_text=program.text, final_in_reasoning=False, final_is_cut=is_cut)


def _agent_facts(model: SGLangModel, segment: Branch, stop_reason: StopReason) -> dict[str, Any]:
    """Return the facts, by name, about one segment of an agent's conversation: end, final text, turns and tokens."""
    trajectory = segment.trajectory
    turn_s = [turn.latency_s for turn in trajectory.turns]
    spans = [(number, span) for number, turn in enumerate(trajectory.turns) for span in turn.weight_spans]
    return {
        "version": METADATA_VERSION,
        "stop_reason": str(stop_reason),
        "final_text": segment.final_text,
        "final_in_reasoning": model.template.opens_reasoning,
        "final_is_cut": segment.stop_reason == "max_tokens" or trajectory.is_open,
        "template_kwargs": model.template_kwargs,
        "turns": len(trajectory.turns),
        "parse_failures": len(segment.parse_failures),
        "transient_texts": segment.transient_texts,
        "generate_s": sum(turn_s),
        "turn_s": turn_s,
        "requests": [
            [number, part.at_s, round(part.latency_s, 4)]
            for number, turn in enumerate(trajectory.turns)
            for part in turn.parts
        ],
        "tool_parser": model.tool_parser,
        "sampled_tokens": trajectory.sampled_length,
        "spans": [[number, span.start, span.end, span.version] for number, span in spans],
        "weight_versions": distinct_versions(span for _, span in spans),
        "version_numberings": distinct_numberings(span for _, span in spans),
    }


def _budgets_used(model: SGLangModel, episode: Episode) -> dict[str, float | None]:
    """Return the used share of each budget, from 0 to 1; None if the budget's limit is 0 or not set."""
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
    """Return the type and the message of an error, in at most 2,000 characters."""
    return f"{type(error).__name__}: {error}"[:2000]
