"""What one call of `generate` is about, and the policy for each of its agents, as slime's args and the settings ask.

Glue: knows slime's args behind their seam, settings and the model; nothing of how an episode is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from strands_rollout.config import RolloutSettings
from strands_rollout.episode_deadline import ABORT_GRACE_S
from strands_rollout.replay_data import ASK_EXPERTS
from strands_rollout.sample_beginning import Beginning
from strands_rollout.sglang_model import SGLangModel
from strands_rollout.slime_seam import (
    collects_partial_rollouts,
    is_aborting,
    processor_of,
    request_span,
    router_url,
    tokenizer_of,
    vocab_size_of,
)
from strands_rollout.token_limits import TokenLimits
from strands_rollout.turn_params import turn_seed

ROUTING_HEADER: Final = "X-SMG-Routing-Key"
_PARTIAL_GRACE_S: Final = 4.0


@dataclass(frozen=True, slots=True)
class RolloutJob:
    """One call of `generate`.

    Attributes:
        args: slime's.
        sample: slime's or ours, made ready.
        sampling_params: slime's.
        settings: Of this episode.
        beginning: How the sample came.
        evaluation: Whether the episode is one of an evaluation.
        fans_out: Whether a list of samples can be returned.
        routing_key: Keeps its requests on one engine behind a router.
    """

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

    @property
    def engine_grace_s(self) -> float:
        """Seconds that an aborted generation is waited for: slime repeats its abort every 3 s until they idle."""
        if self.settings.abort_grace_s is not None:
            return self.settings.abort_grace_s
        collected = collects_partial_rollouts(self.args) or self.settings.should_abort is not None
        kept = self.settings.resume_aborted and collected
        return _PARTIAL_GRACE_S if kept else ABORT_GRACE_S

    def build_model(self, agent: str = "", should_abort: Callable[[], bool] | None = None) -> SGLangModel:
        """The policy for one agent; the main one has no name."""
        args, settings = self.args, self.settings
        params = dict(self.sampling_params)
        if agent and params.get("sampling_seed") is not None:
            params["sampling_seed"] = turn_seed(params["sampling_seed"], agent)
        may_rewrite = bool(agent or settings.conversation_manager or settings.agent_factory)
        limits = TokenLimits(
            max_response_tokens=params.pop("max_new_tokens", None),
            max_context_tokens=context_limit(args, evaluation=self.evaluation),
            max_turn_tokens=settings.max_turn_tokens,
            min_turn_tokens=settings.min_turn_tokens,
        )
        return SGLangModel(
            tokenizer=tokenizer_of(args, self.sample),
            base_url=router_url(args, settings.model_name),
            vocab_size=vocab_size_of(args),
            tool_parser=settings.tool_parser,
            sampling_params=params,
            enable_thinking=settings.enable_thinking,
            chat_template_kwargs=template_kwargs(args, self.sample),
            limits=limits,
            extra={ASK_EXPERTS: True} if getattr(args, "use_rollout_routing_replay", False) else None,
            headers={ROUTING_HEADER: self.routing_key},
            continue_aborted=settings.on_engine_abort == "continue",
            should_abort=should_abort or self.should_abort,
            request_span=request_span(self.sample),
            on_rewritten_history="segment" if may_rewrite else "error",
            processor=processor_of(args, self.sample),
        )


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
