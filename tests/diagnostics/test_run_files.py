"""The doctor on files: the model and its tokenizer, the settings, the prompt data sets."""

import json
from pathlib import Path

import pytest
from stand_in_machine import SHIPPED, assert_fault, doctor_options, find_only, tokenizer_folder

from strands_rollout.diagnostics import Finding, run_files
from strands_rollout.diagnostics.run_files import (
    check_config,
    check_converted_model,
    check_data,
    check_model,
    check_tokenizer,
)

PREPARE = "bash scripts/prepare_model.sh"
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
ROW = {"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "label": "2"}
RENDERED = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"


def look_at(folder: Path) -> list[Finding]:
    return list(check_tokenizer(doctor_options(folder, tokenizer=folder)))


def test_check_tokenizer_falls_back_to_the_shipped_one(tmp_path: Path) -> None:
    found = list(check_tokenizer(doctor_options(tmp_path)))
    assert {finding.status for finding in found} == {"ok"}
    assert str(SHIPPED) in find_only(found, "tokenizer").found
    assert "<|im_end|>" in find_only(found, "chat template").found
    folder = tokenizer_folder(tmp_path / "models" / "Qwen3-8B")
    assert str(folder) in find_only(check_tokenizer(doctor_options(tmp_path)), "tokenizer").found


def test_check_tokenizer_parser_must_read_the_templates_calls(tmp_path: Path) -> None:
    (tmp_path / "rollout.yaml").write_text("strands_rollout: {tool_parser: mistral}")
    found = check_tokenizer(doctor_options(tmp_path, config=tmp_path / "rollout.yaml"))
    assert_fault(found, "chat template: calls", "error", "'mistral' does not read the call", remedy="tool_parser")


TEMPLATE = (SHIPPED / "chat_template.jinja").read_text()
MERGES = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}
ENDS_ELSEWHERE = {
    "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
    "config.json": {"eos_token_id": 1191},
    "generation_config.json": {"eos_token_id": [1191]},
}


@pytest.mark.parametrize(
    ("changes", "name", "words", "remedy"),
    [
        ({"tokenizer.json": None}, "tokenizer", ["no tokenizer.json"], "prepare_model.sh"),
        ({"tokenizer.json": "{ cut off"}, "tokenizer", ["tokenizer.json is not valid JSON"], "prepare_model.sh"),
        ({"tokenizer.json": json.dumps(MERGES)}, "tokenizer", ["can't be loaded"], "prepare_model.sh"),
        ({"chat_template.jinja": None}, "chat template: template", ["no chat template"], "chat_template_kwargs"),
        ({"chat_template.jinja": "{{- messages | length ~ ' messages\\n' -}}" + TEMPLATE}, "chat template: user turns",
         ["not append-only"], "chat_template_kwargs"),
        ({"chat_template.jinja": PLAIN}, "chat template: renders tools", ["tools"], "tools: []"),
        (ENDS_ELSEWHERE, "chat template: end of turn", ["1193", "1191"], "generation_config.json"),
        ({"config.json": {"vocab_size": 1000}}, "vocabulary", ["1200", "1000"], "prepare_model.sh"),
    ],
    ids=["absent", "cut", "merges", "no template", "not append-only", "no tools", "end of turn", "vocabulary"],
)  # fmt: skip
def test_check_tokenizer_unusable_is_an_error(changes, name, words, remedy, tmp_path) -> None:
    folder = tokenizer_folder(tmp_path / "t")
    for file, change in ((folder / file, change) for file, change in changes.items()):
        if change is None:
            file.unlink()
        else:
            file.write_text(change if isinstance(change, str) else json.dumps(json.loads(file.read_text()) | change))
    about_folder = [str(folder)] if name == "tokenizer" else []
    assert_fault(look_at(folder), name, "error", *words, *about_folder, remedy=remedy)


