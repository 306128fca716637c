"""Starting and stopping engines, and what happens when they can't start or break."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import aiohttp
import pytest

from strands_rollout.engine import running_engine
from strands_rollout.engine.kv_rows import KvRows
from strands_rollout.errors import ConfigError

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


def test_importing_is_cheap_and_running_needs_neither_torch_nor_transformers(tiny_dir):
    run = [sys.executable, "-c", LOADED, str(tiny_dir)]
    output = subprocess.run(run, capture_output=True, check=True, text=True, timeout=60).stdout
    assert json.loads(output) == [[], []]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_served_engine_answers_and_ends_cleanly_on_a_signal(tiny_dir, signum):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OPENBLAS")}
    run = [sys.executable, "-c", SERVE, str(tiny_dir)]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True, env=environment) as process:
        base_url = process.stdout.readline().strip()
        with urllib.request.urlopen(base_url + "/server_info", timeout=10) as response:  # noqa: S310
            assert json.load(response)["max_running_requests"] == 2
        process.send_signal(signum)
        assert process.wait(timeout=10) == 0


async def test_an_engine_tells_its_settings(embedded, tiny_dir):
    info = (await embedded.get("/server_info")).body
    assert (info["context_length"], info["max_req_input_len"], info["max_running_requests"]) == (512, 506, 32)
    assert (info["model_path"], info["max_total_num_tokens"]) == (str(tiny_dir), 32 * 512)


async def test_a_port_in_use_is_named(tiny_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1:{port}"):
            async with running_engine(tiny_dir, port=port):
                pass


async def test_a_missing_model_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="model folder not found"):
        async with running_engine(tmp_path / "nowhere"):
            pass


async def test_leaving_the_context_aborts_what_runs_and_frees_the_port(long_dir):
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 15000, "ignore_eos": True}}
    async with aiohttp.ClientSession() as session:
        async with running_engine(long_dir) as base_url:
            task = asyncio.create_task(session.post(base_url + "/generate", json=body))
            await asyncio.sleep(0.1)
            started = time.monotonic()
        assert time.monotonic() - started < 5
        response = await task
        assert (await response.json())["meta_info"]["finish_reason"]["type"] == "abort"
    async with running_engine(long_dir, port=int(base_url.rsplit(":", 1)[1])):
        pass


async def test_a_crash_fails_requests_instead_of_leaving_them_waiting(embedded, monkeypatch, caplog):
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
