"""The command: what it refuses, what it leaves out, and a whole run."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SHIPPED_TOKENIZER

from strands_rollout.bench import bench_variants
from strands_rollout.bench.bench_plot import check_plot
from strands_rollout.bench.bench_report import check_writable, run_and_report_engines
from strands_rollout.bench.bench_variants import playable_variants
from strands_rollout.bench.engines import ComparedEngines, EngineBenchmark
from strands_rollout.errors import ConfigError, EngineUnavailableError

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench.py"


def run(*options: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False, timeout=timeout_s
    )


@pytest.mark.parametrize(
    "options", [["--turns", "five"], ["--turns", "0"], ["--variants", "theirs"], ["--collector", "luck"]]
)
def test_a_wrong_option_is_a_usage_error(options: list[str]) -> None:
    done = run(*options)
    assert done.returncode == 2
    assert options[1] in done.stderr


def test_a_variant_whose_package_is_missing_is_left_out_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_variants._NEEDS, "openai", ("no_such_package", "strands-rollout[openai]"))
    can_play, sentences = playable_variants(["ours", "openai"])
    assert can_play == ["ours"]
    assert sentences == ["openai is left out; to measure it: pip install 'strands-rollout[openai]'"]


def test_a_run_without_any_variant_is_refused() -> None:
    with pytest.raises(ConfigError, match="got no variant that can play"):
        playable_variants([])


def test_an_unknown_variant_is_named() -> None:
    with pytest.raises(ConfigError, match="got the variant 'theirs'; expected some of ours, floor"):
        playable_variants(["theirs"])


def test_a_file_that_can_not_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="folder can't be made"):
        run_and_report_engines(
            EngineBenchmark(), ComparedEngines(embedded=False), out=tmp_path / "file" / "bench.json", json_only=True
        )


def test_a_picture_in_an_unknown_format_is_refused_before_anything_is_measured() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"--plot cpu.picture; expected a file that ends in one of .*png"):
        check_plot(Path("cpu.picture"))


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder" / "bench.json")
    assert (tmp_path / "new" / "folder").is_dir()


@pytest.mark.parametrize(
    "options",
    [
        ["--engine", "name=http://127.0.0.1:1"],
        ["--engines", "--engine", "no-url"],
        ["--engines", "--engine", "embedded=http://127.0.0.1:1"],
    ],
)
def test_an_engine_is_named_with_its_url_where_engines_are_measured(options: list[str]) -> None:
    done = run(*options)
    assert done.returncode == 2
    assert "--engine" in done.stderr


def test_an_engine_that_is_not_there_is_a_failure_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(EngineUnavailableError, match=url):
        run_and_report_engines(
            EngineBenchmark(rounds=1), ComparedEngines({"gone": url}, embedded=False), out=None, json_only=True
        )


@pytest.mark.slow
def test_engines_are_measured_with_the_embedded_one_alone(tmp_path: Path) -> None:
    out = tmp_path / "new" / "engines.json"
    done = run("--engines", "--no-sglang", "--repeats", "1", "--json", "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert rows == json.loads(out.read_text())
    assert {row["engine"] for row in rows} == {"embedded"}


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    done = run("--plot", str(tmp_path / "cpu.png"))
    assert done.returncode == 2
    assert "pip install" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_whole_run_measures_everything(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    few = ["--turns", "1,2", "--concurrency", "2", "--episodes", "2", "--repeats", "1", "--code-episodes", "2"]
    tokenizer = ["--tokenizer", str(SHIPPED_TOKENIZER)]
    done = run(*few, *tokenizer, "--variants", "ours", "--profile", "--out", str(out), "--json", timeout_s=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads(out.read_text())
    kinds = {(row["kind"], row["variant"], row["runs_code"]) for row in result["medians"]}
    own = {(kind, "ours", False) for kind in ("cpu", "lag", "rss", "traced", "profile")}
    assert kinds == own | {("lag", "ours", True)}
    requests = {(row["turns"], row["requests_per_trajectory"]) for row in result["medians"] if row["kind"] == "cpu"}
    assert requests == {(1, 2), (2, 3)}
    assert result["tokenizer"]["name"] == "shipped"
