"""`SandboxFusionExecutor` on a fake server that runs code: results, faults, several servers, event loops."""

import ast
import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_sandbox_fusion import FakeSandboxFusion, Trouble
from fake_sglang import dead_url

from strands_rollout.code_tool import remote, sandbox_fusion
from strands_rollout.code_tool.sandbox_fusion import SandboxFusionExecutor
from strands_rollout.errors import ConfigError


@pytest.fixture
async def fake() -> AsyncIterator[FakeSandboxFusion]:
    async with FakeSandboxFusion() as fake:
        yield fake


@pytest.fixture
async def executor(fake: FakeSandboxFusion) -> AsyncIterator[SandboxFusionExecutor]:
    async with SandboxFusionExecutor(fake.url, timeout_s=20) as executor:
        yield executor


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timeouts for missing answers."""
    monkeypatch.setattr(sandbox_fusion, "_ANSWER_MARGIN_S", 0.3)
    monkeypatch.setattr(sandbox_fusion, "START_ALLOWANCE_S", 0.3)
    monkeypatch.setattr(sandbox_fusion, "_RETRY_DELAY_S", 0.01)


async def test_fusion_cuts_output_to_the_servers_pipes(executor: SandboxFusionExecutor) -> None:
    noise = "import random\nnoise = ''.join(map(chr, (random.randrange(0x4e00, 0x9fff) for _ in range(30000))))\n"
    result = await executor.run(noise + "import sys\nprint(noise, end='>'); print(noise, file=sys.stderr, end='>')")
    assert (result.exit_code, result.truncated, result.infra_error) == (0, True, None)
    assert 2000 < len(result.stdout) < 20_100
    assert result.stdout.endswith(">")
    assert result.stdout.count("characters dropped") == 1


async def test_fusion_code_that_kills_its_supervisor(executor: SandboxFusionExecutor) -> None:
    result = await executor.run("import os\nprint(1)\nos.kill(os.getppid(), 9)")
    assert (result.infra_error, result.killed_by) == (None, "the end of its supervisor")
    assert result.exit_code == -9


async def test_fusion_code_cannot_fake_a_server_fault(executor: SandboxFusionExecutor) -> None:
    code = "import os\nopen(f'/proc/{os.getppid()}/fd/1', 'wb').write(b'\\xff' * 99)\nos.kill(os.getppid(), 9)"
    assert (await executor.run(code)).infra_error is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limit")
async def test_fusion_limits_memory_without_the_servers_help() -> None:
    async with FakeSandboxFusion() as fake, SandboxFusionExecutor(fake.url, memory_mb=256) as executor:
        result = await executor.run("keep = []\nwhile sum(map(len, keep)) < 10**9: keep.append('x' * 10**6)")
    assert result.stderr.endswith("MemoryError\n"), result
    assert fake.requests[0]["memory_limit_MB"] == 256


async def test_fusion_request_matches_the_servers_api(fake: FakeSandboxFusion) -> None:
    async with SandboxFusionExecutor(f"{fake.url}/run_code", headers={"Authorization": "Bearer key"}) as executor:
        await executor.run("1")
    (request,) = fake.requests
    assert (request["language"], request["files"], request["run_timeout"]) == ("python", {}, 70.0)
    assert {"code", "compile_timeout"} <= set(request)
    assert request["code"].isascii()
    assert "memory_limit_MB" not in request
    assert fake.headers[0]["Authorization"] == "Bearer key"


# ---- faults


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (Trouble(code=503), "HTTP 503"),
        (Trouble(body=b"<html>"), "not valid JSON"),
        (Trouble("reset"), "disconnected"),
        (Trouble("sandbox_error"), "Resource temporarily unavailable"),
        (Trouble("no_python"), "exit code 127"),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
@pytest.mark.usefixtures("short_timeouts")
async def test_fusion_persistent_fault_is_infra_error(trouble: Trouble, words: str) -> None:
    async with FakeSandboxFusion(always=trouble) as fake, SandboxFusionExecutor(fake.url) as executor:
        result = await executor.run("1 + 1")
    assert (result.stdout, result.stderr, result.exit_code) == ("", "", None)
    assert words in (result.infra_error or "")
    assert fake.url in (result.infra_error or "")
    assert len(result.infra_error or "") < 1000
    assert len(fake.requests) == 2


async def test_fusion_does_not_retry_refusal_on_same_server() -> None:
    async with FakeSandboxFusion(always=Trouble(code=401)) as fake, SandboxFusionExecutor(fake.url) as executor:
        assert "HTTP 401" in ((await executor.run("1")).infra_error or "")
    assert len(fake.requests) == 1


@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.usefixtures("short_timeouts")
async def test_fusion_honours_retry_after_once(monkeypatch: pytest.MonkeyPatch, passes: bool) -> None:
    waits, sleep = [], asyncio.sleep

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    busy = Trouble(code=429, headers={"retry-after": "1"})
    async with FakeSandboxFusion([busy, *[busy] * (not passes)]) as fake, SandboxFusionExecutor(fake.url) as executor:
        monkeypatch.setattr(asyncio, "sleep", noted)
        result = await executor.run("1")
        monkeypatch.undo()
    assert (result.stdout, "HTTP 429" in (result.infra_error or "")) == (("1\n", False) if passes else ("", True))
    assert [seconds for seconds in waits if seconds >= 1] == [1.0]


@pytest.mark.slow
@pytest.mark.usefixtures("short_timeouts")
async def test_fusion_server_that_hangs_is_infra_error() -> None:
    async with FakeSandboxFusion(always=Trouble("hang")) as fake, SandboxFusionExecutor(fake.url) as executor:
        result = await asyncio.wait_for(executor.run("1", timeout_s=0.3), 30)
        assert "no answer in 0.9 s" in (result.infra_error or "")
        assert len(fake.requests) == 1


@pytest.mark.usefixtures("short_timeouts")
async def test_fusion_errors_show_no_secrets() -> None:
    url = dead_url().replace("http://", "http://someone:hunter2@")
    async with SandboxFusionExecutor(url, headers={"Authorization": "Bearer hunter2"}) as executor:
        error = (await executor.run("1")).infra_error or ""
    assert dead_url().rpartition(":")[0] in error
    assert "hunter2" not in error


# ---- several servers


@pytest.mark.usefixtures("short_timeouts")
async def test_fusion_avoids_failing_server() -> None:
    async with (
        FakeSandboxFusion(always=Trouble(code=503)) as bad,
        FakeSandboxFusion() as good,
        SandboxFusionExecutor([bad.url, good.url]) as executor,
    ):
        results = [await executor.run(f"{number}") for number in range(6)]
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(6)]
    assert len(bad.requests) == 1


@pytest.mark.usefixtures("short_timeouts")
async def test_fusion_uses_server_after_cooldown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_fusion, "_COOLDOWN_S", 0.0)
    async with (
        FakeSandboxFusion([Trouble(code=503)]) as recovering,
        FakeSandboxFusion() as good,
        SandboxFusionExecutor([recovering.url, good.url]) as executor,
    ):
        for _ in range(2):
            await executor.run("1")
    assert (len(recovering.requests), len(good.requests)) == (2, 1)


# ---- concurrency, cancellation, closing


async def test_fusion_cancelled_run_frees_its_slot(fake: FakeSandboxFusion) -> None:
    async with SandboxFusionExecutor(fake.url, max_concurrency=1) as executor:
        running = asyncio.create_task(executor.run("import time; time.sleep(20)", timeout_s=1))
        await fake.arrived.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        result = await executor.run("1")
    assert (result.stdout, result.infra_error, len(fake.requests)) == ("1\n", None, 2)


# ---- settings


@pytest.mark.parametrize("urls", [[], "", "ftp://host", ["http://ok", 3], "http://host?x=1"])
def test_fusion_rejects_invalid_urls(urls: object) -> None:
    with pytest.raises(ConfigError, match="url"):
        SandboxFusionExecutor(urls)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", remote._SENT_MODULES)
def test_sent_modules_need_only_python_38_standard_library(name: str) -> None:
    source = (Path(remote.__file__).parent / f"{name}.py").read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in imported} <= sys.stdlib_module_names
