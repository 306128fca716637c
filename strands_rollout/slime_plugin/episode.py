"""Play the episode of one sample in this process, and fill the sample from it.

`play_sample` is the entry. Then read `_run_episode`, which builds the model and the tools; `_choose_player`; and
`RolloutJob.build_model`, which makes an agent's model from slime's args and the settings.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from strands_rollout import errors
from strands_rollout.agent.environment import EpisodeContext, Task, open_context
from strands_rollout.agent.environment_player import EnvironmentRun
from strands_rollout.agent.episode import AgentRun, EpisodeSetup
from strands_rollout.agent.limits import EpisodeLimits, StopReason, reason_of_error
from strands_rollout.agent.multi_agent import AgentModels, factory_team
from strands_rollout.agent.run import SEVERAL_AGENTS, SEVERAL_SEGMENTS, Episode, EpisodeRun, drop_traceback
from strands_rollout.agent.tool_loading import load_conversation_manager, load_function, load_hooks, load_tools
from strands_rollout.aio import run_once
from strands_rollout.code_tool.tool import CODE_TOOL_NAME, CodeCallTotals, episode_code_tool
from strands_rollout.control import ABORT_GRACE_S, Control
from strands_rollout.exits import exits_as_errors
from strands_rollout.log_once import log_once
from strands_rollout.model.replay_data import RETURN_EXPERTS
from strands_rollout.model.sampling import TokenLimits, turn_seed
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.own_loop import OwnLoop
from strands_rollout.samples import METADATA_KEY, SampleLike, SlimeArgs, statuses_of
from strands_rollout.settings import CODE_TOOL_PATH, MISSING_CODE_TOOL, RolloutSettings, settings_from_args
from strands_rollout.slime_plugin import sample_writer, slime_adapter
from strands_rollout.slime_plugin.conditions import context_limit, episode_conditions, template_kwargs
from strands_rollout.slime_plugin.garbage import freeze_long_lived
from strands_rollout.slime_plugin.inputs import episode_prompt, run_settings, with_row_settings
from strands_rollout.slime_plugin.journal import EpisodeJournal, RecordSink, continue_from_journal, open_journal
from strands_rollout.slime_plugin.own_reward import check_reward, values_for_evaluators
from strands_rollout.slime_plugin.resume import EpisodeStart, prepare_sample, reset_sample
from strands_rollout.slime_plugin.sample_writer import EndedEpisode, WritingRules
from strands_rollout.slime_plugin.slime_adapter import GenerateCall
from strands_rollout.user_code import find_file
from strands_rollout.watchdog import watch_running_loop

logger = logging.getLogger(__name__)
ROUTING_HEADER: Final = "X-SMG-Routing-Key"
_PARTIAL_GRACE_S: Final = 4.0
# reasons why an episode can't be continued, in addition to those of `agent.run`
_CLOSED_ENVIRONMENT: Final = "its environment and resources were closed"
_NO_REPLAY: Final = "its program may not be started again (allow it with resumable: replay)"


async def play_sample(
    call: GenerateCall, sink: RecordSink | None = None, *, settings: RolloutSettings | None = None
) -> SampleLike | list[SampleLike]:
    """Play the episode of a call of `generate` and fill its sample; if this fails, fill the sample with the failure.

    Args:
        call: slime's call, or the call that a worker was sent.
        sink: Stores the episode's journal records, and provides any records of an earlier attempt whose process died.
            Default: the result of `open_journal`, which may be None.
        settings: The settings of the run, if the caller has read them from `call.args` already.

    Returns:
        The sample or a list of samples, as for `generate`.

    Raises:
        ConfigError: The sample can't be filled.
    """
    sample = call.sample
    try:
        with exits_as_errors("the episode", RuntimeError):
            settings = settings or run_settings(call.args)
            fans_out = _fans_out(call, settings)
            settings = with_row_settings(settings, sample.metadata)
            conditions = functools.partial(episode_conditions, call, settings)
            sink = sink or await open_journal(sample, settings, conditions, evaluation=call.evaluation)
            may_resume = settings.resume_aborted and sample.status is statuses_of(sample).ABORTED
            current_conditions = await asyncio.to_thread(conditions) if may_resume else None
            # an aborted sample's own state is used, unless the journal is known to be from its latest attempt
            start = prepare_sample(sample, current_conditions, may_resume=settings.resume_aborted)
            start = continue_from_journal(start, sink, settings)
            key = getattr(sample, "session_id", None) or uuid.uuid4().hex
            grace_s = functools.partial(_engine_grace_s, call.args, settings)
            control = slime_adapter.rollout_control(call.args, call.sample, settings.should_abort, grace_s)
            return await _play_and_fill(RolloutJob(call, settings, start, fans_out, key, control, sink))
    except Exception as e:  # a training run must survive every failure of one sample
        return fail_sample(call, e)
    finally:
        if sink is not None:
            sink.close(keep=sample_writer.is_unfinished(sample))


def fail_sample(call: GenerateCall, error: Exception) -> SampleLike | list[SampleLike]:
    """Log why an episode could not be played or written, and fill its sample; `call.args` may be unreadable.

    Returns:
        The sample or a list with the sample, as for `generate`.

    Raises:
        ConfigError: The sample can't be filled.
    """
    args, sample = call.args, call.sample
    log_failure(sample, error)
    may_abort = fans_out = False
    try:
        with exits_as_errors("reading args", RuntimeError):
            may_abort = slime_adapter.may_return_aborted(args, sample)
            fans_out = _fans_out(call, settings_from_args(args))
    except Exception:  # args may be unreadable, which may be why the episode failed
        logger.debug("args can't be read", exc_info=True)
    rules = WritingRules(may_abort=may_abort, fans_out=fans_out, evaluation=call.evaluation)
    try:
        with exits_as_errors("the sample", RuntimeError):
            sample_writer.write_failure(sample, error, reason_of_error(error), rules)
    except Exception as e:  # a sample's own setters may raise anything
        raise errors.ConfigError(f"generate got a sample that can't be filled ({e!r}); expected slime's Sample") from e
    try:
        with exits_as_errors("reading args", RuntimeError):
            sample_writer.fill_batch_fields(args, sample, call.sampling_params)
    except Exception:  # args may be unreadable
        logger.debug("args can't be read", exc_info=True)
    return [sample] if sample_writer.is_fan_out(sample, rules) else sample


def _fans_out(call: GenerateCall, settings: RolloutSettings) -> bool:
    """Return whether slime gets a list of samples if the sample does not become ABORTED.

    The settings of the run decide this, not the row's. Apart from ABORTED samples, slime takes lists either from all
    episodes or from none.
    """
    return settings.fan_out and sample_writer.may_fan_out(call.args, call.sample, evaluation=call.evaluation)


async def _play_and_fill(job: RolloutJob) -> SampleLike | list[SampleLike]:
    call, settings = job.call, job.settings
    ended = await _run_episode(job)
    if isinstance(ended.episode.error, errors.ReplayError):
        job = _restarted_job(job, ended.episode.error)
        ended = await _run_episode(job)
    episode = ended.episode
    log_episode(call.sample, episode)
    if episode.stop_reason is not StopReason.INTERNAL_ERROR:  # the traceback of a bug may still be logged
        for error in filter(None, (episode.error, episode.tools.infrastructure_error)):
            drop_traceback(error)
    # the id "" stands for agents that were made outside of a tool call. These agents succeeded if the episode did
    succeeded = episode.tools.succeeded | ({""} if episode.stop_reason is StopReason.COMPLETED else set())
    segments = sample_writer.sibling_segments(ended.model, ended.sub_agents, succeeded)
    obstacle = _resume_obstacle(job, ended, has_siblings=bool(segments))
    if obstacle and settings.resume_aborted and episode.stop_reason is StopReason.ABORTED:
        logger.warning("aborted sample will start from scratch index=%s reason=%s", call.sample.index, obstacle)
    may_resume = settings.resume_aborted and not obstacle
    rules = WritingRules(
        may_abort=slime_adapter.may_return_aborted(call.args, call.sample),
        fans_out=job.fans_out,
        max_staleness=settings.max_staleness,
        resume_conditions=functools.partial(episode_conditions, call, settings) if may_resume else None,
        evaluation=call.evaluation,
        sampling_params=call.sampling_params,
    )
    samples = sample_writer.write_episode(call.args, call.sample, ended, rules, segments)
    for written in samples:
        sample_writer.fill_batch_fields(call.args, written, call.sampling_params)
    return samples if sample_writer.is_fan_out(call.sample, rules) else call.sample


def _restarted_job(job: RolloutJob, error: Exception) -> RolloutJob:
    """Reset the sample and return a job that starts from scratch, since a request differs from the earlier attempt."""
    logger.warning("resumed sample starts from scratch index=%s reason=%s", job.call.sample.index, error)
    resume = job.start.resume
    sampled = 0 if resume is None else sum(resume.trajectory.loss_mask)
    reset_sample(job.call.sample)
    return replace(job, start=replace(job.start, resume=None, dropped_tokens=job.start.dropped_tokens + sampled))


def _start_after_divergence(job: RolloutJob, episode: Episode) -> EpisodeStart:
    """Return the state that the episode started from.

    If the program's requests differ from the earlier attempt's, drop that attempt's state and reset the sample.
    """
    program = episode.program
    if program is None or program.dropped_tokens is None:
        return job.start
    reset_sample(job.call.sample)
    return replace(job.start, resume=None, dropped_tokens=job.start.dropped_tokens + program.dropped_tokens)


def _resume_obstacle(job: RolloutJob, ended: EndedEpisode, *, has_siblings: bool) -> str:
    """Return the reason why an aborted episode can't be resumed; "" if it can."""
    # only the main branch's tokens and the messages can be saved
    if len(ended.model.conversation.branches) > 1 or (job.fans_out and has_siblings):
        return SEVERAL_SEGMENTS
    may_replay = job.settings.environment_plays and ended.episode.is_resumable
    if job.settings.resources or (job.settings.environment and not may_replay):
        return _CLOSED_ENVIRONMENT
    if ended.episode.is_resumable:
        return ""
    return _NO_REPLAY if job.settings.has_program else SEVERAL_AGENTS


