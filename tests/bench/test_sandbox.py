"""The benchmark of the sandbox: its command line, what it counts, and what it refuses to count."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strands_rollout.errors import SandboxError

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts/bench_sandbox.py"
# stands for camel-ai: its own environment's modules, and a program that is started as `python`
FAKE_CAMEL = """
import subprocess

class SubprocessInterpreter:
    def __init__(self, require_confirm=True, print_stdout=False, print_stderr=True):
        assert not require_confirm and not print_stderr

    def run(self, code, code_type):
        done = subprocess.run(["python", "-c", code], capture_output=True, text=True)
        return done.stdout + done.stderr
"""


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Callable[[str], Any]]:
    """Imports a module of scripts/sandbox_benchmark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "scripts"))
        yield lambda name: importlib.import_module(f"sandbox_benchmark.{name}")


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)


def make_python(path: Path, script: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_quick_run_prints_a_table_and_all_figures_as_json(tmp_path: Path) -> None:
    done = run_script("--quick", "--json", str(tmp_path / "bench.json"))
    assert done.returncode == 0, done.stderr
    assert "camel-ai is left out" in done.stderr
    assert "-m venv .venv-camel" in done.stderr
    assert "loop lag: p99, ms" in done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "bench.json").read_text())
    assert result.keys() == {"machine", "plan", "contenders", "ratios"}
    contenders, ratios = result["contenders"], result["ratios"]
    assert contenders["camel"] is None
    assert ratios["camel"] is None
    for name in ("local", "cold_python", "subprocess"):
        assert contenders[name]["sympy_at_once_per_s"] > 0
        for program in ("trivial", "numpy", "sympy"):
            assert 0 < contenders[name][f"{program}_p50_ms"] <= contenders[name][f"{program}_p99_ms"]
        for program in ("trivial", "sympy"):
            lags = [contenders[name][f"{program}_lag_{p}_ms"] for p in ("p50", "p99", "max")]
            assert lags == sorted(lags)
            assert contenders[name][f"{program}_client_cpu_ms"] > 0
    own = contenders["local"]
    assert own["start_ms"] > own["first_call_ms"] > 0
    assert own["session_p50_ms"] > 0
    expected = own["sympy_p50_ms"] / contenders["cold_python"]["sympy_p50_ms"]
    assert ratios["cold_python"]["sympy_p50_ms"] == pytest.approx(expected, rel=0.01)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root may look into the children")
def test_memory_is_of_the_children_and_of_each_helper(benchmark: Callable[[str], Any]) -> None:
    with benchmark("worker_link").WorkerLink("local", sys.executable, places=2) as worker:
        found = worker.ask("memory", children=2, sleep_s=0.6)
    assert found.keys() == {
        f"{name}_{kind}_mb" for name in ("child", "supervisor", "template") for kind in ("uss", "pss")
    }
    for name in ("child", "supervisor", "template"):
        assert 0.5 < found[f"{name}_uss_mb"] < found[f"{name}_pss_mb"] < 200
    assert found["child_uss_mb"] > 2


def test_camel_is_measured_in_its_own_environment(benchmark: Callable[[str], Any], tmp_path: Path) -> None:
    (tmp_path / "camel").mkdir()
    (tmp_path / "camel" / "interpreters.py").write_text(FAKE_CAMEL)
    python = make_python(tmp_path / "bin/python", f'PYTHONPATH={tmp_path} exec {sys.executable} "$@"')
    with benchmark("worker_link").WorkerLink("camel", str(python)) as worker:
        assert len(worker.ask("one_at_a_time", program="trivial", calls=3)) == 3
        assert worker.keeps_sessions is False
        assert worker.ask("at_once", program="trivial", callers=4, calls_each=2)["per_s"] > 0


def test_a_python_that_is_not_on_the_path_as_python_is_refused(benchmark: Callable[[str], Any], tmp_path: Path) -> None:
    (tmp_path / "camel").mkdir()
    (tmp_path / "camel" / "interpreters.py").write_text(FAKE_CAMEL)
    make_python(tmp_path / "bin/python", "echo /another/environment")
    python = make_python(tmp_path / "bin/python3", f'PYTHONPATH={tmp_path} exec {sys.executable} "$@"')
    with pytest.raises(SandboxError, match="'/another/environment'; expected"):
        benchmark("worker_link").WorkerLink("camel", str(python))


