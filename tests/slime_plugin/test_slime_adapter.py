"""`slime_adapter` without slime, and with stand-ins for slime's state and trace."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from harness import ANSWER, TOOL_CALL, run

from strands_rollout import Sample
from strands_rollout.errors import ConfigError
from strands_rollout.slime_plugin import slime_adapter
from strands_rollout.slime_plugin.slime_adapter import (
    engine_patience_s,
    is_aborting,
    is_slime_sample,
    may_return_aborted,
    request_span,
    router_url,
    tokenizer_of,
    tool_span,
)

STATE_MODULE = "slime.rollout.sglang_rollout"


class _Singleton(type):
    """Metaclass that creates one object per class, like the metaclass of slime's generation state."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any) -> Any:
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args)
        return cls._instances[cls]


@dataclass
class SlimeLikeSample(Sample):
    """A sample whose class claims to be slime's."""


SlimeLikeSample.__module__ = "slime.utils.types"


@pytest.fixture
def state_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """Stand-in for slime's generation state, of which a process has one."""

    class GenerateState(metaclass=_Singleton):
        def __init__(self, args: Any) -> None:
            self.tokenizer, self.aborted = args.tokenizer, False

    module = ModuleType(STATE_MODULE)
    module.GenerateState = GenerateState  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, STATE_MODULE, module)
    yield GenerateState
    _Singleton._instances.clear()


def test_slime_adapter_without_slime_never_aborts() -> None:
    assert is_slime_sample(SlimeLikeSample())
    assert not is_slime_sample(Sample())
    assert not is_aborting(SimpleNamespace(), Sample())
    assert may_return_aborted(SimpleNamespace(), Sample())
    assert tool_span(Sample()) is None
    assert request_span(Sample()) is None


def test_watch_aborts_calls_its_listeners_as_the_flag_is_set(state_class: type, monkeypatch) -> None:
    args, sample, notified = SimpleNamespace(tokenizer=None), SlimeLikeSample(), list[bool]()
    monkeypatch.setattr(slime_adapter, "ABORT_LISTENERS", {lambda: notified.append(is_aborting(args, sample))})
    slime_adapter.watch_aborts(args, sample)  # slime has no state yet
    state = state_class(args)
    for _ in range(2):
        slime_adapter.watch_aborts(args, sample)
    assert (isinstance(state, state_class), state_class(args) is state, state.aborted) == (True, True, False)
    for value in (False, True, True, False, True):
        state.aborted = value
        assert state.aborted is value
    assert notified == [True, True]


ROUTERS = {"actor": ("10.0.0.1", 3000), "judge": ("10.0.0.2", 3001)}


@pytest.mark.parametrize(("routers", "models"), [(ROUTERS, "'actor', 'judge'"), (None, "none")])
def test_router_url_lists_served_models_in_error(routers: Any, models: str) -> None:
    args = SimpleNamespace(sglang_router_ip="10.0.0.1", sglang_router_port=3000, sglang_model_routers=routers)
    assert router_url(args, None) == "http://10.0.0.1:3000"
    assert routers is None or router_url(args, "judge") == "http://10.0.0.2:3001"
    with pytest.raises(ConfigError, match=f"got model_name='other'; slime serves these models: {models}"):
        router_url(args, "other")


def test_is_aborting_calls_should_abort() -> None:
    assert is_aborting(SimpleNamespace(), Sample(), lambda: True)
    assert not is_aborting(SimpleNamespace(), Sample(), lambda: False)
    assert is_aborting(SimpleNamespace(), Sample(), "os.getpid")


@pytest.mark.parametrize("path", ["os.no_such_function", "os.name", "not a path"])
def test_is_aborting_refuses_path_of_no_function(path: str) -> None:
    with pytest.raises(ConfigError, match=f"got should_abort='{path}'"):
        is_aborting(SimpleNamespace(), Sample(), path)


def test_tokenizer_of_loads_checkpoint_once(shipped_tokenizer: Any) -> None:
    args = SimpleNamespace(hf_checkpoint=shipped_tokenizer.name_or_path)
    first = tokenizer_of(args, Sample())
    assert first.get_vocab() == shipped_tokenizer.get_vocab()
    assert tokenizer_of(args, Sample()) is first


