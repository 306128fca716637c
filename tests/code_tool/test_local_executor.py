"""`LocalExecutor` from outside: sessions, concurrency, limits, libraries, isolation, faults of processes, cleanup."""

import ast
import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import is_running

from strands_rollout.code_tool import ExecutionResult, LocalExecutor
from strands_rollout.code_tool.sandbox import scratch
from strands_rollout.code_tool.sandbox.supervisor import Supervisor
from strands_rollout.code_tool.sandbox.watch import unaccounted_memory
from strands_rollout.code_tool.supervisor_link import SupervisorLink
from strands_rollout.errors import ConfigError, SandboxError

ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc and layers")


def executor_without_libraries(**options: Any) -> LocalExecutor:
    """Return an executor that starts fast, because it imports no libraries."""
    return LocalExecutor(libraries=[], **options)


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    executor = LocalExecutor(timeout_s=20, max_concurrency=8)
    yield executor
    asyncio.run(executor.aclose())


@pytest.fixture(scope="module")
def single_slot() -> Iterator[LocalExecutor]:
    """Executor without libraries and with one slot, which all its runs use."""
    executor = executor_without_libraries(disk_mb=16, timeout_s=20, max_concurrency=1)
    yield executor
    asyncio.run(executor.aclose())


@pytest.fixture
async def disposable() -> AsyncIterator[LocalExecutor]:
    async with executor_without_libraries(timeout_s=20, max_concurrency=8) as executor:
        yield executor


def descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def helpers(executor: LocalExecutor) -> tuple[int, int]:
    supervisor = executor._supervisor.link._process.pid  # type: ignore[union-attr]
    (fork_server,) = map(int, Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split())
    return supervisor, fork_server


def root_of(executor: LocalExecutor) -> Path:
    return Path(executor._supervisor._root.path)  # type: ignore[union-attr]


async def has_started(executor: LocalExecutor) -> bool:
    await executor.start()
    return await wait_until(lambda: any(root_of(executor).glob("*/started")))


WAIT_FOR_GO = "import os, time\nopen('started', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)"


def send_go(executor: LocalExecutor) -> None:
    (started,) = root_of(executor).glob("*/started")
    started.with_name("go").touch()


def cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def paths_in(root: Path) -> list[str]:
    walks = [walk for place in os.scandir(root) for walk in os.walk(place.path)]
    return [name for _, folders, files in walks for name in (*folders, *files)]


async def wait_until(condition: Any, within_s: float = 30.0) -> bool:
    deadline = time.monotonic() + within_s
    while not (is_met := bool(condition())) and time.monotonic() < deadline:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.02)
    return is_met


async def test_session_keeps_variables_and_files_until_closed(executor: LocalExecutor) -> None:
    await executor.run("x = 1; import math; open('f', 'w').write('kept')", session="a")
    assert (await executor.run("x + 1, math.pi > 3, open('f').read()", session="a")).stdout == "(2, True, 'kept')\n"
    assert "NameError" in (await executor.run("x", session="b")).stderr
    assert "NameError" in (await executor.run("x")).stderr
    await executor.close_session("a")
    result = await executor.run("import os; print(os.listdir()); x", session="a")
    assert (result.stdout, result.stderr.splitlines()[-1]) == ("[]\n", "NameError: name 'x' is not defined")
    await executor.close_session("a")
    await executor.close_session("b")
    await executor.close_session("never opened")


async def test_session_call_shows_its_own_output_and_lines(executor: LocalExecutor) -> None:
    await executor.run("def f(x):\n    return 1 / x", session="lines")
    result = await executor.run("print('é', end='')\nf(0)", session="lines")
    assert result.stdout == "é"
    assert "return 1 / x" in result.stderr
    assert 'File "<code 2>", line 2, in <module>' in result.stderr
    assert (result.exit_code, result.session_lost) == (1, False)
    result = await executor.run("1", session="lines")
    assert (result.stdout, result.stderr, result.exit_code) == ("1\n", "", 0)
    assert (await executor.run("raise SystemExit(7)", session="lines")).exit_code == 7
    assert (await executor.run("f.__name__", session="lines")).stdout == "'f'\n"
    await executor.close_session("lines")


@pytest.mark.parametrize("end", ["while True: pass", "import os; os._exit(3)", "import ctypes; ctypes.string_at(0)"])
async def test_session_whose_process_ends_is_reported_lost(executor: LocalExecutor, end: str) -> None:
    for limit_s in (0.5, 5.0, 20.0):  # increased until the code prints, also on a busy machine
        await executor.run("x = 1", session="short")
        result = await executor.run(f"print('before')\n{end}", session="short", timeout_s=limit_s)
        if result.stdout:
            break
    assert (result.stdout, result.session_lost, result.infra_error) == ("before\n", True, None)
    result = await executor.run("x", session="short")
    assert "NameError" in result.stderr
    assert result.session_lost is False
    await executor.close_session("short")


@LINUX
async def test_session_is_stopped_between_calls(executor: LocalExecutor) -> None:
    code = "import os, threading, time\nn = 0\ndef count():\n    global n\n    while True: n += 1\n"
    code += "threading.Thread(target=count, daemon=True).start()\nwhile n == 0: time.sleep(0.001)\nos.getpid()"
    pid = int((await executor.run(code, session="busy")).stdout)
    assert await wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    before = cpu_ticks(pid)
    await asyncio.sleep(0.2)
    assert cpu_ticks(pid) == before
    assert int((await executor.run("n", session="busy")).stdout) > 0
    await executor.close_session("busy")
    assert await wait_until(lambda: not is_running(pid))