async def _run_episode(job: RolloutJob) -> EndedEpisode:
    settings, resume = job.settings, job.start.resume
    watch_running_loop()
    # the first episode of a process loads the tokenizer in a thread; all other episodes wait for it
    await run_once(str(getattr(job.call.args, "hf_checkpoint", None)), job.prepare)
    if settings.reward.is_user_defined:
        await run_once(settings.reward.model_dump_json(), functools.partial(check_reward, settings.reward))
    model = job.build_model()
    task = await _build_task(job, model)
    code_calls = CodeCallTotals(**resume.code) if resume else CodeCallTotals()
    score: dict[str, Any] | None = None
    state: dict[str, Any] | None = None
    if resume:
        model.resume(resume.trajectory, resume.progress.messages, resume.progress.covered)
    sub_agents = AgentModels(job.build_model)
    journal = _build_journal(job, model, sub_agents, code_calls)
    # an agent shares this event loop with its model and tools. An `agent_program` may block, so the program gets a loop
    # of its own, and calls the model through the gateway's endpoint
    own_loop = OwnLoop() if settings.agent_program is not None else nullcontext()
    with closing(model.record), sub_agents.active(), job.control.running():
        async with own_loop as loop, episode_code_tool(settings, code_calls) as code_tool:
            task = replace(task, tools=[] if settings.environment_plays else build_tools(settings, code_tool))
            self_timed = () if code_tool is None else (CODE_TOOL_NAME,)
            async with open_context(settings, task, job.control, loop) as context:
                question = job.start.question if resume else context.prompt
                episode = await _choose_player(job, model, context, self_timed, journal).play()
                is_trained = episode.stop_reason in sample_writer.TRAINED_REASONS
                if is_trained:
                    score = await context.score()
                    state = await context.state() if settings.reward.has_evaluator else None
    models = (model, *sub_agents.created)
    # an aborted request is awaited for a grace period, so that the engine's last tokens are kept
    finishing = [each.finish(job.control.engine_grace_s(each.sent_at or 0.0)) for each in models]
    await (asyncio.gather(*finishing) if len(finishing) > 1 else finishing[0])
    if score is None and episode.program is not None:
        score = episode.program.score
    if episode.played is not None and is_trained:
        score = episode.played.score
    is_evaluated = settings.reward.has_evaluator and is_trained
    return EndedEpisode(
        model,
        episode,
        _start_after_divergence(job, episode),
        code_calls=code_calls,
        sub_agents=sub_agents.created,
        score=score,
        question=question,
        evaluated=values_for_evaluators(model, episode, state) if is_evaluated else None,
    )


