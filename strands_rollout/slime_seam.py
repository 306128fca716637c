"""The one seam to slime: its `Sample`, its generation state, abort flag and trace, or our equals where slime is absent.

slime is imported here only, inside functions. It is installed from its repository; the `slime` of PyPI is another
package. Written for slime 0.3.
"""

from __future__ import annotations

import functools
import sys
from contextlib import AbstractContextManager
from typing import Any, Final

from strands.hooks import (
    AfterModelCallEvent,
    AfterToolCallEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    HookProvider,
    HookRegistry,
)

from strands_rollout.errors import ConfigError
from strands_rollout.trajectory import Trajectory

_STATE_MODULE: Final = "slime.rollout.sglang_rollout"
_FULLY_ASYNC: Final = "fully_async"


def is_slime_sample(sample: object) -> bool:
    """Whether a sample is slime's own, so that slime's state is there to be asked."""
    return any(base.__module__.startswith("slime.") for base in type(sample).__mro__)


def tokenizer_of(args: Any, sample: object) -> Any:  # noqa: ANN401 - slime's Namespace; any Hugging Face tokenizer
    """The tokenizer that slime already holds, or the one of `args.hf_checkpoint`, loaded once per process.

    Raises:
        ConfigError: There is no usable checkpoint.
    """
    held = getattr(_generate_state(args, sample), "tokenizer", None)
    if held is not None:
        return held
    checkpoint = getattr(args, "hf_checkpoint", None)
    if not checkpoint:
        raise ConfigError(
            "got no hf_checkpoint in args; expected the folder or hub id of the model whose tokenizer is used"
        )
    return load_tokenizer(str(checkpoint))


@functools.lru_cache(maxsize=8)
def load_tokenizer(checkpoint: str) -> Any:  # noqa: ANN401 - any Hugging Face tokenizer
    """The tokenizer of a folder or hub id, loaded once per process.

    Raises:
        ConfigError: It can't be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError) as e:
        raise ConfigError(f"got hf_checkpoint={checkpoint!r}, whose tokenizer can't be loaded: {e}") from e


def vocab_size_of(args: Any) -> int | None:  # noqa: ANN401 - slime's Namespace
    """Rows of the embedding by the model's config, maybe more than the tokenizer knows; None without a config."""
    checkpoint = getattr(args, "hf_checkpoint", None)
    return _load_vocab_size(str(checkpoint)) if checkpoint else None


@functools.lru_cache(maxsize=8)
def _load_vocab_size(checkpoint: str) -> int | None:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(checkpoint)
    except (OSError, ValueError):  # a folder with a tokenizer alone
        return None
    size = getattr(config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def is_aborting(args: Any, sample: object) -> bool:  # noqa: ANN401 - slime's Namespace
    """Whether slime is collecting: every running episode should return at once, as ABORTED."""
    return bool(getattr(_generate_state(args, sample), "aborted", False))


def may_return_aborted(args: Any, sample: object) -> bool:  # noqa: ANN401 - slime's Namespace
    """Whether slime can take an ABORTED sample now.

    It recycles them while it is aborting and in its fully-async rollout; at any other time one crashes the run.
    """
    if not is_slime_sample(sample):
        return True
    return is_aborting(args, sample) or _FULLY_ASYNC in (getattr(args, "rollout_function_path", None) or "")


def trace_hooks(sample: object, trajectory: Trajectory) -> list[HookProvider]:
    """Strands hooks that record an episode in slime's trace, from which slime takes its request metrics.

    Args:
        sample: Nothing is recorded unless it is slime's.
        trajectory: The episode's; its turns carry the engine's `meta_info`.
    """
    return [_EpisodeTrace(sample, trajectory)] if is_slime_sample(sample) else []


class _EpisodeTrace(HookProvider):
    """A span for each model turn and each tool call, under the names that slime's metrics look for."""

    def __init__(self, sample: object, trajectory: Trajectory) -> None:
        self._sample = sample
        self._trajectory = trajectory
        self._turn: tuple[AbstractContextManager[Any], Any, int] | None = None
        self._tools: dict[str, AbstractContextManager[Any]] = {}

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:  # noqa: ARG002, ANN401 - Strands' signature
        """Called by Strands."""
        registry.add_callback(BeforeModelCallEvent, self._before_turn)
        registry.add_callback(AfterModelCallEvent, self._after_turn)
        registry.add_callback(BeforeToolCallEvent, self._before_tool)
        registry.add_callback(AfterToolCallEvent, self._after_tool)

    def _before_turn(self, event: BeforeModelCallEvent) -> None:  # noqa: ARG002 - Strands' signature
        span = _trace_span(self._sample, "sglang_generate")
        self._turn = (span, span.__enter__(), len(self._trajectory.turns))

    def _after_turn(self, event: AfterModelCallEvent) -> None:  # noqa: ARG002 - Strands' signature
        if self._turn is None:  # another hook refused the call before this one saw it
            return
        span, record, turns_before = self._turn
        self._turn = None
        if record is not self._sample:  # what slime hands back where it could not open a span
            for turn in self._trajectory.turns[turns_before:]:
                record.update(_meta_attributes(dict(turn.meta_info)))
        span.__exit__(None, None, None)

    def _before_tool(self, event: BeforeToolCallEvent[Any]) -> None:
        span = self._tools[event.tool_use["toolUseId"]] = _trace_span(self._sample, f"tool:{event.tool_use['name']}")
        span.__enter__()

    def _after_tool(self, event: AfterToolCallEvent[Any]) -> None:
        span = self._tools.pop(event.tool_use["toolUseId"], None)
        if span is not None:
            span.__exit__(None, None, None)


def _trace_span(sample: object, name: str) -> AbstractContextManager[Any]:
    from slime.observability.trace_utils import trace_span

    return trace_span(sample, name)  # type: ignore[no-any-return]


def _meta_attributes(meta_info: dict[str, Any]) -> dict[str, Any]:
    from slime.observability.trace_utils import build_sglang_meta_trace_attrs

    return build_sglang_meta_trace_attrs(meta_info)  # type: ignore[no-any-return]


def _generate_state(args: Any, sample: object) -> Any:  # noqa: ANN401
    """Slime's process-wide state, where its rollout has made it; None elsewhere.

    It is not made here: that loads a tokenizer and needs all of slime's args, which a caller of `generate` outside of
    slime's rollout has no use for.
    """
    state_class = getattr(sys.modules.get(_STATE_MODULE), "GenerateState", None)
    if state_class is None or not is_slime_sample(sample):
        return None
    instances = getattr(state_class, "_instances", None)
    return state_class(args) if instances is None else instances.get(state_class)
