"""slime's entry point `generate`: one sample in, the same sample filled from one agent episode out.

Glue, and the one place where errors become statuses. Read this first: settings, prompt, model, episode, sample.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from strands_rollout.agent import Episode, EpisodeLimits, run_episode
from strands_rollout.agent_models import AgentModels
from strands_rollout.config import CODE_TOOL_PATH, RolloutSettings, settings_from_args
from strands_rollout.episode_code import episode_code_tool
from strands_rollout.episode_deadline import ABORT_GRACE_S
from strands_rollout.errors import EngineError, RolloutError, SandboxError
from strands_rollout.fan_out import as_fan_out, may_fan_out, siblings, spoken_beside
from strands_rollout.first_use import freeze_long_lived, once
from strands_rollout.loop_pass import own_pass
from strands_rollout.prompt_messages import to_episode_prompt
from strands_rollout.prompts import CODE_TOOL_NAME
from strands_rollout.replay_data import ASK_EXPERTS
from strands_rollout.sample import fill_replay_gaps, write_episode, write_failure
from strands_rollout.sample_beginning import Beginning, begin_sample
from strands_rollout.sglang_model import SGLangModel
from strands_rollout.slime_seam import (
    collects_partial_rollouts,
    is_aborting,
    may_return_aborted,
    request_span,
    router_url,
    tokenizer_of,
    tool_span,
    vocab_size_of,
)
from strands_rollout.stop_reason import StopReason
from strands_rollout.token_limits import TokenLimits
from strands_rollout.tool_loading import load_conversation_manager, load_hooks, load_tools
from strands_rollout.tools import CodeCalls
from strands_rollout.turn_params import turn_seed

logger = logging.getLogger(__name__)

ROUTING_HEADER: Final = "X-SMG-Routing-Key"
_PARTIAL_GRACE_S: Final = 4.0


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
        settings = settings_from_args(args)
        fans_out = settings.fan_out and may_fan_out(args, evaluation=evaluation)
        beginning = begin_sample(sample, may_resume=settings.resume_aborted)
        routing_key = getattr(sample, "session_id", None) or uuid.uuid4().hex
        job = _Job(args, sample, sampling_params, settings, beginning, evaluation, fans_out, routing_key)
        played = await _run(job)
        log_episode(sample, played.episode)
        others = _write(job, played)
    except Exception as e:  # a training run must survive every failure of one sample
        log_failure(sample, e)
        write_failure(sample, e, reason_of_failure(e))
    for one in [sample, *(other for _, other in others)]:
        fill_replay_gaps(args, one, sampling_params)
    # slime takes back one aborted sample, and never a list; of any other episode it wants lists if it gets one
    is_list = fans_out and sample.status is not type(sample).Status.ABORTED
    return as_fan_out(sample, others) if is_list else sample


def _write(job: _Job, played: _Played) -> list[tuple[str, Any]]:
    """Fill the job's sample; return its siblings with their kinds, where there are any."""
    settings, code_calls = job.settings, played.code_calls
    beside = spoken_beside(played.model, played.sub_agents.made, played.episode.tools.succeeded)
    # tokens beside those of the sample can't be saved
    is_whole = not played.model.conversation.segments and not (job.fans_out and beside)
    if not is_whole and settings.resume_aborted and played.episode.stop_reason is StopReason.ABORTED:
        logger.warning("aborted sample will start afresh index=%s reason=it has several segments", job.sample.index)
    write_episode(
        job.args,
        job.sample,
        played.model,
        played.episode,
        may_abort=may_return_aborted(job.args, job.sample),
        code_calls=code_calls,
        beginning=job.beginning,
        keep_progress=settings.resume_aborted and is_whole,
        max_staleness=settings.max_staleness,
    )
    return siblings(job.args, job.sample, beside if job.fans_out else [], max_staleness=settings.max_staleness)


def reason_of_failure(error: Exception) -> StopReason:
    """Why no episode could be run, or none could be written."""
    kinds: list[tuple[type[Exception], StopReason]] = [
        (SandboxError, StopReason.SANDBOX_ERROR),
        (EngineError, StopReason.ENGINE_ERROR),
        (RolloutError, StopReason.SETUP_ERROR),
    ]
    return next((reason for kind, reason in kinds if isinstance(error, kind)), StopReason.INTERNAL_ERROR)


@dataclass(frozen=True, slots=True)
class _Job:
    """What one call of `generate` is about."""

    args: Any
    sample: Any
    sampling_params: Mapping[str, Any]
    settings: RolloutSettings
    beginning: Beginning
    evaluation: bool
    fans_out: bool
    routing_key: str

    def should_abort(self) -> bool:
        """Whether the rollout is being aborted."""
        return is_aborting(self.args, self.sample, self.settings.should_abort)


@dataclass(frozen=True, slots=True)
class _Played:
    """An episode and whoever played in it."""

    model: SGLangModel
    episode: Episode
    code_calls: CodeCalls
    sub_agents: AgentModels


