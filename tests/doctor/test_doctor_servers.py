"""The doctor on servers: dead, loading, foreign, too small, of another vocabulary, behind a router."""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path
from typing import Any

from fake_sglang import FakeSGLang, dead_url
from stand_in_machine import SHIPPED, answering, assert_fault, only, tokenizer_folder

from strands_rollout.doctor.engine_server import Expected, check_server
from strands_rollout.doctor.finding import Finding

SERVES = {"model_path": "/models/m", "served_model_name": "m", "weight_version": "default"}


async def look(url: str, limit_s: float = 15.0, **expected: Any) -> list[Finding]:
    return await asyncio.to_thread(check_server, url, Expected(**expected), limit_s)


async def test_a_server_is_shown_with_version_model_and_context() -> None:
    routes = {"/health": (200, None), "/server_info": (200, {**SERVES, "version": "0.5.23", "context_length": 40960})}
    async with answering(routes) as url:
        found = await look(url, max_context_length=32768)
    assert [finding.status for finding in found] == ["ok", "ok", "skipped"]
    assert "SGLang 0.5.23" in found[0].found
    assert "/models/m" in found[0].found
    assert "40960" in found[1].found


async def test_an_sglang_that_is_too_old_is_a_warning() -> None:
    async with answering({"/health": (200, None), "/server_info": (200, {**SERVES, "version": "0.4.9"})}) as url:
        assert_fault(await look(url), "server", "warning", "0.4.9", remedy="sglang>=0.5")


async def test_a_dead_server_is_an_error() -> None:
    url = dead_url()
    assert_fault(await look(url), "server", "error", "nothing answers", url, remedy="sglang.launch_server")


async def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and is never looked at
        found = await look(f"http://127.0.0.1:{silent.getsockname()[1]}", limit_s=0.3)
    assert_fault(found, "server", "error", "did not answer within 0.3 s", remedy="log")


async def test_a_server_that_loads_is_an_error() -> None:
    async with answering({"/health": (503, None)}) as url:
        assert_fault(await look(url), "server", "error", "503", url, remedy="wait")


async def test_a_server_that_is_not_sglang_is_an_error() -> None:
    async with answering({"/health": (200, None), "/v1/models": (200, {"data": []})}) as url:
        assert_fault(await look(url), "server", "error", "not SGLang", "404", remedy="check the port")


async def test_a_broken_url_is_an_error() -> None:
    assert_fault(await look("http://127.0.0.1:1/generate"), "server", "error", "/generate", remedy="http://")


async def test_a_context_that_is_too_small_is_a_warning() -> None:
    async with FakeSGLang([], context_length=4096) as fake:
        found = await look(fake.base_url + "/worker", max_context_length=20480)
    assert_fault(found, "server context", "warning", "4096", "20480", remedy="--context-length 20480")


async def test_an_unknown_context_is_a_warning_where_one_is_wanted() -> None:
    async with answering({"/health": (200, None), "/server_info": (200, SERVES)}) as url:
        found = await look(url, max_context_length=20480)
    assert_fault(found, "server context", "warning", "does not tell", remedy="--context-length 20480")


async def test_a_router_is_known_and_its_worker_is_asked() -> None:
    async with FakeSGLang([], context_length=4096, router=True) as fake:
        found = await look(fake.base_url, max_context_length=1024)
    assert "a router" in found[0].found
    assert "behind the router" in found[1].found
    assert only(found, "server context").status == "ok"


async def test_a_router_without_workers_is_an_error() -> None:
    sick = [{"url": "http://127.0.0.1:1", "is_healthy": False}]
    async with answering({"/health": (200, None), "/workers": (200, {"workers": sick})}) as url:
        assert_fault(await look(url), "server", "error", "1 workers, none of them healthy", remedy="/workers")


async def test_a_server_with_another_vocabulary_is_an_error() -> None:
    routes = {"/health": (200, None), "/server_info": (200, SERVES), "/tokenize": (200, {"tokens": [1, 2, 3]})}
    async with answering(routes) as url:
        named = await look(url, tokenizer=SHIPPED, tokenizer_is_named=True)
        guessed = await look(url, tokenizer=SHIPPED)
    assert_fault(named, "server tokens", "error", str(SHIPPED), "/models/m", "3 there", remedy="--tokenizer")
    assert only(guessed, "server tokens").status == "warning"


async def test_the_servers_own_folder_is_read_where_it_does_not_tokenize(tmp_path: Path) -> None:
    served = tokenizer_folder(tmp_path / "served")
    async with answering({"/health": (200, None), "/server_info": (200, {**SERVES, "model_path": str(served)})}) as url:
        same = await look(url, tokenizer=SHIPPED, tokenizer_is_named=True)
        shutil.rmtree(served)
        unknown = await look(url, tokenizer=SHIPPED, tokenizer_is_named=True)
    assert only(same, "server tokens").status == "ok"
    assert only(unknown, "server tokens").status == "skipped"