async def test_session_calls_run_one_after_the_other(executor: LocalExecutor) -> None:
    await executor.run("n = 0", session="serial")
    code = "import time\nm = n\ntime.sleep(0.05)\nn = m + 1"
    await asyncio.gather(*(executor.run(code, session="serial") for _ in range(5)))
    assert (await executor.run("n", session="serial")).stdout == "5\n"
    await executor.close_session("serial")


async def test_run_rejects_empty_session_name(executor: LocalExecutor) -> None:
    for session in ("", 3):
        with pytest.raises(ConfigError, match="expected a name"):
            await executor.run("1", session=session)  # type: ignore[arg-type]


async def test_run_reports_queued_s(single_slot: LocalExecutor) -> None:
    first = asyncio.create_task(single_slot.run(WAIT_FOR_GO))
    assert await has_started(single_slot)
    second = asyncio.create_task(single_slot.run("1"))
    await asyncio.sleep(0)  # the run is queued for the slot
    await asyncio.sleep(0.2)
    send_go(single_slot)
    assert (await second).queued_s > 0.1
    assert (await first).exit_code == 0


@LINUX
@pytest.mark.parametrize("victim", ["supervisor", "fork_server"])
@pytest.mark.slow
async def test_run_survives_killed_supervisor_with_64_calls(disposable, victim) -> None:
    calls = [asyncio.create_task(disposable.run(f"import time; time.sleep(0.1); print({n})")) for n in range(64)]
    await asyncio.sleep(0.4)
    os.kill(helpers(disposable)[victim == "fork_server"], signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(64)]
    assert all(result.infra_error is None for result in results)


@pytest.mark.parametrize("session", [None, "s"])
def test_closed_loop_releases_slot_and_ends_code(session: str | None) -> None:
    executor = executor_without_libraries(timeout_s=60, max_concurrency=1)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(executor.start())
    call = loop.create_task(executor.run(WAIT_FOR_GO, session=session))
    loop.run_until_complete(has_started(executor))
    call._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()

    async def run_later() -> ExecutionResult:
        # wait for less than the first code's time limit
        result = await asyncio.wait_for(executor.run("1 + 1", session=session), 50)
        await executor.aclose()
        return result

    assert asyncio.run(run_later()).stdout == "2\n"


@LINUX
@pytest.mark.parametrize("name", ["SIGTSTP", "SIGTTIN", "SIGTTOU"])
async def test_terminal_signal_does_not_stop_code(executor: LocalExecutor, name: str) -> None:
    result = await executor.run(f"import os, signal; os.kill(os.getpid(), signal.{name}); print('went on')")
    assert result.stdout == "went on\n"


@LINUX
@pytest.mark.parametrize(
    ("options", "has_own_session"),
    [({"isolation": "seccomp"}, False), ({"isolation": "files", "programs": True}, True)],
)
async def test_unfiltered_code_has_a_session_of_its_own(options: dict[str, Any], has_own_session: bool) -> None:
    async with executor_without_libraries(**options) as executor:
        result = await executor.run("import os; print(os.getsid(0) == os.getpid())")
    assert result.stdout == f"{has_own_session}\n"


def autogroup_of(pid: int) -> str:
    return Path(f"/proc/{pid}/autogroup").read_text()


@LINUX
async def test_local_executor_code_yields_to_other_processes(disposable: LocalExecutor) -> None:
    result = await disposable.run("import os; print(os.getpriority(os.PRIO_PROCESS, 0))")
    priority = min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)
    assert result.stdout == f"{priority}\n"
    _, fork_server = helpers(disposable)
    with contextlib.suppress(FileNotFoundError):  # a kernel without autogroups
        assert autogroup_of(fork_server).endswith(" nice 5\n")


@LINUX
async def test_oom_killer_prefers_code(disposable: LocalExecutor) -> None:
    def score(path: str) -> int:
        return int(Path("/proc", path, "oom_score_adj").read_text())

    def threads() -> list[tuple[Path, ...]]:
        return [tuple(Path(f"/proc/{pid}/task").iterdir()) for pid in descendants(fork_server)]

    code = "import threading, time\nfor _ in range(2): threading.Thread(target=time.sleep, args=(30,)).start()"
    run = asyncio.create_task(disposable.run(code))
    supervisor, fork_server = helpers(disposable)
    assert await wait_until(lambda: any(len(process) == 3 for process in threads()))
    assert await wait_until(lambda: {score(str(thread)) for process in threads() for thread in process} == {1000})
    assert score(str(supervisor)) == score(str(fork_server)) == score("self") < 1000
    run.cancel()


@LINUX
@pytest.mark.parametrize("in_a_call", [True, False])
async def test_session_of_dead_supervisor_is_reported_lost(disposable, in_a_call) -> None:
    await disposable.run("import time", session="a")
    code = "open('started', 'w').close(); time.sleep(60)" if in_a_call else "print('fresh')"
    call = asyncio.create_task(disposable.run(code, session="a")) if in_a_call else None
    assert call is None or await has_started(disposable)
    os.kill(helpers(disposable)[0], signal.SIGKILL)
    assert await wait_until(lambda: not disposable._supervisor.is_usable)  # type: ignore[union-attr]
    result = await asyncio.wait_for(call or disposable.run(code, session="a"), 30)
    lost = "the supervisor process ended" if in_a_call else "session 'a' was lost with the supervisor process"
    assert (result.infra_error or "").startswith(lost)
    assert result.session_lost
    assert (await disposable.run("1")).stdout == "1\n"


