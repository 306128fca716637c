"""Fixtures of the tests on the real engines."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import stage_tools
from episode_stage import EpisodeStage, episodes_on
from gateway_stage import NAMES, OwnWorker
from run_report import note_engine


@pytest.fixture(scope="session")
def own_worker() -> Iterator[OwnWorker]:
    worker = OwnWorker()
    yield worker
    worker.kill()


@pytest.fixture
async def stage(sglang: str, shipped_tokenizer: Any) -> AsyncIterator[EpisodeStage]:
    """Yield a stage on the real SGLang, with empty records of tool calls."""
    stage_tools.began.clear()
    stage_tools.is_to_hang.clear()
    async with episodes_on(sglang, shipped_tokenizer) as made:
        yield made
    stage_tools.is_to_hang.clear()


@pytest.fixture(params=NAMES)
def router(request: pytest.FixtureRequest) -> str:
    note_engine(request.node, NAMES[request.param])
    return str(request.param)