def test_check_model_names_missing_files(tmp_path: Path) -> None:
    asked, folder = doctor_options(tmp_path), tmp_path / "models" / "Qwen3-8B"
    folder.mkdir(parents=True)
    assert_fault(check_model(asked), "model", "error", "config.json", remedy=PREPARE)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    assert_fault(check_model(asked), "model", "error", "safetensors", remedy=PREPARE)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").write_bytes(bytes(2000))
    (folder / "model-2.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    remedy = f"remove model-2.safetensors from the folder, then run: {PREPARE}"  # the script keeps files that exist
    assert_fault(check_model(asked), "model", "error", "lacks weights: model-2.safetensors", remedy=remedy)
    (folder / "model-2.safetensors").write_bytes(bytes(2000))
    assert find_only(check_model(asked), "model").status == "ok"


def test_prepare_model_command_takes_names_of_rows(tmp_path: Path) -> None:
    options = doctor_options(tmp_path, env={"MODEL": "qwen3.5-4B"})
    assert options.prepare_model_command == f"{PREPARE} --model qwen3.5-4B"


@pytest.mark.parametrize(
    ("env", "name", "model", "converted"),
    [
        ({"HF_CHECKPOINT": "/a/m", "REF_LOAD": "/b/c"}, None, "/a/m", "/b/c"),
        ({"MODEL_DIR": "/d", "MODEL": "Qwen3-4B"}, None, "/d/Qwen3-4B", "/d/Qwen3-4B_torch_dist"),
        ({"MODEL": "Qwen3-8B"}, "Foo-4B", "models/Foo-4B", "models/Foo-4B_torch_dist"),
    ],
)
def test_check_model_looks_where_the_scripts_look(env, name, model, converted, tmp_path):
    asked = doctor_options(tmp_path, env, model_name=name, tokenizer=tmp_path)
    remedy = f"{PREPARE} --model {'OWNER/Foo' if name else 'Qwen/Qwen3'}-4B" if "4B" in model else PREPARE
    assert_fault(check_model(asked), "model", "warning", f"{tmp_path / model} does not exist", remedy=remedy)
    found = check_converted_model(asked)
    assert_fault(found, "converted model", "warning", f"{tmp_path / converted} does not exist", remedy=remedy)
    assert_fault(check_tokenizer(asked), "tokenizer", "error", remedy=remedy)


def test_check_converted_model_incomplete_is_an_error(tmp_path: Path) -> None:
    asked, folder = doctor_options(tmp_path), tmp_path / "models" / "Qwen3-8B_torch_dist"
    folder.mkdir(parents=True)
    tracker = folder / "latest_checkpointed_iteration.txt"
    remedy = f"remove {folder}, then run: {PREPARE}"  # prepare_model.sh converts only if the folder does not exist
    assert_fault(check_converted_model(asked), "converted model", "error", tracker.name, remedy=remedy)
    tracker.write_text("12")
    assert_fault(check_converted_model(asked), "converted model", "error", "12", remedy=remedy)
    (folder / "iter_0000012").mkdir()
    assert find_only(check_converted_model(asked), "converted model").status == "ok"


def config(folder: Path, text: str) -> list[Finding]:
    (folder / "rollout.yaml").write_text(text)
    return list(check_config(doctor_options(folder, config=folder / "rollout.yaml")))


def test_check_config_lists_good_settings(tmp_path: Path) -> None:
    found = config(tmp_path, "strands_rollout: {max_tool_iterations: 3}")
    assert {finding.status for finding in found} == {"ok"}
    assert "max_tool_iterations" in found[0].found
    assert find_only(check_config(doctor_options(tmp_path)), "config").status == "skipped"


def test_check_config_checks_workers_and_journal(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_files, "find_spec", lambda _name: None)
    found = config(tmp_path, "strands_rollout: {episode_workers: 2}")
    assert_fault(found, "config: episode_workers", "error", "Ray", remedy="pip install")
    monkeypatch.undo()
    monkeypatch.setattr(run_files, "find_spec", bool)
    found = config(tmp_path, "strands_rollout: {episode_workers: 4096}")
    assert_fault(found, "config: episode_workers", "warning", "4096", remedy="fewer")
    found = config(tmp_path, "strands_rollout: {episode_workers: {per_node: 4096}}")
    assert_fault(found, "config: episode_workers", "warning", "4096 workers per node, 1 CPU each", remedy="fewer")
    found = config(tmp_path, "strands_rollout: {episode_workers: {count: 1, per_node: 4096}}")
    assert find_only(found, "config: episode_workers").status == "ok"
    (tmp_path / "file").write_text("")
    found = config(tmp_path, f"strands_rollout: {{journal_dir: {tmp_path}/file/folder}}")
    assert_fault(found, "config: journal_dir", "error", "file/folder", remedy="folder")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("strands_rollout: {max_tool_iteration: 3}", ("max_tool_iteration", "'max_tool_iterations'")),
        ("strands_rollout: [", ("YAML",)),
        ("strand_rollout: {}", ("strand_rollout",)),
    ],
)
def test_check_config_unusable_settings_are_an_error(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    assert_fault(config(tmp_path, text), "config", "error", "rollout.yaml", *words, remedy="strands-rollout config")


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("tools", "[strands_rollout.tools.execute_pyton_code]", "execute_python_code"),
        ("should_abort", "json.no_such", "json.no_such"),
        ("tool_parser", "hermse", "hermes"),
        ("executor", "{name: local, memory: 3}", "memory_mb"),
    ],
)
def test_check_config_names_must_exist(name: str, value: str, word: str, tmp_path: Path) -> None:
    found = config(tmp_path, f"strands_rollout: {{{name}: {value}}}")
    assert_fault(found, f"config: {name}", "error", word, remedy="PYTHONPATH")


def test_check_config_mcp_server_that_is_down_is_an_error(tmp_path: Path) -> None:
    found = config(tmp_path, "strands_rollout: {tools: ['http://127.0.0.1:1/mcp']}")
    assert_fault(found, "config: tools", "error", "http://127.0.0.1:1/mcp", "did not start", remedy="start the server")


