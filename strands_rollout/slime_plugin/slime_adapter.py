"""What is read of slime itself: its generation state, abort flag and trace, or our own equivalents where it is absent.

slime is imported here only, inside functions. It is installed from its repository; the `slime` of PyPI is another
package. Written for the newest slime and its releases from 0.2.4 on, between which some of its modules moved.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import httpx

from strands_rollout.control import Control, EngineGrace, short_grace
from strands_rollout.errors import ConfigError, ToolError
from strands_rollout.exits import exits_as_errors
from strands_rollout.log_once import log_once
from strands_rollout.samples import SampleLike, SlimeArgs
from strands_rollout.user_code import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from strands_rollout.agent.tool_call import ToolSpan
    from strands_rollout.model.sampling import RequestSpan

logger = logging.getLogger(__name__)

# the first is the newest slime's, the second that of releases up to 0.3.1
_TRACE_MODULES: Final = ("slime.observability.trace_utils", "slime.utils.trace_utils")
DRIVER_STATE_ATTR: Final = "strands_rollout_drivers_state"
"""Of the args in an episode worker: slime's state in the driver, as far as it was told."""
_STATE_MODULE: Final = "slime.rollout.sglang_rollout"
REWARD_PATHS: Final = ("strands_rollout.reward_func", "strands_rollout.slime_plugin.reward.reward_func")
"""The paths by which slime may call this package's reward."""
_HUB_ID: Final = re.compile(r"(?!.*(--|\.\.))(?=.{1,96}$)\w[\w.-]*(/\w[\w.-]*)?")
_HUB_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One call of `generate`; `sampling_params` are slime's, `evaluation` says that it is one of an evaluation."""

    args: SlimeArgs
    sample: SampleLike
    sampling_params: Mapping[str, Any]
    evaluation: bool


def is_slime_sample(sample: object) -> bool:
    """Whether a sample is slime's own, so that slime's state is there to be asked."""
    return any(base.__module__.startswith("slime.") for base in type(sample).__mro__)


def tokenizer_of(args: SlimeArgs, sample: object) -> PreTrainedTokenizerBase:
    """The tokenizer that slime already holds, or the one of `args.hf_checkpoint`, loaded once per process.

    Raises:
        ConfigError: There is no usable checkpoint.
    """
    held = getattr(slime_state(args, sample), "tokenizer", None)
    if held is not None:
        return held
    checkpoint = getattr(args, "hf_checkpoint", None)
    if not checkpoint or not isinstance(checkpoint, str | os.PathLike):
        got = f"hf_checkpoint={checkpoint!r:.200} of type {type(checkpoint).__name__}"
        raise ConfigError(
            f"got {got if checkpoint else 'no hf_checkpoint in args'}; expected the folder or hub id of the model "
            "whose tokenizer is used"
        )
    try:
        return load_tokenizer(str(checkpoint))
    except ConfigError as e:
        raise ConfigError(f"got hf_checkpoint={str(checkpoint)!r:.200}: {e}") from e


def processor_of(args: SlimeArgs, sample: object) -> ProcessorMixin | str | None:
    """The processor that slime already holds, or the checkpoint to load it from when the first image occurs."""
    held = getattr(slime_state(args, sample), "processor", None)
    return held if held is not None else str(getattr(args, "hf_checkpoint", None) or "") or None


_LOADING: Final = threading.Lock()
"""Held while transformers is imported, which several threads can't do at once, and while it loads."""