async def _run(job: _Job) -> _Played:
    settings, resume = job.settings, job.beginning.resume
    await once(getattr(job.args, "hf_checkpoint", None), lambda: _prepare(job))
    model = _build_model(job)
    prompt = to_episode_prompt(job.sample.prompt, settings.system_prompt, model.template)
    code_calls = CodeCalls(**resume.code) if resume else CodeCalls()
    if resume:
        model.resume(resume.trajectory, resume.progress.messages, resume.progress.covered)
    sub_agents = AgentModels(lambda name: _build_model(job, name, lambda: sub_agents.is_closed or job.should_abort()))
    limits = EpisodeLimits(
        max_tool_iterations=settings.max_tool_iterations,
        max_tool_calls=settings.max_tool_calls,
        max_parallel_tool_calls=settings.max_parallel_tool_calls,
        tool_timeout_s=settings.tool_timeout_s,
        episode_timeout_s=settings.episode_timeout_s,
    )
    with sub_agents.active():
        async with episode_code_tool(settings, code_calls) as code_tool:
            episode = await run_episode(
                model,
                prompt.messages,
                system_prompt=prompt.system_prompt,
                tools=build_tools(settings, code_tool),
                limits=limits,
                hooks=load_hooks(settings.hooks),
                self_timed_tools=() if code_tool is None else (CODE_TOOL_NAME,),
                tool_span=tool_span(job.sample),
                should_abort=job.should_abort,
                engine_grace_s=_engine_grace_s(job),
                conversation_manager=load_conversation_manager(settings.conversation_manager),
                progress=resume.progress if resume else None,
            )
    return _Played(model, episode, code_calls, sub_agents)


def _prepare(job: _Job) -> None:
    """Load the tokenizer and try out its template: all that later models share."""
    _build_model(job)
    if job.settings.freeze_gc:
        freeze_long_lived()


def _engine_grace_s(job: _Job) -> float:
    """How long an aborted generation is waited for: slime repeats its abort every 3 s until the engines are idle."""
    if job.settings.abort_grace_s is not None:
        return job.settings.abort_grace_s
    collected = collects_partial_rollouts(job.args) or job.settings.should_abort is not None
    kept = job.settings.resume_aborted and collected
    return _PARTIAL_GRACE_S if kept else ABORT_GRACE_S


def _build_model(job: _Job, agent: str = "", should_abort: Callable[[], bool] | None = None) -> SGLangModel:
    """The policy for one agent; the main one has no name."""
    args, settings = job.args, job.settings
    params = dict(job.sampling_params)
    if agent and params.get("sampling_seed") is not None:
        params["sampling_seed"] = turn_seed(params["sampling_seed"], agent)
    limits = TokenLimits(
        max_response_tokens=params.pop("max_new_tokens", None),
        max_context_tokens=context_limit(args, evaluation=job.evaluation),
        max_turn_tokens=settings.max_turn_tokens,
        min_turn_tokens=settings.min_turn_tokens,
    )
    return SGLangModel(
        tokenizer=tokenizer_of(args, job.sample),
        base_url=router_url(args, settings.model_name),
        vocab_size=vocab_size_of(args),
        tool_parser=settings.tool_parser,
        sampling_params=params,
        enable_thinking=settings.enable_thinking,
        chat_template_kwargs=template_kwargs(args, job.sample),
        limits=limits,
        extra={ASK_EXPERTS: True} if getattr(args, "use_rollout_routing_replay", False) else None,
        headers={ROUTING_HEADER: job.routing_key},
        continue_aborted=settings.on_engine_abort == "continue",
        should_abort=should_abort or job.should_abort,
        request_span=request_span(job.sample),
        on_rewritten_history="segment" if agent or settings.conversation_manager else "error",
    )


def build_tools(settings: RolloutSettings, code_tool: Any) -> list[Any]:  # noqa: ANN401 - a Strands tool, or None
    """The tools in their configured order."""
    tools: list[Any] = []
    for path in settings.tools:
        tools += [code_tool] if path == CODE_TOOL_PATH else load_tools([path])
    return tools


def template_kwargs(args: Any, sample: Any) -> Mapping[str, Any]:  # noqa: ANN401
    """Slime sets them per data set, on the sample; `--apply-chat-template-kwargs` otherwise."""
    return (
        getattr(sample, "apply_chat_template_kwargs", None) or getattr(args, "apply_chat_template_kwargs", None) or {}
    )


def context_limit(args: Any, *, evaluation: bool) -> int | None:  # noqa: ANN401
    """Slime's context limit: the configured one, else what a training batch can hold, else only the engine's."""
    names = ("eval_max_context_len", "rollout_max_context_len") if evaluation else ("rollout_max_context_len",)
    for name in names:
        limit = getattr(args, name, None)
        if limit is not None:
            return int(limit)
    max_tokens_per_gpu = getattr(args, "max_tokens_per_gpu", None)
    if evaluation or max_tokens_per_gpu is None:
        return None
    return int(max_tokens_per_gpu) * int(getattr(args, "context_parallel_size", None) or 1)


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