@pytest.mark.slow
@LINUX
async def test_stopped_supervisor_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    grace, kill = "strands_rollout.code_tool.local._ANSWER_GRACE_S", SupervisorLink.kill

    def kill_and_extend_grace(link: SupervisorLink) -> None:
        monkeypatch.setattr(grace, 90.0)
        kill(link)

    monkeypatch.setattr(grace, -19.0)  # the first attempt gets one second
    monkeypatch.setattr(SupervisorLink, "kill", kill_and_extend_grace)
    async with executor_without_libraries(timeout_s=20) as executor:
        os.kill(helpers(executor)[0], signal.SIGSTOP)
        result = await asyncio.wait_for(executor.run("1 + 1"), 60)
        assert result.stdout == "2\n"


@LINUX
async def test_aclose_leaves_nothing_behind() -> None:
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    executor = executor_without_libraries()
    await executor.run("import os; os.makedirs('a/b'); open('a/b/c', 'w').close()")
    await executor.run("x = 1", session="open")
    pids = descendants(helpers(executor)[0])
    root = root_of(executor)
    await executor.aclose()
    await executor.aclose()
    assert not os.path.exists(root)  # noqa: ASYNC240, PTH110
    assert not any(map(is_running, pids))
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
    with pytest.raises(SandboxError, match="after aclose"):
        await executor.run("1")


_FOLDER_CODES = {
    "nests-deeply": ("for _ in range(1900): os.mkdir('d'); os.chdir('d')", "32 folders inside each other"),
    "removes-permissions": (
        "os.mkdir('a', 0); os.mkdir('b', 0o300); open('b/c', 'w').close()",
        None if ROOT else "a folder that can't be looked into",
    ),
    "gives-odd-names": (
        "for name in (b'\\xff\\xfe', b'\\n', b'a\\x01', b'x' * 255): os.makedirs(name + b'/' + name)",
        None,
    ),
    "has-an-odd-name": ("PR.prctl(15, b'\\xff) R 1', 0, 0, 0)", None),
    "moves-its-own-folder": (
        "here = os.getcwd()\nfor act in (lambda: os.rename(here, here + 'x'), lambda: os.rmdir(here)):\n"
        "    try: act()\n    except OSError: pass",
        None,
    ),
}


@LINUX
@pytest.mark.parametrize(("code", "limit"), list(_FOLDER_CODES.values()), ids=list(_FOLDER_CODES))
async def test_code_in_its_folder_never_causes_infra_error(executor, code, limit) -> None:
    await executor.start()
    root = root_of(executor)
    pause_s = 0.4 if limit is None else 60  # the limit ends the code earlier
    code = f"import ctypes, os, time\nPR = ctypes.CDLL(None)\n{code}\ntime.sleep({pause_s})"
    result = await executor.run(code, timeout_s=60)
    assert result.infra_error is None
    assert (limit or "") in (result.killed_by or ""), result
    assert limit is not None or result.killed_by is None, result
    assert await wait_until(lambda: not paths_in(root))
    assert os.path.exists("/etc/passwd")  # noqa: ASYNC240, PTH110
    assert (await executor.run("print(1)")).stdout == "1\n"


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """Mount a file system of 640 MiB."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", "size=640m,mode=755", "tmpfs", folder]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("this process can't mount file systems")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


@LINUX
@pytest.mark.slow
async def test_disk_limit_counts_deleted_files_of_own_processes(small_disk) -> None:
    fill = """
import os, time
for i in range(8):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            handle = os.open(f"a{i}", os.O_CREAT | os.O_RDWR)
            os.unlink(f"a{i}")
            for _ in range(60):
                os.write(handle, bytes(1 << 20))
            time.sleep(30)
        os._exit(0)
    os.wait()
