"""Fixtures of the tests on the real engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from findings import ran_on
from gateway_stage import NAMES, OwnWorker
from many_tools_engine import many_tools_engine, many_tools_sglang, on_sglang, play

__all__ = ["many_tools_engine", "many_tools_sglang", "on_sglang", "play"]  # pytest finds them here


@pytest.fixture(scope="session")
def own_worker() -> Iterator[OwnWorker]:
    """A real SGLang that tests may kill, started when the first asks for its URL."""
    worker = OwnWorker()
    yield worker
    worker.kill()


@pytest.fixture(params=NAMES)
def router(request: pytest.FixtureRequest) -> str:
    """Each router in turn."""
    ran_on(request.node, NAMES[request.param])
    return str(request.param)
