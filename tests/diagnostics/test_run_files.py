"""The doctor on files: tokenizer and template, the model, the settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from stand_in_machine import REPOSITORY, SHIPPED, assert_fault, only, question, tokenizer_folder

from strands_rollout.doctor.data_file import check_data
from strands_rollout.doctor.finding import Finding
from strands_rollout.doctor.model_folder import check_converted_model, check_model
from strands_rollout.doctor.rollout_config import check_config
from strands_rollout.doctor.tokenizer_folder import check_tokenizer


def look_at(folder: Path) -> list[Finding]:
    return check_tokenizer(question(folder, tokenizer=folder))


def changed(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def config(folder: Path, text: str) -> list[Finding]:
    path = folder / "rollout.yaml"
    path.write_text(text)
    return check_config(path)


def statuses(findings: Sequence[Finding]) -> set[str]:
    return {finding.status for finding in findings}


def test_the_shipped_tokenizer_is_looked_at_where_there_is_no_model(tmp_path: Path) -> None:
    found = check_tokenizer(question(tmp_path))
    assert statuses(found) == {"ok"}
    assert str(SHIPPED) in only(found, "tokenizer").found
    assert "<|im_end|>" in only(found, "chat template").found


def test_a_prepared_models_tokenizer_is_looked_at_first(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    folder = tokenizer_folder(tmp_path / "models" / "Qwen3-8B")
    assert str(folder) in only(check_tokenizer(question(tmp_path)), "tokenizer").found


def test_a_missing_tokenizer_is_an_error(tmp_path: Path) -> None:
    assert_fault(look_at(tmp_path / "none"), "tokenizer", "error", "none", remedy="prepare_model.sh")
    assert_fault(look_at(tmp_path), "tokenizer", "error", "no tokenizer.json", remedy="prepare_model.sh")


def test_a_corrupt_tokenizer_is_an_error(tmp_path: Path) -> None:
    file = tokenizer_folder(tmp_path / "t") / "tokenizer.json"
    file.write_text(file.read_text()[:5000])
    assert_fault(look_at(file.parent), "tokenizer", "error", str(file), remedy="prepare_model.sh")


@pytest.mark.parametrize(
    "content",
    [{"model": 3}, {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}],
)
def test_a_tokenizer_that_is_json_but_no_tokenizer_is_an_error(content: object, tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t")
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert_fault(look_at(folder), "tokenizer", "error", str(folder), "can't be loaded", remedy="prepare_model.sh")


def test_a_tokenizer_without_a_template_is_an_error(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t")
    (folder / "chat_template.jinja").unlink()
    assert_fault(look_at(folder), "chat template", "error", "no chat template", remedy="--tokenizer")


def test_a_template_that_is_not_append_only_is_an_error(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t")
    template = folder / "chat_template.jinja"
    template.write_text("{{- messages | length ~ ' messages\\n' -}}" + template.read_text())
    assert_fault(look_at(folder), "chat template", "error", "not append-only", remedy="--tokenizer")


def test_a_template_that_shows_no_tools_is_an_error(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t")
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(plain + "<|im_start|>assistant\n")
    assert_fault(look_at(folder), "tools in the template", "error", "tools", remedy="tools: []")


def test_an_end_of_turn_at_which_nothing_stops_is_an_error(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t")
    changed(folder / "tokenizer_config.json", eos_token="<|endoftext|>")  # noqa: S106
    changed(folder / "config.json", eos_token_id=1191)
    changed(folder / "generation_config.json", eos_token_id=[1191])
    assert_fault(look_at(folder), "end of turn", "error", "1193", "1191", remedy="generation_config.json")


def test_a_tokenizer_larger_than_the_model_is_an_error(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t")
    changed(folder / "config.json", vocab_size=1000)
    assert_fault(look_at(folder), "vocabulary", "error", "1200", "1000", remedy="prepare_model.sh")


def test_a_model_is_whole_or_what_it_lacks_is_named(tmp_path: Path) -> None:
    asked = question(tmp_path)
    assert_fault(check_model(asked), "model", "warning", "Qwen3-8B", remedy="bash scripts/prepare_model.sh")
    folder = tmp_path / "models" / "Qwen3-8B"
    folder.mkdir(parents=True)
    assert_fault(check_model(asked), "model", "error", "config.json", remedy="bash scripts/prepare_model.sh")
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    assert_fault(check_model(asked), "model", "error", "safetensors", remedy="bash scripts/prepare_model.sh")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").write_bytes(bytes(2000))
    (folder / "model-2.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    found = check_model(asked)
    assert_fault(found, "model", "error", "model-2.safetensors", remedy="bash scripts/prepare_model.sh")
    assert "model-1.safetensors" not in found[0].found
    (folder / "model-2.safetensors").write_bytes(bytes(2000))
    assert check_model(asked)[0].status == "ok"


def test_the_model_is_looked_for_where_the_scripts_look(tmp_path: Path) -> None:
    hub, both = {"HF_CHECKPOINT": "/a/m"}, {"HF_CHECKPOINT": "/a/m", "REF_LOAD": "/b/c"}
    assert "/a/m is" in check_model(question(tmp_path, hub))[0].found
    assert "/a/m_torch_dist is" in check_converted_model(question(tmp_path, hub))[0].found
    assert "/b/c is" in check_converted_model(question(tmp_path, both))[0].found


def test_a_conversion_that_did_not_end_is_an_error(tmp_path: Path) -> None:
    asked, folder = question(tmp_path), tmp_path / "models" / "Qwen3-8B_torch_dist"
    assert_fault(check_converted_model(asked), "converted model", "warning", remedy="prepare_model.sh")
    folder.mkdir(parents=True)
    tracker = folder / "latest_checkpointed_iteration.txt"
    assert_fault(check_converted_model(asked), "converted model", "error", tracker.name, remedy="prepare_model.sh")
    tracker.write_text("release\n")
    assert_fault(check_converted_model(asked), "converted model", "error", "'release'", remedy="prepare_model.sh")
    (folder / "release").mkdir()
    assert check_converted_model(asked)[0].status == "ok"
    tracker.write_text("12")
    (folder / "iter_0000012").mkdir()
    assert check_converted_model(asked)[0].status == "ok"


def test_good_settings_are_listed(tmp_path: Path) -> None:
    found = config(tmp_path, "strands_rollout: {max_tool_iterations: 3}")
    assert statuses(found) == {"ok"}
    assert "max_tool_iterations" in found[0].found
    assert check_config(None)[0].status == "skipped"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("strands_rollout: {max_tool_iteration: 3}", ("max_tool_iteration", "'max_tool_iterations'")),
        ("strands_rollout: {tool_timeout_s: -1}", ("tool_timeout_s", "-1")),
        ("strands_rollout: [", ("YAML",)),
        ("just text", ("mapping",)),
        ("strand_rollout: {}", ("strand_rollout",)),
    ],
)
def test_settings_that_can_not_be_used_are_an_error(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    assert_fault(config(tmp_path, text), "config", "error", "rollout.yaml", *words, remedy="strands-rollout config")


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("tools", "[strands_rollout.tools.execute_pyton_code]", "execute_python_code"),
        ("hooks", "[no.such.hook]", "no.such.hook"),
        ("conversation_manager", "json.loads", "json.loads"),
        ("should_abort", "json.no_such", "json.no_such"),
        ("tool_parser", "hermse", "hermes"),
        ("executor", "lokal", "local"),
        ("executor", "{name: local, memory: 3}", "memory_mb"),
    ],
)
def test_what_settings_name_must_be_there(name: str, value: str, word: str, tmp_path: Path) -> None:
    found = config(tmp_path, f"strands_rollout: {{{name}: {value}}}")
    assert_fault(found, f"config: {name}", "error", word, remedy="PYTHONPATH")


def test_keys_that_override_slimes_command_line_are_a_warning(tmp_path: Path) -> None:
    found = config(tmp_path, "strands_rollout: {}\nrollout_batch_size: 4")
    assert_fault(found, "config: other keys", "warning", "rollout_batch_size", remedy="command line")


def test_another_model_is_looked_for_and_fetched_by_its_name(tmp_path: Path) -> None:
    for asked in (
        question(tmp_path, model_name="Qwen3-4B"),
        question(tmp_path, model_name="Qwen/Qwen3-4B"),
        question(tmp_path, {"MODEL": "Qwen3-4B"}),
    ):
        remedy = "bash scripts/prepare_model.sh --model Qwen/Qwen3-4B"
        assert_fault(check_model(asked), "model", "warning", "models/Qwen3-4B is", remedy=remedy)
        assert_fault(check_converted_model(asked), "converted model", "warning", "Qwen3-4B_torch_dist", remedy=remedy)
    folder = tokenizer_folder(tmp_path / "t")
    (folder / "tokenizer.json").unlink()
    found = check_tokenizer(question(tmp_path, model_name="Qwen3-4B", tokenizer=folder))
    assert_fault(found, "tokenizer", "error", remedy="--model Qwen/Qwen3-4B")


def test_a_training_run_can_not_do_without_model_and_data(tmp_path: Path) -> None:
    asked = question(tmp_path, training=True)
    assert_fault(check_model(asked), "model", "error", remedy="prepare_model.sh")
    assert_fault(check_converted_model(asked), "converted model", "error", remedy="prepare_model.sh")
    found = check_data(asked)
    for name, status in (("dapo-math-17k", "error"), ("aime-2024", "error"), ("aime-2025", "warning")):
        assert_fault(found, f"data: {name}.jsonl", status, remedy="python data_prep/")


def test_the_configuration_is_the_one_that_the_scripts_take(tmp_path: Path) -> None:
    assert question(tmp_path).config_file is None
    assert question(tmp_path, {"ROLLOUT_CONFIG": "/a/b.yaml"}).config_file == Path("/a/b.yaml")
    assert question(tmp_path, {"ROLLOUT_CONFIG": "/a/b.yaml"}, config=Path("/c")).config_file == Path("/c")
    assert question(REPOSITORY).config_file == REPOSITORY / "configs" / "math_code.yaml"
