"""Fixtures of the engine's tests: tiny model folders and engines with a client for each."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
from engine_api import Api, api_to
from scripted_qwen3 import write_scripted_qwen3
from tiny_qwen3 import TinyQwen3, build_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a context of 512 tokens."""
    return TinyQwen3().write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape with other weights."""
    return TinyQwen3(seed=1).write(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="session")
def long_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a context long enough for a generation to be interrupted."""
    return TinyQwen3(context_length=16384).write(tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="session")
def long_other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the long one's shape with other weights."""
    return TinyQwen3(context_length=16384, seed=1).write(tmp_path_factory.mktemp("long_other"))


@pytest.fixture(scope="session")
def scripted_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that calls a tool, reads the result and answers."""
    return write_scripted_qwen3(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tiny models' tokenizer."""
    return build_tokenizer()


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Any]]:
    """Starts engines that live until the test ends: `api = await start(folder, max_running_requests=2)`."""
    async with AsyncExitStack() as stack:

        async def enter(model_dir: Path, **options: Any) -> Api:
            return await stack.enter_async_context(api_to(model_dir, **options))

        yield enter


@pytest.fixture
async def embedded(tiny_dir: Path) -> AsyncIterator[Api]:
    """An embedded engine with the tiny model, for what only it promises."""
    async with api_to(tiny_dir) as client:
        yield client
