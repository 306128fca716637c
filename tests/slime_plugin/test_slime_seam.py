"""The seam where slime is absent, and beside a stand-in of slime's state: what it asks for, and when it does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from strands_rollout import Sample
from strands_rollout.bounded_tool import no_tool_span
from strands_rollout.errors import ConfigError
from strands_rollout.slime_seam import (
    is_aborting,
    is_slime_sample,
    may_return_aborted,
    request_span,
    router_url,
    tokenizer_of,
    tool_span,
)
from strands_rollout.turn_sampler import no_span

STATE_MODULE = "slime.rollout.sglang_rollout"


class _Once(type):
    """Makes one object of a class, as the metaclass of slime's generation state does."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any) -> Any:
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args)
        return cls._instances[cls]


@dataclass
class SlimeLikeSample(Sample):
    """A sample of a class that comes from slime."""


SlimeLikeSample.__module__ = "slime.utils.types"


@pytest.fixture
def state_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """A generation state that is made once per process, in the place of slime's."""

    class GenerateState(metaclass=_Once):
        def __init__(self, args: Any) -> None:
            self.tokenizer, self.aborted = args.tokenizer, False

    module = ModuleType(STATE_MODULE)
    module.GenerateState = GenerateState  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, STATE_MODULE, module)
    yield GenerateState
    _Once._instances.clear()


def test_our_own_sample_is_not_slimes() -> None:
    assert not is_slime_sample(Sample())
    assert is_slime_sample(SlimeLikeSample())


def test_without_slime_nothing_aborts_and_an_aborted_sample_may_be_returned() -> None:
    assert not is_aborting(SimpleNamespace(), Sample())
    assert may_return_aborted(SimpleNamespace(), Sample())
    assert tool_span(Sample()) is no_tool_span
    assert request_span(Sample()) is no_span


ROUTERS = {"actor": ("10.0.0.1", 3000), "judge": ("10.0.0.2", 3001)}


def test_a_named_models_router_is_used() -> None:
    args = SimpleNamespace(sglang_router_ip="10.0.0.1", sglang_router_port=3000, sglang_model_routers=ROUTERS)
    assert router_url(args, None) == "http://10.0.0.1:3000"
    assert router_url(args, "judge") == "http://10.0.0.2:3001"


@pytest.mark.parametrize(("routers", "known"), [(ROUTERS, "'actor', 'judge'"), (None, "none")])
def test_a_model_that_slime_does_not_serve_is_an_error_with_those_that_it_does(routers: Any, known: str) -> None:
    args = SimpleNamespace(sglang_router_ip="10.0.0.1", sglang_router_port=3000, sglang_model_routers=routers)
    with pytest.raises(ConfigError, match=f"got model_name='other'; slime serves these models: {known}"):
        router_url(args, "other")


def test_a_function_tells_of_an_abort_without_slime() -> None:
    assert is_aborting(SimpleNamespace(), Sample(), lambda: True)
    assert not is_aborting(SimpleNamespace(), Sample(), lambda: False)
    assert is_aborting(SimpleNamespace(), Sample(), "os.getpid")


@pytest.mark.parametrize("path", ["os.no_such_function", "no_such_module.function", "os.name", "not a path"])
def test_a_path_that_names_no_function_is_an_error(path: str) -> None:
    with pytest.raises(ConfigError, match=f"got should_abort='{path}'"):
        is_aborting(SimpleNamespace(), Sample(), path)


def test_without_slime_the_tokenizer_is_that_of_the_checkpoint_and_is_loaded_once(shipped_tokenizer: Any) -> None:
    args = SimpleNamespace(hf_checkpoint=shipped_tokenizer.name_or_path)
    first = tokenizer_of(args, Sample())
    assert first.get_vocab() == shipped_tokenizer.get_vocab()
    assert tokenizer_of(args, Sample()) is first


@pytest.mark.parametrize("args", [SimpleNamespace(), SimpleNamespace(hf_checkpoint=None)])
def test_a_missing_checkpoint_is_an_error_that_says_what_to_set(args: Any) -> None:
    with pytest.raises(ConfigError, match="got no hf_checkpoint in args; expected the folder or hub id"):
        tokenizer_of(args, Sample())


def test_a_folder_without_a_tokenizer_is_named_in_the_error(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"got hf_checkpoint='.*nothing', whose tokenizer can't be loaded"):
        tokenizer_of(SimpleNamespace(hf_checkpoint=str(tmp_path / "nothing")), Sample())


def test_slimes_state_gives_its_tokenizer_and_tells_of_an_abort(state_class: Any) -> None:
    args = SimpleNamespace(tokenizer=object())
    state = state_class(args)
    sample = SlimeLikeSample()
    assert tokenizer_of(args, sample) is state.tokenizer
    assert not is_aborting(args, sample)
    assert not may_return_aborted(args, sample)
    state.aborted = True
    assert is_aborting(args, sample)
    assert may_return_aborted(args, sample)


def test_slimes_state_is_never_made_here(state_class: Any, shipped_tokenizer: Any) -> None:
    args = SimpleNamespace(hf_checkpoint=shipped_tokenizer.name_or_path, tokenizer=object())
    assert tokenizer_of(args, SlimeLikeSample()) is not args.tokenizer
    assert not is_aborting(args, SlimeLikeSample())
    assert _Once._instances == {}


def test_a_fully_async_rollout_takes_aborted_samples_at_any_time(state_class: Any) -> None:
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    assert may_return_aborted(SimpleNamespace(rollout_function_path=path), SlimeLikeSample())
    assert not may_return_aborted(SimpleNamespace(rollout_function_path=None), SlimeLikeSample())
