"""`generate` through text: the same agent on Strands' own OpenAI model and the engine's `/v1/chat/completions`.

For comparison with `strands_rollout.generate`: settings, tools, limits, aborts, statuses and facts are the same, and
only the source of the tokens differs. The engine renders the messages again for each turn, and returns each sampled
turn as a message. After the episode, the whole conversation is rendered and encoded once, and the mask is computed from
this rendering (`chat_transcript`). This loses or changes

- the sampled tokens: text that the policy spelled with other tokens is trained with the tokenizer's tokens
- logprobs: the endpoint returns them for the sampled tokens, not for the trained ones
- the prompt: an engine may render tools differently (SGLang 0.5.23 adds `"defer_loading": null` to each), so that every
  turn is sampled after another prompt than the one in training
- the text of calls: their JSON is parsed and rendered again (white space, escapes, numbers), and text between or after
  calls moves before them
- white space around content and reasoning, which engines strip
- missing reasoning: if the template adds an empty reasoning block to the last turn, the block is trained although it
  was not sampled
- reasoning in later prompts: Strands' model drops it, so that later turns are sampled without reasoning that precedes
  them in training
- calls that can't be parsed: they stay in the content, the episode ends with them as its answer, and the policy gets no
  error message
- untrusted text: a tool result that contains the text of a control token becomes that token, in prompt and training
- turns that the engine aborts, as for a weight update: their tokens are lost, and the episode starts from scratch.

Several calls of one turn, and their results in order, are preserved. Results that exceed the budget are not cut.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

from strands.agent.conversation_manager import NullConversationManager

from experiments.chat_policy import ChatPolicy, RecordedChat, chat_client, engine_context, request_params
from experiments.chat_transcript import ChatRenderer, Transcript
from strands_rollout.agent.episode import EpisodeSetup, run_episode
from strands_rollout.agent.limits import EpisodeLimits, StopReason, reason_of_error
from strands_rollout.agent.run import Episode
from strands_rollout.agent.tool_loading import load_hooks
from strands_rollout.aio import run_once
from strands_rollout.code_tool.tool import CODE_TOOL_NAME, CodeCallTotals, episode_code_tool
from strands_rollout.errors import ConfigError
from strands_rollout.model.sampling import TokenLimits
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.samples import METADATA_KEY, METADATA_VERSION, EpisodeFacts
from strands_rollout.settings import RolloutSettings, settings_from_args
from strands_rollout.slime_plugin.conditions import context_limit, template_kwargs
from strands_rollout.slime_plugin.episode import build_tools, log_episode, log_failure
from strands_rollout.slime_plugin.inputs import to_episode_prompt, with_row_settings
from strands_rollout.slime_plugin.metrics import TRUNCATING
from strands_rollout.slime_plugin.resume import prepare_sample
from strands_rollout.slime_plugin.sample_writer import (
    WritingRules,
    error_text,
    write_facts,
    write_failure,
    write_untrained,
)
from strands_rollout.slime_plugin.slime_adapter import (
    may_return_aborted,
    rollout_control,
    router_url,
    tokenizer_of,
    tool_span,
)

TEXT_ENDPOINT_KEY: Final = "text_endpoint"
"""Key of a fact: the changes that the text endpoint caused, as counts; see `Transcript`."""


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:  # noqa: FBT001 - slime's signature
    """Run one agent episode for a sample through the chat endpoint.

    `rollout_log_probs` is None, because the logprobs of the trained tokens are unknown; an ABORTED sample starts from
    scratch. The settings `fan_out`, `conversation_manager`, `agent_factory`, `environment` and `resources` are refused:
    the sample is FAILED.

    Args:
        args: slime's args, as `strands_rollout.generate` reads them.
        sample: slime's `Sample`, or this package's; filled in place.
        sampling_params: slime's sampling parameters; those about decoding to text, such as `skip_special_tokens`, have
            no effect.
        evaluation: Whether this is an evaluation rollout, which has its own context limit.

    Returns:
        The same sample, valid whatever happened.

    Raises:
        asyncio.CancelledError: The caller was cancelled. Nothing else is raised.
    """
    try:
        settings = _checked(with_row_settings(settings_from_args(args), sample.metadata))
        aborts = prepare_sample(sample, None, may_resume=False).aborts
        played = await _run(args, sample, sampling_params, settings, evaluation=evaluation)
        log_episode(sample, played.episode)
        _write(args, sample, played, aborts, sampling_params)
    except Exception as e:  # a training run must survive every failure of one sample
        log_failure(sample, e)
        write_failure(sample, e, reason_of_error(e), WritingRules())
        sample.rollout_log_probs = None
    return sample


def _checked(settings: RolloutSettings) -> RolloutSettings:
    missing = ("fan_out", "conversation_manager", "agent_factory", "environment", "resources")
    given = [name for name in missing if getattr(settings, name)]
    if given:
        raise ConfigError(
            f"got {', '.join(given)}; expected none of these: through a chat endpoint, one agent plays with one history"
        )
    return settings


@dataclass(frozen=True, slots=True)
class _Played:
    """An episode and its traffic with the endpoint."""

    episode: Episode
    chat: RecordedChat
    renderer: ChatRenderer
    code_calls: CodeCallTotals


async def _run(
    args: Any,
    sample: Any,
    sampling_params: Mapping[str, Any],
    settings: RolloutSettings,
    *,
    evaluation: bool,
) -> _Played:
    kwargs = dict(template_kwargs(args, sample))
    if settings.enable_thinking is not None:
        kwargs["enable_thinking"] = settings.enable_thinking
    checkpoint = getattr(args, "hf_checkpoint", None)
    await run_once(("chat endpoint", checkpoint), lambda: ChatRenderer(tokenizer_of(args, sample), kwargs))
    renderer = ChatRenderer(tokenizer_of(args, sample), kwargs)
    prompt = to_episode_prompt(sample.prompt, settings.system_prompt, renderer.template)
    url = router_url(args, settings.model_name)
    limits = TokenLimits(
        max_response_tokens=sampling_params.get("max_new_tokens"),
        max_context_tokens=context_limit(args, evaluation=evaluation),
        max_turn_tokens=settings.max_turn_tokens,
    )
    chat = RecordedChat(
        chat_client(url),
        renderer.prompt_ids,
        limits,
        engine_context=await engine_context(url),
        seed=sampling_params.get("sampling_seed"),
    )
    policy = ChatPolicy(chat, request_params(sampling_params, kwargs, getattr(sample, "session_id", None)))
    code_calls = CodeCallTotals()
    async with episode_code_tool(settings, code_calls) as code_tool:
        episode = await run_episode(
            cast("SGLangModel", policy),  # an episode uses only the part of the interface that the policy has
            prompt.messages,
            EpisodeSetup(
                system_prompt=prompt.system_prompt,
                tools=build_tools(settings, code_tool),
                limits=EpisodeLimits(
                    max_tool_iterations=settings.max_tool_iterations,
                    max_tool_calls=settings.max_tool_calls,
                    max_parallel_tool_calls=settings.max_parallel_tool_calls,
                    tool_timeout_s=settings.tool_timeout_s,
                    episode_timeout_s=settings.episode_timeout_s,
                ),
                hooks=load_hooks(settings.hooks),
                self_timed_tools=() if code_tool is None else (CODE_TOOL_NAME,),
                tool_span=tool_span(sample),
                control=rollout_control(args, sample, settings.should_abort),
                # Strands' own loop plays the episode: this package's faster loop needs an `SGLangModel`
                conversation_manager=NullConversationManager(),
            ),
        )
    return _Played(episode, chat, renderer, code_calls)


def _write(args: Any, sample: Any, played: _Played, aborts: int, sampling_params: Mapping[str, Any]) -> None:
    """Fill the sample from the traffic with the endpoint."""
    chat, reason = played.chat, played.episode.stop_reason
    transcript = played.renderer.transcript(chat.turns) if chat.turns else None
    if transcript is not None and transcript.spans:
        sample.tokens, sample.loss_mask = transcript.tokens, transcript.loss_mask
        sample.response_length = len(transcript.loss_mask)
        sample.response = played.renderer.template.encoder.decode(transcript.tokens[transcript.prompt_length :])
    else:
        write_untrained(sample, chat.prompt_ids, played.renderer.template.end_of_turn_id)
    sample.rollout_log_probs = None
    sample.weight_versions = _versions(chat)
    sample.status = _status(sample, reason, may_abort=may_return_aborted(args, sample))
    if sample.status is type(sample).Status.FAILED:
        sample.loss_mask, sample.remove_sample = [0] * sample.response_length, True
    sample.non_generation_time = played.episode.tools.waited_s
    write_facts(sample, _facts(played, transcript, aborts, sampling_params))
    sample.metadata[METADATA_KEY][TEXT_ENDPOINT_KEY] = _losses(transcript)


def _status(sample: Any, reason: StopReason, *, may_abort: bool) -> Any:
    status = type(sample).Status
    if reason is StopReason.COMPLETED:
        return status.COMPLETED
    if str(reason) in TRUNCATING:
        return status.TRUNCATED
    return status.ABORTED if reason is StopReason.ABORTED and may_abort else status.FAILED


def _facts(
    played: _Played, transcript: Transcript | None, aborts: int, sampling_params: Mapping[str, Any]
) -> EpisodeFacts:
    episode, chat = played.episode, played.chat
    spans = transcript.spans if transcript else []
    return EpisodeFacts(
        version=METADATA_VERSION,
        stop_reason=str(episode.stop_reason),
        error=None if episode.error is None else error_text(episode.error),
        final_text=transcript.final_text if transcript else "",
        final_in_reasoning=played.renderer.template.opens_reasoning,
        final_is_cut=bool(chat.turns) and chat.turns[-1].finish_reason == "length",
        turns=len(chat.turns),
        parse_failures=0,
        generate_s=sum(turn.latency_s for turn in chat.turns),
        turn_s=[turn.latency_s for turn in chat.turns],
        sampled_tokens=sum(turn.completion_tokens for turn in chat.turns),
        spans=[
            [number, start, end, turn.weight_version]
            for number, (turn, (start, end)) in enumerate(zip(chat.turns, spans, strict=False))
        ],
        weight_versions=_versions(chat),
        tool_iterations=episode.tool_iterations,
        tool_calls=episode.tool_calls,
        user_turns=episode.user_turns,
        tool_errors=episode.tools.errors,
        tool_timeouts=episode.tools.timeouts,
        unknown_tools=sum(call["status"] == "unknown" for call in episode.tools.calls),
        tool_s=episode.tools.seconds,
        calls=episode.tools.calls,
        code=asdict(played.code_calls),
        duration_s=episode.duration_s,
        segments=1,
        stale_tokens=0,
        aborts=aborts,
        resumes=0,
        engine_aborts=0,
        sampling_params=dict(sampling_params),
    )


def _losses(transcript: Transcript | None) -> dict[str, int | None]:
    """Return the number of trained tokens, and the changes that the text endpoint caused."""
    return {
        "trained_tokens": sum(end - start for start, end in transcript.spans) if transcript else 0,
        "unmatched_sampled": transcript.unmatched_sampled if transcript else None,
        "unmatched_trained": transcript.unmatched_trained if transcript else None,
        "reread_turns": transcript.reread_turns if transcript else 0,
        "foreign_prompts": transcript.foreign_prompts if transcript else 0,
    }


def _versions(chat: RecordedChat) -> list[str]:
    """Return the distinct weight versions, in the order of their first turns."""
    return list(dict.fromkeys(turn.weight_version for turn in chat.turns if turn.weight_version is not None))
