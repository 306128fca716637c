"""Fixtures for tests that run slime's own code; these tests are skipped without slime."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import recorded_tools
from slime_install import find_slime
from slime_interruptions import Begin, set_up_scene
from slime_stage import Start, set_up
from slime_workers import cluster, give_up_soon

import strands_rollout
from strands_rollout.diagnostics.slime_episode import make_importable

QWEN3_VOCABULARY = 151_936
_REASON = "needs THUDM/slime: set SLIME_PATH to a checkout of it (the slime of PyPI is an unrelated package)"


@pytest.fixture(scope="session", autouse=True)
def slime_package() -> Iterator[Path]:
    """Make slime importable, or skip the tests."""
    root = find_slime()
    if root is None:
        pytest.skip(_REASON)
    with make_importable(root):
        try:
            import slime.ray.rollout  # noqa: F401
        except ModuleNotFoundError as e:
            pytest.skip(f"slime needs the package {e.name!r}, which is not installed")
        yield root


@pytest.fixture(autouse=True)
def fresh_slime(slime_package: Path) -> Iterator[None]:
    """Reset slime's process-wide state after a test: generation state, event loop, HTTP client, caches."""
    from slime.rollout import sglang_rollout
    from slime.utils import async_utils, http_utils
    from slime.utils.misc import load_function

    yield
    sglang_rollout.GenerateState.clear_instances()
    sglang_rollout.EVAL_PROMPT_DATASET.clear()
    if hasattr(load_function, "cache_clear"):  # slime's function has no cache before slime 0.3.1
        load_function.cache_clear()
    if async_utils.async_loop is not None:
        _end_loop(async_utils.async_loop, http_utils._http_client)
    async_utils.async_loop = http_utils._http_client = None


def _end_loop(loop_thread: Any, http_client: Any) -> None:
    async def close() -> None:
        # tasks of an ended run would otherwise be destroyed during another test
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if http_client is not None:
            await http_client.aclose()
        await asyncio.get_running_loop().shutdown_asyncgens()
        # lets closed connections finish
        await asyncio.sleep(0.01)

    loop_thread.run(close())
    loop_thread.loop.call_soon_threadsafe(loop_thread.loop.stop)
    loop_thread._thread.join()
    loop_thread.loop.close()


@pytest.fixture(autouse=True)
def new_tool_records() -> Iterator[None]:
    """Clear the records of the tools after each test."""
    yield
    recorded_tools.clear_calls()


@pytest.fixture(autouse=True)
def _give_up_engines_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    give_up_soon(monkeypatch.setitem)


@pytest.fixture(scope="session", autouse=True)
def workers(slime_package: Path) -> Iterator[None]:
    """Start episode workers if the variable `STRANDS_ROLLOUT_TEST_WORKERS` asks for them."""
    with cluster(slime_package):
        yield


@pytest.fixture(scope="session")
def chat_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the tokenizer of a checkpoint folder: Qwen3's if available, else the shipped model's."""
    from transformers import AutoTokenizer

    try:
        source = Path(request.getfixturevalue("qwen3_tokenizer").name_or_path)
    except pytest.skip.Exception:
        source = Path(request.getfixturevalue("shipped_tokenizer").name_or_path)
    if (source / "config.json").is_file():
        return AutoTokenizer.from_pretrained(source)
    folder = tmp_path_factory.mktemp("checkpoint")
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": QWEN3_VOCABULARY}))
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session", autouse=True)
def no_cluster(workers: None) -> Iterator[None]:
    """Keep what slime puts into Ray's object store in this process: the real `ray.put` would start a cluster."""
    from slime.ray import rollout

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout.ray, "put", lambda value, **_options: value)
        yield


@pytest.fixture(scope="session", autouse=True)
def tokenizers_are_loaded_once(slime_package: Path) -> Iterator[None]:
    """Load the tokenizer only once: slime would load it for each of its objects, which takes seconds in each test."""
    from slime.rollout import data_source, sglang_rollout
    from slime.utils.processing_utils import load_tokenizer

    load = functools.cache(load_tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        for module in (data_source, sglang_rollout):
            patch.setattr(module, "load_tokenizer", load)
            patch.setattr(module, "load_processor", lambda _folder, **_options: None)
        yield


@pytest.fixture
async def start(chat_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Yield a function that starts a stage and records calls of `generate`: `await start(plans, tasks, **args)`."""
    async with AsyncExitStack() as stack:
        yield _watched(functools.partial(set_up, stack, chat_tokenizer, tmp_path), monkeypatch)


@pytest.fixture
async def begin(chat_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Begin]:
    """Yield a function like `start`, with an interruptible policy: `await begin(plans, tasks, disturb, **args)`."""
    async with AsyncExitStack() as stack:
        yield _watched(functools.partial(set_up_scene, stack, chat_tokenizer, tmp_path), monkeypatch)


def _watched(set_up_all: Callable[..., Awaitable[Any]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    async def start(*args: Any, **more: Any) -> Any:
        scene = await set_up_all(*args, **more)
        watched = scene.rollouts.watched(strands_rollout.generate)
        monkeypatch.setattr(strands_rollout, "generate", watched, raising=False)
        return scene

    return start
