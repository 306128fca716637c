"""The embedded engine as a child process: it serves, it is stopped, and it never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import aiohttp
import pytest

from strands_rollout.engine_process import engine_process
from strands_rollout.errors import EngineUnavailableError

PARENT = """
import asyncio
from strands_rollout.engine_process import engine_process

async def main():
    async with engine_process() as url:
        print(url, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def answers(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def test_it_serves_while_the_block_lasts_and_is_gone_afterwards() -> None:
    async with engine_process() as url:
        assert await answers(url)
    assert not await answers(url)


async def test_it_is_stopped_when_the_block_fails() -> None:
    urls: list[str] = []

    async def failing() -> None:
        async with engine_process() as url:
            urls.append(url)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await failing()
    assert not await answers(urls[0])


async def test_it_ends_when_its_parent_is_killed() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PARENT,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    try:
        assert parent.stdout is not None
        url = (await parent.stdout.readline()).decode().strip()
        assert await answers(url)
    finally:
        parent.kill()
        await parent.communicate()
    for _ in range(200):
        if not await answers(url):
            return
        await asyncio.sleep(0.05)
    pytest.fail("the engine still answers 10 s after its parent was killed")


async def test_a_model_that_can_not_be_served_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(
        EngineUnavailableError, match=r"exit code 2 before it was ready. It printed: error: .*config\.json"
    ):
        async with engine_process(tmp_path):
            pass