@pytest.mark.parametrize(
    "checkpoint",
    [*(5, None, "/no/such", "./no", "~/no", "a/b/c", "a b", "http://a/b", "\ud800", "x" * 100_000)],
    ids=lambda value: repr(value)[:20],
)
def test_tokenizer_of_refuses_invalid_checkpoint(checkpoint, monkeypatch) -> None:
    import transformers

    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("from_pretrained was called")
    )
    got = "args have no hf_checkpoint" if checkpoint is None else "got hf_checkpoint="
    with pytest.raises(ConfigError, match=rf"{got}.*expected (the folder or hub id|one of them)") as refusal:
        tokenizer_of(SimpleNamespace(hf_checkpoint=checkpoint), Sample())
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize(
    ("name", "variables", "error"),
    [
        ("5", {"HF_ENDPOINT": "http://127.0.0.1:1"}, "hub can't be reached"),
        ("models/Qwen3-8B", {"https_proxy": "http://127.0.0.1:1"}, "hub can't be reached"),
        ("nobody/no-model", {"HF_ENDPOINT": "no url"}, "hub can't be reached"),
        ("nobody/no-model", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    ],
)
def test_tokenizer_of_reads_cache_only_without_hub(name, variables, error, monkeypatch) -> None:
    import transformers

    calls: list[Any] = []

    def refuse(*_: Any, local_files_only: bool) -> None:
        calls.append(local_files_only)
        raise OSError("not in the cache")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"{error}.*; expected the folder of a model.* .hf download {name}"):
        tokenizer_of(SimpleNamespace(hf_checkpoint=name), Sample())
    assert calls == [True]


def test_slime_adapter_reads_tokenizer_and_abort_from_state(state_class: Any) -> None:
    args = SimpleNamespace(tokenizer=object())
    sample = SlimeLikeSample()
    assert not is_aborting(args, sample)
    assert _Singleton._instances == {}  # the adapter never creates a state
    state = state_class(args)
    assert tokenizer_of(args, sample) is state.tokenizer
    assert not is_aborting(args, sample)
    assert not may_return_aborted(args, sample)
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    assert may_return_aborted(SimpleNamespace(**vars(args), rollout_function_path=path), sample)
    state.aborted = True
    assert is_aborting(args, sample)
    assert may_return_aborted(args, sample)


TRACE_MODULES = ("slime.observability.trace_utils", "slime.utils.trace_utils")
TURNS = [TOOL_CALL.format(name="calculate", arguments='{"expression": "17 * 2"}'), ANSWER]
CALCULATOR = {"tools": ["strands_rollout.examples.shop.calculate"]}


class StandInTrace(ModuleType):
    """Stand-in for slime's module of spans, which fails at the step `fault`."""

    def __init__(self, fault: str = "", error: type[BaseException] = RuntimeError) -> None:
        super().__init__("trace_utils")
        self.fault, self.error = fault, error
        self.started: list[str] = []

    def fail(self, step: str) -> None:
        if step == self.fault:
            raise self.error(f"no {step}")

    def trace_span(self, sample: Any, name: str, attrs: Any = None) -> Any:
        self.fail("call")
        self.started.append(name)
        return self._span()

    @contextmanager
    def _span(self) -> Iterator[Any]:
        self.fail("entry")
        yield SimpleNamespace(update=lambda more: self.fail("update"))
        self.fail("exit")

    def build_sglang_meta_trace_attrs(self, meta: dict[str, Any]) -> dict[str, Any]:
        self.fail("attributes")
        return {"finish_reason": meta["finish_reason"]["type"]}


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
@pytest.mark.parametrize("fault", ["import", "no trace_span", "call", "entry", "update", "attributes", "exit"])
async def test_failing_slime_trace_is_logged_once(fault, error, shipped_tokenizer, monkeypatch, caplog) -> None:
    modules = {"import": None, "no trace_span": ModuleType("empty")}
    for name in TRACE_MODULES:
        monkeypatch.setitem(sys.modules, name, modules[fault] if fault in modules else StandInTrace(fault, error))
    for _ in range(2):
        sample = SlimeLikeSample(prompt="What is 17 * 2?", index=0)
        sample = (await run(shipped_tokenizer, TURNS, sample=sample, settings=CALCULATOR)).sample
        assert sample.status is Sample.Status.COMPLETED
        assert sum(sample.loss_mask) > 0
    [warning] = [record for record in caplog.records if record.name == slime_adapter.logger.name]
    assert "slime's trace could not" in warning.getMessage()
    assert "episodes continue" in warning.getMessage()


@pytest.mark.parametrize("module", TRACE_MODULES)
async def test_slime_trace_has_spans_of_requests_and_tools(module, shipped_tokenizer, monkeypatch):
    trace = StandInTrace()
    for name in TRACE_MODULES:
        monkeypatch.setitem(sys.modules, name, trace if name == module else None)
    sample = SlimeLikeSample(prompt="What is 17 * 2?", index=0)
    await run(shipped_tokenizer, TURNS, sample=sample, settings=CALCULATOR)
    assert trace.started == ["sglang_generate", "tool:calculate", "sglang_generate"]


@pytest.mark.parametrize(
    ("args", "setting", "patience_s"),
    [({}, None, 90.0), ({"use_fault_tolerance": False}, None, 600.0), ({"use_fault_tolerance": True}, 5.0, 5.0)],
)
def test_slime_adapter_waits_longer_for_engines_in_a_job(
    args: dict[str, Any], setting: float | None, patience_s: float
) -> None:
    assert engine_patience_s(SimpleNamespace(**args), setting) == patience_s
