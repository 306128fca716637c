"""Fixtures for tests that run slime's own code; all of them are skipped where slime is not at hand."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import FakeSGLang
from slime_gateway import Gateway
from slime_install import find_slime, importable
from slime_policy import Policy, prompt
from slime_run import CONTEXT_LENGTH, Rollouts, arguments, chat_row, write_rows

import strands_rollout

QWEN3_VOCABULARY = 151_936
_REASON = "needs THUDM/slime: set SLIME_PATH to a checkout of it (the slime of PyPI is an unrelated package)"


@pytest.fixture(scope="session", autouse=True)
def slime_package() -> Iterator[Path]:
    """slime, importable; the tests are skipped where it is not."""
    root = find_slime()
    if root is None:
        pytest.skip(_REASON)
    with importable(root):
        try:
            import slime.ray.rollout  # noqa: F401
        except ModuleNotFoundError as e:
            pytest.skip(f"slime needs the package {e.name!r}, which is not installed")
        yield root


@pytest.fixture(autouse=True)
def fresh_slime(slime_package: Path) -> Iterator[None]:
    """slime's process-wide state made anew: generation state, event loop, HTTP client, dataset cache."""
    from slime.rollout import sglang_rollout
    from slime.utils import async_utils, http_utils
    from slime.utils.misc import load_function

    yield
    sglang_rollout.GenerateState.clear_instances()
    sglang_rollout.EVAL_PROMPT_DATASET.clear()
    load_function.cache_clear()
    if async_utils.async_loop is not None:
        _end_loop(async_utils.async_loop, http_utils._http_client)
    async_utils.async_loop = http_utils._http_client = None


def _end_loop(loop_thread: Any, http_client: Any) -> None:
    async def close() -> None:
        if http_client is not None:
            await http_client.aclose()
        await asyncio.get_running_loop().shutdown_asyncgens()
        # what the closed connections still have to say
        await asyncio.sleep(0.01)

    loop_thread.run(close())
    loop_thread.loop.call_soon_threadsafe(loop_thread.loop.stop)
    loop_thread._thread.join()
    loop_thread.loop.close()


@pytest.fixture(scope="session")
def chat_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer of a checkpoint's folder: Qwen3's where it is at hand, else the shipped model's."""
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
def tokenizers_are_loaded_once(slime_package: Path) -> Iterator[None]:
    """slime loads the tokenizer anew for each of its objects, seconds for each test; it gets the same one here."""
    from slime.rollout import data_source, sglang_rollout
    from slime.utils.processing_utils import load_tokenizer

    load = functools.cache(load_tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        for module in (data_source, sglang_rollout):
            patch.setattr(module, "load_tokenizer", load)
            patch.setattr(module, "load_processor", lambda _folder, **_options: None)
        yield


@dataclass
class Stage:
    """A running engine and router, and slime's rollouts against them."""

    engine: FakeSGLang
    gateway: Gateway
    policy: Policy
    rollouts: Rollouts
    tokenizer: Any


Start = Callable[..., Any]


@pytest.fixture
async def start(chat_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Starts a stage: `await start(plans, tasks, **args)`, with one prompt per entry of `tasks`."""
    tokenizer = chat_tokenizer
    async with AsyncExitStack() as stack:

        async def begin(plans: dict[str, Any], tasks: list[str] | None = None, **more: Any) -> Stage:
            policy = Policy(tokenizer, plans)
            rows = more.pop("rows", None) or [chat_row(prompt(task, n)) for n, task in enumerate(tasks or plans)]
            engine = await stack.enter_async_context(
                FakeSGLang(policy, context_length=more.pop("context_length", CONTEXT_LENGTH), vocab_size=len(tokenizer))
            )
            gateway = await stack.enter_async_context(Gateway(engine.base_url))
            data = write_rows(tmp_path / "rows.jsonl", rows)
            groups, samples = len(rows), more.setdefault("n_samples_per_prompt", 2)
            more.setdefault("rollout_batch_size", groups)
            more.setdefault("over_sampling_batch_size", more["rollout_batch_size"])
            more.setdefault("global_batch_size", more["rollout_batch_size"] * samples)
            args = arguments(
                str(tokenizer.name_or_path),
                prompt_data=str(data),
                sglang_router_ip=gateway.host,
                sglang_router_port=gateway.port,
                save_debug_rollout_data=str(tmp_path / "rollout_{rollout_id}.pt"),
                **more,
            )
            rollouts = Rollouts(args)
            monkeypatch.setattr(strands_rollout, "generate", rollouts.watched(strands_rollout.generate), raising=False)
            return Stage(engine, gateway, policy, rollouts, tokenizer)

        yield begin