def _build_journal(
    job: RolloutJob, model: SGLangModel, sub_agents: AgentModels, code_calls: CodeCallTotals
) -> EpisodeJournal | None:
    if job.sink is None or not job.settings.resume_aborted:
        return None
    journal = EpisodeJournal(job.sink, model, code_calls, sub_agents.created, fans_out=job.fans_out, start=job.start)
    if obstacle := _journal_obstacle(job):
        journal.close(obstacle)
    return journal


def _journal_obstacle(job: RolloutJob) -> str:
    """Return the reason why this job's episode could not be continued from a journal; "" if it could."""
    if job.settings.resources or job.settings.environment:
        return _CLOSED_ENVIRONMENT
    if job.settings.has_program and job.settings.resumable != "replay":
        return _NO_REPLAY
    custom = job.call.sampling_params.get("custom_params")
    wants_top_p = isinstance(custom, Mapping) and custom.get("return_top_p_token_ids")
    if wants_top_p or getattr(job.call.args, "use_rollout_routing_replay", False):
        return "it asks for replay data (routed experts or top-p ids), which is not saved"
    return ""


async def _build_task(job: RolloutJob, model: SGLangModel) -> Task:
    settings, sample = job.settings, job.call.sample
    config_file = settings.environment_config
    # the default system prompt describes the code tool, which a user's own agent may not have
    has_own_agent = settings.agent_factory is not None or settings.has_program or settings.environment_plays
    uses_system_prompt = not has_own_agent or "system_prompt" in settings.model_fields_set
    if settings.lacks_code_tool:
        log_once(logger, logging.WARNING, MISSING_CODE_TOOL)
    prompt = await episode_prompt(sample, settings.system_prompt if uses_system_prompt else None, model.template)
    metadata = sample.metadata if isinstance(sample.metadata, Mapping) else {}
    return Task(
        prompt.messages,
        prompt.system_prompt,
        label=getattr(sample, "label", None),
        metadata={key: value for key, value in metadata.items() if key != METADATA_KEY},
        index=getattr(sample, "index", None),
        evaluation=job.call.evaluation,
        environment_config=str(find_file(config_file)) if isinstance(config_file, str) else None,
    )