def load_tokenizer(checkpoint: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or hub id, which is loaded once per process.

    Raises:
        ConfigError: It can't be loaded.
    """
    with _LOADING:
        return _loaded_tokenizer(checkpoint)


@functools.lru_cache(maxsize=8)
def _loaded_tokenizer(checkpoint: str) -> PreTrainedTokenizerBase:
    is_folder = os.path.isdir(checkpoint)  # noqa: PTH112 - false, and no error, for what can't be a path
    if not is_folder and not _HUB_ID.fullmatch(checkpoint):
        raise ConfigError(
            f"the tokenizer of {checkpoint!r:.200} can't be loaded: it is no folder here, and no id of Hugging Face's "
            "hub; expected one of them"
        )
    from transformers import AutoTokenizer

    obstacle = None if is_folder else hub_unreachable_reason()
    try:
        return AutoTokenizer.from_pretrained(checkpoint, local_files_only=obstacle is not None)
    except (OSError, ValueError) as e:
        reason = " ".join(str(e).split())
        if is_folder and not os.path.exists(os.path.join(checkpoint, "tokenizer.json")):  # noqa: PTH110, PTH118 - as above
            reason = "it has no tokenizer.json; expected the folder of a model, or of its tokenizer"
        if obstacle is not None:
            remedy = f"expected the folder of a model; with a network, hf download {checkpoint} fetches it"
            reason = f"it is no folder here and not in the cache, and {obstacle}; {remedy}"
        raise ConfigError(f"the tokenizer of {checkpoint!r} can't be loaded: {reason}") from e


def hub_unreachable_reason() -> str | None:
    """Why the hub can't be asked, by one request through the environment's proxies: transformers tries for a minute."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        httpx.head(endpoint, timeout=_HUB_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError) as e:  # the latter two: of its proxy's URL
        return f"Hugging Face's hub can't be reached ({endpoint}: {e})"
    return None


def vocab_size_of(args: SlimeArgs) -> int | None:
    """Rows of the embedding by the model's config, maybe more than the tokenizer knows; None without a config."""
    checkpoint = getattr(args, "hf_checkpoint", None)
    if not checkpoint:
        return None
    with _LOADING:
        return _load_vocab_size(str(checkpoint))


@functools.lru_cache(maxsize=8)
def _load_vocab_size(checkpoint: str) -> int | None:
    from transformers import AutoConfig

    is_local = os.path.isdir(checkpoint) or hub_unreachable_reason() is not None  # noqa: PTH112 - as above
    try:
        config = AutoConfig.from_pretrained(checkpoint, local_files_only=is_local)
    except (OSError, ValueError):  # a folder with a tokenizer alone
        return None
    size = getattr(config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def router_url(args: SlimeArgs, model_name: str | None) -> str:
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


def is_aborting(args: SlimeArgs, sample: object, asked: str | Callable[[], bool] | None = None) -> bool:
    """Whether the rollout is being aborted: every running episode should return at once, as ABORTED.

    Args:
        args: slime's.
        sample: slime's own flag is read where the sample is slime's.
        asked: A further function to ask, or its dotted path.

    Raises:
        ConfigError: The path names nothing, or the function raised SystemExit or its like.
    """
    if asked is not None:
        with exits_as_errors("should_abort", ConfigError):
            if (load_should_abort(asked) if isinstance(asked, str) else asked)():
                return True
    return bool(getattr(slime_state(args, sample), "aborted", False))


def rollout_control(
    args: SlimeArgs,
    sample: object,
    asked: str | Callable[[], bool] | None,
    engine_grace_s: EngineGrace = short_grace,
) -> Control:
    """Return the control of one sample's episode or reward, which ends when `is_aborting` holds."""
    should_abort = functools.partial(is_aborting, args, sample, asked)
    return Control(should_abort, engine_grace_s=engine_grace_s, poll_key=abort_key(args, sample, asked))


def abort_key(args: SlimeArgs, sample: object, asked: str | Callable[[], bool] | None) -> Hashable:
    """Return a value that is equal for samples of which `is_aborting` asks the same, as long as they are in use."""
    return id(args), is_slime_sample(sample), asked if isinstance(asked, str) else id(asked)


ABORT_LISTENERS: Final[set[Callable[[], object]]] = set()
"""Called by `watch_aborts`; they must not raise, and return soon."""


def watch_aborts(args: SlimeArgs, sample: object) -> None:
    """Have the listeners called from now on when slime sets its abort flag, before slime does anything else.

    slime tells the engines next, and again after 3 s if one has a request by then: whoever may send requests from other
    processes must know first. slime has no event for it. Its flag is an attribute of one object, whose class becomes a
    subclass that notices.
    """
    state = None if hasattr(args, DRIVER_STATE_ATTR) else slime_state(args, sample)
    if state is not None and not hasattr(type(state), _NOTICES):
        state.__class__ = _noticing(type(state))


_NOTICES: Final = "strands_rollout_notices_aborts"


def _noticing(kind: type) -> type:
    """A subclass whose `aborted` calls the listeners when it is set."""

    def get(state: object) -> object:
        return vars(state).get("aborted", False)

    def set_flag(state: object, value: object) -> None:
        begins = value and not get(state)
        vars(state)["aborted"] = value
        for listener in list(ABORT_LISTENERS) if begins else ():
            listener()

    return type(kind)(kind.__name__, (kind,), {"aborted": property(get, set_flag), _NOTICES: True})


def was_sent_before_abort(args: SlimeArgs, sent_at: float) -> bool:
    """Whether a request that was sent at this time of `time.monotonic` was sent before the abort that is known by now.

    That is so where slime's flag is read before each request. An episode worker knows until when it was not set.
    """
    told = getattr(args, DRIVER_STATE_ATTR, None)
    return told is None or sent_at <= told.clear_until


@functools.lru_cache(maxsize=8)
def load_should_abort(path: str) -> Callable[[], bool]:
    """The function of a dotted path.

    Raises:
        ConfigError: The path names none.
    """
    try:
        found = resolve(path)
    except ToolError as e:
        raise ConfigError(f"got should_abort={path!r}; expected the path of a function: {e}") from e
    if not callable(found):
        raise ConfigError(f"got should_abort={path!r}, a {type(found).__name__}; expected a function of no arguments")
    return found


def may_return_aborted(args: SlimeArgs, sample: object) -> bool:
    """Whether slime can take an ABORTED sample now.

    It recycles them while it is aborting and in its fully-async rollout; at any other time one crashes the run.
    """
    return not is_slime_sample(sample) or is_aborting(args, sample) or is_fully_async(args)


def uses_reward_func(args: SlimeArgs, sample: object) -> bool:
    """Whether slime has this package's `reward_func` grade a sample."""
    own = None if getattr(args, "group_rm", False) else getattr(sample, "custom_rm_path", None)
    return (own or getattr(args, "custom_rm_path", None)) in REWARD_PATHS


def is_fully_async(args: SlimeArgs) -> bool:
    """Whether slime's fully-async rollout runs: it loses what `generate` raises, and takes one sample per episode."""
    return "fully_async" in (getattr(args, "rollout_function_path", None) or "")


def request_span(sample: object) -> RequestSpan | None:
    """Records each request to the engine in slime's trace, its source of request metrics, if the sample is slime's."""
    if not is_slime_sample(sample):
        return None

    @contextmanager
    def span(max_new_tokens: int | None) -> Iterator[Callable[[Mapping[str, Any]], object] | None]:
        with _trace_span(sample, "sglang_generate", {"max_new_tokens": max_new_tokens}) as record:
            # slime hands the sample back where it could not open a span
            yield None if record is None or record is sample else functools.partial(_note, record)

    return span


def tool_span(sample: object) -> ToolSpan | None:
    """Records each tool call in slime's trace, as `tool:<name>`; nothing unless the sample is slime's."""
    return (lambda name: _trace_span(sample, f"tool:{name}")) if is_slime_sample(sample) else None


@contextmanager
def _trace_span(sample: object, name: str, attrs: Mapping[str, Any] | None = None) -> Iterator[object]:
    """One of slime's spans, which ends however its block does; yields None where slime's trace can't record it."""
    record: object = None
    with ExitStack() as stack:
        with _tracing("begin a span"):
            span = _slimes_trace().trace_span(sample, name, attrs=attrs)
            record = span.__enter__()
            stack.push(functools.partial(_end_span, span))
        yield record


def _end_span(span: Any, kind: object, error: BaseException | None, at: object) -> None:  # noqa: ANN401 - slime's span
    with _tracing("end a span"):
        # slime ends a span for an Exception only: a cancellation must look like an ordinary end
        span.__exit__(*((kind, error, at) if isinstance(error, Exception) else (None, None, None)))


def _note(record: Any, meta_info: Mapping[str, Any]) -> None:  # noqa: ANN401 - slime's span
    with _tracing("note an answer"):
        record.update(_slimes_trace().build_sglang_meta_trace_attrs(dict(meta_info)))


def open_spans(sample: object) -> object:
    """The open spans of slime's trace where this is called, for `within_spans` in another process."""
    found: object = None
    if is_slime_sample(sample):
        with _tracing("read the open spans"):
            found = _slimes_trace()._TRACE_STACK.get()
    return found


@contextmanager
def within_spans(spans: object) -> Iterator[None]:
    """Let spans of the block be children of those that were open elsewhere."""
    if spans is not None:
        with _tracing("take over open spans"):
            _slimes_trace()._TRACE_STACK.set(spans)
    yield


@contextmanager
def _tracing(step: str) -> Iterator[None]:
    """Keeps a trace from failing an episode; each kind of error is logged once per process."""
    try:
        with exits_as_errors("slime's trace", RuntimeError):
            yield
    except Exception as e:  # slime's trace may raise anything
        words = "slime's trace could not %s, so that spans are missing in it; episodes go on: %s: %s"
        log_once(logger, logging.WARNING, words, step, type(e).__name__, e, key=(step, type(e)), exc_info=e)


def _slimes_trace() -> ModuleType:
    """Slime's module of spans, which its rollout has loaded.

    Raises:
        ImportError: It is at none of its known places.
    """
    fault: Exception | None = None
    loaded = [name for name in _TRACE_MODULES if name in sys.modules]  # first, since it costs nothing
    for name in (*loaded, *_TRACE_MODULES):
        try:
            found = importlib.import_module(name)
        except Exception as e:  # another program's import may raise anything
            fault = e
            continue
        if hasattr(found, "trace_span"):
            return found
    raise ImportError(f"slime has trace_span neither in {' nor in '.join(_TRACE_MODULES)}: {fault}") from fault


def slime_state(args: SlimeArgs, sample: object = None) -> object:
    """Slime's process-wide state where its rollout has made it; None elsewhere, and for a sample that is not slime's.

    It is not made here: that loads a tokenizer, and needs args that a caller outside of slime's rollout may lack. In an
    episode worker it is what the driver has told of it.
    """
    if (told := getattr(args, DRIVER_STATE_ATTR, None)) is not None:
        return told
    state_class = getattr(sys.modules.get(_STATE_MODULE), "GenerateState", None)
    if state_class is None or (sample is not None and not is_slime_sample(sample)):
        return None
    instances = getattr(state_class, "_instances", None)
    return state_class(args) if instances is None else instances.get(state_class)
