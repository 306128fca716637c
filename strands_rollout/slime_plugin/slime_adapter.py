"""The one seam to slime: its `Sample`, its generation state, abort flag and trace, or our equals where slime is absent.

slime is imported here only, inside functions. It is installed from its repository; the `slime` of PyPI is another
package. Written for slime 0.3.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from strands_rollout.bounded_tool import ToolSpan, no_tool_span
from strands_rollout.errors import ConfigError
from strands_rollout.turn_sampler import RequestSpan, no_note, no_span

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


def processor_of(args: Any, sample: object) -> Any:  # noqa: ANN401 - slime's Namespace; any Hugging Face processor
    """The processor that slime already holds, or the checkpoint to load it from when the first image occurs."""
    held = getattr(_generate_state(args, sample), "processor", None)
    return held if held is not None else str(getattr(args, "hf_checkpoint", None) or "") or None


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


def router_url(args: Any, model_name: str | None) -> str:  # noqa: ANN401 - slime's Namespace
    """The URL of the router before a named model of slime's `--sglang-config`; of its first model if there is no name.

    Raises:
        ConfigError: There is no such model, or no router at all.
    """
    routers = getattr(args, "sglang_model_routers", None) or {}
    if model_name is not None and model_name not in routers:
        known = ", ".join(map(repr, sorted(routers))) or "none"
        raise ConfigError(f"got model_name={model_name!r}; slime serves these models: {known}")
    named = routers[model_name] if model_name is not None else (None, None)
    host = named[0] or getattr(args, "sglang_router_ip", None)
    port = named[1] or getattr(args, "sglang_router_port", None)
    if not host or not port:
        raise ConfigError(f"got sglang_router_ip={host!r} and sglang_router_port={port!r}; expected both in args")
    return f"http://{host}:{port}"


def is_aborting(
    args: Any,  # noqa: ANN401 - slime's Namespace
    sample: object,
    asked: str | Callable[[], bool] | None = None,
) -> bool:
    """Whether the rollout is being aborted: every running episode should return at once, as ABORTED.

    Args:
        args: slime's.
        sample: slime's own flag is asked where the sample is slime's.
        asked: A function that knows, or its dotted path, asked as well.

    Raises:
        ConfigError: The path names nothing.
    """
    if asked is not None and bool((load_should_abort(asked) if isinstance(asked, str) else asked)()):
        return True
    return bool(getattr(_generate_state(args, sample), "aborted", False))


@functools.lru_cache(maxsize=8)
def load_should_abort(path: str) -> Callable[[], bool]:
    """The function of a dotted path.

    Raises:
        ConfigError: The path names none.
    """
    try:
        found = pkgutil.resolve_name(path)
    except (ValueError, ImportError, AttributeError) as e:
        raise ConfigError(f"got should_abort={path!r}; expected the dotted path of a function: {e}") from e
    if not callable(found):
        raise ConfigError(f"got should_abort={path!r}, a {type(found).__name__}; expected a function of no arguments")
    return found  # type: ignore[no-any-return]


def may_return_aborted(args: Any, sample: object) -> bool:  # noqa: ANN401 - slime's Namespace
    """Whether slime can take an ABORTED sample now.

    It recycles them while it is aborting and in its fully-async rollout; at any other time one crashes the run.
    """
    if not is_slime_sample(sample):
        return True
    return is_aborting(args, sample) or _FULLY_ASYNC in (getattr(args, "rollout_function_path", None) or "")


def collects_partial_rollouts(args: Any) -> bool:  # noqa: ANN401 - slime's Namespace
    """Whether slime keeps aborted samples for its next rollout."""
    return bool(getattr(args, "partial_rollout", False))


def request_span(sample: object) -> RequestSpan:
    """Records each request to the engine in slime's trace, from which slime takes its request metrics.

    Args:
        sample: Nothing is recorded unless it is slime's.
    """
    if not is_slime_sample(sample):
        return no_span

    @contextmanager
    def span(max_new_tokens: int | None) -> Iterator[Callable[[Mapping[str, Any]], object]]:
        with _trace_span(sample, "sglang_generate", {"max_new_tokens": max_new_tokens}) as record:
            # slime hands the sample back where it could not open a span
            yield no_note if record is sample else lambda meta: record.update(_meta_attributes(dict(meta)))

    return span


def tool_span(sample: object) -> ToolSpan:
    """Records each tool call in slime's trace, as `tool:<name>`; nothing unless the sample is slime's."""
    if not is_slime_sample(sample):
        return no_tool_span
    return lambda name: _trace_span(sample, f"tool:{name}")


@contextmanager
def _trace_span(sample: object, name: str, attrs: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """One of slime's spans, which ends however its block does: by itself slime ends it for an `Exception` only."""
    from slime.observability.trace_utils import trace_span

    span = trace_span(sample, name, attrs=attrs)
    record = span.__enter__()
    try:
        yield record
    except Exception:
        span.__exit__(*sys.exc_info())
        raise
    except BaseException:  # a cancellation, for which slime's span would not end
        span.__exit__(None, None, None)
        raise
    else:
        span.__exit__(None, None, None)


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