time.sleep(30)
"""
    wait = "import time\nopen('mine', 'w').write('x' * 9)\ntime.sleep(8)\nopen('mine').read()"
    async with executor_without_libraries(
        scratch_dir=str(small_disk), disk_mb=600, isolation="files", programs=True, max_concurrency=2
    ) as executor:
        filled, waited = await asyncio.gather(executor.run(fill, timeout_s=60), executor.run(wait, timeout_s=60))
        assert (filled.infra_error, waited.infra_error) == (None, None), (filled, waited)
        assert filled.killed_by == "a disk that is almost full, of which it held the most"
        assert waited.stdout == "'xxxxxxxxx'\n"
        assert await wait_until(lambda: scratch.free_space(str(small_disk))[0] > 600 << 20)


@LINUX
@pytest.mark.slow
async def test_disk_limit_with_short_lived_programs() -> None:
    work = (
        "import subprocess\nshell = 'for i in $(seq 300); do head -c 900000 /dev/urandom | cat > f$((i % 9)); done'\n"
    )
    work += "subprocess.run([shell], shell=True, check=True)\nprint('done')"
    async with executor_without_libraries(
        isolation="files", programs=True, max_concurrency=2, timeout_s=120
    ) as executor:
        results = await asyncio.gather(*(executor.run(work) for _ in range(2)))
    assert [(result.stdout, result.killed_by) for result in results] == [("done\n", None)] * 2


@LINUX
async def test_disk_limit_counts_last_writes_of_session_call(single_slot: LocalExecutor) -> None:
    code = "import os\nfor n in range(8):\n    open(f'f{n}', 'wb').write(bytes(8 << 20))\nos.listdir()"
    result = await single_slot.run(code, session="s")
    assert (result.killed_by or "").startswith("disk limit of 16 MiB"), result
    assert (result.exit_code, result.session_lost, result.infra_error) == (-9, True, None)
    assert (await single_slot.run("import os; os.listdir()", session="s")).stdout == "[]\n"
    await single_slot.close_session("s")


async def test_run_retries_when_no_child_can_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strands_rollout.code_tool.sandbox.supervisor._FORK_PAUSE_S", 0.0)
    limits = {"memory_mb": 1, "disk_mb": 1, "max_files": 9, "max_threads": 9, "max_output_mb": 1, "max_output_chars": 9}
    settings = {"limits": limits, "spares": 0, "root": "/tmp"}
    keeper = Supervisor(settings, object(), (), print)  # type: ignore[arg-type]
    child, outcomes = object(), [RuntimeError("Resource temporarily unavailable")] * 3

    async def next_child() -> object:
        if outcomes:
            raise outcomes.pop()
        return child

    monkeypatch.setattr(keeper, "_next_child", next_child)
    assert await keeper._ready_child() is child
    monkeypatch.setattr("strands_rollout.code_tool.sandbox.supervisor._FORK_RETRY_S", -1.0)
    outcomes.append(RuntimeError("Resource temporarily unavailable"))
    assert "temporarily" in (await keeper.run("1", 1.0, None))["infra_error"]


@LINUX
async def test_folder_times_and_sizes_reveal_no_earlier_run(single_slot: LocalExecutor) -> None:
    look = "import os, time\nhere = os.stat('.')\nhere.st_ino, here.st_size, here.st_blocks, here.st_nlink"
    times = "import os\nmin(getattr(os.stat(f), t) for f in '. ..'.split() for t in ('st_mtime', 'st_ctime'))"
    grow = "for n in range(600): open('f' * 200 + str(n), 'w').close()"
    first = (await single_slot.run(look)).stdout.split(", ", 1)
    for _ in range(2):
        assert (await single_slot.run(grow)).infra_error is None
        second = (await single_slot.run(look)).stdout.split(", ", 1)
        assert second[1] == first[1]  # an ext4 directory that was only emptied would keep its larger size
    await asyncio.sleep(0.2)  # so that the prepared process has waited in its folder longer than the 50 ms below
    asked_at = time.time()
    assert float((await single_slot.run(times)).stdout) > asked_at - 0.05  # a file's time is the kernel's last tick


@LINUX
async def test_library_access_times_carry_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # noqa: PTH101, S103 - code runs as another user
        library = Path(folder, "message_board")
        os.mkdir(library)  # noqa: PTH102
        for name in ("__init__.py", "a.py", "b.py"):
            (library / name).write_text("x = 1\n")
            os.utime(library / name, (1_000_000_000, 1_500_000_000))
        monkeypatch.setattr("strands_rollout.code_tool.local.library_files", lambda _: {folder: ["message_board"]})
        asked = f"import os\n[os.stat({str(library)!r} + '/' + n).st_atime_ns for n in ('a.py', 'b.py', '.')]"
        read = f"import os\nopen({str(library / 'a.py')!r}).read(), os.listdir({str(library)!r})"
        async with executor_without_libraries(max_concurrency=1) as executor:
            before = await executor.run(asked)
            assert "x = 1" in (await executor.run(read)).stdout
            assert (await executor.run(asked)).stdout == before.stdout


SCRIPT = """
import asyncio, os, sys
from strands_rollout.code_tool import ExecutionResult, LocalExecutor
async def main():
    executor = LocalExecutor(libraries=[])
    print((await executor.run("1 + 1")).stdout, executor._supervisor.link._process.pid, executor._supervisor._root.path,
          flush=True)
    {end}
