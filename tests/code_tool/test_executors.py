"""Executors by name, and how a bad setting is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from strands_rollout.errors import ConfigError
from strands_rollout.executors import EXECUTORS, make_executor, shared_executor
from strands_rollout.sandbox import CodeExecutor, ExecutionResult, LocalExecutor, SubprocessExecutor


class EchoExecutor:
    """An executor of a user's own."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        return ExecutionResult(self.prefix + code, "", 0)

    async def close_session(self, session: str) -> None: ...

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> EchoExecutor:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...


def nothing() -> dict[str, str]:
    return {}


@pytest.mark.parametrize(("name", "kind"), [("local", LocalExecutor), ("subprocess", SubprocessExecutor)])
def test_a_name_makes_its_executor_once_per_process(name: str, kind: type) -> None:
    assert isinstance(shared_executor(name), kind)
    assert shared_executor(name) is shared_executor(name)
    assert make_executor(name) is not shared_executor(name)


def test_options_make_another_one() -> None:
    small = {"name": "local", "memory_mb": 512, "libraries": ["numpy"]}
    executor = shared_executor(small)
    assert executor is shared_executor(dict(reversed(small.items())))
    assert executor is not shared_executor("local")
    assert executor.facts.memory_mb == 512  # type: ignore[attr-defined]


def test_a_dotted_path_makes_an_executor_of_the_users_own() -> None:
    executor = make_executor({"name": f"{__name__}.EchoExecutor", "prefix": "> "})
    assert isinstance(executor, CodeExecutor)
    assert asyncio.run(executor.run("1")).stdout == "> 1"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lokal", "unknown executor 'lokal'; did you mean 'local'?"),
        ("zzz", "unknown executor 'zzz'; expected one of local, subprocess"),
        ({"memory_mb": 1}, "expected a name, or a mapping with the key name"),
        ({"name": "local", "memory": 1}, "can't take the options memory: .*did you mean 'memory_mb'?"),
        ({"name": "local", "memory_mb": -1}, "memory_mb is -1"),
        ({"name": "local", "isolation": "some"}, "isolation is 'some'"),
        ("no_such.module", "can't load the executor 'no_such.module'"),
        (f"{__name__}.pytest", "is a module; expected a class or a function"),
        (f"{__name__}.nothing", "made a dict, which is no CodeExecutor"),
    ],
)
def test_a_bad_setting_says_what_was_got_and_what_is_expected(setting: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_executor(setting)


def test_options_values_are_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        make_executor({"name": "local", "api_key": "secret-value"})
    assert "secret-value" not in str(refused.value)


@pytest.mark.parametrize("name", EXECUTORS)
def test_every_name_leads_to_a_class(name: str) -> None:
    import pkgutil

    assert isinstance(pkgutil.resolve_name(EXECUTORS[name]), type)
