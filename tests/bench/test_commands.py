"""Command line of the benchmarks, and whole runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench_stage import SHIPPED_TOKENIZER
from typer.testing import CliRunner

from benchmarks import client
from benchmarks.__main__ import app
from benchmarks.checkouts import table
from benchmarks.client import playable_variants
from benchmarks.variants import Need
from strands_rollout.errors import ConfigError

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench.py"


def run(*options: str, timeout_s: float = 110.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False, timeout=timeout_s
    )


def test_client_benchmark_leaves_out_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(client.NEEDS, "openai", Need("no_such_package", "bench"))
    can_play, sentences = playable_variants(["ours", "openai"])
    assert can_play == ["ours"]
    assert sentences == ["openai is left out: to measure it, run: pip install 'strands-rollout[bench]'"]
    with pytest.raises(ConfigError, match="none of the variants can be measured here; openai is left out"):
        playable_variants(["openai"])


@pytest.mark.parametrize("command", [command.callback.__name__ for command in app.registered_commands])
def test_help_of_each_benchmark(command: str) -> None:
    result = CliRunner().invoke(app, [command.replace("_", "-"), "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["client", "--turns", "two"], "got --turns 'two'; expected whole numbers of at least 1"),
        (["client", "--concurrency", "0"], "got --concurrency '0'; expected whole numbers of at least 1"),
        (["table", "--rows", "peer,speed"], "got --rows 'peer,speed'; expected some of peer, floor"),
        (["checkouts", ".", "--settings", "{tool}"], "got --settings '{tool}'; expected a JSON object"),
    ],
)
def test_commands_name_invalid_values(command: list[str], message: str) -> None:
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_client_benchmark_measures_everything(tmp_path: Path) -> None:
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


@pytest.mark.end_to_end
def test_client_benchmark_compares_gateway_with_direct_turns() -> None:
    few = ["--turns", "3", "--concurrency", "2", "--repeats", "1", "--tokenizer", str(SHIPPED_TOKENIZER), "--json"]
    done = run("client", "--variants", "ours,gateway-chat", "--measures", "turns", *few)
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


@pytest.mark.end_to_end
@pytest.mark.parametrize(("agent", "measure"), [("plain", "memory"), ("hook", "cpu"), ("gateway", "cpu")])
def test_checkouts_benchmark_uses_package_of_each(agent: str, measure: str, tmp_path: Path) -> None:
    other = tmp_path / "before"
    other.mkdir()
    (other / "strands_rollout").symlink_to(SHIPPED_TOKENIZER.parents[1])
    few = ["--turns", "2", "--concurrency", "2", "--episodes", "2", "--repeats", "2"]
    kind = ["--agent", agent, "--measure", measure, "--tokenizer", str(SHIPPED_TOKENIZER)]
    done = run("checkouts", str(other), str(SCRIPT.parents[1]), *few, *kind, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    name = "ms_per_episode" if measure == "cpu" else "peak_kb_per_episode"
    assert [row["checkout"] for row in rows] == [str(other), str(SCRIPT.parents[1])]
    assert [rows[0][f"{name}_ratio"], *rows[0][f"{name}_quartiles"], rows[0][f"{name}_least_ratio"]] == [1, 1, 1, 1]
    assert all(row[name] > 0 and row[f"{name}_ratio"] > 0 for row in rows)


def test_checkouts_benchmark_prints_medians_and_ratios() -> None:
    rows = [
        {"checkout": "before", "turns": 5, "ms_per_episode": 8.0, "ms_per_episode_ratio": 1.0}
        | {"ms_per_episode_quartiles": [1.0, 1.0], "ms_per_episode_least_ratio": 1.0},
        {"checkout": ".", "turns": 5, "ms_per_episode": 9.0, "ms_per_episode_ratio": 1.125}
        | {"ms_per_episode_quartiles": [1.1, 1.15], "ms_per_episode_least_ratio": 1.12},
    ]
    assert table(rows).splitlines() == [
        "| checkout | tool turns | ms_per_episode | ratio to the first | quartiles | ratio of minima |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| before | 5 | 8.00 | 1.000x | 1.000 to 1.000 | 1.000x |",
        "| . | 5 | 9.00 | 1.125x | 1.100 to 1.150 | 1.120x |",
    ]


def test_checkouts_benchmark_fails_on_different_episodes(tmp_path: Path) -> None:
    package = tmp_path / "strands_rollout"
    package.mkdir()
    (package / "__init__.py").write_text("class Sample: ...\n\n\nasync def generate(*given): ...\n")
    few = ["--turns", "2", "--repeats", "1", "--tokenizer", str(SHIPPED_TOKENIZER)]
    done = run("checkouts", str(tmp_path), *few)
    assert (done.returncode, "takes no arguments" in done.stderr) == (1, True), done.stderr
    assert f"the process on {tmp_path} ended" in done.stderr


def test_checkouts_benchmark_refuses_folder_without_package(tmp_path: Path) -> None:
    done = run("checkouts", str(tmp_path), "--tokenizer", str(SHIPPED_TOKENIZER))
    assert (done.returncode, "expected a folder that contains strands_rollout" in done.stderr) == (2, True)
