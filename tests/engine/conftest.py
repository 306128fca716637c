"""Fixtures of the engine's tests: tiny model folders, and engines with a client each."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from engine_api import Api, serve_engine
from tiny_qwen3 import TinyQwen3
from tokenizers import Tokenizer

from strands_rollout.engine import SHIPPED_MODEL_DIR


def _folder_of(model: TinyQwen3) -> Any:
    @pytest.fixture(scope="session")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return model.write(tmp_path_factory.mktemp("model"))

    return folder


tiny_dir = _folder_of(TinyQwen3())
long_dir = _folder_of(TinyQwen3(context_length=16384))  # long enough to interrupt a generation


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return Tokenizer.from_file(str(SHIPPED_MODEL_DIR / "tokenizer.json"))


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Any]]:
    """Yield a function that starts engines until the test ends: `api = await start(folder, max_running_requests=2)`."""
    async with AsyncExitStack() as stack:

        async def enter(model_dir: Path, **options: Any) -> Api:
            return await stack.enter_async_context(serve_engine(model_dir, **options))

        yield enter


@pytest.fixture
async def embedded(start: Callable[..., Any], tiny_dir: Path) -> Api:
    """Start an embedded engine with the tiny model, for tests that apply to this engine only."""
    return await start(tiny_dir)
