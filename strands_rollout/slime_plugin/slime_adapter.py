"""Access to slime's arguments, tokenizer, generation state, abort flag and trace, for episodes.

This module imports slime inside functions, so each function also works without slime. Install slime from its
repository: the `slime` of PyPI is another package. The code supports the newest slime and its releases from 0.2.4 on,
which have some modules in other places.
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

from strands_rollout.client.retry import DEFAULT_PATIENCE_S
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

# the module of slime's trace in the newest slime, and in releases up to 0.3.1
_TRACE_MODULES: Final = ("slime.observability.trace_utils", "slime.utils.trace_utils")
DRIVER_STATE_ATTR: Final = "strands_rollout_drivers_state"
"""Attribute of slime's args in an episode worker; its value is the worker's copy of slime's state in the driver."""
_STATE_MODULE: Final = "slime.rollout.sglang_rollout"
REWARD_PATHS: Final = ("strands_rollout.reward_func", "strands_rollout.slime_plugin.reward.reward_func")
"""The dotted paths of this package's reward function."""
# Requests are retried through an outage of five minutes and the start of an engine
_JOB_PATIENCE_S: Final = 600.0
_HUB_ID: Final = re.compile(r"(?!.*(--|\.\.))(?=.{1,96}$)\w[\w.-]*(/\w[\w.-]*)?")
_HUB_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """The arguments of one call of `generate`."""

    args: SlimeArgs
    sample: SampleLike
    sampling_params: Mapping[str, Any]
    evaluation: bool


def is_slime_sample(sample: object) -> bool:
    """Return whether a sample is of slime's own class or a subclass of it."""
    return any(base.__module__.startswith("slime.") for base in type(sample).__mro__)


def tokenizer_of(args: SlimeArgs, sample: object) -> PreTrainedTokenizerBase:
    """Return the tokenizer that slime has loaded, else the one of `args.hf_checkpoint`, loaded once per process.

    Raises:
        ConfigError: There is no usable checkpoint.
    """
    loaded = getattr(slime_state(args, is_slime=is_slime_sample(sample)), "tokenizer", None)
    if loaded is not None:
        return loaded
    checkpoint = getattr(args, "hf_checkpoint", None)
    if not checkpoint or not isinstance(checkpoint, str | os.PathLike):
        got = f"got hf_checkpoint={checkpoint!r:.200} of type {type(checkpoint).__name__}"
        raise ConfigError(
            f"{got if checkpoint else 'args have no hf_checkpoint'}; expected the folder or hub id of the model "
            "whose tokenizer is used"
        )
    try:
        return load_tokenizer(str(checkpoint))
    except ConfigError as e:
        raise ConfigError(f"got hf_checkpoint={str(checkpoint)!r:.200}: {e}") from e


def processor_of(args: SlimeArgs, sample: object) -> ProcessorMixin | str | None:
    """Return the processor that slime has loaded, else `args.hf_checkpoint`; None if there is neither.

    The checkpoint's processor is loaded when the first image needs it.
    """
    loaded = getattr(slime_state(args, is_slime=is_slime_sample(sample)), "processor", None)
    return loaded if loaded is not None else str(getattr(args, "hf_checkpoint", None) or "") or None


_TRANSFORMERS_LOCK: Final = threading.Lock()
"""Held while transformers is imported or loads from a checkpoint. Concurrent imports may fail."""