def test_check_config_warns_of_keys_that_override_slime(tmp_path: Path) -> None:
    found = config(tmp_path, "strands_rollout: {}\nrollout_batch_size: 4")
    assert_fault(found, "config: other keys", "warning", "rollout_batch_size", remedy="command line")


def data(folder: Path, *rows: object, name: str = "train.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def look_at_data(path: Path) -> list[Finding]:
    return list(check_data(doctor_options(path.parent, data=[path])))


def test_check_data_passes_good_rows(tmp_path: Path) -> None:
    path = data(tmp_path, ROW, {"prompt": "What is 2 + 2?", "label": 4})
    assert [finding.status for finding in look_at_data(path)] == ["ok"]


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ("{broken", "expected a JSON object like"),
        ({"prompt": "", "label": "2"}, "empty prompt"),
        ({"prompt": [{"role": "assistant", "content": "2"}], "label": "2"}, "user's message"),
        ({"prompt": "What?", "label": "2", "metadata": {"strands_rollout_settings": {"max_turns": 1}}}, "max_turns"),
        ({"prompt": "What?", "label": None}, "label"),
        ({"prompt": "What?", "label": {"a": 1}}, "{'a': 1}"),
        ({"prompt": "What?", "label": ["", None]}, "every answer is wrong"),
        ({"prompt": "What?", "label": [[[[[[[[[[[["2"]]]]]]]]]]]]}, "more than 10 levels deep"),
        ({"prompt": [{"role": "user", "content": RENDERED}], "label": "2"}, "rendered"),
    ],
)
def test_check_data_unusable_row_is_an_error(row: object, word: str, tmp_path: Path) -> None:
    remedy = "--apply-chat-template" if word == "rendered" else '"prompt"'
    found = look_at_data(data(tmp_path, ROW, row, row))
    assert_fault(found, "data: train.jsonl", "error", "line 2: ", word, "1 more", remedy=remedy)


@pytest.mark.parametrize(
    ("label", "status", "words"),
    [
        ("['2']", "ok", "line 2: the label \"['2']\" is the text of a list, read as '2'"),
        ("[1, 2]", "ok", "line 2: the label '[1, 2]' is read as mathematics"),
        ("{'a': 1}", "warning", "line 2: the label \"{'a': 1}\" looks like the text of a list or mapping"),
    ],
)
def test_check_data_reports_labels_that_look_like_containers(
    label: str, status: str, words: str, tmp_path: Path
) -> None:
    finding = find_only(look_at_data(data(tmp_path, ROW, {**ROW, "label": label})), "data: train.jsonl")
    assert (finding.status, words in finding.found) == (status, True)


def test_check_data_without_a_tokenizer_and_an_empty_file(tmp_path: Path) -> None:
    found = check_data(doctor_options(tmp_path, data=[data(tmp_path, ROW)], tokenizer=tmp_path / "none"))
    assert find_only(found, "data: train.jsonl").status == "ok"
    assert_fault(look_at_data(data(tmp_path)), "data: train.jsonl", "error", "no rows", remedy="JSON")


def test_check_data_with_a_reward_needs_no_labels(tmp_path: Path) -> None:
    path = data(tmp_path, {"prompt": "What?"})
    assert find_only(check_data(doctor_options(tmp_path, data=[path])), "data: train.jsonl").status == "error"
    asked = doctor_options(tmp_path, data=[path], changes=["reward=mine.score"])
    assert find_only(check_data(asked), "data: train.jsonl").status == "ok"


@pytest.mark.parametrize(("training", "status"), [(False, "warning"), (True, "error")])
def test_check_data_missing_is_an_error_for_training(training: bool, status: str, tmp_path: Path) -> None:
    found = list(check_data(doctor_options(tmp_path, training=training)))
    assert_fault(found, "data: dapo-math-17k.jsonl", status, remedy="python data_prep/dapo_math_17k.py")
    assert_fault(found, "data: aime-2024.jsonl", status, remedy="python data_prep/aime_2024.py")
    assert_fault(found, "data: aime-2025.jsonl", "warning", remedy="python data_prep/aime_2025.py")
    found = list(check_data(doctor_options(tmp_path, {"EVAL_SETS": "gsm8k-test"})))
    assert_fault(found, "data: gsm8k-test.jsonl", "warning", remedy="python data_prep/gsm8k.py --split test")


@pytest.mark.parametrize(
    ("key", "status", "words"),
    [("temperature", "ok", "all data files can be read"), ("temprature", "error", "did you mean 'temperature'?")],
)
def test_check_data_checks_the_eval_configs_data_sets(key: str, status: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "eval.yaml"
    path.write_text(f"eval: {{datasets: [{{name: train, path: {data(tmp_path, ROW)}, {key}: 0}}]}}")
    finding = find_only(check_data(doctor_options(tmp_path, env={"EVAL_CONFIG": str(path)})), "eval config")
    assert (finding.status, words in finding.found) == (status, True)
    assert status == "ok" or f"EVAL_CONFIG={path} strands-rollout doctor" in str(finding.remedy)
