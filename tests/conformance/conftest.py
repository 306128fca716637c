"""Fixtures that run the conformance tests on the embedded engine and on a real SGLang server.

The SGLang server is started with the shipped model, or is already running at `--sglang-base-url`. Tests that compare
numbers or load other weights are skipped unless the server has loaded this checkout's folder of the shipped model.
For these tests, the server must compute in single precision.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from differences import DIFFERENCES, TABLE
from engine_api import client_session
from engine_thread import run_on_thread
from processes import is_running
from real_server import RealServer, start_sglang, version_of
from run_report import note_engine
from served_engine import EngineFacts, ServedEngine, facts_of

from strands_rollout.engine import SHIPPED_MODEL_DIR, running_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

BOTH = ["embedded", pytest.param("sglang", marks=pytest.mark.real)]
NARROW_OPTIONS = {"max_running_requests": 1, "prefill_chunk_tokens": 16, "context_length": 1024}
_NARROW_FLAGS = ("--max-running-requests", "1", "--chunked-prefill-size", "16", "--context-length", "1024")


@pytest.fixture(scope="session")
def embedded_server() -> Iterator[str]:
    """Yield the URL of the embedded engine that all tests share; a test must leave the engine as it was."""
    with run_on_thread(running_engine()) as url:
        yield url


@pytest.fixture(scope="session")
def narrow_embedded_server() -> Iterator[str]:
    with run_on_thread(running_engine(**NARROW_OPTIONS)) as url:
        yield url


@pytest.fixture(scope="session")
def narrow_sglang_server() -> Iterator[Callable[[], RealServer]]:
    """Yield a function that returns a real SGLang for one generation at a time, started again if a test killed it."""
    servers: list[RealServer] = []

    def alive() -> RealServer:
        if not servers or not is_running(servers[-1].pid):
            servers.append(start_sglang(None, *_NARROW_FLAGS))
        return servers[-1]

    yield alive
    if servers and is_running(servers[-1].pid):
        servers[-1].stop()


@pytest.fixture(params=BOTH)
def engine_url(request: pytest.FixtureRequest) -> str:
    if request.param == "sglang":
        return request.getfixturevalue("sglang")
    note_engine(request.node, "the embedded engine")
    return request.getfixturevalue("embedded_server")


@pytest.fixture(params=BOTH)
def narrow_url(request: pytest.FixtureRequest) -> str:
    """Return the URL of each engine that runs one generation at a time."""
    if request.param == "sglang":
        url = request.getfixturevalue("narrow_sglang_server")().base_url
        note_engine(request.node, f"SGLang {version_of(url)}")
        return url
    note_engine(request.node, "the embedded engine")
    return request.getfixturevalue("narrow_embedded_server")


@pytest.fixture
async def engine(engine_url: str) -> AsyncIterator[ServedEngine]:
    async with client_session() as session:
        served = ServedEngine(engine_url, session, facts_of(engine_url))
        await served.settle()
        yield served


@pytest.fixture
async def narrow(narrow_url: str) -> AsyncIterator[ServedEngine]:
    """Yield each engine that runs one generation at a time; other requests wait in its queue."""
    async with client_session() as session:
        served = ServedEngine(narrow_url, session, facts_of(narrow_url))
        await served.settle()
        yield served


@pytest.fixture
def shipped(engine: ServedEngine) -> ServedEngine:
    _needs_the_shipped_weights(engine.facts)
    return engine


def _needs_the_shipped_weights(facts: EngineFacts) -> None:
    if facts.model_path != str(SHIPPED_MODEL_DIR):
        pytest.skip(f"needs {SHIPPED_MODEL_DIR}; the server has {facts.model_path}")


@pytest.fixture
async def reweighted(shipped: ServedEngine, other_weights: Path) -> AsyncIterator[Callable[..., Any]]:
    """Yield a function that loads other weights: `await reweighted(weight_version="v2")`.

    At the end of the test, the shipped weights are loaded again.
    """

    async def update(**fields: Any) -> Any:
        return await shipped.post("/update_weights_from_disk", {"model_path": str(other_weights), **fields})

    yield update
    await shipped.settle()
    original = {"model_path": str(SHIPPED_MODEL_DIR), "weight_version": "default"}
    assert (await shipped.post("/update_weights_from_disk", original)).status == 200


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.numpy import load_file, save_file

    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(SHIPPED_MODEL_DIR, folder)
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = (tensor + 0.3 * tensor.std() * rng.standard_normal(tensor.shape)).astype(tensor.dtype)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


@pytest.fixture
async def both(sglang: str, embedded_server: str) -> AsyncIterator[tuple[ServedEngine, ServedEngine]]:
    """Yield the embedded engine and the real one with the same weights."""
    _needs_the_shipped_weights(facts_of(sglang))
    async with client_session() as session:
        served = [ServedEngine(url, session, facts_of(url)) for url in (embedded_server, sglang)]
        for engine in served:
            await engine.settle()
        yield served[0], served[1]


@pytest.fixture
def report_difference(report_row: Callable[..., None]) -> Callable[[str], None]:
    """Return a function that adds a measured difference, by its name, to the summary of the run."""

    def add(name: str) -> None:
        difference = DIFFERENCES[name]
        report_row(TABLE, what=name, SGLang=difference.sglang, embedded=difference.embedded, because=difference.reason)

    return add