asyncio.run(main())
"""


@LINUX
@pytest.mark.parametrize(
    "end", ["pass", "os._exit(0)", "os.kill(os.getpid(), 9)", "sys.exit(3)", "os.fork() and os._exit(0) or os.pause()"]
)
@pytest.mark.slow
async def test_sandbox_ends_with_its_process(end: str) -> None:
    end = end.replace("os.pause()", "__import__('time').sleep(2)")
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "error", "-c", SCRIPT.format(end=end)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    result, supervisor, root = done.stdout.split()
    assert result == "2"
    assert await wait_until(lambda: not is_running(int(supervisor)))
    assert await wait_until(lambda: not Path(root).exists())


@LINUX
async def test_start_deletes_abandoned_scratch_directories(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)  # noqa: ASYNC240
    abandoned = tmp_path / "strands-rollout-code-abandoned"
    (abandoned / "0").mkdir(parents=True)
    os.utime(abandoned, (1, 1))
    young = tmp_path / "strands-rollout-code-young"
    young.mkdir()
    async with executor_without_libraries(scratch_dir=str(tmp_path), isolation="rlimits") as executor:
        os.utime(root_of(executor), (1, 1))
        async with executor_without_libraries(scratch_dir=str(tmp_path), isolation="rlimits"):
            assert not abandoned.exists()
            assert young.exists()
            assert (await executor.run("open('f', 'w').write('x')")).exit_code == 0


async def test_sets_have_the_same_order_in_every_sandbox(executor: LocalExecutor, single_slot: LocalExecutor) -> None:
    assert len({(await each.run("set('abcdefghij')")).stdout for each in (executor, single_slot)}) == 1


async def test_only_named_libraries_can_be_imported() -> None:
    async with LocalExecutor(libraries=["numpy"]) as executor:
        assert (await executor.run("import numpy; 1")).stdout == "1\n"
        for name in ("sympy", "strands_rollout", "transformers", "pytest"):
            assert f"No module named '{name}'" in (await executor.run(f"import {name}")).stderr
        assert executor.facts.libraries == ("numpy",)
    async with LocalExecutor(libraries=["jsonschema"]) as executor:  # with its dependencies
        assert (await executor.run("import jsonschema, attr; 1")).stdout == "1\n"


@pytest.mark.slow
async def test_matplotlib_draws() -> None:
    pytest.importorskip("matplotlib")
    code = "import matplotlib.pyplot as plt\nplt.switch_backend('Agg')\nplt.plot([1, 2])\nplt.savefig('a.png')"
    async with LocalExecutor(libraries=["matplotlib"]) as executor:
        result = await executor.run(f"{code}\nopen('a.png', 'rb').read(4)")
    assert result.stdout == "b'\\x89PNG'\n", result


async def test_start_names_library_that_is_not_installed() -> None:
    with pytest.raises(ConfigError, match="'no-such-library', which is not installed"):
        await LocalExecutor(libraries=["no-such-library"]).run("1")


async def test_start_names_library_that_cannot_be_imported(tmp_path, monkeypatch) -> None:
    with pytest.raises(SandboxError, match=r"did not start: libraries contains 'PyYAML', which can't be imported") as e:
        await LocalExecutor(libraries=["PyYAML"]).start()
    assert str(e.value).endswith("Correct the name, or remove it from the list")
    _make_library(tmp_path, "broken_library", "1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SandboxError, match=r"'broken_library', which can't be imported \(ZeroDivisionError: division"):
        await LocalExecutor(libraries=["broken_library"]).start()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({name: 0}, name) for name in ("memory_mb", "disk_mb", "max_files", "max_threads")),
        ({"memory_mb": 512.5}, "memory_mb is 512.5; expected an integer"),
        ({"isolation": "none"}, "expected one of full, files, seccomp, rlimits"),
        ({"libraries": "numpy"}, r"expected a list of names: \['numpy'\]"),
    ],
)
def test_local_executor_rejects_invalid_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalExecutor(**options)


@LINUX
@pytest.mark.parametrize(
    ("disabled", "isolation", "missing"),
    [
        (["syscalls"], "files", "syscalls"),
        (["landlock", "chroot"], "seccomp", "files"),
        (["files"], "seccomp", "files"),
    ],
)
async def test_start_rejects_less_isolation_unless_named(disabled, isolation, missing, caplog) -> None:
    with pytest.raises(SandboxError, match=f"can't enforce isolation='full'.* {missing}: .*isolation='{isolation}'"):
        await executor_without_libraries(disabled_layers=disabled).run("1")
    caplog.set_level(logging.INFO)
    async with executor_without_libraries(disabled_layers=disabled, isolation=isolation) as executor:
        report = await executor.start()
        assert missing in report.missing
        assert report.isolation == isolation
        assert (await executor.run("1 + 1")).stdout == "2\n"
    (record,) = [record for record in caplog.records if "code sandbox isolation" in record.getMessage()]  # logged once
    assert f"missing=[{missing}: left out" in record.getMessage()
    assert all(layer in record.getMessage() for layer in report.enforced)
    assert set(report.enforced) | set(report.missing) >= {"limits", "files", "syscalls"}


@pytest.mark.slow
@LINUX
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its root directory")
async def test_chroot_replaces_landlock_for_root() -> None:
    async with LocalExecutor(disabled_layers=["landlock"]) as executor:
        assert (await executor.start()).isolation == "full"
        code = "import os; os.getcwd(), os.listdir('/'), os.path.exists('/etc'), os.path.exists('/proc')"
        assert (await executor.run(code)).stdout == "('/', [], False, False)\n"
        assert (await executor.run("import sympy, numpy, csv, sqlite3, xml.dom.minidom, zoneinfo; 1")).stdout == "1\n"
        assert (await executor.run("import tempfile; tempfile.mkdtemp().rpartition('/')[0]")).stdout == "''\n"


async def test_start_names_unusable_scratch_dir() -> None:
    with pytest.raises(SandboxError, match="'/nowhere/tmp'.*scratch_dir"):
        await executor_without_libraries(scratch_dir="/nowhere/tmp").run("1")


@pytest.mark.parametrize(
    ("command", "message"),
    [(["false"], "the process ended"), (["sleep", "60"], "no report came within 1 s")],
    ids=["ends", "never answers"],
)
async def test_start_failure_reports_reason_and_leaves_nothing(monkeypatch, tmp_path, command, message):
    link = "strands_rollout.code_tool.supervisor_link"
    monkeypatch.setattr(f"{link}.python_command", lambda *_: command)
    monkeypatch.setattr(f"{link}._START_TIMEOUT_S", 1.0 if "within 1 s" in message else 60.0)
    with pytest.raises(SandboxError, match=f"did not start: {message}"):
        await executor_without_libraries(scratch_dir=str(tmp_path)).run("1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("session", [None, "forger"])
@pytest.mark.parametrize(
    ("code", "exit_code", "killed_by"),
    [
        ("import os; os.close(3); os._exit(3)", 3, None),
        ("import os; os.close(3); raise SystemExit(4)", 4, None),
        ("import os, time\nos.write(3, b'X' * 9)\ntime.sleep(20)", -9, "writing to the sandbox's own descriptor"),
        ("import os, time\nos.write(3, b'D\\x05'); time.sleep(20)", 5, None),  # the message that os._exit(5) causes
    ],
)
async def test_code_with_control_socket_ends_only_itself(executor, code, exit_code, killed_by, session):
    result = await executor.run(f"print('before')\n{code}", session=session, timeout_s=10)
    if session is not None and "SystemExit" in code:
        exit_code = 1  # the session's process can't report its exit code, and ends
    assert (result.stdout, result.infra_error, result.killed_by) == ("before\n", None, killed_by)
    assert result.exit_code == exit_code
    assert not result.timed_out
    if session is not None:
        await executor.close_session(session)
    assert (await executor.run("1")).stdout == "1\n"


@pytest.fixture
def roots_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File of root, next to a library `rootsown` that only root can read."""
    package, facts = tmp_path / "rootsown", tmp_path / "rootsown-1.0.dist-info"
    package.mkdir()
    facts.mkdir()
    (package / "__init__.py").write_text("from rootsown.inner import VALUE")
    (package / "inner.py").write_text("VALUE = 42")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: rootsown\nVersion: 1.0\n")
    (facts / "RECORD").write_text("rootsown/__init__.py,,\nrootsown/inner.py,,\n")
    secret = tmp_path / "labels"
    secret.write_text("secret")
    for path in [*tmp_path.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    monkeypatch.syspath_prepend(str(tmp_path))
    return secret


AS_ROOT = pytest.mark.skipif(not ROOT, reason="an ordinary user's code reads what that user may read")


@LINUX
@AS_ROOT
async def test_imports_from_folders_that_only_root_can_read(roots_secret: Path) -> None:
    secret = roots_secret
    async with LocalExecutor(libraries=["numpy", "rootsown"]) as executor:
        report = await executor.start()
        assert (report.isolation, report.missing) == ("full", {})
        code = "import os, rootsown\nopen('f', 'w').write('x')\nrootsown.VALUE, os.getuid() > 60000, open('f').read()"
        assert (await executor.run(code)).stdout == "(42, True, 'x')\n"
        for attack in (f"open({str(secret)!r})", "os.setuid(0)", "os.kill(os.getppid(), 0)", "os.listdir('/root')"):
            assert "PermissionError" in (await executor.run(f"import os\n{attack}")).stderr
        status = await executor.run("open('/proc/self/status').read()")
        assert "PermissionError" in status.stderr


@LINUX
@AS_ROOT
async def test_programs_reading_as_root_change_no_root_files(roots_secret: Path) -> None:
    before = os.stat(roots_secret)  # noqa: PTH116
    async with LocalExecutor(libraries=["rootsown"], isolation="files", programs=True) as executor:
        assert (await executor.run("import rootsown; rootsown.VALUE")).stdout == "42\n"
        for attack in ("chmod({0}, 0o777)", "utime({0}, (1, 1))", "setxattr({0}, 'user.a', b'1')", "truncate({0}, 0)"):
            result = await executor.run("import os\nos." + attack.format(repr(str(roots_secret))))
            assert "Error: [Errno" in result.stderr, result
    after = os.stat(roots_secret)  # noqa: PTH116
    assert (after.st_mode, after.st_ctime_ns) == (before.st_mode, before.st_ctime_ns)


async def test_call_waiting_for_lost_session_runs_in_new_one(executor: LocalExecutor) -> None:
    lost, waited = await asyncio.gather(
        executor.run("while True: pass", session="s", timeout_s=0.5), executor.run("y = 5", session="s")
    )
    assert (lost.session_lost, waited.session_lost, waited.exit_code) == (True, False, 0)
    assert (await executor.run("y", session="s")).stdout == "5\n"
    await executor.close_session("s")


async def test_cancelled_session_call_ends_session(executor: LocalExecutor) -> None:
    pid = int((await executor.run("import os, time; os.getpid()", session="s")).stdout)
    call = asyncio.create_task(executor.run("open('started', 'w').close(); time.sleep(60)", session="s"))
    assert await has_started(executor)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await wait_until(lambda: not is_running(pid))
    result = await executor.run("print('fresh')\ntime", session="s")
    assert (result.stdout, "NameError" in result.stderr, result.session_lost) == ("fresh\n", True, True)
    assert (await executor.run("1", session="s")).session_lost is False
    await executor.close_session("s")


async def test_calls_waiting_for_session_hold_no_slot() -> None:
    async with executor_without_libraries(max_concurrency=2) as executor:
        calls = [asyncio.create_task(executor.run(WAIT_FOR_GO, session="s")) for _ in range(5)]
        assert await has_started(executor)
        assert (await executor.run("1")).stdout == "1\n"
        assert not any(call.done() for call in calls)
        send_go(executor)
        assert [result.exit_code for result in await asyncio.gather(*calls)] == [0] * 5


@LINUX
async def test_anonymous_mmap_works(single_slot: LocalExecutor) -> None:
    code = """
import mmap
whole, readable = mmap.mmap(-1, 4096), mmap.mmap(-1, 4096, access=mmap.ACCESS_READ)
whole[:2] = b"ab"
whole.resize(8192)
copied = mmap.mmap(-1, 4096, access=mmap.ACCESS_COPY)
copied[0] = 1
try:
    readable[0] = 1
except TypeError as error:
    print(error)
print(type(whole), whole[:2], len(whole), mmap.mmap(-1, 9, mmap.MAP_PRIVATE)[:1])
"""
    result = await single_slot.run(code)
    assert result.stdout.splitlines()[1:] == ["<class 'mmap.mmap'> b'ab' 8192 b'\\x00'"], result
    assert "readonly" in result.stdout


@LINUX
@pytest.mark.slow
@pytest.mark.xfail(strict=False, reason="reads the memory of the whole machine, so some runs miss the warning")
async def test_memory_watch_warns_of_unaccounted_memory(caplog) -> None:
    hold_half = "import os, socket, time\nfile, kept = os.open('a', os.O_CREAT | os.O_RDWR), []\n"
    hold_half += "for i in range({0}):\n    if i % 100 == 0: kept.append(socket.socketpair())\n"
    hold_half += "    os.ftruncate(file, 0)\n    os.pwrite(file, bytes(2 << 20), 0)\n"
    hold_half += "    os.sendfile(kept[-1][0].fileno(), file, 0, 1)\nos.ftruncate(file, 0)\ntime.sleep(0.3)"
    held = 0

    async def run(executor: LocalExecutor, count: int) -> bool:
        nonlocal held
        before = unaccounted_memory()
        running = asyncio.ensure_future(executor.run(hold_half.format(count), timeout_s=60))
        while not running.done():
            await asyncio.wait([running], timeout=0.05)
            held = max(held, unaccounted_memory() - before)
        assert (running.result().exit_code, running.result().stderr) == (0, "")
        with contextlib.suppress(TimeoutError):
            await wait_until(lambda: "belonged to no process" in caplog.text, within_s=3)
        return "belonged to no process" in caplog.text

    async with executor_without_libraries(memory_mb=256, isolation="rlimits", disabled_layers=["syscalls"]) as executor:
        assert not await run(executor, 10)
        # changes of other processes' memory may hide the growth
        for _ in range(3):
            if is_warned := await run(executor, 400):
                break
    if not is_warned and held < 600 << 20:
        pytest.skip("the page cache has no large folios to spare, for example because memory is fragmented")
    assert caplog.text.count("belonged to no process") == 1


_WRITES_MODULES = """
import os, sys
os.makedirs("package", exist_ok=True)
open("package/__init__.py", "w").close()
import package
for i in range(200):  # within one tick of the clock by which a folder's changes are known
    for name in (f"m{i}", f"package.m{i}"):
        try:
            __import__(name)
        except ImportError:
            pass
        with open(name.replace(".", "/") + ".py", "w") as file:
            file.write(f"x = {i}")
        assert __import__(name, fromlist=["x"]).x == i
os.chdir("package")
import m7
"""


@pytest.mark.parametrize("disabled", [[], pytest.param(["landlock"], marks=[pytest.mark.slow, LINUX])])
async def test_code_imports_modules_that_it_just_wrote(disabled: list[str]) -> None:
    if disabled and not ROOT:
        pytest.skip("only root can change its root directory")
    async with executor_without_libraries(disabled_layers=disabled) as executor:
        for session in (None, "s"):
            result = await executor.run(_WRITES_MODULES, session=session)
            assert (result.exit_code, result.stderr) == (0, ""), result
        change = "os.chdir('..')\nopen('m7.py', 'w').write('x = 8')\ndel sys.modules['m7']\nimport m7\nm7.x"
        assert (await executor.run(change, session="s")).stdout == "8\n"
        lost = await executor.run("import json, m7\njson.loads('[')")
        assert lost.stderr.endswith("ModuleNotFoundError: No module named 'm7'\n")
        shown = await executor.run("import json\njson.loads('[')")
        assert shown.stderr.count("File ") == 1


# stand-in libraries with a random generator that a fork inherits: attributes, and code that draws a number
_GENERATOR = "import random\n_own = random.Random(0)\n"
_LIBRARIES = {
    "torch": (
        "class default_generator:\n    manual_seed = staticmethod(_own.seed)\ndef rand(): return _own.random()\n",
        "torch.rand()",
    ),
    "tensorflow": (
        "class random:\n    set_seed = _own.seed\n    uniform = _own.random\n",
        "tensorflow.random.uniform()",
    ),
    "cupy": ("class random:\n    reset_states = _own.seed\n    rand = _own.random\n", "cupy.random.rand()"),
    "paddle": ("seed = _own.seed\nrand = _own.random\n", "paddle.rand()"),
}


def _make_library(folder: Path, name: str, source: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(source)
    (folder / f"{name}-1.0.dist-info").mkdir()
    (folder / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / f"{name}-1.0.dist-info" / "RECORD").write_text(f"{name}/__init__.py,,\n")


@LINUX
async def test_runs_draw_different_random_numbers_per_library(tmp_path, monkeypatch) -> None:
    for name, (source, _) in _LIBRARIES.items():
        _make_library(tmp_path, name, _GENERATOR + source)
    monkeypatch.syspath_prepend(str(tmp_path))
    draws = ", ".join(draw for _, draw in _LIBRARIES.values())
    async with LocalExecutor(libraries=list(_LIBRARIES)) as executor:
        results = [await executor.run(f"import {', '.join(_LIBRARIES)}\n{draws}") for _ in range(3)]
    drawn = [ast.literal_eval(result.stdout) for result in results]
    assert len({number for numbers in drawn for number in numbers}) == 3 * len(_LIBRARIES)


@LINUX
async def test_start_names_library_that_cannot_be_reseeded(tmp_path, monkeypatch) -> None:
    _make_library(tmp_path, "torch", "version = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SandboxError, match="random numbers of torch can't be made different.*remove torch"):
        await LocalExecutor(libraries=["torch"]).start()


@LINUX
async def test_python_copies_files_in_every_way(single_slot: LocalExecutor) -> None:
    code = """
import pathlib, shutil
pathlib.Path("a").write_text("text" * 9)
shutil.copyfile("a", "b"), shutil.copy("a", "c"), shutil.copy2("a", "d"), shutil.move("d", "e")
with open("a", "rb") as source, open("f", "wb") as goal:
    shutil.copyfileobj(source, goal)
if hasattr(pathlib.Path, "copy"):  # Python 3.14
    pathlib.Path("a").copy("g")
{pathlib.Path(name).read_text() for name in "bcef"} == {"text" * 9}
"""
    assert (await single_slot.run(code)).stdout == "True\n"


@LINUX
async def test_shared_anonymous_memory_is_no_disk_usage(executor: LocalExecutor) -> None:
    code = "import mmap, time\nkept = [mmap.mmap(-1, 4096) for _ in range(9)]\ntime.sleep(0.3)\nlen(kept)"
    result = await executor.run(code)
    assert (result.stdout, result.killed_by) == ("9\n", None)


@LINUX
@pytest.mark.parametrize("handles", ["kept", "closed"])
@pytest.mark.parametrize("name", ["a\\rb", "a\\r1 2 3 zz:q 5 x", "a (deleted)\\n0-1 r", "a\\x0cb\\x85\\x0b"])
async def test_disk_limit_counts_mapped_deleted_files_of_any_name(
    single_slot: LocalExecutor, name: str, handles: str
) -> None:
    code = f"""
import ctypes, os, time
libc = ctypes.CDLL(None)
handle = os.open('{name}', os.O_CREAT | os.O_RDWR)
os.write(handle, bytes(4096))
libc.mmap(None, ctypes.c_size_t(4096), 1, 1, handle, ctypes.c_size_t(0))
os.close(handle)
os.unlink('{name}')
open('kept', 'w').write('x')  # its size is unknown and counts as the whole limit
if {handles == "closed"}:
    os.closerange(0, 64)
time.sleep(60)
"""
    result = await single_slot.run(code, timeout_s=60)
    assert "counting deleted files" in (result.killed_by or ""), result


@LINUX
async def test_disk_limit_ignores_replaced_libraries(tmp_path, monkeypatch) -> None:
    package = tmp_path / "replaced_library"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import ctypes, os\nmapped = ctypes.CDLL(None).mmap\nmapped.restype = ctypes.c_void_p\n"
        "def load(name):\n    handle = os.open(os.path.join(os.path.dirname(__file__), name), os.O_RDONLY)\n"
        "    address = mapped(None, ctypes.c_size_t(4096), 1, 2, handle, ctypes.c_size_t(0))\n"
        "    os.close(handle)\n    return address not in (None, 2**64 - 1)\nassert load('first.so')\n"
    )
    for name in ("first.so", "second.so"):
        (package / name).write_bytes(bytes(4096))
    record = tmp_path / "replaced_library-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Name: replaced_library\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with LocalExecutor(libraries=["replaced_library"], disk_mb=16, timeout_s=20) as executor:
        loaded = await executor.run("import replaced_library\nreplaced_library.load('second.so')", session="s")
        assert loaded.stdout == "True\n", loaded
        for name in ("first.so", "second.so"):
            (package / name).unlink()
            (package / name).write_bytes(bytes(8192))
        work = "import time\nwith open('a', 'wb') as f: f.write(bytes(9 << 20))\ntime.sleep(0.3)\nprint('done')"
        results = [await executor.run(work, session=session) for session in ("s", None)]
    assert [(result.stdout, result.killed_by) for result in results] == [("done\n", None)] * 2


async def test_run_rejects_code_that_is_too_long(executor: LocalExecutor) -> None:
    result = await executor.run("#" * 16_000_001)
    assert (result.exit_code, result.infra_error) == (1, None)
    assert "at most 16000000 can be run" in result.stderr


@LINUX
async def test_code_that_exceeds_memory_is_the_codes_fault() -> None:
    async with executor_without_libraries(memory_mb=96) as executor:
        for session in (None, "s"):
            result = await executor.run("'" + "\U0001f600" * 3_000_000 + "'", session=session)
            assert (result.exit_code, result.infra_error, result.killed_by) == (1, None, None)
            assert result.stderr.startswith("MemoryError: the next code can't be read"), result
            assert (await executor.run("1 + 1", session=session)).stdout == "2\n"


async def test_session_survives_nonblocking_control_socket(single_slot: LocalExecutor) -> None:
    await single_slot.run("import os\nos.set_blocking(3, False)", session="s")
    result = await single_slot.run("1", session="s")
    assert (result.stdout, result.session_lost) == ("1\n", False)
    await single_slot.close_session("s")
