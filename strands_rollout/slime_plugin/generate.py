"""slime's entry point `generate`: one sample in, the same sample filled from one agent episode out.

Glue, and the one place where errors become statuses. Read this first: settings, prompt, model, episode, sample.
"""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from strands_rollout.agent import Episode, run_episode
from strands_rollout.agent_models import AgentModels
from strands_rollout.agent_team import built_team
from strands_rollout.config import CODE_TOOL_PATH, RolloutSettings, settings_from_args
from strands_rollout.episode_bounds import EpisodeLimits
from strands_rollout.episode_clock import episode_clock
from strands_rollout.episode_code import episode_code_tool
from strands_rollout.episode_record import METADATA_KEY, SCORE_KEY
from strands_rollout.errors import (
    EngineAbortedError,
    EngineError,
    EnvironmentFaultError,
    RolloutError,
    SandboxError,
)
from strands_rollout.fan_out import as_fan_out, may_fan_out, siblings, spoken_beside
from strands_rollout.first_use import freeze_long_lived, once
from strands_rollout.loop_pass import own_pass
from strands_rollout.prompt_messages import episode_prompt
from strands_rollout.prompts import CODE_TOOL_NAME
from strands_rollout.rollout_job import RolloutJob
from strands_rollout.row_settings import with_row_settings
from strands_rollout.sample import TRAINED_REASONS, fill_replay_gaps, write_episode, write_failure
from strands_rollout.sample_beginning import begin_sample
from strands_rollout.sglang_model import SGLangModel
from strands_rollout.slime_seam import (
    may_return_aborted,
    tool_span,
)
from strands_rollout.stop_reason import StopReason
from strands_rollout.surroundings import Surroundings, open_surroundings
from strands_rollout.task import Task, running
from strands_rollout.tool_loading import load_conversation_manager, load_hooks, load_tools
from strands_rollout.tools import CodeCalls

logger = logging.getLogger(__name__)


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002 - slime's signature
    """Run one agent episode for a sample; slime's `--custom-generate-function-path`.

    Args:
        args: slime's args; see the README for what is read.
        sample: slime's `Sample`, or ours where slime is absent.
        sampling_params: slime's sampling parameters; not changed. `max_new_tokens` is the budget of the whole
            response, tool results included.
        evaluation: Whether this is an evaluation rollout, which has its own context limit.

    Returns:
        The same sample: tokens, loss_mask, rollout_log_probs, response and status are set and valid whatever happened.
        With the setting `fan_out` a list of it and its siblings, unless it was aborted or slime can't take a list.

    Raises:
        asyncio.CancelledError: The caller was cancelled. Nothing else is raised: slime's run would die of it.
    """
    fans_out = False
    others: list[tuple[str, Any]] = []
    await own_pass()  # of hundreds of samples that come at once, one begins in each pass of the loop
    try:
        settings = with_row_settings(settings_from_args(args), sample.metadata)
        fans_out = settings.fan_out and may_fan_out(args, evaluation=evaluation)
        beginning = begin_sample(sample, may_resume=settings.resume_aborted)
        routing_key = getattr(sample, "session_id", None) or uuid.uuid4().hex
        job = RolloutJob(args, sample, sampling_params, settings, beginning, evaluation, fans_out, routing_key)
        played = await _run(job)
        log_episode(sample, played.episode)
        others = _write(job, played)
    except Exception as e:  # a training run must survive every failure of one sample
        log_failure(sample, e)
        write_failure(sample, e, reason_of_failure(e), may_abort=may_return_aborted(args, sample))
    for one in [sample, *(other for _, other in others)]:
        fill_replay_gaps(args, one, sampling_params)
    # slime takes back one aborted sample, and never a list; of any other episode it wants lists if it gets one
    is_list = fans_out and sample.status is not type(sample).Status.ABORTED
    return as_fan_out(sample, others) if is_list else sample


def _write(job: RolloutJob, played: _Played) -> list[tuple[str, Any]]:
    """Fill the job's sample; return its siblings with their kinds, where there are any."""
    settings, code_calls = job.settings, played.code_calls
    # agents that were made outside of a call are done when the episode is
    is_done = played.episode.stop_reason is StopReason.COMPLETED
    succeeded = played.episode.tools.succeeded | ({""} if is_done else set())
    beside = spoken_beside(played.model, played.sub_agents.made, succeeded)
    obstacle = _obstacle_to_resuming(job, played, bool(beside))
    if obstacle and settings.resume_aborted and played.episode.stop_reason is StopReason.ABORTED:
        logger.warning("aborted sample will start afresh index=%s reason=%s", job.sample.index, obstacle)
    write_episode(
        job.args,
        job.sample,
        played.model,
        played.episode,
        may_abort=may_return_aborted(job.args, job.sample),
        code_calls=code_calls,
        beginning=job.beginning,
        keep_progress=settings.resume_aborted and not obstacle,
        max_staleness=settings.max_staleness,
    )
    facts = job.sample.metadata[METADATA_KEY]
    facts["sampling_params"] = dict(job.sampling_params)
    if played.score is not None:
        facts[SCORE_KEY] = played.score
    return siblings(job.args, job.sample, beside if job.fans_out else [], max_staleness=settings.max_staleness)


def _obstacle_to_resuming(job: RolloutJob, played: _Played, speaks_beside: bool) -> str:  # noqa: FBT001 - a fact
    """Why an episode that was cut can't be gone on with; "" if it can."""
    # tokens beside those of the sample can't be saved, nor what is outside of the messages
    if played.model.conversation.segments or (job.fans_out and speaks_beside):
        return "it has several segments"
    if job.settings.resources or job.settings.environment:
        return "its environment and resources are closed"
    return "" if played.episode.is_resumable else "it is a swarm's or graph's"


