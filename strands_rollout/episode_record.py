"""What a sample says of its episode in `metadata["strands_rollout"]`: plain JSON, for reward, metrics and viewers.

Knows episodes and the model that played them; nothing of slime's Sample.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from strands_rollout.agent import Episode
from strands_rollout.conversation import Segment
from strands_rollout.sglang_model import SGLangModel
from strands_rollout.staleness import distinct_versions
from strands_rollout.stop_reason import StopReason
from strands_rollout.tools import CodeCalls

METADATA_KEY: Final = "strands_rollout"
METADATA_VERSION: Final = 2
RESUME_KEY: Final = "resume"
FAN_OUT_KEY: Final = "fan_out"
SCORE_KEY: Final = "environment_score"


def episode_record(
    model: SGLangModel, episode: Episode, code_calls: CodeCalls, *, aborts: int, resumes: int, engine_aborts: int
) -> dict[str, Any]:
    """The facts of an episode, those before it was resumed included.

    Args:
        model: Its policy.
        episode: Its end.
        code_calls: What its code tool did.
        aborts: How often the sample had come back ABORTED before.
        resumes: How often it was gone on with.
        engine_aborts: Requests that the engine aborted and that were continued in place.
    """
    return {
        **agent_record(model, model.conversation.last_segment(), episode.stop_reason),
        "generate_s": _generate_s(model),
        "error": None if episode.error is None else error_text(episode.error),
        "tool_iterations": episode.tool_iterations,
        "tool_calls": episode.tool_calls,
        "user_turns": episode.user_turns,
        "tool_errors": episode.tools.errors,
        "tool_timeouts": episode.tools.timeouts,
        "tool_s": episode.tools.seconds,
        "calls": episode.tools.calls,
        "code": asdict(code_calls),
        "duration_s": episode.duration_s,
        "segments": len(model.conversation.segments) + 1,
        "stale_tokens": 0,
        "aborts": aborts,
        "resumes": resumes,
        "engine_aborts": engine_aborts,
        "budgets": _budgets_used(model, episode),
    }


def _generate_s(model: SGLangModel) -> float:
    segments = [*model.conversation.beside_last(), model.conversation.last_segment()]
    return sum(turn.latency_s for segment in segments for turn in segment.trajectory.turns)


def agent_record(model: SGLangModel, segment: Segment, stop_reason: StopReason) -> dict[str, Any]:
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
        "template_kwargs": model.template_kwargs,
        "turns": len(trajectory.turns),
        "parse_failures": len(segment.parse_failures),
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
    }


def _budgets_used(model: SGLangModel, episode: Episode) -> dict[str, float | None]:
    """Used shares of the limits, from 0.0 to 1.0; None where there is none."""
    trajectory, limits, tokens = model.trajectory, episode.limits, model.config["limits"]
    contexts = [limit for limit in (tokens.max_context_tokens, model.context_window_limit) if limit is not None]
    amounts = {
        "response": (
            model.conversation.earlier_response_length + trajectory.response_length,
            tokens.max_response_tokens,
        ),
        "context": (len(trajectory.token_ids), min(contexts, default=None)),
        "tool_iterations": (episode.tool_iterations, limits.max_tool_iterations),
        "tool_calls": (episode.tool_calls, limits.max_tool_calls),
    }
    return {name: used / limit if limit else None for name, (used, limit) in amounts.items()}


def error_text(error: BaseException) -> str:
    """The error in at most 2,000 characters."""
    return f"{type(error).__name__}: {error}"[:2000]
