"""The benchmark of the sandbox: its command line, what it counts, and what it refuses to count."""

import asyncio
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.measuring import tree_cpu_s
from benchmarks.sandbox import QUICK_PLAN, Samples, WorkerLink, figures_of, summary, table
from benchmarks.sandbox_worker import one_at_a_time
from strands_rollout.errors import SandboxError

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
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


def make_python(path: Path, script: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_quick_run_prints_a_table_and_all_figures_as_json(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    options = ["--quick", "--json", "--out", str(tmp_path / "bench.json")]
    command = [sys.executable, "-m", "benchmarks", "sandbox", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "camel-ai is left out" in done.stderr
    assert "-m venv .venv-camel" in done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "bench.json").read_text())
    contenders, ratios = result["contenders"], result["ratios"]
    assert contenders["camel"] is ratios["camel"] is None
    for name in ("local", "cold_python", "subprocess"):
        assert contenders[name]["sympy_at_once_per_s"] > 0
        for program in ("trivial", "numpy", "sympy"):
            assert 0 < contenders[name][f"{program}_p50_ms"] <= contenders[name][f"{program}_p99_ms"]
        for program in ("trivial", "sympy"):
            lags = [contenders[name][f"{program}_lag_{p}_ms"] for p in ("p50", "p99", "max")]
            assert lags == sorted(lags)
            assert contenders[name][f"{program}_client_cpu_ms"] > 0
    own = contenders["local"]
    assert min(own[name] for name in ("start_ms", "first_call_ms", "session_p50_ms")) > 0
    expected = own["sympy_p50_ms"] / contenders["cold_python"]["sympy_p50_ms"]
    assert ratios["cold_python"]["sympy_p50_ms"] == pytest.approx(expected, rel=0.01)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root may look into the children")
def test_memory_is_of_the_children_and_of_each_helper() -> None:
    with WorkerLink("local", sys.executable, places=2) as worker:
        # on a busy machine the children start one after the other, and must all be asleep at the same time
        asked = (worker.ask("memory", children=2, sleep_s=sleep_s) for sleep_s in (0.6, 6.0, 30.0))
        found = next(filter(None, asked))
    for name in ("child", "supervisor", "template"):
        assert 0.5 < found[f"{name}_uss_mb"] < found[f"{name}_pss_mb"] < 200
    assert found["child_uss_mb"] > 2


def test_camel_is_measured_in_its_own_environment(tmp_path: Path) -> None:
    (tmp_path / "camel").mkdir()
    (tmp_path / "camel" / "interpreters.py").write_text(FAKE_CAMEL)
    python = make_python(tmp_path / "bin/python", f'PYTHONPATH={tmp_path} exec {sys.executable} "$@"')
    with WorkerLink("camel", str(python)) as worker:
        assert len(worker.ask("one_at_a_time", program="trivial", calls=3)) == 3
        assert worker.keeps_sessions is False
        assert worker.ask("at_once", program="trivial", callers=4, calls_each=2)["per_s"] > 0
    broken = make_python(tmp_path / "python", "echo 'no such environment' >&2; exit 3")
    with pytest.raises(SandboxError, match="the contender 'camel' failed: its process ended.*no such environment"):
        WorkerLink("camel", str(broken))


async def test_a_contender_that_answers_wrongly_is_not_fast() -> None:
    class Wrong:
        async def run(self, code: str, session: str | None = None) -> str:
            return "6\n"

    with pytest.raises(RuntimeError, match="printed '6\\\\n'; expected '5'"):
        await one_at_a_time(Wrong(), "trivial", 1)


def test_figures_are_medians_over_rounds_and_percentiles_over_all_calls() -> None:
    phases = [{"per_s": n, "lags_ms": [n], "client_cpu_ms": n, "total_cpu_ms": None} for n in (5.0, 1.0, 3.0)]
    samples = Samples(
        calls_ms={"trivial": [[1.0, 2.0, 3.0], [100.0, 200.0, 300.0], [4.0, 5.0, 6.0]]}, at_once={"trivial": phases}
    )
    figures = figures_of(samples)
    wanted = {"trivial_p50_ms": 5.0, "trivial_p99_ms": 300.0, "trivial_at_once_per_s": 3.0, "trivial_lag_max_ms": 5.0}
    assert {key: figures[key] for key in wanted} == wanted
    assert figures["trivial_total_cpu_ms"] is None
    assert figures["numpy_p50_ms"] is None
    shown = Console(width=160, file=io.StringIO(), record=True)
    shown.print(table(summary({"local": samples, "cold_python": samples}, QUICK_PLAN, 0.0)))
    lines = shown.export_text().splitlines()
    assert ["1.00x" in line for line in lines if "trivial, one at a time: p50" in line] == [True]
    assert not any("numpy" in line for line in lines), "lines without a value are left out"


async def test_time_on_cpus_is_that_of_the_process_and_of_all_below_it() -> None:
    if tree_cpu_s(os.getpid()) is None:
        pytest.skip("needs /proc")
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    before = tree_cpu_s(os.getpid())
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", f"{burn}\nprint(flush=True)\ninput()", stdin=-1, stdout=-1
    )
    assert child.stdout is not None
    await child.stdout.readline()
    alive = tree_cpu_s(os.getpid()) - before
    await child.communicate(b"\n")
    reaped = tree_cpu_s(os.getpid()) - before
    assert 0.4 < alive <= reaped