def _choose_player(
    job: RolloutJob,
    model: SGLangModel,
    context: EpisodeContext,
    self_timed_tools: Sequence[str],
    journal: EpisodeJournal | None,
) -> EpisodeRun:
    """Choose what plays the episode (an environment, a program, or an agent in this process); return its run."""
    settings, task, resume = job.settings, context.task, job.start.resume
    progress = resume.progress if resume else None
    may_replay = settings.resumable == "replay"
    hooks = load_hooks(settings.hooks) if settings.hooks else ()
    tool_span = slime_adapter.tool_span(job.call.sample)
    if settings.environment_plays:
        return EnvironmentRun(
            model,
            context,
            _named_limits(settings),
            hooks=hooks,
            tool_span=tool_span,
            progress=progress,
            may_replay=may_replay,
        )
    next_message = context.answer if context.can_answer else None
    if settings.has_program:
        from strands_rollout.gateway.program import Program, ProgramRun, play_command

        if next_message is not None:
            raise errors.ConfigError(
                "the agent is a program, which can't receive the messages of the environment's method `answer`; "
                "expected an environment without `answer`"
            )
        path, command = settings.agent_program, settings.agent_command
        play = functools.partial(play_command, command) if command is not None else load_function(str(path))
        name = "agent_command" if command is not None else f"agent_program {path!r}"
        program = Program(name, play, may_replay=may_replay, loop=context.loop)
        limits = _episode_limits(settings)
        return ProgramRun(program, model, task, limits, job.control, progress=progress, journal=journal)
    manager = settings.conversation_manager
    setup = EpisodeSetup(
        system_prompt=task.system_prompt,
        tools=task.tools,
        limits=_episode_limits(settings),
        hooks=hooks,
        self_timed_tools=self_timed_tools,
        tool_span=tool_span,
        control=job.control,
        conversation_manager=load_conversation_manager(manager) if manager else None,
        progress=progress,
        team=None if settings.agent_factory is None else factory_team(settings.agent_factory, model, task),
        next_message=next_message,
        journal=journal,
    )
    return AgentRun(model, task.messages, setup)


