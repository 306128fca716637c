"""The Ray backend on a real cluster of two nodes on this machine: spread, faults, sessions, cancellation."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from processes import ends, written_number
from ray_cluster import ray_cluster

from strands_rollout.code_tool import CodeExecutor
from strands_rollout.code_tool.local import LocalExecutor
from strands_rollout.code_tool.ray import RayExecutor
from strands_rollout.errors import ConfigError, SandboxError

LOCAL = "strands_rollout.code_tool.LocalExecutor"
SUBPROCESS = "strands_rollout.code_tool.SubprocessExecutor"
PROCESS = "stand_in_executors.ProcessExecutor"
CPUS = {"small": 1, "large": 3}

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # older Rays' own log files


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimpleNamespace]:
    """Two nodes, of 1 and of 3 CPUs."""
    with ray_cluster(CPUS, Path(__file__).parent) as made:
        yield made


@pytest.fixture(scope="module")
def executor(cluster: SimpleNamespace) -> Iterator[RayExecutor]:
    """One for all tests: each has an event loop of its own, which must not matter."""
    executor = RayExecutor(timeout_s=20)
    yield executor
    asyncio.run(executor.aclose())


@pytest.fixture
async def answering(cluster: SimpleNamespace) -> AsyncIterator[RayExecutor]:
    async with RayExecutor(executor=PROCESS) as executor:
        yield executor


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Calls wait for it to be made: what is done before that happens while they run."""
    return tmp_path / "gate"


def open_gate(gate: Path) -> None:
    gate.touch()


async def pid_of(executor: RayExecutor, gate: Path | str = "", session: str | None = None) -> int:
    result = await executor.run(str(gate), session=session)
    assert result.infra_error is None, result
    return int(result.stdout)


async def actor_pids(executor: RayExecutor) -> set[int]:
    """The actors' processes: enough calls at once that each node gets some."""
    return set(await asyncio.gather(*(pid_of(executor) for _ in range(16))))


async def test_the_backend_is_a_code_executor_like_those_of_the_nodes(executor, cluster) -> None:
    assert isinstance(executor, CodeExecutor)
    assert executor.facts == LocalExecutor().facts
    for limit_s in (0.5, 5.0, 30.0):  # until it is enough to print, on a busy machine too
        result = await executor.run("print('before')\nwhile True: pass", timeout_s=limit_s)
        if result.stdout:
            break
    assert (result.timed_out, result.stdout, result.infra_error) == (True, "before\n", None)
    async with RayExecutor(executor=SUBPROCESS, max_output_chars=100) as short:
        result = await short.run("print('x' * 1000)")
    assert (result.truncated, len(result.stdout) < 200) == (True, True)


async def test_calls_are_spread_by_the_nodes_cpus(answering: RayExecutor, gate: Path) -> None:
    await actor_pids(answering)
    calls = [asyncio.ensure_future(pid_of(answering, gate)) for _ in range(16)]
    await asyncio.sleep(0.1)
    open_gate(gate)
    assert sorted(Counter(await asyncio.gather(*calls)).values()) == [4, 12]


async def test_only_the_named_nodes_are_used(cluster: SimpleNamespace) -> None:
    async with RayExecutor(executor=PROCESS, nodes=[cluster.ids["large"]]) as executor:
        assert len(await actor_pids(executor)) == 1


async def test_no_cpu_need_be_free(cluster: SimpleNamespace) -> None:
    ray = cluster.ray
    group = ray.util.placement_group([{"CPU": cpus} for cpus in CPUS.values()])
    assert group.wait(10)
    try:
        async with RayExecutor(executor=PROCESS) as executor:
            assert len(await actor_pids(executor)) == 2
    finally:
        ray.util.remove_placement_group(group)


async def test_it_works_inside_an_actor(cluster: SimpleNamespace) -> None:
    @cluster.ray.remote(num_cpus=1)
    class Rollout:
        async def run(self) -> str:
            async with RayExecutor(executor=SUBPROCESS) as executor:
                return (await executor.run("6 * 7")).stdout

    actor = Rollout.remote()
    assert await actor.run.remote() == "42\n"
    cluster.ray.kill(actor)


async def test_calls_survive_the_death_of_an_actor_as_do_new_sessions(answering: RayExecutor, gate: Path) -> None:
    victim = min(await actor_pids(answering))
    calls = [asyncio.ensure_future(pid_of(answering, gate)) for _ in range(16)]
    names = [f"s{n}" for n in range(4)]
    first_calls = [asyncio.ensure_future(pid_of(answering, gate, session=name)) for name in names]
    await asyncio.sleep(0.1)
    os.kill(victim, signal.SIGKILL)
    open_gate(gate)
    answers = await asyncio.gather(*calls)
    homes = await asyncio.gather(*first_calls)
    assert len(answers) == 16
    assert victim not in {*answers, *homes}
    assert homes == [await pid_of(answering, session=name) for name in names]


async def test_a_dead_actor_comes_back(cluster: SimpleNamespace, gate: Path) -> None:
    async with RayExecutor(executor=PROCESS, nodes=[cluster.ids["small"]]) as executor:
        first = await pid_of(executor)
        call = asyncio.ensure_future(pid_of(executor, gate))
        await asyncio.sleep(0.1)
        os.kill(first, signal.SIGKILL)
        open_gate(gate)
        second = await call
        assert second != first
        assert await pid_of(executor) == second


