"""Protocols in slime's evaluation: the sets and arguments that are written for it, and what marks them as modified."""

import json
from pathlib import Path
from typing import Any

import pytest

from strands_rollout.errors import ConfigError
from strands_rollout.evaluation.protocols import PROTOCOLS, find_protocol
from strands_rollout.evaluation.slime_protocol import ProtocolSet, check_context, main, protocol_set
from strands_rollout.settings import RolloutSettings, read_config_file
from strands_rollout.slime_plugin.inputs import with_row_settings

CONFIGS = Path(__file__).parents[2] / "configs"
QWEN3_BOX = "Please reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "aime-2024.jsonl"
    rows = ({"prompt": [{"role": "user", "content": f"{number} + 0?"}], "label": str(number)} for number in range(30))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def under(protocol: str, path: Path, settings: RolloutSettings | None = None, **overrides: Any) -> ProtocolSet:
    settings = settings or read_config_file(CONFIGS / "math_code.yaml")
    return protocol_set("aime-2024", path, find_protocol(protocol), settings, overrides)


def test_qwen3_sets_sampling_prompt_and_agent_of_each_row(data: Path) -> None:
    found = under("qwen3", data)
    sampling = found.sampling
    assert (sampling.samples, sampling.max_new_tokens) == (64, 38_912)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.95, 20)
    assert found.name == "aime-2024@qwen3"
    assert found.rows[3]["prompt"][0]["content"] == f"3 + 0?\n{QWEN3_BOX}"
    settings = with_row_settings(read_config_file(CONFIGS / "math_code.yaml"), found.rows[3]["metadata"])
    assert (settings.tools, settings.system_prompt, settings.enable_thinking) == ((), None, True)
    assert "Qwen3-8B 76.0%" in found.measurement.comparability


def test_tool_protocol_follows_the_training_agent(data: Path) -> None:
    found = under("tool", data)
    assert (found.name, found.sampling.samples, found.sampling.max_new_tokens) == ("aime-2024@tool", 16, 16_384)
    settings = with_row_settings(read_config_file(CONFIGS / "math_code.yaml"), found.rows[0]["metadata"])
    assert settings.tools == RolloutSettings().tools
    with pytest.raises(ConfigError, match=r"needs the tools .*execute_python_code.*row_tools"):
        under("tool", data, RolloutSettings(tools=()))


@pytest.mark.parametrize(
    ("overrides", "settings", "change"),
    [
        ({"samples": 8}, {}, "samples 8 instead of 64"),
        ({"temperature": 1.0}, {}, "temperature 1.0 instead of 0.6"),
        ({}, {"code_session": True}, "the setting code_session"),
    ],
)
def test_other_conditions_are_marked_in_the_name(
    overrides: dict[str, Any], settings: dict[str, Any], change: str, data: Path
) -> None:
    found = under("qwen3", data, RolloutSettings(**settings), **overrides)
    assert (found.name, found.measurement.changes) == ("aime-2024@qwen3+modified", (change,))


def test_missing_problems_are_marked_in_the_name(data: Path) -> None:
    data.write_text(data.read_text().partition("\n")[0])
    assert under("qwen3", data).measurement.changes == ("1 of 30 problems",)


def run(data: Path, *options: str, protocol: str = "qwen3", protocol_files: str | None = None) -> int:
    config, out = str(CONFIGS / "math_code.yaml"), str(data.parent / "out")
    sets = [f"aime-2024={data}", *([] if protocol_files is None else [protocol_files])]
    return main(["--protocol", protocol, "--config", config, "--out", out, *options, *sets])


