"""The command line: what it leaves out, and whole runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench_stage import SHIPPED_TOKENIZER

from benchmarks import client
from benchmarks.client import playable_variants
from strands_rollout.errors import ConfigError

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench.py"


def run(*options: str, timeout_s: float = 110.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False, timeout=timeout_s
    )


def test_a_variant_whose_package_is_missing_is_left_out_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(client.NEEDS, "openai", "no_such_package")
    can_play, sentences = playable_variants(["ours", "openai"])
    assert can_play == ["ours"]
    assert sentences == ["openai is left out; to measure it: pip install 'strands-rollout[bench]'"]
    with pytest.raises(ConfigError, match="got no variant that can play; openai is left out"):
        playable_variants(["openai"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_whole_run_of_the_client_benchmark_measures_everything(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    few = ["--turns", "1,2", "--concurrency", "2", "--episodes", "2", "--repeats", "1", "--code-episodes", "2"]
    all_measures = ["--variants", "ours", "--measures", "cpu,lag,code,memory,profile"]
    written = ["--tokenizer", str(SHIPPED_TOKENIZER), "--out", str(out), "--json"]
    done = run("client", *few, *all_measures, *written, timeout_s=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads(out.read_text())
    kinds = {(row["kind"], row["variant"], row["runs_code"]) for row in result["medians"]}
    own = {(kind, "ours", False) for kind in ("cpu", "lag", "rss", "traced", "profile")}
    assert kinds == own | {("lag", "ours", True)}
    requests = {(row["turns"], row["requests_per_trajectory"]) for row in result["medians"] if row["kind"] == "cpu"}
    assert (requests, result["tokenizer"]["name"]) == ({(1, 2), (2, 3)}, "shipped")


def test_the_gateway_benchmark_measures_turns_beside_those_without_a_gateway() -> None:
    few = ["--turns", "3", "--concurrency", "2", "--repeats", "1", "--tokenizer", str(SHIPPED_TOKENIZER), "--json"]
    done = run("gateway", *few)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = {row["variant"]: row for row in result["medians"]}
    assert {row["kind"] for row in rows.values()} == {"turns"}
    assert set(rows) == {"ours", "gateway-chat"}
    for row in rows.values():
        assert row["growth"] == pytest.approx(row["cpu_ms_of_last_turn"] / row["cpu_ms_of_8th_turn"])
        assert row["turns_per_s_and_core"] == pytest.approx(1000 / row["cpu_ms_per_turn"])
    ratio = rows["gateway-chat"]["cpu_ms_per_turn"] / rows["ours"]["cpu_ms_per_turn"]
    assert [(one["ratio"], one["value"]) for one in result["ratios"]] == [("gateway-chat / ours", pytest.approx(ratio))]