def load_tokenizer(checkpoint: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or hub id, loaded once per process.

    Raises:
        ConfigError: The tokenizer can't be loaded.
    """
    with _TRANSFORMERS_LOCK:
        return _load_tokenizer(checkpoint)


@functools.lru_cache(maxsize=8)
def _load_tokenizer(checkpoint: str) -> PreTrainedTokenizerBase:
    is_folder = os.path.isdir(checkpoint)  # noqa: PTH112 - returns False for an invalid path, where pathlib raises
    if not is_folder and not _HUB_ID.fullmatch(checkpoint):
        raise ConfigError(
            f"the tokenizer of {checkpoint!r:.200} can't be loaded: it is neither a folder here nor an id of Hugging "
            "Face's hub; expected one of them"
        )
    from transformers import AutoTokenizer

    obstacle = None if is_folder else hub_unreachable_reason()
    try:
        return AutoTokenizer.from_pretrained(checkpoint, local_files_only=obstacle is not None)
    except (OSError, ValueError) as e:
        reason = " ".join(str(e).split())
        if is_folder and not os.path.exists(os.path.join(checkpoint, "tokenizer.json")):  # noqa: PTH110, PTH118 - never raises
            reason = "it has no tokenizer.json; expected the folder of a model, or of its tokenizer"
        if obstacle is not None:
            remedy = f"expected the folder of a model; with a network, download it with `hf download {checkpoint}`"
            reason = f"it is neither a folder here nor in the cache, and {obstacle}; {remedy}"
        raise ConfigError(f"the tokenizer of {checkpoint!r} can't be loaded: {reason}") from e


def hub_unreachable_reason() -> str | None:
    """Return the reason why Hugging Face's hub can't be used, or None.

    Unless `HF_HUB_OFFLINE` is set, this sends one request, through any proxies set in environment variables.
    transformers itself would retry for a minute.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        httpx.head(endpoint, timeout=_HUB_TIMEOUT_S)
    # ImportError: a SOCKS proxy needs a package that is missing; ValueError: a proxy's URL has an unknown scheme
    except (httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError) as e:
        return f"Hugging Face's hub can't be reached ({endpoint}: {e})"
    return None


def vocab_size_of(args: SlimeArgs) -> int | None:
    """Return the number of rows of the model's embedding, which may exceed the tokenizer's size; None if unknown."""
    checkpoint = getattr(args, "hf_checkpoint", None)
    if not checkpoint:
        return None
    with _TRANSFORMERS_LOCK:
        return _load_vocab_size(str(checkpoint))


@functools.lru_cache(maxsize=8)
def _load_vocab_size(checkpoint: str) -> int | None:
    from transformers import AutoConfig

    is_local = os.path.isdir(checkpoint) or hub_unreachable_reason() is not None  # noqa: PTH112 - never raises
    try:
        config = AutoConfig.from_pretrained(checkpoint, local_files_only=is_local)
    except (OSError, ValueError):  # no usable model config, as in a folder with a tokenizer alone
        return None
    size = getattr(config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def router_url(args: SlimeArgs, model_name: str | None) -> str:
    """Return the URL of a model's router; if `model_name` is None, of the first model in slime's `--sglang-config`.

    Raises:
        ConfigError: slime serves no model of this name, or there is no router.
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


def is_aborting(args: SlimeArgs, sample: object, should_abort: str | Callable[[], bool] | None = None) -> bool:
    """Return whether the rollout is being aborted, so that every running episode must end at once.

    Args:
        args: slime's args.
        sample: The sample; slime's abort flag is read only for a sample of slime's class.
        should_abort: The setting `should_abort`: a function that is called first, or its dotted path; None if not set.

    Raises:
        ConfigError: There is no function at the path, or the function raised SystemExit or the like.
        Exception: Any other exception that the function raised.
    """
    return _is_aborting(args, should_abort, is_slime=is_slime_sample(sample))


def _is_aborting(args: SlimeArgs, should_abort: str | Callable[[], bool] | None, *, is_slime: bool) -> bool:
    if should_abort is not None:
        with exits_as_errors("should_abort", ConfigError):
            if (load_should_abort(should_abort) if isinstance(should_abort, str) else should_abort)():
                return True
    return bool(getattr(slime_state(args, is_slime=is_slime), "aborted", False))


def rollout_control(
    args: SlimeArgs,
    sample: object,
    should_abort: str | Callable[[], bool] | None,
    engine_grace_s: EngineGrace = short_grace,
) -> Control:
    """Return a control that aborts one sample's episode or reward when `is_aborting` returns True."""
    # no reference to the sample: Strands' agents are in reference cycles, which would keep the sample in memory through
    # the control of the agents' tools
    is_aborted = functools.partial(_is_aborting, args, should_abort, is_slime=is_slime_sample(sample))
    return Control(is_aborted, engine_grace_s=engine_grace_s, poll_key=abort_key(args, sample, should_abort))


def abort_key(args: SlimeArgs, sample: object, should_abort: str | Callable[[], bool] | None) -> Hashable:
    """Return a key that samples share if `is_aborting` reads the same flag and function for them.

    The key contains ids of objects, so compare it only while `args` and `should_abort` exist.
    """
    return id(args), is_slime_sample(sample), should_abort if isinstance(should_abort, str) else id(should_abort)


ABORT_LISTENERS: Final[set[Callable[[], object]]] = set()
"""Functions to call when slime sets its abort flag. They must not raise, and must return soon."""


def watch_aborts(args: SlimeArgs, sample: object) -> None:
    """From now on, call `ABORT_LISTENERS` when slime sets its abort flag, before slime does anything else.

    After setting the flag, slime aborts the engines' requests. slime 0.3.1 and newer repeat this every 3 s while an
    engine has requests. Processes that send requests must know of the abort first. Otherwise, they would send new
    requests after slime's first attempt. slime has no event for the abort: its flag is an attribute of one object. So
    this function replaces that object's class by a subclass with a property. Do nothing in an episode worker, or if
    `slime_state` returns None.
    """
    state = None if hasattr(args, DRIVER_STATE_ATTR) else slime_state(args, is_slime=is_slime_sample(sample))
    if state is not None and not hasattr(type(state), _CALLS_LISTENERS):
        state.__class__ = _with_abort_listeners(type(state))


_CALLS_LISTENERS: Final = "strands_rollout_notices_aborts"


def _with_abort_listeners(state_class: type) -> type:
    def get(state: object) -> object:
        return vars(state).get("aborted", False)

    def set_flag(state: object, value: object) -> None:
        begins = value and not get(state)
        vars(state)["aborted"] = value
        for listener in list(ABORT_LISTENERS) if begins else ():
            listener()

    members = {"aborted": property(get, set_flag), _CALLS_LISTENERS: True}
    return type(state_class)(state_class.__name__, (state_class,), members)


def was_sent_before_abort(args: SlimeArgs, sent_at: float) -> bool:
    """Return whether a request that was sent at `sent_at` was certainly sent before the current abort.

    `sent_at` is a time of `time.monotonic`. The result is always True in slime's own process, where the flag is read
    before each request. An episode worker may learn of an abort late, and knows only the latest time at which no abort
    was in progress.
    """
    driver_state = getattr(args, DRIVER_STATE_ATTR, None)
    return driver_state is None or sent_at <= driver_state.last_clear_at


@functools.lru_cache(maxsize=8)
def load_should_abort(path: str) -> Callable[[], bool]:
    """Return the function at the dotted path that `should_abort` names.

    Raises:
        ConfigError: There is no function at the path.
    """
    try:
        function = resolve(path)
    except ToolError as e:
        raise ConfigError(f"got should_abort={path!r}; expected the dotted path of a function ({e})") from e
    if not callable(function):
        kind = type(function).__name__
        raise ConfigError(f"got should_abort={path!r}, a {kind}; expected a function without arguments")
    return function


def may_return_aborted(args: SlimeArgs, sample: object) -> bool:
    """Return whether slime can take an ABORTED sample now.

    slime recycles aborted samples while it is aborting, and in its fully-async rollout. At other times, an ABORTED
    sample would end the run with an error. A sample that is not of slime's class may always be returned
    as ABORTED.
    """
    return not is_slime_sample(sample) or is_aborting(args, sample) or is_fully_async(args)


def uses_reward_func(args: SlimeArgs, sample: object) -> bool:
    """Return whether slime grades a sample with this package's `reward_func`."""
    path_of_sample = None if getattr(args, "group_rm", False) else getattr(sample, "custom_rm_path", None)
    return (path_of_sample or getattr(args, "custom_rm_path", None)) in REWARD_PATHS


def is_fully_async(args: SlimeArgs) -> bool:
    """Return whether the job uses slime's fully-async rollout.

    That rollout loses exceptions of `generate`, and takes one sample per episode.
    """
    return "fully_async" in (getattr(args, "rollout_function_path", None) or "")


def engine_patience_s(args: SlimeArgs, setting: float | None) -> float:
    """Return how long to retry requests, in seconds: `setting` or, if it is None, a default.

    In jobs of slime, the default is longer: an episode that gives up costs training data. Elsewhere, a wrong URL should
    be reported soon. Jobs of slime are recognized by an argument that only slime's parser has.
    """
    if setting is not None:
        return setting
    return _JOB_PATIENCE_S if hasattr(args, "use_fault_tolerance") else DEFAULT_PATIENCE_S


def request_span(sample: object) -> RequestSpan | None:
    """Return a recorder of requests in slime's trace, for slime's metrics; None if `sample` is not slime's."""
    if not is_slime_sample(sample):
        return None

    @contextmanager
    def span(max_new_tokens: int | None) -> Iterator[Callable[[Mapping[str, Any]], object] | None]:
        with _trace_span(sample, "sglang_generate", {"max_new_tokens": max_new_tokens}) as record:
            # slime yields the sample itself if it could not open a span
            yield None if record is None or record is sample else functools.partial(_record_answer, record)

    return span


def tool_span(sample: object) -> ToolSpan | None:
    """Return a recorder of tool calls, as `tool:<name>` in slime's trace; None if `sample` is not slime's."""
    return (lambda name: _trace_span(sample, f"tool:{name}")) if is_slime_sample(sample) else None


@contextmanager
def _trace_span(sample: object, name: str, attrs: Mapping[str, Any] | None = None) -> Iterator[object]:
    """Open a span of slime's trace for the block; yield slime's object for the span (the sample or None on failure)."""
    record: object = None
    with ExitStack() as stack:
        with _ignoring_trace_errors("begin a span"):
            span = _slime_trace().trace_span(sample, name, attrs=attrs)
            record = span.__enter__()
            stack.push(functools.partial(_end_span, span))
        yield record


def _end_span(span: Any, kind: object, error: BaseException | None, at: object) -> None:  # noqa: ANN401 - slime's span
    with _ignoring_trace_errors("end a span"):
        # slime accepts only an Exception here, so a cancellation ends the span like an ordinary end
        span.__exit__(*((kind, error, at) if isinstance(error, Exception) else (None, None, None)))


def _record_answer(record: Any, meta_info: Mapping[str, Any]) -> None:  # noqa: ANN401 - slime's span
    with _ignoring_trace_errors("record an answer"):
        record.update(_slime_trace().build_sglang_meta_trace_attrs(dict(meta_info)))


def current_spans(sample: object) -> object:
    """Return the open spans of slime's trace, for `within_spans` in another process; None if they can't be read."""
    spans: object = None
    if is_slime_sample(sample):
        with _ignoring_trace_errors("read the open spans"):
            spans = _slime_trace()._TRACE_STACK.get()
    return spans


@contextmanager
def within_spans(spans: object) -> Iterator[None]:
    """Make the block's spans children of `spans`, which `current_spans` returned in another process."""
    if spans is not None:
        with _ignoring_trace_errors("take over open spans"):
            _slime_trace()._TRACE_STACK.set(spans)
    yield


@contextmanager
def _ignoring_trace_errors(step: str) -> Iterator[None]:
    """Suppress errors of slime's trace, which must not fail an episode; log an error once per type and `step`."""
    try:
        with exits_as_errors("slime's trace", RuntimeError):
            yield
    except Exception as e:  # slime's trace may raise anything
        message = "slime's trace could not %s and may be incomplete now; episodes continue: %s: %s"
        log_once(logger, logging.WARNING, message, step, type(e).__name__, e, key=(step, type(e)), exc_info=e)


def _slime_trace() -> ModuleType:
    error: Exception | None = None
    loaded = [name for name in _TRACE_MODULES if name in sys.modules]  # tried first, since they cost nothing
    for name in (*loaded, *_TRACE_MODULES):
        try:
            module = importlib.import_module(name)
        except Exception as e:  # another program's import may raise anything
            error = e
            continue
        if hasattr(module, "trace_span"):
            return module
    raise ImportError(f"slime has trace_span neither in {' nor in '.join(_TRACE_MODULES)}: {error}") from error


def slime_state(args: SlimeArgs, *, is_slime: bool = True) -> object:
    """Return slime's process-wide state; None if slime's rollout has not created it, or the sample is not slime's.

    In an episode worker, return the copy of the driver's state.

    This function does not create the state. Creating the state loads a tokenizer, and needs args that a caller outside
    of slime's rollout may lack. There is one exception: if the state's class lacks `_instances`, the class is called.
    This may create the state.
    """
    if (driver_state := getattr(args, DRIVER_STATE_ATTR, None)) is not None:
        return driver_state
    state_class = getattr(sys.modules.get(_STATE_MODULE), "GenerateState", None)
    if state_class is None or not is_slime:
        return None
    instances = getattr(state_class, "_instances", None)
    return state_class(args) if instances is None else instances.get(state_class)