async def test_a_node_that_fails_is_avoided(cluster: SimpleNamespace, tmp_path: Path) -> None:
    log = tmp_path / "faults"
    options = {"faulty_node": cluster.ids["large"], "faults_log": str(log)}
    async with RayExecutor(executor=PROCESS, options=options) as executor:
        assert len(await actor_pids(executor)) == 1
        faults = log.read_text()
        assert len({await pid_of(executor) for _ in range(4)}) == 1
        assert log.read_text() == faults != ""
    async with RayExecutor(executor=PROCESS, options=options, nodes=[cluster.ids["large"]]) as executor:
        assert (await executor.run("")).infra_error == "the disk is full"


async def test_cancelling_a_call_ends_its_code(cluster: SimpleNamespace) -> None:
    async with RayExecutor(executor=SUBPROCESS) as executor:
        with tempfile.TemporaryDirectory() as folder:
            note = Path(folder) / "pid"
            code = f"import os, time\nopen({str(note)!r}, 'w').write(f'{{os.getpid()}}\\n')\ntime.sleep(60)"
            call = asyncio.ensure_future(executor.run(code))
            pid = await asyncio.to_thread(written_number, note)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await asyncio.to_thread(ends, pid)


async def test_a_session_keeps_its_variables_and_its_node(executor: RayExecutor) -> None:
    names = ["a", "b", "c", "d"]
    for name in names:
        await executor.run(f"x = {name!r}", session=name)
    for _ in range(3):
        assert [(await executor.run("x", session=name)).stdout for name in names] == [f"{name!r}\n" for name in names]
    await executor.close_session("a")
    await executor.close_session("never opened")
    assert "NameError" in (await executor.run("x", session="a")).stderr


@pytest.mark.parametrize("in_flight", [True, False])
async def test_a_session_whose_process_died_is_never_silently_fresh(answering, gate, in_flight) -> None:
    home = await pid_of(answering, session="s")
    call = asyncio.ensure_future(answering.run(str(gate), session="s")) if in_flight else None
    await asyncio.sleep(0.1)
    os.kill(home, signal.SIGKILL)
    assert await asyncio.to_thread(ends, home)
    result = await (call or answering.run("", session="s"))
    assert result.session_lost
    assert result.infra_error
    assert await pid_of(answering, session="s") != home


async def test_closing_waits_for_what_runs_and_ends_the_actors_only(cluster: SimpleNamespace, gate: Path) -> None:
    executor = RayExecutor(executor=PROCESS)
    actors = await actor_pids(executor) | {await pid_of(executor, session="s")}
    call = asyncio.ensure_future(pid_of(executor, gate))
    await asyncio.sleep(0)  # it counts as running
    closing = asyncio.ensure_future(executor.aclose())
    await asyncio.sleep(0.1)
    assert not closing.done()
    open_gate(gate)
    await closing
    assert call.done()
    assert await call in actors
    for pid in actors:
        assert await asyncio.to_thread(ends, pid)
    assert cluster.ray.is_initialized()
    await executor.aclose()
    with pytest.raises(SandboxError, match="after aclose"):
        await executor.run("")


async def test_an_address_where_nobody_listens_is_an_infrastructure_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    async with RayExecutor(address=f"127.0.0.1:{port}", executor=SUBPROCESS) as executor:
        result = await executor.run("1")
    assert f"no Ray cluster answers at 127.0.0.1:{port}" in (result.infra_error or "")


CONNECTING = """
import asyncio, sys, ray
from strands_rollout.errors import ConfigError
from strands_rollout.code_tool.ray import RayExecutor

async def main(address, executor):
    try:
        RayExecutor(executor=executor)
    except ConfigError as e:
        assert "ray.init() first" in str(e)
    async with RayExecutor(address=address, executor=executor) as mine:
        assert (await mine.run("1")).stdout == "1\\n"
    assert not ray.is_initialized(), "it connected, so it disconnects"
    ray.init(address=address, log_to_driver=False)
    theirs = RayExecutor(executor=executor)
    assert (await theirs.run("2")).stdout == "2\\n"
    ray.shutdown()
    assert "shut down" in (await theirs.run("3")).infra_error
    await theirs.aclose()
    assert not ray.is_initialized(), "nothing starts Ray unasked"

asyncio.run(main(*sys.argv[1:]))
print("all well")
"""


def test_it_connects_where_it_is_told_and_never_starts_ray_unasked(cluster: SimpleNamespace) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", CONNECTING, cluster.nodes.address, SUBPROCESS]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert child.stdout.endswith("all well\n"), child.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"executor": "nowhere.Executor"}, "can't load the executor 'nowhere.Executor'"),
        ({"options": {"memory": 1}}, "can't take the options .*did you mean 'memory_mb'"),
        ({"nodes": "10.0.0.1"}, "expected 'all', or a list"),
        ({"address": "ray://10.0.0.1:10001"}, "Ray Client"),
        ({"actor_options": {"num_cpus": 1, "name": "x"}}, "names name, num_cpus"),
    ],
)
def test_a_wrong_setting_is_refused(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str) -> None:
    monkeypatch.setitem(sys.modules, "ray", initialized_ray())
    with pytest.raises(ConfigError, match=message):
        RayExecutor(**{"executor": LOCAL} | settings)


def test_a_machine_without_ray_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="pip install ray"):
        RayExecutor(executor=LOCAL)


def initialized_ray() -> ModuleType:
    """What the settings' checks see of Ray, where it is not installed too."""
    from importlib.machinery import ModuleSpec

    ray = ModuleType("ray")
    ray.__spec__ = ModuleSpec("ray", None)
    ray.is_initialized = lambda: True  # type: ignore[attr-defined]
    return ray
