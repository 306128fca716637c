"""Requests that kill a real SGLang server, and that the embedded engine refuses. Each needs its own server."""

import asyncio
import shutil
from contextlib import suppress

import aiohttp
import pytest
from engine_api import IDS, Api, client_session
from prompts import CHAT_IDS
from real_server import start_sglang

from strands_rollout.engine import SHIPPED_MODEL_DIR

ONE = {"max_new_tokens": 1}


@pytest.fixture
def broken_weights(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED_MODEL_DIR, folder)
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 garbage")
    return folder


@pytest.fixture
def fatal(broken_weights):
    """Return the path and body of each fatal request, by the name of its difference."""
    return {
        "ids outside the vocabulary": ("/generate", {"input_ids": [5, 10**6], "sampling_params": ONE}),
        "an empty text": ("/generate", {"text": "", "sampling_params": ONE}),
        "a broken file of weights": ("/update_weights_from_disk", {"model_path": str(broken_weights)}),
    }


async def _is_killed_by(api: Api, path: str, body: object) -> bool:
    """Return whether a request kills a server."""
    assert (await api.generate(CHAT_IDS[:9], max_new_tokens=1))["meta_info"]["prompt_tokens"] == 9
    with suppress(aiohttp.ClientError, TimeoutError):
        await api.post(path, body)
    with suppress(aiohttp.ClientError, TimeoutError):
        await api.generate(IDS, **ONE)
        return False
    return True


@pytest.mark.real
async def test_fatal_request_kills_sglang(narrow_sglang_server, fatal, report_difference):
    servers = [
        narrow_sglang_server(),
        *await asyncio.gather(*(asyncio.to_thread(start_sglang) for _ in range(len(fatal) - 1))),
    ]
    try:
        async with client_session() as session:
            deaths = await asyncio.gather(
                *(
                    _is_killed_by(Api(server.base_url, session), path, body)
                    for server, (path, body) in zip(servers, fatal.values(), strict=True)
                )
            )
    finally:
        for server in servers:
            with suppress(ProcessLookupError):
                server.kill()
    assert deaths == [True] * len(fatal)
    for name in fatal:
        report_difference(name)
