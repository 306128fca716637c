"""The one seam to slime: its `Sample`, its generation state and its abort flag, or our equals where slime is absent.

slime is imported here only, inside functions. It is installed from its repository; the `slime` of PyPI is another package.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from strands_rollout.errors import ConfigError

logger = logging.getLogger(__name__)


def is_slime_sample(sample: object) -> bool:
    """Whether a sample is slime's own, so that slime's state is there to be asked."""
    return any(base.__module__.startswith("slime.") for base in type(sample).__mro__)


def tokenizer_of(args: Any, sample: object) -> Any:  # noqa: ANN401 - slime's Namespace; any Hugging Face tokenizer
    """The tokenizer that slime already holds, or the one of `args.hf_checkpoint`, loaded once per process.

    Raises:
        ConfigError: There is no usable checkpoint.
    """
    state = _generate_state(args) if is_slime_sample(sample) else None
    if state is not None:
        return state.tokenizer
    checkpoint = getattr(args, "hf_checkpoint", None)
    if not checkpoint:
        raise ConfigError("got no hf_checkpoint in args; expected the folder or hub id of the model whose tokenizer is used")
    return _load_tokenizer(str(checkpoint))


def is_aborting(args: Any, sample: object) -> bool:  # noqa: ANN401 - slime's Namespace
    """Whether slime is collecting: every running episode should return at once, as ABORTED."""
    state = _generate_state(args) if is_slime_sample(sample) else None
    return state is not None and bool(state.aborted)


def may_return_aborted(args: Any, sample: object) -> bool:  # noqa: ANN401 - slime's Namespace
    """Whether slime can take an ABORTED sample now.

    It recycles them while it is aborting and in its fully-async rollout; at any other time one crashes the run.
    """
    if not is_slime_sample(sample):
        return True
    return is_aborting(args, sample) or "fully_async" in (getattr(args, "rollout_function_path", None) or "")


def _generate_state(args: Any) -> Any:  # noqa: ANN401
    """slime's process-wide state; None where its samples are used outside its rollout, whose args it would need."""
    from slime.rollout.sglang_rollout import GenerateState

    try:
        return GenerateState(args)
    except AttributeError as e:
        logger.debug("slime's GenerateState can't be made from these args error=%s", e)
        return None


@functools.lru_cache(maxsize=8)
def _load_tokenizer(checkpoint: str) -> Any:  # noqa: ANN401
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError) as e:
        raise ConfigError(f"got hf_checkpoint={checkpoint!r}, whose tokenizer can't be loaded: {e}") from e