def _named_limits(settings: RolloutSettings) -> EpisodeLimits:
    """Return the limits that are set, without defaults: a library's environment has limits of its own."""
    return EpisodeLimits(
        **{
            limit.name: getattr(settings, limit.name) if limit.name in settings.model_fields_set else None
            for limit in fields(EpisodeLimits)
        }
    )


def _episode_limits(settings: RolloutSettings) -> EpisodeLimits:
    return EpisodeLimits(
        max_tool_iterations=settings.max_tool_iterations,
        max_tool_calls=settings.max_tool_calls,
        max_parallel_tool_calls=settings.max_parallel_tool_calls,
        max_user_turns=settings.max_user_turns,
        tool_timeout_s=settings.tool_timeout_s,
        episode_timeout_s=settings.episode_timeout_s,
    )


def build_tools(settings: RolloutSettings, code_tool: object) -> list[object]:
    """Return the tools in the order of the settings, with `code_tool` in place of the code tool's path.

    `code_tool` is None if the settings lack the code tool.
    """
    tools: list[object] = []
    for path in settings.tools:
        tools += [code_tool] if path == CODE_TOOL_PATH else load_tools([path])
    return tools


def log_episode(sample: SampleLike, episode: Episode) -> None:
    """Log one line for an episode that ended with an error; for a bug, also the traceback."""
    reason, error = episode.stop_reason, episode.error
    if reason is StopReason.INTERNAL_ERROR:
        logger.error("episode failed index=%s stop_reason=%s", sample.index, reason, exc_info=error)
    elif error is not None:
        level = logging.WARNING if reason.endswith("_error") else logging.DEBUG
        logger.log(level, "episode ended index=%s stop_reason=%s error=%s", sample.index, reason, error)


def log_failure(sample: SampleLike, error: Exception) -> None:
    """Log why an episode could not be played or written, with the traceback unless the error is this package's own."""
    bug, index = None if isinstance(error, errors.RolloutError) else error, getattr(sample, "index", None)
    logger.error("sample failed index=%s error=%s: %s", index, type(error).__name__, error, exc_info=bug)