def test_main_writes_sets_and_prints_slimes_arguments(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(data) == 0
    (config,) = data.parent.glob("out/*/eval.json")
    lengths = ["--eval-max-response-len", "38912", "--eval-max-context-len", "40960"]
    printed = capsys.readouterr()
    assert printed.out.split() == ["--eval-config", str(config), *lengths]
    assert "comparable with numbers reported" in printed.err
    (entry,) = json.loads(config.read_text())["eval"]["datasets"]
    assert (entry["name"], entry["n_samples_per_eval_prompt"], entry["top_k"]) == ("aime-2024@qwen3", 64, 20)
    assert len(Path(entry["path"]).read_text().splitlines()) == 30


def test_main_dry_run_needs_no_data_and_writes_nothing(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data.unlink()
    assert run(data, "--dry-run", "--samples", "4") == 0
    assert "aime-2024@qwen3+modified: samples 4 instead of 64" in capsys.readouterr().err
    assert not (data.parent / "out").exists()


@pytest.mark.parametrize(
    ("protocol", "words"),
    [
        ("qwen4", "expected one of qwen3, tool"),
        ("qwen3", "40960 positions; the model has 32768. Set EVAL_MAX_RESPONSE_LEN=30720"),
    ],
)
def test_main_refuses_unknown_protocols_and_short_models(
    protocol: str, words: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data.parent / "config.json").write_text('{"max_position_embeddings": 32768}')
    assert run(data, "--model", str(data.parent), protocol=protocol) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("prompt_tokens", [32_768, 40_000])
def test_check_context_never_advises_an_impossible_length(prompt_tokens: int, data: Path) -> None:
    (data.parent / "config.json").write_text('{"max_position_embeddings": 32768}')
    with pytest.raises(ConfigError, match="expected less than the 32768 positions of the model") as refused:
        check_context([under("qwen3", data)], prompt_tokens, data.parent)
    assert "EVAL_MAX_RESPONSE_LEN" not in str(refused.value)


def test_main_keeps_the_files_of_another_job(data: Path) -> None:
    """A job that starts later in the same folder, with other samples or problems, leaves an earlier job's files."""
    assert run(data) == 0
    (config,) = data.parent.glob("out/*/eval.json")
    (entry,) = json.loads(config.read_text())["eval"]["datasets"]
    before = (config.read_bytes(), Path(entry["path"]).read_bytes())
    assert run(data) == 0  # a restart
    assert len(list(data.parent.glob("out/*/eval.json"))) == 1
    assert run(data, "--samples", "8") == 0
    data.write_text(data.read_text().replace("3 + 0?", "3 + 1?"))
    assert run(data) == 0
    assert len(list(data.parent.glob("out/*/eval.json"))) == 3
    assert (config.read_bytes(), Path(entry["path"]).read_bytes()) == before


def test_main_keeps_labels_and_metadata(data: Path) -> None:
    row = {
        "prompt": "1 + 0?",
        "label": ["1", 2],
        "metadata": {"source": "x", "strands_rollout_settings": {"tools": []}},
    }
    data.write_text(json.dumps(row) + "\n")
    assert run(data, protocol="tool") == 0
    (written,) = data.parent.glob("out/*/aime-2024@tool+modified.jsonl")
    found = json.loads(written.read_text())
    assert (found["label"], found["metadata"]["source"]) == (["1", 2], "x")
    assert found["metadata"]["strands_rollout_settings"]["tools"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("aime-2024", "expected NAME=PATH"),
        ("=x.jsonl", "expected NAME=PATH"),
        ("a/b=x.jsonl", "expected NAME=PATH"),
        ("other=/nowhere.jsonl", "/nowhere.jsonl is not a file"),
        ("aime-2024=/nowhere.jsonl", "a different name for each"),
    ],
)
def test_main_refuses_wrong_sets(entry: str, words: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(data, protocol_files=entry) == 1
    assert words in capsys.readouterr().err
    assert not (data.parent / "out").exists()


def test_main_reports_a_folder_that_it_can_not_write(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data.parent / "out").write_text("a file")
    assert run(data) == 1
    assert "choose another folder with --out" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["max_staleness", "max_sample_staleness"])
def test_settings_of_the_training_do_not_modify_a_protocol(setting: str, data: Path) -> None:
    assert under("qwen3", data, RolloutSettings(**{setting: 4})).name == "aime-2024@qwen3"


def test_every_protocol_is_accepted_by_name(data: Path) -> None:
    assert {under(name, data).name for name in PROTOCOLS} == {f"aime-2024@{name}" for name in PROTOCOLS}