def reason_of_failure(error: Exception) -> StopReason:
    """Why no episode could be run, or none could be written."""
    kinds: list[tuple[type[Exception], StopReason]] = [
        (EngineAbortedError, StopReason.ABORTED),
        (EnvironmentFaultError, StopReason.ENVIRONMENT_ERROR),
        (SandboxError, StopReason.SANDBOX_ERROR),
        (EngineError, StopReason.ENGINE_ERROR),
        (RolloutError, StopReason.SETUP_ERROR),
    ]
    return next((reason for kind, reason in kinds if isinstance(error, kind)), StopReason.INTERNAL_ERROR)


@dataclass(frozen=True, slots=True)
class _Played:
    """An episode and whoever played in it."""

    model: SGLangModel
    episode: Episode
    code_calls: CodeCalls
    sub_agents: AgentModels
    score: dict[str, Any] | None


async def _run(job: RolloutJob) -> _Played:
    settings, resume = job.settings, job.beginning.resume
    await once(getattr(job.args, "hf_checkpoint", None), lambda: _prepare(job))
    model = job.build_model()
    task = await _task(job, model)
    code_calls = CodeCalls(**resume.code) if resume else CodeCalls()
    if resume:
        model.resume(resume.trajectory, resume.progress.messages, resume.progress.covered)
    sub_agents = AgentModels(lambda name: job.build_model(name, lambda: sub_agents.is_closed or job.should_abort()))
    with sub_agents.active():
        async with episode_code_tool(settings, code_calls) as code_tool:
            task = replace(task, tools=build_tools(settings, code_tool))
            self_timed = () if code_tool is None else (CODE_TOOL_NAME,)
            if settings.resources or settings.environment:
                async with open_surroundings(settings, task, job.should_abort) as around:
                    answer = around.answer if around.answers else None
                    episode = await _play(job, model, around.task, self_timed, answer)
                    score = await _score(around, episode)
            else:  # as most are, at no cost
                with running(task):
                    episode, score = await _play(job, model, task, self_timed), None
    return _Played(model, episode, code_calls, sub_agents, score)


async def _task(job: RolloutJob, model: SGLangModel) -> Task:
    settings, sample = job.settings, job.sample
    # a factory's agent is not given words about tools that it need not have
    is_meant = settings.agent_factory is None or "system_prompt" in settings.model_fields_set
    prompt = await episode_prompt(sample, settings.system_prompt if is_meant else None, model.template)
    metadata = sample.metadata if isinstance(sample.metadata, Mapping) else {}
    return Task(
        prompt.messages,
        prompt.system_prompt,
        label=getattr(sample, "label", None),
        metadata={key: value for key, value in metadata.items() if key != METADATA_KEY},
        index=getattr(sample, "index", None),
        evaluation=job.evaluation,
    )


async def _play(
    job: RolloutJob,
    model: SGLangModel,
    task: Task,
    self_timed_tools: Sequence[str],
    next_message: Callable[[str], Awaitable[str | None]] | None = None,
) -> Episode:
    settings, resume = job.settings, job.beginning.resume
    # set up first, so that the clock and the duration begin together
    play = functools.partial(
        run_episode,
        model,
        task.messages,
        system_prompt=task.system_prompt,
        tools=task.tools,
        limits=EpisodeLimits(**{limit.name: getattr(settings, limit.name) for limit in fields(EpisodeLimits)}),
        hooks=load_hooks(settings.hooks),
        self_timed_tools=self_timed_tools,
        tool_span=tool_span(job.sample),
        should_abort=job.should_abort,
        engine_grace_s=job.engine_grace_s,
        conversation_manager=load_conversation_manager(settings.conversation_manager),
        progress=resume.progress if resume else None,
        team=None if settings.agent_factory is None else built_team(settings.agent_factory, model, task),
        next_message=next_message,
    )
    with episode_clock(resume.progress.duration_s if resume else 0.0):
        return await play()


async def _score(around: Surroundings, episode: Episode) -> dict[str, Any] | None:
    """What the environment makes of an episode that is to be trained."""
    is_trained = episode.stop_reason in TRAINED_REASONS
    return await around.score() if is_trained else None


def _prepare(job: RolloutJob) -> None:
    """Load the tokenizer and try out its template: all that later models share."""
    job.build_model()
    if job.settings.freeze_gc:
        freeze_long_lived()


def build_tools(settings: RolloutSettings, code_tool: Any) -> list[Any]:  # noqa: ANN401 - a Strands tool, or None
    """The tools in their configured order."""
    tools: list[Any] = []
    for path in settings.tools:
        tools += [code_tool] if path == CODE_TOOL_PATH else load_tools([path])
    return tools


def log_episode(sample: Any, episode: Episode) -> None:  # noqa: ANN401
    """One line per failed episode; a bug also with its traceback."""
    if episode.stop_reason is StopReason.INTERNAL_ERROR:
        logger.error(
            "episode failed index=%s stop_reason=%s", sample.index, episode.stop_reason, exc_info=episode.error
        )
    elif episode.error is not None:
        level = logging.WARNING if episode.stop_reason.endswith("_error") else logging.DEBUG
        logger.log(
            level, "episode ended index=%s stop_reason=%s error=%s", sample.index, episode.stop_reason, episode.error
        )


def log_failure(sample: Any, error: Exception) -> None:  # noqa: ANN401
    """Our own errors speak for themselves; anything else is a bug and needs its traceback."""
    bug = None if isinstance(error, RolloutError) else error
    logger.error(
        "sample failed index=%s error=%s: %s", getattr(sample, "index", None), type(error).__name__, error, exc_info=bug
    )