def _engine_grace_s(args: SlimeArgs, settings: RolloutSettings, sent_at: float) -> float:
    """Return the seconds to wait for the answer to an aborted request.

    The wait is short for a request that may have been sent after the abort. slime's abort ends all requests; from 0.3.1
    on, slime repeats the abort every 3 s until the engines are idle. An episode worker may learn of an abort later than
    the engines. The abort may then miss a request that the worker sends in between. Such a request ends at once only if
    its connection is closed.
    """
    are_samples_collected = getattr(args, "partial_rollout", False) or settings.should_abort is not None
    grace_s = _PARTIAL_GRACE_S if settings.resume_aborted and are_samples_collected else ABORT_GRACE_S
    if settings.abort_grace_s is not None:
        grace_s = settings.abort_grace_s
    return grace_s if slime_adapter.was_sent_before_abort(args, sent_at) else min(grace_s, ABORT_GRACE_S)


@dataclass(slots=True)
class RolloutJob:
    """An episode to play: a call of `generate`, its settings, and the state that it starts from.

    Attributes:
        settings: The settings of this episode, including the row's.
        fans_out: True if `fan_out` is on and slime can take a list of samples. slime then gets a list, except for an
            ABORTED sample.
        routing_key: A key that is sent with each request. A router sends all requests with the same key to one engine.
        sink: Stores the episode's journal records; None to store none.
    """

    call: GenerateCall
    settings: RolloutSettings
    start: EpisodeStart
    fans_out: bool
    routing_key: str
    control: Control
    sink: RecordSink | None = None

    def __post_init__(self) -> None:
        params = self.call.sampling_params
        if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
            raise errors.ConfigError(
                f"generate got sampling_params={params!r:.200}; expected a mapping with names as keys, such as "
                'slime\'s {"temperature": 1.0, "max_new_tokens": 8192}'
            )

    def prepare(self) -> None:
        """Load the tokenizer and probe its template; the results are cached for all later models.

        If the setting `freeze_gc` is on, also exclude the objects loaded so far from garbage collection.
        """
        self.build_model()
        if self.settings.freeze_gc:
            freeze_long_lived()

    def build_model(self, agent: str = "") -> SGLangModel:
        """Return the model of one agent; `agent` is "" for the main agent, else the sub-agent's name."""
        args, sample, settings = self.call.args, self.call.sample, self.settings
        params = dict(self.call.sampling_params)
        if agent and params.get("sampling_seed") is not None:
            params["sampling_seed"] = turn_seed(params["sampling_seed"], agent)
        # users' code, sub-agents and a library's environments may rewrite the history; the agent loop only appends
        user_code = settings.conversation_manager or settings.agent_factory or settings.hooks or settings.has_program
        may_rewrite = bool(agent or user_code or settings.environment_plays)
        limits = TokenLimits(
            max_response_tokens=params.pop("max_new_tokens", None),
            max_context_tokens=context_limit(args, evaluation=self.call.evaluation),
            max_turn_tokens=settings.max_turn_tokens,
            min_turn_tokens=settings.min_turn_tokens,
        )
        return SGLangModel(
            tokenizer=slime_adapter.tokenizer_of(args, sample),
            base_url=slime_adapter.router_url(args, settings.model_name),
            vocab_size=slime_adapter.vocab_size_of(args),
            tool_parser=settings.tool_parser,
            sampling_params=params,
            enable_thinking=settings.enable_thinking,
            chat_template_kwargs=template_kwargs(args, sample),
            limits=limits,
            extra={RETURN_EXPERTS: True} if getattr(args, "use_rollout_routing_replay", False) else {},
            headers={ROUTING_HEADER: self.routing_key},
            continue_aborted=settings.on_engine_abort == "continue",
            control=self.control,
            request_span=slime_adapter.request_span(sample),
            on_rewritten_history="segment" if may_rewrite else "error",
            conversations="many",
            transient_context=settings.transient_context,
            processor=slime_adapter.processor_of(args, sample),
            engine_patience_s=slime_adapter.engine_patience_s(args, settings.engine_patience_s),
        )
