"""EVAL_PROTOCOL, EVAL_TOP_P and EVAL_TOP_K of the launch scripts."""

import json
import re
import shlex
from pathlib import Path

import pytest
from launch_stage import Stage, make_stage, value_of

TRAIN = "strands_qwen3_8b.sh"
ROW = {"prompt": [{"role": "user", "content": "1 + 0?"}], "label": "1"}


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = make_stage(tmp_path)
    stage.provide_files()
    stage.use_real_python()
    (stage.root / "models/Qwen3-8B/config.json").write_text('{"max_position_embeddings": 40960}')
    (stage.root / "data/aime-2024.jsonl").write_text(f"{json.dumps(ROW)}\n" * 30)
    stage.ray_runs.write_text("another's")
    return stage


def words_of(shown: str) -> list[str]:
    return shlex.split(shown.replace("\\\n", ""))


@pytest.mark.end_to_end
@pytest.mark.parametrize("script", [TRAIN, "eval_aime.sh"])
def test_protocol_sets_lengths_within_the_context(script: str, stage: Stage) -> None:
    finished = stage.run(script, "--dry-run", EVAL_PROTOCOL="qwen3", EVAL_SETS="aime-2024")
    assert finished.returncode == 0, finished.stderr
    words = words_of(finished.stdout)
    assert re.search(r"/protocol-qwen3/\w+/eval\.json$", value_of(words, "--eval-config"))
    lengths = [value_of(words, f"--eval-max-{part}-len") for part in ("response", "context")]
    assert lengths == ["38912", "40960"]
    assert not {"--eval-prompt-data", "--eval-temperature", "--n-samples-per-eval-prompt"} & set(words)
    assert "aime-2024@qwen3: comparable with numbers reported" in finished.stderr


@pytest.mark.end_to_end
def test_protocol_files_are_written_before_a_run(stage: Stage) -> None:
    finished = stage.run(TRAIN, "--eval-protocol", "qwen3", "--eval-samples", "4", SAVE_DIR=str(stage.root / "run"))
    assert finished.returncode == 0, finished.stderr
    (config,) = stage.root.glob("run/protocol-qwen3/*/eval.json")
    (entry,) = json.loads(config.read_text())["eval"]["datasets"]
    assert (entry["name"], entry["n_samples_per_eval_prompt"]) == ("aime-2024@qwen3+modified", 4)
    assert len(stage.calls_of("ray", "job", "submit")) == 1


@pytest.mark.end_to_end
def test_protocol_that_does_not_fit_is_refused(stage: Stage) -> None:
    (stage.root / "models/Qwen3-8B/config.json").write_text('{"max_position_embeddings": 32768}')
    finished = stage.run(TRAIN, "--dry-run", "--eval-protocol", "qwen3")
    assert (finished.returncode, finished.stdout) == (1, "")
    assert "Set EVAL_MAX_RESPONSE_LEN=30720" in finished.stderr
    for given, words in (
        (["--eval-protocol", "qwen4"], "expected one of qwen3, tool"),
        (["--eval-protocol", "tool", "--eval-config", "x.yaml"], "got EVAL_PROTOCOL and EVAL_CONFIG"),
        (["--eval-samples", "0"], "got EVAL_SAMPLES='0'; expected a whole number of at least 1"),
    ):
        refused = stage.run(TRAIN, "--dry-run", *given)
        assert refused.returncode in (1, 2)
        assert words in refused.stderr


def test_top_p_and_top_k_without_protocol(stage: Stage) -> None:
    finished = stage.run(TRAIN, "--dry-run", "--eval-top-p", "0.95", "--eval-top-k=20", EVAL_TEMPERATURE="0.6")
    words = words_of(finished.stdout)
    found = [value_of(words, f"--eval-{name}") for name in ("temperature", "top-p", "top-k")]
    assert found == ["0.6", "0.95", "20"]
