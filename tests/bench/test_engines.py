"""Benchmark of engines: all engines get the same work, and an engine that does less causes an error."""

import asyncio
import json

import pytest

from benchmarks import engines as engines_module
from benchmarks.engines import ComparedEngines, EngineBenchmark, EngineRow, Workload, run_engine_benchmark
from strands_rollout.engine import running_engine
from strands_rollout.errors import ConfigError, EngineUnavailableError

PLAN = EngineBenchmark((1, 3), 10, 5, (64,), 3, sample_prompt_tokens=40, sample_new_tokens=4, rounds=1, warmup_rounds=0)
WORK = Workload("decode", "distinct", requests=2, prompt_tokens=10, new_tokens=5)


@pytest.fixture(scope="module")
def rows() -> list[EngineRow]:
    """Return the rows of a small benchmark of the embedded engine."""
    return run_engine_benchmark(PLAN, ComparedEngines())


@pytest.mark.end_to_end
def test_engine_benchmark_has_a_row_per_workload(rows):
    assert [row.workload for row in rows] == PLAN.workloads(2048)
    for row in rows:
        assert row.engine == "embedded"
        assert row.tokens_per_s == pytest.approx(row.workload.counted_tokens / row.wall_s)
        assert row.cpu_us_per_token is None or row.cpu_us_per_token > 0
    found = {(row.workload.kind, row.workload.cache, row.workload.prompt_tokens): row.cached_tokens for row in rows}
    for tokens in (64, 2040):
        assert found["prefill", "flushed", tokens] == 0
        assert found["prefill", "distinct", tokens] < 5
        assert found["prefill", "again", tokens] == tokens - 1
    assert found["samples", "shared", 40] == 2 * 39
    assert found["samples", "flushed", 40] < 5


async def test_engine_benchmark_starts_and_stops_real_server(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="no engine to measure"):
        await asyncio.to_thread(run_engine_benchmark, PLAN, ComparedEngines(embedded=False))
    script, stopped = tmp_path / "server.sh", tmp_path / "stopped"
    monkeypatch.setattr(engines_module, "_SGLANG_SCRIPT", script)
    async with running_engine(context_length=128) as url:
        line = json.dumps({"base_url": url, "pid": 4711, "log": ""})
        script.write_text(f"if [[ $1 == start ]]; then echo '{line}'; else echo $2 > {stopped}; fi\n")
        plan = EngineBenchmark(concurrencies=(1,), prefill_tokens=(), samples=1, rounds=2, decode_new_tokens=2)
        engines, steps = ComparedEngines({"named": url}, embedded=False, sglang=True), []
        rows = await asyncio.to_thread(run_engine_benchmark, plan, engines, on_step=lambda *step: steps.append(step))
    assert [row.engine for row in rows] == ["named", "SGLang"] * (len(rows) // 2)
    assert steps == [(done, 3 * len(rows)) for done in range(1, 3 * len(rows) + 1)]
    assert stopped.read_text().strip() == "4711"
    script.write_text("exit 3\n")
    with pytest.raises(EngineUnavailableError, match="exit code 3"):
        await asyncio.to_thread(run_engine_benchmark, plan, engines)