def test_a_contender_that_does_not_start_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    python = make_python(tmp_path / "python", "echo 'no such environment' >&2; exit 3")
    done = run_script("--quick", "--camel-python", str(python))
    assert done.returncode == 1
    assert "the contender 'camel' failed: its process ended" in done.stderr
    assert "no such environment" in done.stderr
    assert done.stdout == ""


def test_wrong_usage_is_exit_code_2_and_help_has_an_example() -> None:
    assert run_script("--camel-python", "/no/such/python").returncode == 2
    assert run_script("--repeats", "0").returncode == 2
    done = run_script("--help")
    assert done.returncode == 0
    assert "Example: python scripts/bench_sandbox.py" in " ".join(done.stdout.split())


async def test_a_contender_that_answers_wrongly_is_not_fast(benchmark: Callable[[str], Any]) -> None:
    class Wrong:
        async def run(self, code: str, session: str | None = None) -> str:
            return "6\n"

    with pytest.raises(RuntimeError, match="printed '6\\\\n'; expected '5'"):
        await benchmark("measures").one_at_a_time(Wrong(), "trivial", 1)


async def test_a_blocked_loop_is_counted_for_as_long_as_it_is_blocked(benchmark: Callable[[str], Any]) -> None:
    async with benchmark("loop_lag").LagWatch() as watch:
        await asyncio.sleep(0.05)
        time.sleep(0.4)  # noqa: ASYNC251 - that is what is to be seen
        await asyncio.sleep(0.05)
    lags = sorted(watch.lags_ms)
    assert 395 <= lags[-1] < 2000
    assert len([lag for lag in lags if lag > 20]) >= 70
    assert len([lag for lag in lags if 180 < lag < 220]) >= 6


async def test_a_loop_that_is_blocked_to_the_end_is_counted(benchmark: Callable[[str], Any]) -> None:
    async with benchmark("loop_lag").LagWatch() as watch:
        await asyncio.sleep(0.01)
        time.sleep(0.2)  # noqa: ASYNC251 - as above
    assert max(watch.lags_ms) > 180


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([3.0], 0.99, 3.0), ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0), (list(range(1, 201)), 0.99, 198)],
)
def test_a_percentile_is_one_of_the_values(
    benchmark: Callable[[str], Any], values: list[float], share: float, expected: float | None
) -> None:
    assert benchmark("figures").percentile(values, share) == expected


def test_figures_are_medians_over_rounds_and_percentiles_over_all_calls(benchmark: Callable[[str], Any]) -> None:
    phases = [{"per_s": n, "lags_ms": [n], "client_cpu_ms": n, "total_cpu_ms": None} for n in (5.0, 1.0, 3.0)]
    samples = benchmark("rounds").Samples(
        calls_ms={"trivial": [[1.0, 2.0, 3.0], [100.0, 200.0, 300.0], [4.0, 5.0, 6.0]]}, at_once={"trivial": phases}
    )
    figures = benchmark("figures").figures_of(samples)
    wanted = {"trivial_p50_ms": 5.0, "trivial_p99_ms": 300.0, "trivial_at_once_per_s": 3.0, "trivial_lag_max_ms": 5.0}
    assert {key: figures[key] for key in wanted} == wanted
    assert figures["trivial_total_cpu_ms"] is None
    assert figures["numpy_p50_ms"] is None


async def test_time_on_cpus_is_that_of_the_process_and_of_all_below_it(benchmark: Callable[[str], Any]) -> None:
    cpu_s = benchmark("process_tree").cpu_s
    if cpu_s(os.getpid()) is None:
        pytest.skip("needs /proc")
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    before = cpu_s(os.getpid())
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", f"{burn}\nprint(flush=True)\ninput()", stdin=-1, stdout=-1
    )
    assert child.stdout is not None
    await child.stdout.readline()
    alive = cpu_s(os.getpid()) - before
    await child.communicate(b"\n")
    reaped = cpu_s(os.getpid()) - before
    assert 0.4 < alive <= reaped < 3
