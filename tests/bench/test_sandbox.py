"""Benchmark of the sandbox: command line, figures, and refused results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sandbox_worker import one_at_a_time

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]


def test_sandbox_benchmark_prints_table_and_json(tmp_path: Path) -> None:
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


async def test_sandbox_benchmark_refuses_wrong_answers() -> None:
    class Wrong:
        async def run(self, code: str, session: str | None = None) -> str:
            return "6\n"

    with pytest.raises(RuntimeError, match="printed '6\\\\n'; expected '5'"):
        await one_at_a_time(Wrong(), "trivial", 1)
