"""Starting and stopping engines, also as a child process, and engines that fail to start or crash."""

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from engine_api import Api, wait_for_load

from strands_rollout.engine import engine_process, running_engine
from strands_rollout.engine.qwen3 import KvRows
from strands_rollout.errors import ConfigError, EngineUnavailableError

SERVE = """
import sys
from strands_rollout.engine import serve
serve(sys.argv[1], port=0, max_running_requests=2, on_ready=lambda url: print(url, flush=True))
"""
LOADED = """
import asyncio, json, sys
import strands_rollout.engine
cheap = sorted({"numpy", "aiohttp", "tokenizers", "jinja2"} & set(sys.modules))
async def main():
    async with strands_rollout.engine.running_engine(sys.argv[1]):
        pass
asyncio.run(main())
print(json.dumps([cheap, sorted({"torch", "transformers", "strands", "pydantic"} & set(sys.modules))]))
"""

BUSY = {
    "a batch that is computed": {"input_ids": [[1]] * 32, "sampling_params": {"n": 32, "max_new_tokens": 400}},
    "a text that is encoded": {"text": " " * (8 << 20)},
}
PARENT = """
import asyncio
from strands_rollout.engine import engine_process

async def main():
    async with engine_process() as url:
        print(url, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_engine_imports_neither_torch_nor_transformers(tiny_dir):
    run = [sys.executable, "-c", LOADED, str(tiny_dir)]
    output = subprocess.run(run, capture_output=True, check=True, text=True, timeout=300).stdout
    assert json.loads(output) == [[], []]


@contextmanager
def served(model_dir, code=SERVE):
    run = [sys.executable, "-c", code, str(model_dir)]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True) as process:
        yield process, process.stdout.readline().strip()


@contextmanager
def asked(base_url, body):
    connection = http.client.HTTPConnection(base_url.removeprefix("http://"))
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    time.sleep(0.2)
    yield
    connection.close()


@pytest.mark.parametrize("body", BUSY.values(), ids=BUSY.keys())
def test_serve_ends_by_a_signal_while_busy(tiny_dir, body):
    with served(tiny_dir) as (process, base_url), asked(base_url, body):
        process.terminate()
        assert process.wait(timeout=30) == 0


@pytest.mark.slow
def test_serve_ends_by_a_signal_while_hanging(tiny_dir):
    hanging = SERVE.replace("import sys", "import sys, time\nfrom strands_rollout.engine.scheduler import Scheduler", 1)
    hanging = hanging.replace("serve(", "Scheduler.step = lambda _: time.sleep(1000)\nserve(", 1)
    with served(tiny_dir, hanging) as (process, base_url), asked(base_url, {"input_ids": [1]}):
        process.terminate()
        assert process.wait(timeout=30) == -signal.SIGALRM


async def test_running_engine_names_a_port_in_use(tiny_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1:{port}"):
            async with running_engine(tiny_dir, port=port):
                pass


async def test_running_engine_aborts_and_frees_the_port_on_exit(long_dir):
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 15000, "ignore_eos": True}}
    async with aiohttp.ClientSession() as session:
        async with running_engine(long_dir) as base_url:
            task = asyncio.create_task(session.post(base_url + "/generate", json=body))
            await wait_for_load(Api(base_url, session), 1)
        response = await asyncio.wait_for(task, 30)
        assert (await response.json())["meta_info"]["finish_reason"]["type"] == "abort"
    async with running_engine(long_dir, port=int(base_url.rsplit(":", 1)[1])):
        pass


async def test_engine_crash_fails_waiting_requests(embedded, monkeypatch, caplog):
    def explode(*_args: object) -> None:
        raise ArithmeticError("boom")

    monkeypatch.setattr(KvRows, "attend_step", explode)
    body = {"input_ids": [1, 2, 3]}
    answers = await asyncio.gather(*(embedded.post("/generate", body) for _ in range(5)))
    answers.append(await embedded.post("/generate", body))
    assert [(answer.status, list(answer.body)) for answer in answers] == [(500, ["error"])] * 6
    assert (await embedded.get("/health")).status == 503
    assert (await embedded.post("/flush_cache")).status == 500
    assert "boom" in caplog.text


async def answers(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def test_engine_process_ends_when_its_parent_is_killed() -> None:
    run = [sys.executable, "-c", PARENT]
    parent = await asyncio.create_subprocess_exec(*run, stdout=asyncio.subprocess.PIPE)
    try:
        assert parent.stdout is not None
        url = (await parent.stdout.readline()).decode().strip()
        assert await answers(url)
    finally:
        parent.kill()
        await parent.communicate()
    async with asyncio.timeout(30):
        while await answers(url):  # noqa: ASYNC110 - the state polled is another process's
            await asyncio.sleep(0.05)


async def test_engine_process_error_names_the_cause(tmp_path: Path) -> None:
    words = r"exited with code 2 before it was ready. It printed: error: .*config\.json"
    with pytest.raises(EngineUnavailableError, match=words):
        async with engine_process(tmp_path):
            pass
